"""The command: run figures, print what was measured against its bound."""

import json
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict

import uvloop

from loadtest.reliability.amplification import figure_e
from loadtest.reliability.bad_input import figure_g
from loadtest.reliability.cancellation import figure_c
from loadtest.reliability.fidelity import figure_b
from loadtest.reliability.hedging import figure_t
from loadtest.reliability.measured import Measured, Size
from loadtest.reliability.slow_peers import figure_h
from loadtest.reliability.streams_held import figure_j
from loadtest.stack import StackError

Figure = Callable[[Size], Awaitable[list[Measured]]]
FIGURES: Mapping[str, Figure] = {
    "B": figure_b, "C": figure_c, "E": figure_e, "G": figure_g, "H": figure_h, "J": figure_j,
    "T": figure_t,
}  # fmt: skip


async def measure(figure: str, size: Size) -> list[Measured]:
    """One figure.

    Raises:
        KeyError: there is no such figure.
        StackError: the gateway did not start.
    """
    began_s = time.monotonic()
    found = await FIGURES[figure](size)
    return [*found, Measured(figure, "took", round(time.monotonic() - began_s, 1), "s")]


def run_reliability(figures: Sequence[str] = (), *, size: Size = Size.CI, as_json: bool = False) -> int:
    """Run figures (all by default) one after another.

    Returns:
        0 where every bound is kept, 1 where one is missed, 2 where a figure could not be taken.
    """
    wanted = [figure.upper() for figure in figures] or list(FIGURES)
    unknown = [figure for figure in wanted if figure not in FIGURES]
    if unknown:
        print(f"no figure {', '.join(unknown)}; there are {', '.join(FIGURES)}", file=sys.stderr)
        return 2
    missed = False
    for figure in wanted:
        try:
            found = uvloop.run(measure(figure, size))
        except StackError as error:
            print(f"figure {figure} could not be taken: {error}", file=sys.stderr)
            return 2
        for value in found:
            missed = missed or not value.holds
            print(json.dumps({**asdict(value), "holds": value.holds}) if as_json else value.line(), flush=True)
    return 1 if missed else 0
