"""`headrace fake-engine`: one fake engine as a process of its own.

Prints one JSON line, `{"url": ..., "pid": ...}`, when it listens.
"""

import argparse
import ctypes
import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from starlette.applications import Starlette

from loadtest.fake_engine.cards import UnknownCard, load_cards
from loadtest.fake_engine.faults import BadFault, Fault, parse_fault, read_faults
from loadtest.fake_engine.server import FakeEngineOptions, FakeEngineServer, bind, build_app, url_of

PR_SET_PDEATHSIG = 1
DIED_BY_FAULT = 70


def main(arguments: list[str] | None = None) -> int:
    """Runs until a signal ends it; returns the exit code, 2 where the options do not make an engine."""
    options = _parser().parse_args(arguments)
    if options.list_cards:
        _print_cards()
        return 0
    if options.die_with_parent is not None:
        die_with_parent(options.die_with_parent or os.getppid())
    try:
        app = build_app(_engine_options(options), die=lambda: os._exit(DIED_BY_FAULT))
        listener = bind(options.host, options.port)
    except (UnknownCard, ValueError, OSError, YAMLError) as problem:
        print(f"fake engine: {problem}", file=sys.stderr)
        return 2
    try:
        _AnnouncingServer(app, url_of(listener)).run(sockets=[listener])
    except KeyboardInterrupt:
        return 130
    return 0


def die_with_parent(parent: int, check_interval_s: float = 1.0) -> None:
    """Ends this process when its parent, the process `parent`, is gone, even by SIGKILL.

    Linux sends the signal; it does so too when the *thread* that started us ends, so start engines from a thread that
    stays. The loop beside it covers other systems, and a parent that went before the signal was asked for: the latter
    only where the caller gave its process id.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(check_interval_s)
        os._exit(1)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()


class _AnnouncingServer(FakeEngineServer):
    def __init__(self, app: Starlette, url: str) -> None:
        super().__init__(app)
        self._url = url

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print(json.dumps({"url": self._url, "pid": os.getpid()}), flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="headrace fake-engine", description=__doc__,
        epilog="Faults: see the head of loadtest/fake_engine/faults.py.",
    )
    default = FakeEngineOptions()
    parser.add_argument("--card", default=default.card, help="measured card to play (default: %(default)s)")
    parser.add_argument("--list-cards", action="store_true", help="print the cards and exit")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free port (default)")
    parser.add_argument("--served-model-name", default=default.served_model_name)
    parser.add_argument("--time-scale", type=float, default=default.time_scale, help="times faster than the card")
    parser.add_argument("--seed", type=int, default=default.seed)
    parser.add_argument("--slots", type=int, default=default.slots, help="sequences that run at once")
    parser.add_argument("--context", type=int, default=default.context_tokens, help="longest prompt and output, tokens")
    parser.add_argument("--kv-capacity", type=int, help="KV cache in tokens, in place of the card's")
    parser.add_argument("--no-chunked-prefill", action="store_true", help="prompts run whole while decoding waits")
    parser.add_argument("--prefix-cache", action="store_true", help="reuse the beginnings of prompts")
    parser.add_argument("--noise", type=float, default=default.noise_sigma, help="lognormal sigma of step times")
    parser.add_argument("--api-key")
    parser.add_argument("--fault", action="append", default=[], metavar="FAULT", help="'slow x3 from 5 to 10'; repeat")
    parser.add_argument("--faults-file", type=Path, help="YAML or JSON list of faults")
    parser.add_argument(
        "--die-with-parent", type=int, nargs="?", const=0, metavar="PID",
        help="end when the parent process does; with its PID, also when it was gone before we started",
    )
    return parser


def _engine_options(options: argparse.Namespace) -> FakeEngineOptions:
    return FakeEngineOptions(
        card=options.card,
        served_model_name=options.served_model_name,
        time_scale=options.time_scale,
        seed=options.seed,
        slots=options.slots,
        context_tokens=options.context,
        kv_capacity_tokens=options.kv_capacity,
        chunked_prefill=not options.no_chunked_prefill,
        prefix_cache=options.prefix_cache,
        noise_sigma=options.noise,
        faults=_faults(options),
        api_key=options.api_key,
    )


def _faults(options: argparse.Namespace) -> tuple[Fault, ...]:
    lines = tuple(parse_fault(line) for line in options.fault)
    if options.faults_file is None:
        return lines
    entries = YAML(typ="safe").load(options.faults_file.read_text(encoding="utf-8"))
    if not isinstance(entries, list):
        raise BadFault(f"{options.faults_file}: must hold a list of faults")
    return lines + read_faults(entries)


def _print_cards() -> None:
    for card in load_cards().values():
        price = f"{card.price_per_hour:.2f} USD/h" + (" (assumed)" if card.price_assumed else "")
        print(f"{card.id:21} {card.model:10} {card.hardware} x{card.devices}, {card.quantization}, {price}")


if __name__ == "__main__":
    sys.exit(main())
