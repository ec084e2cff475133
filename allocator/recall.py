"""Whom to stop when devices must come back: the greedy choice that loses little work.

There are cells (lent replicas, nodes), each with a size, and runs that lie over one or more of them. Enough cells must
come free. With `w` the work lost by stopping a run and `spread` the number of cells that it lies on::

    cost(cell) = Σ over live runs on the cell of  w / spread        free cells cost nothing

1. Take the cell with the least cost per device; all runs on it are as good as stopped, so the other cells that they lie
   on get cheaper. Until it is enough.
2. Fill back: cells that turned out not to be needed are let off, the dearest first.
3. Improve: one taken cell against one that was not, as long as that loses less; then fill back again.

Runs that will be gone by the deadline anyway have a `w` of 0, and so have elastic ones that can do with less. Lyra
(EuroSys 2023) reclaims by a greedy of this kind; weighing by lost work instead of counting jobs is ours.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import inf


def choose_cells(need: float, sizes: Mapping[str, float], weights: Mapping[str, float],
                 lies_on: Mapping[str, Iterable[str]]) -> tuple[str, ...]:
    """Cells whose sizes add up to `need` or more; all of them where even that is too little.

    `sizes`: by cell. `weights`: by run, what stopping it loses. `lies_on`: by run, the cells.
    """
    if need <= 0.0:
        return ()
    on: dict[str, list[str]] = {cell: [] for cell in sizes}
    spread: dict[str, int] = {}
    for run, cells in lies_on.items():
        mine = [cell for cell in dict.fromkeys(cells) if cell in on]
        spread[run] = len(mine)
        for cell in mine:
            on[cell].append(run)
    taken = _filled_back(need, sizes, weights, on, _greedy(need, sizes, weights, on, spread))
    return tuple(_filled_back(need, sizes, weights, on, _improved(need, sizes, weights, on, taken)))


def _greedy(need: float, sizes: Mapping[str, float], weights: Mapping[str, float], on: Mapping[str, Sequence[str]],
            spread: Mapping[str, int]) -> list[str]:
    taken: list[str] = []
    dead: set[str] = set()
    left = sorted(sizes)
    while need > 0.0 and left:
        prices = []
        for cell in left:
            whole = sum(weights[run] / spread[run] for run in on[cell] if run not in dead)
            # A cell larger than what is still needed is worth no more than that.
            prices.append((whole / min(sizes[cell], need) if sizes[cell] > 0.0 else inf, sizes[cell], cell))
        cell = min(prices)[2]
        left.remove(cell)
        taken.append(cell)
        dead.update(on[cell])
        need -= sizes[cell]
    return taken


def lost(cells: Iterable[str], weights: Mapping[str, float], on: Mapping[str, Sequence[str]]) -> float:
    """The work lost by freeing these cells: each run that lies on any of them counts once."""
    return sum(weights[run] for run in sorted({run for cell in cells for run in on[cell]}))


def _filled_back(need: float, sizes: Mapping[str, float], weights: Mapping[str, float],
                 on: Mapping[str, Sequence[str]], taken: list[str]) -> list[str]:
    total = sum(sizes[cell] for cell in taken)
    for cell in sorted(taken, key=lambda cell: (-lost([cell], weights, on), cell)):
        if total - sizes[cell] >= need:
            taken.remove(cell)
            total -= sizes[cell]
    return taken


def _improved(need: float, sizes: Mapping[str, float], weights: Mapping[str, float], on: Mapping[str, Sequence[str]],
              taken: list[str]) -> list[str]:
    total = sum(sizes[cell] for cell in taken)
    for _ in range(len(taken)):
        best, now = lost(taken, weights, on), (total, taken)
        for out in taken:
            rest = [cell for cell in taken if cell != out]
            for into in sizes:
                size = total - sizes[out] + sizes[into]
                if into in taken or size < need:
                    continue
                swapped = [*rest, into]
                loss = lost(swapped, weights, on)
                if loss < best:
                    best, now = loss, (size, swapped)
        if now[1] is taken:
            break
        total, taken = now
    return taken
