"""The simulator beside the real thing: the same arrivals through the real gateway before real fake engines."""

import pytest

from loadtest.run import LoadOptions
from loadtest.sim.command import SimOptions, run
from loadtest.sim.validation import Comparison, Span, ValidationOptions, compare, simulate


@pytest.mark.load
def test_first_tokens_come_when_the_simulator_says() -> None:
    """P50 and P99 within 10 %. A machine that is busy with something else makes the real side later: one more try."""
    tries: list[Comparison] = []
    while len(tries) < 2 and not (tries and tries[-1].agrees()):
        tries.append(compare(ValidationOptions(duration_s=25.0)))
    last = tries[-1]
    assert last.requests > 150
    assert last.failed == 0
    assert last.agrees(), [one.as_json() for one in tries]


def test_a_figure_inside_the_span_is_not_missed() -> None:
    span = Span(1.0, 1.2, 1.5)
    assert span.missed_by(1.3) == 0.0
    assert span.missed_by(2.0) == pytest.approx(0.25)
    assert span.missed_by(0.8) == pytest.approx(0.25)


def test_the_simulated_side_gets_the_very_requests_of_the_load_test() -> None:
    options = ValidationOptions(duration_s=20.0)
    shape = LoadOptions(cards=options.cards, rate_per_s=options.rate_per_s, duration_s=20.0, seed=options.seed,
                        time_scale=1.0)
    world = simulate(options, shape)
    assert len(world.outcomes) == pytest.approx(160, abs=50)
    assert {outcome.request.latency_class for outcome in world.outcomes} == {"interactive", "batch"}
    assert all(outcome.request.max_output_tokens == outcome.request.output_tokens for outcome in world.outcomes)


def test_an_unknown_policy_is_refused_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("validate", SimOptions("validate", policies=("nobody",))) == 2
    assert "no preset 'nobody'" in capsys.readouterr().err
