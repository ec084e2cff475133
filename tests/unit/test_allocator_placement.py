"""Which devices a gang gets, and which card."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allocator.model.inventory import Node
from allocator.model.jobs import Level
from allocator.placement.topology import grouped, joined, place, without
from tests.allocator_worlds import a_config, a_job, a_node, a_queue, a_stage

NODES = {name: Node(name, "v100", 8, island_devices=4, leaf=leaf, pod=pod, site=site)
         for name, leaf, pod, site in (("a", "l0", "p0", "s0"), ("b", "l0", "p0", "s0"), ("c", "l1", "p0", "s0"),
                                       ("d", "l2", "p1", "s0"), ("e", "l3", "p2", "s1"))}


def spread_of(devices: tuple[str, ...]) -> Level:
    """The level on which these devices have one domain."""
    nodes = [NODES[name] for name in {device.split(":")[0] for device in devices}]
    if len(nodes) == 1:
        return Level.ISLAND if len({int(device.split(":")[1]) // 4 for device in devices}) == 1 else Level.NODE
    for level, place_of in ((Level.LEAF, lambda node: (node.site, node.pod, node.leaf)),
                            (Level.POD, lambda node: (node.site, node.pod))):
        if len({place_of(node) for node in nodes}) == 1:
            return level
    return Level.SITE


def free(**indices: str) -> dict[str, tuple[str, ...]]:
    """`free(a="0145")`: devices 0, 1, 4 and 5 of node a."""
    return {name: tuple(f"{name}:{index}" for index in devices) for name, devices in indices.items()}


def placed(size: int, widest: Level = Level.SITE, **indices: str) -> str | None:
    found = place(NODES, free(**indices), size, widest)
    return None if found is None else " ".join(found)


def test_the_tightest_island_first() -> None:
    assert placed(2, a="0123", b="01") == "b:0 b:1"
    assert placed(3, a="012345", b="012") == "b:0 b:1 b:2"
    assert placed(2, a="0145", b="0123") == "a:0 a:1", "two islands of two beat breaking one of four"


def test_one_node_before_two() -> None:
    assert placed(6, a="0123", b="012345", c="0123") == "b:0 b:1 b:2 b:3 b:4 b:5"
    assert placed(4, a="0145", c="0123") == "c:0 c:1 c:2 c:3"
    assert placed(4, a="0145", d="04") == "a:0 a:1 a:4 a:5"


def test_the_same_leaf_before_another() -> None:
    assert placed(8, a="0123", b="0123", c="0123", d="0123") == "a:0 a:1 a:2 a:3 b:0 b:1 b:2 b:3"
    assert placed(8, a="0123", c="0123", d="0123") == "a:0 a:1 a:2 a:3 c:0 c:1 c:2 c:3"


def test_a_gang_over_nodes_is_split_evenly_where_it_divides() -> None:
    assert placed(8, a="01234567"[:6], b="0123") == "a:0 a:1 a:2 a:3 b:0 b:1 b:2 b:3"
    assert placed(7, a="012345", b="0123") == "a:0 a:1 a:2 a:3 a:4 a:5 b:0"


def test_a_gang_never_crosses_sites() -> None:
    assert placed(8, d="0123", e="0123") is None


def test_P63_fragments_on_two_nodes_are_no_node() -> None:
    assert placed(2, Level.NODE, a="0", b="0") is None
    assert placed(2, Level.LEAF, a="0", b="0") == "a:0 b:0"
    assert placed(2, Level.ISLAND, a="04") is None
    assert placed(2, Level.NODE, a="04") == "a:0 a:4"
    assert placed(2, Level.LEAF, a="0", c="0") is None


FREE = st.dictionaries(st.sampled_from(sorted(NODES)), st.sets(st.integers(0, 7), min_size=1).map(sorted)).map(
    lambda found: {name: tuple(f"{name}:{index}" for index in indices) for name, indices in found.items()})


@given(FREE, st.integers(1, 20), st.sampled_from(Level))
def test_a_gang_is_whole_free_and_within_its_level(found: dict[str, tuple[str, ...]], size: int, widest: Level) -> None:
    devices = place(NODES, found, size, widest)
    if devices is None:
        return
    assert len(set(devices)) == len(devices) == size
    assert set(devices) <= {device for names in found.values() for device in names}
    assert spread_of(devices) <= widest


@given(FREE, FREE, st.integers(1, 20), st.sampled_from(Level))
def test_more_free_devices_never_undo_a_fit(found: dict[str, tuple[str, ...]], more: dict[str, tuple[str, ...]],
                                            size: int, widest: Level) -> None:
    """Reservations search by halves because of this."""
    both = grouped({device for names in (*found.values(), *more.values()) for device in names})
    if place(NODES, found, size, widest) is not None:
        assert place(NODES, both, size, widest) is not None


@given(FREE, FREE)
def test_what_is_taken_and_joined_again_is_what_it_was(found: dict[str, tuple[str, ...]],
                                                       taken: dict[str, tuple[str, ...]]) -> None:
    gone = {device for names in taken.values() for device in names}
    left = without(found, gone)
    back = grouped(device for names in found.values() for device in names if device in gone)
    assert joined(left, back) == found


def test_P60_each_job_has_one_card_type_and_all_are_used() -> None:
    stage = a_stage(a_node("v", "v100", 2), a_node("p", "p100", 2))
    stage.submit_and_tick(*(a_job(f"j{n}", cards=("v100", "p100")) for n in range(4)))
    assert sorted(stage.runs().values()) == ["p100", "p100", "v100", "v100"]


def test_a_gang_is_never_split_over_card_types() -> None:
    stage = a_stage(a_node("v", "v100", 2), a_node("p", "p100", 2))
    stage.submit_and_tick(a_job("j", gang=4, cards=("v100", "p100")))
    assert stage.runs() == {}
    assert stage.pending("j").value == "gang_too_large"


def test_the_card_on_which_the_job_ends_soonest() -> None:
    stage = a_stage(a_node("v", "v100"), a_node("p", "p100"), a_node("k", "k80"))
    cards = ("k80", "p100", "v100")
    stage.submit_and_tick(a_job("vision", cards=cards, family="ResNet-50 (batch size 64)"),
                          a_job("ads", cards=cards, family="Recommendation (batch size 1024)"))
    assert stage.runs() == {"vision": "v100", "ads": "p100"}


def test_waiting_for_a_much_faster_card_beats_starting_on_a_slow_one() -> None:
    """ResNet-50 runs 7 times faster on the V100, which is free in 100 s; the job takes 1,000 s there."""
    stage = a_stage(a_node("v", "v100", 1), a_node("k", "k80", 1))
    stage.submit_and_tick(a_job("first", work_unit_s=100.0))
    stage.submit_and_tick(a_job("j", cards=("v100", "k80"), family="ResNet-50 (batch size 64)", work_unit_s=1000.0))
    assert stage.pending("j").value == "better_card"
    stage.submit_and_tick(a_job("even", cards=("v100", "k80"), family="A3C", work_unit_s=100.0))
    assert stage.runs()["even"] == "k80"


def test_P68_P59_a_card_out_of_service_does_not_stand_in_the_way() -> None:
    from allocator.events import NodeDown
    stage = a_stage(a_node("v", "v100", 2), a_node("p", "p100", 2))
    stage.happens(NodeDown(at_s=0.0, node="p"))
    stage.submit_and_tick(a_job("j", cards=("p100", "b200", "v100")))
    assert stage.runs() == {"j": "v100"}
    stage.submit_and_tick(a_job("only p", cards=("p100", "b200")))
    answer = stage.why("only p")
    assert answer.code.value == "not_healthy"
    assert "p100: not_healthy; b200: card_unknown" in answer.sentence


def test_memory_is_never_oversubscribed() -> None:
    stage = a_stage(a_node("small", devices=4, memory_gb=16.0), a_node("large", devices=1, memory_gb=32.0))
    stage.submit_and_tick(*(a_job(f"j{n}", memory_gb=24.0) for n in range(2)), a_job("small", memory_gb=16.0))
    assert stage.run_of("j0").devices == ("large:0",)
    assert stage.pending("j1").value == "devices_busy"
    assert stage.run_of("small").devices == ("small:0",)
    stage.submit_and_tick(a_job("huge", memory_gb=80.0))
    assert stage.pending("huge").value == "memory"


@pytest.mark.parametrize(("data_gb", "site"), [(0.0, "s1"), (1000.0, "s2")])
def test_data_draws_a_job_to_its_site(data_gb: float, site: str) -> None:
    stage = a_stage(a_node("near", devices=2, site="s2"), a_node("tight", devices=1, site="s1"))
    stage.submit_and_tick(a_job("j", data_site="s2", data_gb=data_gb))
    assert stage.world.nodes[stage.run_of("j").devices[0].split(":")[0]].site == site


def test_moving_data_may_outweigh_a_faster_card() -> None:
    """1 TB at 10 Gbit/s is 800 s; at the P100 the job takes 1.06 times its 600 s."""
    stage = a_stage(a_node("v", "v100", site="far"), a_node("p", "p100", site="here"))
    stage.submit_and_tick(a_job("heavy", cards=("v100", "p100"), data_site="here", data_gb=1000.0),
                          a_job("light", cards=("v100", "p100"), data_site="here", data_gb=0.1))
    assert stage.runs() == {"heavy": "p100", "light": "v100"}


def test_small_jobs_leave_whole_nodes_whole() -> None:
    from dataclasses import replace

    from tests.allocator_worlds import INFERENCE, TRAINING
    pool = replace(TRAINING, keep_whole_nodes=1)
    stage = a_stage(a_node("n0"), a_node("n1"), config=a_config(a_queue("q"), pools=(pool, INFERENCE)))
    stage.submit_and_tick(*(a_job(f"j{n}") for n in range(5)))
    assert len(stage.runs()) == 4
    stage.submit_and_tick(a_job("whole", gang=4))
    assert "whole" in stage.runs()
