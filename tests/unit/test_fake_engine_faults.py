"""The schedule of faults."""

from math import inf

import pytest

from loadtest.fake_engine.faults import (
    BadFault,
    Fault,
    FaultKind,
    active,
    death_s,
    find_active,
    parse_fault,
    read_faults,
    slow_factor,
)


@pytest.mark.parametrize(("line", "fault"), [
    ("slow x3 from 5 to 10", Fault(FaultKind.SLOW, 5, 10, factor=3)),
    ("error 503", Fault(FaultKind.ERROR, status=503)),
    ("error 429:2 p 0.25 to 7.5", Fault(FaultKind.ERROR, to_s=7.5, status=429, retry_after_s=2, probability=0.25)),
    ("hang from 20", Fault(FaultKind.HANG, 20)),
    ("cut 8", Fault(FaultKind.CUT, after_chunks=8)),
    ("cut 8 clean p 0.5", Fault(FaultKind.CUT, after_chunks=8, clean=True, probability=0.5)),
    ("freeze-metrics", Fault(FaultKind.FREEZE_METRICS)),
    ("lie-metrics from 1 to 2", Fault(FaultKind.LIE_METRICS, 1, 2)),
    ("slow-health 3", Fault(FaultKind.SLOW_HEALTH, delay_s=3)),
    ("die from 30", Fault(FaultKind.DIE, 30)),
])
def test_lines_read_and_write_back(line: str, fault: Fault) -> None:
    assert parse_fault(line) == fault
    assert str(fault) == line


@pytest.mark.parametrize(("line", "wrong"), [
    ("", "empty"),
    ("explode", "there are slow, error"),
    ("slow", "forms of slow"),
    ("slow fast", "forms of slow"),
    ("slow x0", "factor"),
    ("slow x2 from 5 to 5", "time"),
    ("slow x2 p 0.5", "p means nothing"),
    ("error 200", "status"),
    ("hang p 0", "p must"),
    ("hang soon", "'soon' is out of place"),
    ("hang from 1 from 2", "'from' is out of place"),
    ("cut 3 from", "forms of cut"),
])
def test_what_cannot_be_read_says_why(line: str, wrong: str) -> None:
    with pytest.raises(BadFault, match=wrong):
        parse_fault(line)


def test_mappings_are_as_good_as_lines() -> None:
    assert read_faults([{"kind": "slow", "factor": 2.0, "to_s": 9}, "hang"]) == (
        Fault(FaultKind.SLOW, to_s=9, factor=2), Fault(FaultKind.HANG),
    )
    for entry, wrong in (
        ({"factor": 2.0}, "kind"),
        ({"kind": "slow", "speed": 2}, "unknown field 'speed'"),
        ({"kind": "explode"}, "no fault"),
        ({"kind": "slow", "factor": "much"}, "slow"),
    ):
        with pytest.raises(BadFault, match=wrong):
            read_faults([entry])


def test_time_is_half_open() -> None:
    faults = (parse_fault("slow x2 from 5 to 10"), parse_fault("slow x3 from 8"), parse_fault("hang from 9"))
    assert [len(active(faults, t)) for t in (4.9, 5, 8, 9, 10)] == [0, 1, 2, 3, 2]
    assert [slow_factor(faults, t) for t in (0, 5, 8, 10)] == [1, 2, 6, 3]


def test_dice_decide_whether_a_fault_hits() -> None:
    faults = (parse_fault("error 500 p 0.2"), parse_fault("error 503 from 5"))
    assert find_active(faults, FaultKind.ERROR, 0, dice=0.19) == faults[0]
    assert find_active(faults, FaultKind.ERROR, 0, dice=0.2) is None
    assert find_active(faults, FaultKind.ERROR, 5, dice=0.2) == faults[1]
    assert find_active(faults, FaultKind.HANG, 5) is None


def test_death_is_the_earliest_of_all() -> None:
    assert death_s(()) is None
    assert death_s((parse_fault("die from 9"), parse_fault("die from 3"), parse_fault("hang"))) == 3
    assert parse_fault("die").to_s == inf
