"""What was learned survives a restart, ages by the time between, and never costs a start or somebody's file."""

import json
import logging
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from policies.facts import Budget
from policies.learners.ccr.learner import CcrLearner
from policies.learning import NoLearner
from policies.policy import Priced
from router.fleet.state_file import MAX_BYTES, StateFile, fingerprint
from router.request.prompt_ratios import PromptRatios
from router.request.prompt_size import PromptSize
from tests.policy_fleet import A100_PAIR, NOW_S, a_backend, a_request
from tests.policy_memory import serve

SIZE = PromptSize(1000.0)
VIEW = a_backend("a")


def learned(learner: CcrLearner | None = None) -> tuple[CcrLearner, PromptRatios]:
    """A hundred answers of 300 tokens whose first token came late, and prompts twice as large as they look."""
    learner, ratios = learner or CcrLearner(), PromptRatios()
    for _ in range(100):
        serve(learner, VIEW, a_request(stream=True, budget=Budget(1.0, 0.1)), ttft_s=0.6, total_s=9.0,
              output_tokens=300)
        ratios.observe("m", "t", SIZE, 2000)
    learner.belief("a", NOW_S).drift.set(0.9)
    return learner, ratios


def expectation(learner: CcrLearner) -> int:
    return learner.expect_output(a_request(stream=True, budget=Budget(1.0, 0.1)))


class Clock:
    def __init__(self) -> None:
        self.now_s = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now_s


def restarted(path: Path, clock: Clock, view: Any = VIEW) -> tuple[CcrLearner, PromptRatios, bool]:
    learner, ratios = CcrLearner(), PromptRatios()
    found = StateFile(path, wall_clock=clock).load(learner, ratios, [view.spec])
    return learner, ratios, found


@pytest.fixture(name="path")
def a_path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "state.json"


def test_a_restart_keeps_residuals_lengths_drift_and_prompt_sizes(path: Path) -> None:
    learner, ratios = learned()
    assert StateFile(path, wall_clock=Clock()).save(learner, ratios, [VIEW.spec])
    again, ratios_again, found = restarted(path, Clock())
    assert found
    before, after = learner.belief("a", NOW_S), again.belief("a", NOW_S)
    assert after.ttft.samples == pytest.approx(before.ttft.samples, rel=0.01)
    assert after.ttft.table == pytest.approx(before.ttft.table, abs=0.02)
    assert after.drift.applied == pytest.approx(before.drift.applied)
    assert expectation(again) == expectation(learner) != expectation(CcrLearner())
    assert ratios_again.tokens("m", "t", SIZE, b"") == ratios.tokens("m", "t", SIZE, b"") > 1500
    assert [entry.name for entry in path.parent.iterdir()] == ["state.json"]


def test_what_is_old_has_relaxed(path: Path) -> None:
    learner, ratios = learned()
    clock = Clock()
    StateFile(path, wall_clock=clock).save(learner, ratios, [VIEW.spec])
    samples, drifts, sizes = [], [], []
    for age_s in (0.0, 600.0, 7_200.0, 30 * 86_400.0):
        clock.now_s = Clock().now_s + age_s
        again, ratios_again, _ = restarted(path, clock)
        samples.append(again.belief("a", NOW_S).ttft.samples)
        drifts.append(again.belief("a", NOW_S).drift.applied)
        sizes.append(ratios_again.tokens("m", "t", SIZE, b""))
    assert samples == sorted(samples, reverse=True)
    assert samples[-1] < 0.01 * samples[0]
    assert drifts[0] > 2.0 > 1.01 > drifts[1]
    assert sizes[0] > 1500 > 1010 > sizes[-1]


def test_a_clock_that_went_back_ages_nothing(path: Path) -> None:
    clock = Clock()
    StateFile(path, wall_clock=clock).save(*learned(), [VIEW.spec])
    clock.now_s -= 1e6
    assert restarted(path, clock)[0].belief("a", NOW_S).ttft.samples > 50


@pytest.mark.parametrize(
    "other",
    [{"url": "http://elsewhere"}, {"coefficients": replace(A100_PAIR, host_ms=9.0)}, {"card_count": 4},
     {"quantization": "fp8"}],
)
def test_a_backend_that_is_another_one_now_starts_afresh(path: Path, other: dict[str, Any]) -> None:
    StateFile(path, wall_clock=Clock()).save(*learned(), [VIEW.spec])
    again, ratios, found = restarted(path, Clock(), a_backend("a", **other))
    assert found
    assert again.belief("a", NOW_S).ttft.samples == 0
    assert again.belief("a", NOW_S).drift.applied == 1.0
    assert ratios.tokens("m", "t", SIZE, b"") > 1500


def test_price_weight_and_labels_do_not_make_it_another_one() -> None:
    same = a_backend("a", price_per_hour=9.0, weight=0.5, labels={"pool": "x"}, slots=4)
    assert fingerprint(same.spec) == fingerprint(VIEW.spec)


def test_another_policys_learner_takes_the_prompt_sizes_only(path: Path) -> None:
    learner, ratios = NoLearner(), PromptRatios()
    StateFile(path, wall_clock=Clock()).save(*learned(), [VIEW.spec])
    assert StateFile(path, wall_clock=Clock()).load(learner, ratios, [VIEW.spec])
    assert ratios.tokens("m", "t", SIZE, b"") > 1500


# --- files that are no use ------------------------------------------------------------------------------------------


def no_state(path: Path, caplog: pytest.LogCaptureFixture) -> tuple[StateFile, str]:
    learner, ratios = CcrLearner(), PromptRatios()
    state = StateFile(path, wall_clock=Clock())
    with caplog.at_level(logging.WARNING):
        assert not state.load(learner, ratios, [VIEW.spec])
    assert expectation(learner) == expectation(CcrLearner())
    assert ratios.tokens("m", "t", SIZE, b"") == 1000
    return state, caplog.text


def test_no_file_is_no_warning(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert no_state(path, caplog)[1] == ""


@pytest.mark.parametrize(
    "content", [b"", b"version: 1\nlisten: {port: 80}\n", b"\x00\xff" * 50, b"[]", b'{"a": 1}', b"[" * 100_000,
                b'{"format":"other","v":1,"saved_at_s":1.0}']
)
def test_a_file_that_is_not_ours_is_said_and_never_written_over(
    path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    state, text = no_state(path, caplog)
    assert str(path) in text
    assert "left alone" in text
    assert not state.save(*learned(), [VIEW.spec])
    assert path.read_bytes() == content


@pytest.mark.parametrize("damage", [lambda raw: raw[:-9], lambda raw: raw.replace(b'"v":1', b'"v":"x"', 1),
                                    lambda raw: raw.replace(b'"v":1', b'"v":99', 1)])
def test_one_of_ours_that_is_broken_or_of_another_version_is_said_and_begun_anew(
    path: Path, damage: Any, caplog: pytest.LogCaptureFixture
) -> None:
    StateFile(path, wall_clock=Clock()).save(*learned(), [VIEW.spec])
    path.write_bytes(damage(path.read_bytes()))
    state, text = no_state(path, caplog)
    assert "learning starts afresh" in text
    assert state.save(*learned(), [VIEW.spec])
    assert restarted(path, Clock())[2]


def test_nonsense_inside_is_passed_over(path: Path) -> None:
    StateFile(path, wall_clock=Clock()).save(*learned(), [VIEW.spec])
    document = json.loads(path.read_bytes())
    document["learner"]["state"]["backends"]["a"]["drift"] = "fast"
    document["learner"]["state"]["classes"] = {"not": "a list"}
    path.write_bytes(json.dumps(document, separators=(",", ":")).encode())
    again, _, found = restarted(path, Clock())
    assert found
    assert again.belief("a", NOW_S).ttft.samples > 50
    assert again.belief("a", NOW_S).drift.applied == 1.0


def test_a_giant_is_not_read(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path.parent.mkdir()
    with path.open("wb") as file:
        file.truncate(MAX_BYTES + 1)  # a hole: no disk is used
    assert "MB" in no_state(path, caplog)[1]


# --- writing --------------------------------------------------------------------------------------------------------


def test_a_disk_that_refuses_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        assert not StateFile(tmp_path / "file" / "state.json").save(*learned(), [VIEW.spec])
    assert "requests go on" in caplog.text


def test_saving_beside_a_learner_at_work_writes_a_whole_file(path: Path) -> None:
    learner, ratios = learned()
    stop = threading.Event()

    def work() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            backend = a_backend(f"b{number % 3000}")
            sent = learner.sent(a_request(latency_class=f"c{number % 60}"), Priced(backend, 0.1), NOW_S)
            ratios.observe("m", f"t{number % 500}", SIZE, 1500)
            learner.first_token(sent, NOW_S + 0.1)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        saved = [StateFile(path, wall_clock=Clock()).save(learner, ratios, [VIEW.spec]) for _ in range(5)]
    finally:
        stop.set()
        thread.join()
    assert any(saved)
    assert restarted(path, Clock())[2]
