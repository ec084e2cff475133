"""One gateway a policy: the same backends, prices and promises in its fleet file, and another policy.

Each is `headrace serve` as a process of its own, with free ports, and nothing learned from earlier runs. All of them
stay up from the warm-up to the end, so that a policy keeps what it learns; while one has the engines the others only
poll them.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

from loadtest.live.classes import LiveClass
from loadtest.live.fleet import Fleet, ready_line
from loadtest.sim.run import policy_spec
from loadtest.stack import child, tail

START_LIMIT_S = 30.0
IN_SERVICE = ("healthy", "slow_start")
LEFT_OUT = ("auth", "decision_log", "lending", "state")
"""Of the fleet file: no keys between us and the gateway, no past, no borrower."""


class GatewayError(Exception):
    """A gateway does not serve; the message says which and ends with the tail of its log."""


def gateway_document(fleet: Fleet, classes: Sequence[LiveClass], policy: str, log: str | None) -> dict[str, Any]:
    """The fleet file of one policy's gateway; `log` is where its decision records go. Raises `SimError`."""
    spec = policy_spec(policy)
    document = {name: value for name, value in fleet.document.items() if name not in LEFT_OUT}
    free = {"host": "127.0.0.1", "port": 0}
    return {
        **document, "listen": free, "admin": free,
        "latency_classes": [
            {"name": each.name, "ttft_s": each.ttft_s, "inter_token_s": each.inter_token_s} for each in classes],
        "default_latency_class": classes[0].name,
        "policy": {"name": spec.name, "settings": dict(spec.settings)},
        **({"decision_log": {"path": log}} if log else {}),
    }


@dataclass(frozen=True, slots=True)
class Served:
    """A gateway that serves under one policy."""

    policy: str
    url: str
    admin_url: str
    process: "subprocess.Popen[bytes]"
    log: Path

    def fleet(self) -> Mapping[str, Any]:
        """What its admin listener says of the fleet. Raises `GatewayError`."""
        try:
            with urlopen(f"{self.admin_url}/admin/fleet", timeout=5) as answer:  # noqa: S310 our own loopback address
                found: Mapping[str, Any] = json.load(answer)
                return found
        except (URLError, OSError, ValueError) as error:
            raise GatewayError(f"the gateway of {self.policy} does not answer ({error}):\n{tail(self.log)}") from None

    def await_backends(self) -> None:
        """Returns once every backend is in service. Raises `GatewayError`."""
        if not self._until(lambda fleet, _: all(
                one["health"]["state"] in IN_SERVICE for one in fleet["backends"]), START_LIMIT_S):
            states = ", ".join(f"{one['name']} is {one['health']['state']}" for one in self.fleet()["backends"])
            raise GatewayError(f"after {START_LIMIT_S:g} s the gateway of {self.policy} does not see all backends "
                               f"healthy: {states}")

    def becomes_idle(self, limit_s: float, *, engines_too: bool) -> bool:
        """Waits until it has nothing in flight; with `engines_too` until a poll has found the engines idle as well.

        False where that does not come in time. Raises `GatewayError`.
        """
        def idle(fleet: Mapping[str, Any], waited_s: float) -> bool:
            if fleet["in_flight"] or any(one["in_flight"]["requests"] for one in fleet["backends"]):
                return False
            samples = [one["sample"] for one in fleet["backends"] if one["sample"]] if engines_too else []
            return all(sample["age_s"] < waited_s and not sample["running_requests"] and not sample["waiting_requests"]
                       for sample in samples)

        return self._until(idle, limit_s)

    def _until(self, holds: Callable[[Mapping[str, Any], float], bool], limit_s: float) -> bool:
        began_s = time.monotonic()
        while not holds(self.fleet(), time.monotonic() - began_s):
            if time.monotonic() - began_s > limit_s:
                return False
            time.sleep(0.1)
        return True


@contextmanager
def serving(folder: Path, number: int, policy: str, document: Mapping[str, Any]) -> Iterator[Served]:
    """A gateway of that fleet file, until the context ends. Raises `GatewayError`."""
    config, log = folder / f"gateway-{number}.yaml", folder / f"gateway-{number}.log"
    # JSON is YAML as well.
    config.write_text(json.dumps(document, indent=1), encoding="utf-8")
    command = [sys.executable, "-m", "headrace", "serve", "--config", str(config), "--json"]
    with child(command, log, stdout=subprocess.PIPE) as process:
        ready = ready_line(process, START_LIMIT_S)
        if ready is None:
            raise GatewayError(f"the gateway of {policy} did not start:\n{tail(log)}")
        yield Served(policy, ready["url"], ready["admin_url"], process, log)
