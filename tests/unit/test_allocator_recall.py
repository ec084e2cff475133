"""Whom a recall stops: the greedy choice beside the exhaustive optimum."""

from collections.abc import Mapping
from itertools import combinations
from random import Random
from statistics import mean

from allocator.recall import choose_cells

Instance = tuple[float, dict[str, float], dict[str, float], dict[str, set[str]]]


def an_instance(rng: Random) -> Instance:
    """At most ten jobs over at most ten cells: need, sizes of cells, weights of jobs, where they lie."""
    cells = {f"c{index}": float(rng.choice((1, 1, 2, 4))) for index in range(rng.randint(3, 10))}
    jobs = {f"j{index}": rng.choice((0.0, rng.uniform(1, 100), rng.uniform(1, 1000)))
            for index in range(rng.randint(2, 10))}
    lies_on = {job: set(rng.sample(sorted(cells), rng.randint(1, min(4, len(cells))))) for job in jobs}
    return rng.uniform(1.0, sum(cells.values())), cells, jobs, lies_on


def loss(cells: tuple[str, ...], weights: Mapping[str, float], lies_on: Mapping[str, set[str]]) -> float:
    return sum(weights[job] for job, on in lies_on.items() if not on.isdisjoint(cells))


def optimum(instance: Instance) -> float:
    need, sizes, weights, lies_on = instance
    return min(loss(chosen, weights, lies_on) for count in range(len(sizes) + 1)
               for chosen in combinations(sizes, count) if sum(sizes[cell] for cell in chosen) >= need)


def test_the_choice_frees_enough_and_loses_little_more_than_it_must() -> None:
    """1,500 instances of up to ten jobs against every possible choice; the mean ratio is what a recall costs extra."""
    rng, ratios, exact = Random(1), [], 0
    for _ in range(1500):
        instance = an_instance(rng)
        need, sizes, weights, lies_on = instance
        chosen = choose_cells(need, sizes, weights, lies_on)
        assert sum(sizes[cell] for cell in chosen) >= need
        assert len(set(chosen)) == len(chosen)
        best, found = optimum(instance), loss(chosen, weights, lies_on)
        assert found >= best - 1e-9
        exact += found <= best + 1e-9
        if best > 0.0:
            ratios.append(found / best)
        else:
            assert found == 0.0, "free cells were left aside"
    assert len(ratios) > 1000
    # Measured: 1.005 and 0.97; without the improvement at the end of the choice 1.03 to 1.06.
    assert mean(ratios) <= 1.01
    assert exact / 1500 >= 0.95


def test_no_cell_is_taken_that_is_not_needed() -> None:
    rng = Random(2)
    for _ in range(300):
        need, sizes, weights, lies_on = an_instance(rng)
        chosen = choose_cells(need, sizes, weights, lies_on)
        total = sum(sizes[cell] for cell in chosen)
        assert all(total - sizes[cell] < need for cell in chosen)


def test_free_cells_go_first_and_then_what_is_stopped_anyway() -> None:
    sizes = {"busy": 1.0, "free": 1.0, "with busy": 1.0, "other": 1.0}
    lies_on = {"wide": {"busy", "with busy"}, "narrow": {"other"}}
    weights = {"wide": 100.0, "narrow": 60.0}
    assert choose_cells(1, sizes, weights, lies_on) == ("free",)
    # Two more: the wide job frees both of its cells for 100, the narrow one and a wide one would cost 160.
    assert set(choose_cells(3, sizes, weights, lies_on)) == {"free", "busy", "with busy"}


def test_weight_counts_and_not_the_number_of_jobs() -> None:
    sizes = {"many": 1.0, "one": 1.0}
    lies_on = {"a": {"many"}, "b": {"many"}, "c": {"many"}, "long": {"one"}}
    assert choose_cells(1, sizes, {"a": 1.0, "b": 1.0, "c": 1.0, "long": 50.0}, lies_on) == ("many",)


def test_all_cells_where_even_they_are_too_few() -> None:
    assert set(choose_cells(9, {"a": 1.0, "b": 2.0}, {}, {})) == {"a", "b"}
    assert choose_cells(0, {"a": 1.0}, {}, {}) == ()
