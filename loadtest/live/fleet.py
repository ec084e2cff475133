"""The engines under test: `headrace up` starts them and measures them, or a fleet file names some that run.

`headrace up` is run as its user would: what it knows (weights, calibration once per machine, restarts, nothing left
behind) is not done a second time here. Its gateway gets no request; what is used is the fleet file that it writes.
"""

import json
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from backends.catalog.spec import BackendSpec
from loadtest.live.classes import measured_coefficients
from loadtest.live.prompts import mark, prompt_body
from loadtest.measured import unloaded_inter_token_s, unloaded_ttft_s
from loadtest.openai_stream import Ask, Endpoint, Patience, stream_chat
from loadtest.stack import child, tail
from router.config.fleet_file import ConfigError, load_fleet

START_LIMIT_S = 300.0
"""Of `headrace up`: its first start on a machine fetches weights and measures engines."""
PROBES = 3
PROBE_PROMPT_TOKENS = 60
PROBE_OUTPUT_TOKENS = 12


class FleetError(Exception):
    """There are no engines to send to; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """Engines of one model that run."""

    model: str
    specs: tuple[BackendSpec, ...]
    """Those of the model that take requests, with their coefficients."""
    document: Mapping[str, Any]
    """The fleet file's content, as far as it is not default."""
    started_here: bool


@contextmanager
def started_fleet(folder: Path, engines: str, time_scale: float) -> Iterator[Fleet]:
    """The engines that `headrace up` starts, until the context ends. Raises `FleetError`."""
    command = [sys.executable, "-m", "headrace", "up", "--engines", engines, "--json", "--port", "0",
               "--admin-port", "0", "--run-dir", str(folder / "up"), "--time-scale", f"{time_scale:g}"]
    log = folder / "up.log"
    with child(command, log, stdout=subprocess.PIPE) as process:
        ready = ready_line(process, START_LIMIT_S)
        if ready is None:
            raise FleetError(f"`headrace up` did not start its engines:\n{tail(log)}")
        yield read_fleet(Path(ready["fleet_file"]), {}, started_here=True)


def ready_line(process: "subprocess.Popen[bytes]", limit_s: float) -> Mapping[str, Any] | None:
    """The JSON object that a process prints once it serves; `None` where it prints none within the limit."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], limit_s)
    try:
        found = json.loads(process.stdout.readline() if ready else b"")
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def read_fleet(path: Path, environ: Mapping[str, str], *, started_here: bool = False) -> Fleet:
    """The fleet of a file: backends of its first model, drained ones left out.

    Raises:
        FleetError: it is no fleet file.
        NoCoefficients: of one of them nothing was measured.
    """
    try:
        loaded = load_fleet(path, environ)
    except ConfigError as error:
        raise FleetError(str(error)) from None
    model = loaded.config.models[0].name
    specs = tuple(spec for spec in loaded.specs if spec.model == model and spec.weight > 0)
    if not specs:
        raise FleetError(f"{path}: no backend of weight above 0 serves {model}, the first of its models")
    measured_coefficients(specs)
    return Fleet(model, specs, loaded.config.model_dump(mode="json", exclude_unset=True), started_here)


@dataclass(frozen=True, slots=True)
class Probe:
    """What an idle engine takes over what its coefficients say: 1 where they are right."""

    ttft_over_card: float
    inter_token_over_card: float

    @property
    def is_far_off(self) -> bool:
        """Promises and costs that rest on these coefficients mean little."""
        return any(not 0.5 <= ratio <= 1.6 for ratio in (self.ttft_over_card, self.inter_token_over_card))


def probe(fleet: Fleet, seed: int) -> dict[str, Probe]:
    """Ask each engine a few times, past every gateway; the best of them counts. Raises `FleetError`."""
    rng = Random(f"{seed}/probe")
    return {spec.name: _probe(spec, rng) for spec in fleet.specs}


def _probe(spec: BackendSpec, rng: Random) -> Probe:
    card = spec.coefficients
    assert card is not None, "read_fleet takes no backend without"
    firsts, gaps = [], []
    for _ in range(PROBES):
        prompt = f"{mark(rng)} {prompt_body(PROBE_PROMPT_TOKENS, rng)}"
        ask = Ask(time.monotonic(), spec.served_model_name, prompt, PROBE_PROMPT_TOKENS, PROBE_OUTPUT_TOKENS)
        record = stream_chat(Endpoint.parse(spec.url), ask, patience=Patience(), api_key=spec.api_key)
        if record.failure or record.ttft_s is None:
            raise FleetError(f"{spec.name} at {spec.url} does not answer: {record.failure} {record.detail}".rstrip())
        firsts.append(record.ttft_s / unloaded_ttft_s(card, record.prompt_tokens))
        if record.gaps_s:
            context = record.prompt_tokens + record.tokens // 2
            gaps.append(sum(record.gaps_s) / len(record.gaps_s) / unloaded_inter_token_s(card, context))
    return Probe(min(firsts), min(gaps, default=1.0))
