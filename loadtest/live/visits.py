"""A visit: one policy has the engines for one block, from the first arrival until nothing is open any more."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from subprocess import TimeoutExpired

import msgspec

from loadtest.live.gateways import Served
from loadtest.live.schedule import Block, schedule_file
from loadtest.openai_stream import StreamRecord
from loadtest.stack import child, tail

LOCUSTFILE = Path(__file__).with_name("locustfile.py")
START_LIMIT_S = 30.0
"""For locust to start, and to end after the drain time."""
IDLE_LIMIT_S = 30.0


class VisitError(Exception):
    """The load client failed, or a gateway is gone; the message says how."""


@dataclass(frozen=True, slots=True)
class Visit:
    """What came back. `records` go by the number of the arrival; those that were never answered are not there."""

    records: Mapping[int, StreamRecord]
    left_idle: bool
    """Nothing was running on the engines any more when the next visit could begin."""


@dataclass(frozen=True, slots=True)
class _Line:
    number: int
    record: StreamRecord


def visit(served: Served, block: Block, *, model: str, seed: int, drain_s: float, folder: Path) -> Visit:
    """Send the block through the gateway and wait for the end. Raises `VisitError` or `GatewayError`."""
    folder.mkdir()
    schedule, records, log = folder / "schedule.json", folder / "records.jsonl", folder / "locust.log"
    schedule.write_text(schedule_file(block, served.policy, seed, model), encoding="utf-8")
    limit_s = block.seconds + drain_s + START_LIMIT_S
    command = [
        sys.executable, "-m", "locust", "--locustfile", str(LOCUSTFILE), "--host", served.url, "--headless",
        "--only-summary", "--users", "1", "--spawn-rate", "1", "--run-time", f"{limit_s:.0f}",
        "--exit-code-on-error", "0", "--schedule", str(schedule), "--records", str(records),
        "--drain-s", f"{drain_s:.3f}",
    ]
    with child(command, log) as locust:
        try:
            code = locust.wait(timeout=limit_s + START_LIMIT_S)
        except TimeoutExpired:
            raise VisitError(f"locust did not end in {limit_s + START_LIMIT_S:.0f} s:\n{tail(log)}") from None
    if code or not records.exists():
        raise VisitError(f"locust ended with code {code}:\n{tail(log)}")
    if served.process.poll() is not None:
        raise VisitError(f"the gateway of {served.policy} ended with code {served.process.returncode}:\n"
                         f"{tail(served.log)}")
    found = read_records(records)
    # An answer that was given up may still be computed, and would be the next policy's burden.
    idle = served.becomes_idle(IDLE_LIMIT_S, engines_too=len(found) < len(block.arrivals))
    return Visit(found, idle)


def read_records(path: Path) -> dict[int, StreamRecord]:
    """The lines that the locustfile has written, by number of the arrival."""
    decoder = msgspec.json.Decoder(_Line)
    return {line.number: line.record for line in map(decoder.decode, path.read_bytes().splitlines())}
