"""The sample training job: it learns, saves whole or not at all, and resumes to the same curve."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numpy", reason="the training job needs NumPy")

from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.training_job.checkpoint import BadCheckpoint, digest, load, save
from loadtest.training_job.network import new_training, train_step
from tests.processes import until

ROOT = Path(__file__).resolve().parents[2]


def job(folder: Path, *options: str, **environ: str) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-m", "loadtest.training_job", "--json", *options], cwd=folder, text=True,
                            env={**os.environ, "PYTHONPATH": str(ROOT), **environ}, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE)


def lines(text: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in text.splitlines()]


def curve(text: str) -> list[tuple[object, object]]:
    return [(line["step"], line["loss"]) for line in lines(text) if line["event"] == "step"]


def test_it_learns() -> None:
    state = new_training(0)
    losses = [train_step(state) for _ in range(600)]
    assert sum(losses[-50:]) < 0.3 * sum(losses[:50])


@settings(max_examples=20)
@given(st.integers(0, 1000), st.integers(0, 20), st.integers(1, 20))
def test_a_saved_training_goes_on_as_if_it_had_never_stopped(
    tmp_path_factory: pytest.TempPathFactory, seed: int, before: int, after: int
) -> None:
    state = new_training(seed)
    for _ in range(before):
        train_step(state)
    file = tmp_path_factory.mktemp("checkpoint") / "c.npz"
    save(state, file)
    resumed = load(file)
    assert digest(resumed) == digest(state)
    assert [train_step(resumed) for _ in range(after)] == [train_step(state) for _ in range(after)]
    assert digest(resumed) == digest(state)


def test_the_digest_knows_each_part_of_the_state() -> None:
    digests = {digest(new_training(0)), digest(new_training(1))}
    for part in ("parameters", "first_moments", "second_moments"):
        state = new_training(0)
        getattr(state, part)["b1"][0] += 1e-300
        digests.add(digest(state))
    state = new_training(0)
    state.rng.random()
    digests.add(digest(state))
    assert len(digests) == 6


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "c.npz"
    save(new_training(0), file)
    whole = file.read_bytes()
    for data in (b"", b"text", whole[: len(whole) // 2]):
        file.write_bytes(data)
        with pytest.raises(BadCheckpoint, match=r"c\.npz"):
            load(file)


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, state = tmp_path / "c.npz", new_training(0)
    save(state, file)
    before = file.read_bytes()
    train_step(state)

    def full(descriptor: int) -> None:
        raise OSError(28, "no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        save(state, file)
    assert file.read_bytes() == before


@pytest.mark.real_time
def test_interrupted_and_resumed_it_says_the_curve_of_a_job_that_was_not(tmp_path: Path) -> None:
    whole, error = job(tmp_path, "--steps", "80", "--checkpoint", "whole.npz").communicate(timeout=60)
    assert error == ""
    ack = tmp_path / "ack"
    with job(tmp_path, "--steps", "80", "--step-ms", "10", HEADRACE_CHECKPOINT_ACK=str(ack)) as process:
        assert process.stdout is not None
        said = "".join(process.stdout.readline() for _ in range(12))
        process.send_signal(signal.SIGUSR1)
        said += process.stdout.read()
    assert process.returncode == 0
    saved = lines(said)[-1]
    assert saved["event"] == "saved"
    assert json.loads(ack.read_text()) == {name: saved[name] for name in ("step", "resume_from", "digest")}
    assert saved["step"] == curve(said)[-1][0]
    resumed, error = job(tmp_path, "--steps", "80", "--resume").communicate(timeout=60)
    assert error == ""
    assert len(curve(said)) >= 11
    assert len(curve(resumed)) >= 1
    assert curve(said) + curve(resumed) == curve(whole)
    assert lines(resumed)[-1] == lines(whole)[-1]


@pytest.mark.real_time
def test_killed_it_resumes_from_its_last_checkpoint_to_the_same_curve(tmp_path: Path) -> None:
    whole, _ = job(tmp_path, "--steps", "60", "--checkpoint", "whole.npz").communicate(timeout=60)
    with job(tmp_path, "--steps", "60", "--step-ms", "10", "--save-every", "5") as process:
        until((tmp_path / "checkpoint.npz").exists, "a checkpoint")
        process.kill()
    resumed, _ = job(tmp_path, "--steps", "60", "--resume").communicate(timeout=60)
    again = curve(resumed)
    assert 0 < len(again) < 60
    assert again == curve(whole)[-len(again):]


@pytest.mark.parametrize(("options", "signum", "code"), [
    (("--fail-checkpoint",), signal.SIGUSR1, 1),
    ((), signal.SIGTERM, 143),
    (("--ignore-signals",), signal.SIGTERM, 0),
])
@pytest.mark.real_time
def test_how_it_ends(tmp_path: Path, options: tuple[str, ...], signum: int, code: int) -> None:
    ack = tmp_path / "ack"
    with job(tmp_path, "--steps", "30", "--step-ms", "10", *options, HEADRACE_CHECKPOINT_ACK=str(ack)) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signum)
        process.stdout.read()
    assert process.returncode == code
    assert not ack.exists()


@pytest.mark.parametrize(("options", "text"), [
    (("--resume",), "cannot resume: .*checkpoint.npz"),
    (("--steps", "0"), "--steps must be at least 1"),
    (("--step-ms", "nan"), "--step-ms must not be negative"),
])
@pytest.mark.real_time
def test_bad_options(tmp_path: Path, options: tuple[str, ...], text: str) -> None:
    process = job(tmp_path, *options)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 2
    assert re.search(text, error)


@pytest.mark.real_time
def test_another_seed_is_not_resumed_into_and_each_rank_has_its_own(tmp_path: Path) -> None:
    digests = set()
    for rank in ("0", "1"):
        said, _ = job(tmp_path, "--steps", "2", "--checkpoint", "{rank}.npz", RANK=rank).communicate(timeout=60)
        digests.add(lines(said)[-1]["digest"])
    assert len(digests) == 2
    process = job(tmp_path, "--steps", "4", "--resume", "--checkpoint", "1.npz")
    _, error = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "trained with seed 1, not 0" in error
