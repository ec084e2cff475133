"""`headrace loadtest`: start what is to be tested, load it with locust, judge what was measured.

Without a host it brings its own fleet (`stack`); with one it loads whatever answers there. Locust runs as a process of
its own, because gevent rewrites the standard library that it is imported into.
"""

import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from subprocess import TimeoutExpired
from types import MappingProxyType
from typing import Any

import msgspec
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from loadtest import report
from loadtest.beforehand import Hopeless, check_fleet, check_host, check_schedule
from loadtest.measured import Promise, failures, measure, shares
from loadtest.openai_stream import Endpoint, StreamRecord
from loadtest.stack import Stack, StackError, child, simulated_stack, tail
from loadtest.traffic import AZURE_CONV_OUTPUTS, AZURE_CONV_PROMPTS, Lengths, Traffic, arrivals, user_dice
from loadtest.verdict import Threshold, ThresholdsError, judge, parse_thresholds, passed

HERE = Path(__file__).resolve().parent
CLASSES: Mapping[str, Promise] = MappingProxyType({
    "interactive": Promise(ttft_s=2.0, inter_token_s=0.15, e2e_s=30.0),
    "batch": Promise(),
})
# The tail of the trace would double the length of a short run without asking anything new of the gateway.
SHORTER_OUTPUTS = Lengths(AZURE_CONV_OUTPUTS.median_tokens, AZURE_CONV_OUTPUTS.spread, 300)
CLASS_SHARES: Mapping[str, float] = MappingProxyType({"interactive": 3.0, "batch": 1.0})


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """One load test. `cards`, `time_scale`, `policy` and `faults` are for the fleet that it brings itself."""

    host: str | None = None
    model: str = "smollm2-135m-instruct"
    api_key_env: str = ""
    users: int = 20
    rate_per_s: float = 8.0
    duration_s: float = 20.0
    drain_s: float = 25.0
    seed: int = 1
    prompts: Lengths = AZURE_CONV_PROMPTS
    outputs: Lengths = SHORTER_OUTPUTS
    cards: tuple[str, ...] = ("a100x2-bf16", "l40sx2-fp8", "ascend910b2x2-bf16")
    time_scale: float = 2.0
    policy: str = "headrace"
    faults: Mapping[str, Sequence[str]] = field(default_factory=lambda: MappingProxyType({}))
    thresholds: Path = HERE / "thresholds.yaml"
    report: Path | None = None
    json: bool = False

    def with_medians(self, prompt_tokens: int | None, output_tokens: int | None) -> "LoadOptions":
        """Other sizes of the same spread, cut at four times the median; `None` leaves them as they are."""
        return replace(self, prompts=_around(prompt_tokens, self.prompts), outputs=_around(output_tokens, self.outputs))


def _around(median_tokens: int | None, lengths: Lengths) -> Lengths:
    return lengths if median_tokens is None else Lengths(median_tokens, lengths.spread, 4 * median_tokens)


class LoadTestError(Exception):
    """The run could not take place, so there is nothing to judge."""


def run_loadtest(options: LoadOptions) -> int:
    """Run and report. Exit code 0: every threshold holds; 1: one does not; 2: the run could not take place."""
    try:
        thresholds = read_thresholds(options.thresholds, "host" if options.host else "simulated")
        _check(options, thresholds)
        folder = options.report or Path(tempfile.mkdtemp(prefix="headrace-loadtest-"))
        folder.mkdir(parents=True, exist_ok=True)
        result = _run(options, thresholds, folder)
    except (Hopeless, StackError, ThresholdsError, LoadTestError) as error:
        print(f"headrace loadtest: {error}", file=sys.stderr)
        return 2
    report.write(result, folder)
    # Nobody asked for the files of a run that passed; those of one that failed are what to look at next.
    kept = options.report is not None or not passed(result.rows)
    if not kept:
        shutil.rmtree(folder)
    report.show(result, folder if kept else None, json=options.json)
    return 0 if passed(result.rows) else 1


def _check(options: LoadOptions, thresholds: Sequence[Threshold]) -> None:
    """Refuse what could not take place or pass, before anything starts. Raises `Hopeless`."""
    planned = planned_requests(options, {} if options.host else CLASS_SHARES)
    check_schedule(planned, options.rate_per_s, thresholds)
    if options.host is None:
        check_fleet(options.cards, options.policy, options.faults)
    else:
        check_host(options.host, options.model, options.api_key_env)


def _run(options: LoadOptions, thresholds: Sequence[Threshold], folder: Path) -> report.Result:
    with ExitStack() as running:
        stack: Stack | None = None
        if options.host is None:
            _say(f"starting {len(options.cards)} fake engines ({', '.join(options.cards)}) and the gateway")
            stack = running.enter_context(simulated_stack(
                folder, cards=options.cards, time_scale=options.time_scale, policy=options.policy, classes=CLASSES,
                faults=options.faults, seed=options.seed))
        host = stack.url if stack else str(options.host)
        model = stack.model if stack else options.model
        _say(f"sending {options.rate_per_s:g} requests/s to {host} for {options.duration_s:g} s (seed {options.seed})")
        records = load(options, host, model, folder, exact_tokens=stack is not None,
                       classes=CLASS_SHARES if stack else {})
    coefficients = stack.coefficients if stack else {}
    measured = measure(
        records, planned=planned_requests(options, CLASS_SHARES if stack else {}), duration_s=options.duration_s,
        backends=tuple(coefficients), cards=coefficients, classes=CLASSES if stack else None)
    return report.Result(judge(measured, thresholds), measured, shares(records), failures(records))


def load(
    options: LoadOptions, host: str, model: str, folder: Path, *, exact_tokens: bool, classes: Mapping[str, float]
) -> list[StreamRecord]:
    """One bounded headless locust run. Raises `LoadTestError` where locust itself fails."""
    try:
        Endpoint.parse(host)
    except ValueError as error:
        raise LoadTestError(str(error)) from None
    records, log = folder / "records.jsonl", folder / "locust.log"
    records.unlink(missing_ok=True)
    log.unlink(missing_ok=True)
    bound_s = options.duration_s + options.drain_s + 10
    command = [
        sys.executable, "-m", "locust", "--locustfile", str(HERE / "locustfile.py"), "--host", host, "--headless",
        "--only-summary", "--users", str(options.users), "--spawn-rate", str(options.users),
        "--run-time", f"{bound_s:.0f}", "--exit-code-on-error", "0",
        "--html", str(folder / "locust.html"), "--csv", str(folder / "locust"),
        "--model", model, "--request-rate", str(options.rate_per_s), "--arrivals-s", str(options.duration_s),
        "--drain-s", str(options.drain_s), "--seed", str(options.seed),
        "--latency-classes", ",".join(f"{name}={share:g}" for name, share in classes.items()),
        "--prompt-median", str(options.prompts.median_tokens), "--prompt-cap", str(options.prompts.cap_tokens),
        "--output-median", str(options.outputs.median_tokens), "--output-cap", str(options.outputs.cap_tokens),
        "--api-key-env", options.api_key_env, "--records", str(records), *(["--exact-tokens"] if exact_tokens else []),
    ]
    with child(command, log) as locust:
        try:
            code = locust.wait(timeout=bound_s + 20)
        except TimeoutExpired:
            raise LoadTestError(f"locust did not end in {bound_s + 20:.0f} s:\n{tail(log)}") from None
    if code or not records.exists():
        raise LoadTestError(f"locust ended with code {code}:\n{tail(log)}")
    decoder = msgspec.json.Decoder(StreamRecord)
    return [decoder.decode(line) for line in records.read_bytes().splitlines()]


def planned_requests(options: LoadOptions, classes: Mapping[str, float]) -> int:
    """How many requests the users' schedules hold: worked out again from the seed, not taken from locust's word."""
    traffic = Traffic(options.rate_per_s / options.users, options.prompts, options.outputs, classes)
    return sum(
        sum(1 for _ in arrivals(traffic, user_dice(options.seed, number), options.duration_s))
        for number in range(options.users))


def read_thresholds(path: Path, group: str) -> tuple[Threshold, ...]:
    """The thresholds of one group of a YAML file. Raises `ThresholdsError`."""
    try:
        document: Any = YAML(typ="safe").load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ThresholdsError(f"cannot read {path}: {error.strerror}") from None
    except (YAMLError, UnicodeDecodeError) as error:
        raise ThresholdsError(f"{path} is not YAML: {error}") from None
    try:
        return parse_thresholds(document, group)
    except ThresholdsError as error:
        raise ThresholdsError(f"{path}: {error}") from None


def _say(text: str) -> None:
    print(f"loadtest: {text}", file=sys.stderr, flush=True)
