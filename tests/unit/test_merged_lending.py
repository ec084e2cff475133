"""What several workers say of one backend, as one word."""

from itertools import product
from typing import Any

import pytest

from router.lending.stages import Stage
from router.workers.merged_lending import merge_backend, merge_publications


def said(stage: str, **fields: Any) -> dict[str, Any]:
    return {"name": "b0", "stage": stage, "for_s": 5.0, "detail": "", "epoch": 1, "in_flight": 0, "drain_s": 0.0,
            "return_s": 60.0, "returns_measured": 0, "lendable": False, **fields}


@pytest.mark.parametrize(("stages", "together"), [
    (("serving", "serving"), "serving"), (("released", "released"), "released"),
    (("released", "draining"), "draining"), (("draining", "serving"), "draining"),
    (("returning", "serving"), "returning"), (("released", "returning"), "returning"),
    (("released", "serving"), "returning"),
])
def test_whoever_is_on_the_way_is_waited_for(stages: tuple[str, str], together: str) -> None:
    for order in (stages, stages[::-1]):
        assert merge_backend([said(stage) for stage in order])["stage"] == together


def test_an_engine_may_be_stopped_only_when_every_worker_has_let_it_go() -> None:
    for stages in product(Stage, repeat=3):
        merged = merge_backend([said(stage.value) for stage in stages])["stage"]
        assert (merged == "released") == (set(stages) == {Stage.RELEASED})
        assert (merged == "serving") == (set(stages) == {Stage.SERVING})


def test_figures_are_summed_or_the_worst_and_the_rest_is_the_leaders() -> None:
    leader = said("draining", in_flight=2, detail="2 requests are open", epoch=4, lendable=True, for_s=3.0)
    other = said("released", in_flight=0, epoch=5, drain_s=1.5, return_s=9.0, returns_measured=2, for_s=1.0)
    merged = merge_backend([leader, other])
    assert (merged["in_flight"], merged["epoch"], merged["drain_s"]) == (2, 5, 1.5)
    assert (merged["return_s"], merged["returns_measured"]) == (9.0, 2), "what was measured counts, not what is assumed"
    assert (merged["detail"], merged["for_s"], merged["lendable"]) == ("2 requests are open", 3.0, True)


def test_a_backend_that_only_a_sibling_has_is_left_out() -> None:
    leader = {"version": 3, "models": ["of the leader"], "backends": [said("serving")]}
    other = {"version": 9, "models": [], "backends": [said("serving"), said("serving", name="b1")]}
    merged = merge_publications([leader, other], 7)
    assert (merged["version"], merged["models"]) == (7, ["of the leader"])
    assert [entry["name"] for entry in merged["backends"]] == ["b0"]
