"""`python -m loadtest.training_job`: trains a small network on one core until it is done or asked to go.

Asked to go (SIGUSR1), it ends its step, saves, acknowledges in the file that HEADRACE_CHECKPOINT_ACK names, and exits
with 0. Started again with --resume, it goes on to the same loss curve, bit for bit. SIGTERM ends it without saving.
In a gang each member trains a network of its own: its seed is --seed plus its RANK.
"""

import argparse
import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

SAVE, END = signal.SIGUSR1, signal.SIGTERM
if __name__ == "__main__":
    # Signals are waited for, never handled: between two steps, and while we sleep. Before the imports, because a recall
    # may come while they still run.
    signal.pthread_sigmask(signal.SIG_BLOCK, {SAVE, END})
# Threads would add up in another order each time, and take cores from what is being measured beside us.
for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"

from loadtest.training_job.checkpoint import BadCheckpoint, digest, load, replace_file, save  # noqa: E402
from loadtest.training_job.network import TrainingState, new_training, train_step  # noqa: E402

ACK_VARIABLE = "HEADRACE_CHECKPOINT_ACK"
EXIT_FAILED, EXIT_USAGE, EXIT_ENDED = 1, 2, 128 + signal.SIGTERM


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says."""

    steps: int
    seed: int
    checkpoint: Path
    resume: bool
    save_every: int
    step_s: float
    checkpoint_s: float
    ignore_signals: bool
    leave_child: bool
    fail_checkpoint: bool
    json: bool
    log_every: int


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 0 done or saved, 1 a checkpoint failed, 2 bad options, 143 ended by SIGTERM."""
    options = _parse(arguments)
    signal.pthread_sigmask(signal.SIG_BLOCK, {SAVE, END})
    try:
        state = load(options.checkpoint) if options.resume else new_training(options.seed)
    except (BadCheckpoint, OSError) as problem:
        print(f"training job: cannot resume: {problem}", file=sys.stderr)
        return EXIT_USAGE
    if state.seed != options.seed:
        print(f"training job: {options.checkpoint} was trained with seed {state.seed}, not {options.seed}",
              file=sys.stderr)
        return EXIT_USAGE
    if options.leave_child:
        _leave_child()
    _say(options, {"event": "begin", "step": state.step, "pid": os.getpid()}, f"begins at step {state.step}")
    return _train(state, options)


def _train(state: TrainingState, options: Options) -> int:
    while state.step < options.steps:
        step_ends_s = time.monotonic() + options.step_s
        loss = train_step(state)
        if state.step % options.log_every == 0:
            _say(options, {"event": "step", "step": state.step, "loss": loss},
                 f"step {state.step}/{options.steps}, loss {loss:.4f}")
        asked = _wait(max(0.0, step_ends_s - time.monotonic()), options)
        if asked is not None and asked.si_signo == END:
            return EXIT_ENDED
        if asked is not None:
            return _save_and_go(state, options)
        if options.save_every and state.step % options.save_every == 0:
            save(state, options.checkpoint)
    save(state, options.checkpoint)
    _say(options, {"event": "done", "step": state.step, "digest": digest(state)}, f"done, state {digest(state)}")
    return 0


def _wait(pause_s: float, options: Options) -> signal.struct_siginfo | None:
    """The rest of a step; cut short by a signal, which is then returned."""
    if options.ignore_signals:
        time.sleep(pause_s)
        return None
    return signal.sigtimedwait({SAVE, END}, pause_s)


def _save_and_go(state: TrainingState, options: Options) -> int:
    began_s = time.monotonic()
    time.sleep(options.checkpoint_s)
    if options.fail_checkpoint:
        print("training job: the checkpoint failed, as --fail-checkpoint wants it", file=sys.stderr)
        return EXIT_FAILED
    save(state, options.checkpoint)
    ack = {"step": state.step, "resume_from": str(options.checkpoint.absolute()), "digest": digest(state)}
    if ACK_VARIABLE in os.environ:
        replace_file(Path(os.environ[ACK_VARIABLE]), json.dumps(ack).encode())
    _say(options, {"event": "saved", **ack, "took_s": time.monotonic() - began_s},
         f"saved at step {state.step} and goes")
    return 0


def _leave_child() -> None:
    """A child in a session of its own that nobody waits for: what a careless data loader leaves behind."""
    if os.fork() == 0:
        os.setsid()
        while True:
            time.sleep(3600)


def _say(options: Options, record: dict[str, object], words: str) -> None:
    print(json.dumps(record) if options.json else words, flush=True)


def _parse(arguments: list[str] | None) -> Options:
    parser = argparse.ArgumentParser(prog="python -m loadtest.training_job", description=__doc__)
    parser.add_argument("--steps", type=int, default=1000, help="train until this step (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint.npz"),
                        help="file to save to; '{rank}' stands for RANK (default: %(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    parser.add_argument("--save-every", type=int, default=0, metavar="N", help="save every N steps as well; 0: never")
    parser.add_argument("--step-ms", type=float, default=0.0, help="a step takes at least this long")
    parser.add_argument("--checkpoint-s", type=float, default=0.0, help="a checkpoint takes this much longer")
    parser.add_argument("--ignore-signals", action="store_true", help="neither saves nor goes when asked")
    parser.add_argument("--leave-child", action="store_true", help="leave a child behind in a session of its own")
    parser.add_argument("--fail-checkpoint", action="store_true", help="fail to save: exit with 1, no acknowledgement")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--log-every", type=int, default=1, metavar="N", help="say the loss every N steps")
    given = parser.parse_args(arguments)
    for name in ("steps", "log_every"):
        if getattr(given, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    for name in ("save_every", "step_ms", "checkpoint_s", "seed"):
        if not getattr(given, name) >= 0:
            parser.error(f"--{name.replace('_', '-')} must not be negative")
    rank = os.environ.get("RANK", "0")
    return Options(
        steps=given.steps, seed=given.seed + int(rank), resume=given.resume, save_every=given.save_every,
        checkpoint=Path(str(given.checkpoint).replace("{rank}", rank)), step_s=given.step_ms / 1000,
        checkpoint_s=given.checkpoint_s, ignore_signals=given.ignore_signals, leave_child=given.leave_child,
        fail_checkpoint=given.fail_checkpoint, json=given.json, log_every=given.log_every,
    )


if __name__ == "__main__":
    sys.exit(main())
