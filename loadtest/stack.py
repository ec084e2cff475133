"""A whole fleet on loopback for the time of one load test: fake engines with the physics of real cards, and a gateway.

Everything is a child process with its own log, is told to die with its parent, and is gone when the context ends.
"""

import json
import os
import select
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from backends.catalog.spec import Coefficients
from loadtest.fake_engine.cards import Card, UnknownCard, find_card
from loadtest.measured import Promise

PACKAGES = Path(__file__).resolve().parent.parent
START_PATIENCE_S = 30.0


class StackError(Exception):
    """Something of the stack did not start; the message says what and ends with the tail of its log."""


@dataclass(frozen=True, slots=True)
class Stack:
    """A running fleet. `cards` and `coefficients` go by backend name; coefficients are at the run's time scale."""

    url: str
    admin_url: str
    model: str
    coefficients: Mapping[str, Coefficients]


def at_time_scale(coefficients: Coefficients, time_scale: float) -> Coefficients:
    """The coefficients of a card whose clock runs `time_scale` times as fast."""
    scaled = {field.name: getattr(coefficients, field.name) / time_scale
              for field in fields(coefficients) if "_ms" in field.name}
    return replace(coefficients, **scaled)


def fleet_document(
    engines: Sequence[tuple[str, Card]], *, port: int, admin_port: int, policy: str,
    classes: Mapping[str, Promise], time_scale: float,
) -> dict[str, object]:
    """The fleet file of the stack: one backend a card, named after it. `engines` are (url, card) pairs."""
    model = engines[0][1].model
    return {
        "version": 1,
        "listen": {"host": "127.0.0.1", "port": port},
        "admin": {"host": "127.0.0.1", "port": admin_port},
        "models": [{"name": model}],
        "latency_classes": [{"name": name, **_told(promise)} for name, promise in classes.items()],
        "default_latency_class": next(iter(classes)),
        "policy": {"name": policy},
        "backends": [
            {
                "name": card.id, "url": url, "engine": "vllm", "model": model,
                "card": {"type": card.hardware, "count": card.devices}, "quantization": card.quantization,
                "parallel": {"tp": card.devices}, "price_per_hour": card.price_per_hour,
                "coefficients": _told(at_time_scale(card.coefficients, time_scale)),
            }
            for url, card in engines
        ],
        # Scrapes far apart compared with a fake card's queue would make every run judge the poller, not the policy.
        "poll": {"interval_s": 0.5, "timeout_s": 1.0},
    }


def _told(declared: Promise | Coefficients) -> dict[str, object]:
    return {name: value for name, value in asdict(declared).items() if value is not None}


@contextmanager
def simulated_stack(
    folder: Path, *, cards: Sequence[str], time_scale: float, policy: str, classes: Mapping[str, Promise],
    faults: Mapping[str, Sequence[str]] | None = None, seed: int = 1,
) -> Iterator[Stack]:
    """Start one fake engine a card and a gateway before them; logs and the fleet file go to `folder`.

    Raises `StackError` where a card is unknown, or a process does not come up in 30 s.
    """
    found = [_card(card_id) for card_id in cards]
    if len({card.model for card in found}) != 1 or len(set(cards)) != len(cards):
        listed = ", ".join(f"{card.id} ({card.model})" for card in found)
        raise StackError(f"a fleet needs different cards of one model, got {listed}")
    with ExitStack() as running:
        engines = []
        for index, card in enumerate(found):
            of_card = (faults or {}).get(card.id, ())
            engines.append((_start_engine(running, folder, card, time_scale, of_card, seed + index), card))
        port, admin_port = free_ports(2)
        document = fleet_document(engines, port=port, admin_port=admin_port, policy=policy, classes=classes,
                                  time_scale=time_scale)
        # JSON is YAML as well.
        fleet = folder / "fleet.yaml"
        fleet.write_text(json.dumps(document, indent=1), encoding="utf-8")
        url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "headrace", "serve", "--config", str(fleet)]
        log = folder / "gateway.log"
        gateway = running.enter_context(child(command, log))
        _await_ready(gateway, f"{url}/readiness", log)
        yield Stack(url, f"http://127.0.0.1:{admin_port}", found[0].model,
                    {card.id: at_time_scale(card.coefficients, time_scale) for card in found})


def free_ports(number: int) -> list[int]:
    """Loopback ports that nobody listens on at this moment."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)]
        return [one.getsockname()[1] for one in sockets]


@contextmanager
def child(command: Sequence[str], log: Path, *, stdout: int | None = None) -> Iterator["subprocess.Popen[bytes]"]:
    """A process that writes to `log`, dies with this one, and is stopped (TERM, then KILL) at the end."""
    # A parent that is killed cannot stop anybody; the kernel can.
    prefix = ["setpriv", "--pdeathsig", "KILL", "--"] if shutil.which("setpriv") else []
    with log.open("ab") as sink:
        process = subprocess.Popen([*prefix, *command], stdout=stdout or sink, stderr=sink, stdin=subprocess.DEVNULL,  # noqa: S603
                                   env=child_environment())
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout:
            process.stdout.close()


def child_environment() -> dict[str, str]:
    """This environment, with the packages that this process runs first on the path."""
    path = os.pathsep.join(filter(None, [str(PACKAGES), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def _card(card_id: str) -> Card:
    try:
        return find_card(card_id)
    except UnknownCard as error:
        raise StackError(str(error.args[0])) from None


def _start_engine(
    running: ExitStack, folder: Path, card: Card, time_scale: float, faults: Sequence[str], seed: int
) -> str:
    command = [sys.executable, "-m", "loadtest.fake_engine", "--card", card.id, "--port", "0",
               "--served-model-name", card.model, "--time-scale", str(time_scale), "--seed", str(seed),
               "--die-with-parent"]
    for fault in faults:
        command += ["--fault", fault]
    log = folder / f"{card.id}.log"
    process = running.enter_context(child(command, log, stdout=subprocess.PIPE))
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], START_PATIENCE_S)
    line = process.stdout.readline() if ready else b""
    try:
        return str(json.loads(line)["url"])
    except (ValueError, KeyError, TypeError):
        raise StackError(f"the fake engine {card.id} did not start:\n{tail(log)}") from None


def _await_ready(process: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    deadline_s = time.monotonic() + START_PATIENCE_S
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            raise StackError(f"the gateway ended with code {process.returncode}:\n{tail(log)}")
        try:
            with urlopen(url, timeout=1):  # noqa: S310 our own loopback address
                return
        except (URLError, OSError):
            time.sleep(0.05)
    raise StackError(f"the gateway was not ready after {START_PATIENCE_S:.0f} s:\n{tail(log)}")


def tail(log: Path, lines: int = 15) -> str:
    """The last lines of a log, indented."""
    text = log.read_text("utf-8", "replace") if log.exists() else ""
    return "\n".join(f"  {line}" for line in text.splitlines()[-lines:]) or "  (its log is empty)"
