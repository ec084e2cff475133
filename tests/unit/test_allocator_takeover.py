"""An edited file is taken over whole or not at all (F11, F12, F19)."""

from dataclasses import replace

import pytest

from allocator.apply import apply
from allocator.events import CoefficientsActivated, ConfigLoaded, NodeDown, NodeReported, NodeUp
from allocator.invariants import violations
from allocator.model.inventory import Condition, Node
from allocator.model.pools import Pool, PoolKind
from allocator.model.world import World
from allocator.service.taking_over import Refused, takeover
from allocator.units.load import shipped
from tests.allocator_worlds import INFERENCE, TRAINING, a_config, a_job, a_node, a_queue, a_stage, lent_stage

NODES = (a_node("t0", "k80"), a_node("i0", pool="inference"))


def taken(world: World, config: object = None, nodes: tuple[Node, ...] = NODES, table: object = None,
          proven: tuple[str, ...] = ()) -> World:
    events = takeover(world, config or world.config, nodes, table or world.coefficients, 50.0, proven)  # type: ignore[arg-type]
    for event in events:
        after = apply(world, event)
        assert after is not world
        world = after
    assert violations(world) == []
    assert takeover(world, config or world.config, nodes, table or world.coefficients, 60.0, proven) == []  # type: ignore[arg-type]
    return world


def test_the_first_time_everything_is_new_and_only_what_was_seen_idle_is_believed() -> None:
    world = taken(a_stage().world, proven=("t0",))
    assert set(world.nodes) == {"t0", "i0"}
    assert {device for device, condition in world.conditions.items() if condition is Condition.QUARANTINED} == set(
        NODES[1].device_ids)


def test_a_file_that_says_the_same_changes_nothing() -> None:
    stage = lent_stage(replicas=1, gang=4)
    assert takeover(stage.world, stage.world.config, tuple(stage.world.nodes.values()), shipped(), 50.0) == []


@pytest.mark.parametrize(("before", "after", "selectors"), [
    # The old labels under the new selectors would be in two pools,
    ({"pool": "training", "zone": "z"}, {"pool": "training"}, ({"pool": "training"}, {"zone": "z"})),
    # and here the new labels under the old selectors.
    ({"pool": "training"}, {"pool": "inference", "use": "t"}, ({"use": "t"}, {"pool": "other"})),
])
def test_selectors_and_labels_may_change_together(before: dict[str, str], after: dict[str, str],
                                                  selectors: tuple[dict[str, str], dict[str, str]]) -> None:
    stage = a_stage(config=a_config(pools=(TRAINING, INFERENCE)))
    stage.happens(NodeReported(at_s=0.0, node=Node("n", "k80", 2, labels=before), evidence="new"))
    pools = tuple(replace(pool, selector=selector)
                  for pool, selector in zip((TRAINING, INFERENCE), selectors, strict=True))
    world = taken(stage.world, a_config(pools=pools, version="c1"), (Node("n", "k80", 2, labels=after),))
    assert world.nodes["n"].pool == "training"


def test_a_card_may_leave_the_table_together_with_its_last_node() -> None:
    stage = a_stage(a_node("t0", "p100"))
    table = shipped()
    smaller = replace(
        table, version="smaller", cards={name: units for name, units in table.cards.items() if name != "p100"},
        speeds={}, spread_out={})
    world = taken(stage.world, None, (a_node("t0", "k80"),), smaller)
    assert (world.nodes["t0"].card, world.active) == ("k80", "smaller")


def test_a_label_that_puts_a_node_in_two_pools_is_refused_and_nothing_happens() -> None:
    """F12."""
    stage = a_stage(*NODES)
    both = Pool("other", PoolKind.TRAINING, {"pool": "training"})
    with pytest.raises(Refused, match="its labels put it in two pools"):
        takeover(stage.world, a_config(pools=(TRAINING, INFERENCE, both), version="c1"), NODES, shipped(), 50.0)


def test_a_node_in_use_cannot_leave_the_file_and_an_idle_one_goes_out_of_service() -> None:
    stage = lent_stage(replicas=1, gang=4)
    with pytest.raises(Refused, match="node i0 is no longer in the file, but in use"):
        takeover(stage.world, stage.world.config, (a_node("t0", "k80"),), shipped(), 50.0)
    idle = a_stage(*NODES)
    events = takeover(idle.world, idle.world.config, NODES[:1], shipped(), 50.0)
    assert events == [NodeDown(at_s=50.0, node="i0", detail="no longer declared")]
    idle.happens(*events)
    assert takeover(idle.world, idle.world.config, NODES[:1], shipped(), 60.0) == []


def test_a_node_that_is_in_use_cannot_become_another() -> None:
    stage = lent_stage(replicas=1, gang=4)
    bigger = tuple(replace(node, devices=8) if node.name == "i0" else node for node in stage.world.nodes.values())
    with pytest.raises(Refused, match="cannot change under a run or a loan"):
        takeover(stage.world, stage.world.config, bigger, shipped(), 50.0)


def test_rules_may_change_amid_a_recall_and_its_deadline_stays() -> None:
    """F19."""
    stage = lent_stage(replicas=1, gang=4)
    stage.supply(0)
    stage.tick(50.0)
    due_s = stage.loan().recall_deadline_s
    nodes = tuple(stage.world.nodes.values())
    world = taken(stage.world, a_config(a_queue("q"), a_queue("p"), version="c1", grace_s=600.0), nodes)
    assert world.loans["i0-0"].recall_deadline_s == due_s
    assert world.config.rules.grace_s == 600.0


def test_new_coefficients_come_with_loans_out_and_old_runs_keep_theirs() -> None:
    """F11."""
    stage = lent_stage(replicas=1, gang=4)
    table = replace(shipped(), version="measured-2")
    nodes = tuple(stage.world.nodes.values())
    (event,) = takeover(stage.world, stage.world.config, nodes, table, 50.0)
    assert isinstance(event, CoefficientsActivated)
    world = taken(stage.world, None, nodes, table)
    assert world.active == "measured-2"
    assert next(iter(world.runs.values())).coefficients == shipped().version


def test_other_values_under_a_known_version_are_refused() -> None:
    """F18: a correction is a new version."""
    stage = a_stage(*NODES)
    cards = {**shipped().cards, "k80": replace(shipped().cards["k80"], scalar=0.5)}
    with pytest.raises(Refused, match="a change needs a new version"):
        takeover(stage.world, stage.world.config, NODES, replace(shipped(), cards=cards), 50.0)


def test_what_happens_is_in_an_order_that_the_world_takes() -> None:
    stage = a_stage(NODES[0])
    stage.submit_and_tick(a_job("j", cards=("k80",)))
    events = takeover(stage.world, a_config(a_queue("q"), version="c9"), NODES, shipped(), 50.0, ("i0",))
    assert [type(event) for event in events] == [ConfigLoaded, NodeReported]
    assert not any(isinstance(event, NodeUp) for event in events)
