"""One llama.cpp HTTP server: the child process of the embedded default.

``python -m backends.embedded.llama_server --model F --alias A [--port P --threads T --slots N --context C]`` prints
one JSON line ``{"url": ..., "pid": ...}`` on standard output when it listens; everything else goes to standard error.

SIGTERM and SIGINT end the process at once and cut open streams: the library's own shutdown waits for ever while a
stream is open.
"""

import argparse
import json
import os
import signal
import socket
import sys
from pathlib import Path

PROMPT_CACHE_MIB = 256
"""Host memory for prompts of past requests; the library's default of 8 GiB is too much for three engines."""
MEAN_POOLING = 1
EXIT_CANNOT_SERVE = 3


def _exit_now(signum: int, _frame: object) -> None:
    os._exit(0 if signum == signal.SIGTERM else 130)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line, parsed."""
    parser = argparse.ArgumentParser(prog="llama_server", description="One llama.cpp server of one GGUF file.")
    parser.add_argument("--model", type=Path, required=True, help="GGUF file")
    parser.add_argument("--alias", required=True, help="name of the model in /v1/models")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: any free port")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--slots", type=int, default=1, help="requests served at once")
    parser.add_argument("--context", type=int, default=2048, help="context of each slot, in tokens (not the sum)")
    return parser.parse_args(argv)


def claim(host: str, port: int) -> None:
    """Binds the address once and lets it go. Raises OSError where it cannot be had, before the library is loaded.

    The library would find it too, but its log is written by a thread of its own: its last lines may come after the
    message that says why the process ends.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # an address in TIME_WAIT is free
        probe.bind(address)


def serve(options: argparse.Namespace) -> None:
    """Serves until a signal ends the process.

    Raises OSError where the address cannot be had, RuntimeError where the library cannot serve the model on it.
    """
    claim(options.host, options.port)
    # Threads that wait for each other sleep rather than spin: several engines share few cores, and a spinning thread
    # keeps the core from the one it waits for. On two busy cores this makes two threads 3 to 20 times as fast. OpenMP
    # reads the variable when the library is loaded, hence the import below.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(options.model)
    params.model_alias = {options.alias}
    params.hostnames = [options.host]
    params.port = options.port
    params.n_parallel = options.slots
    params.n_ctx = options.slots * options.context
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options.threads
    params.cpuparams.poll = params.cpuparams_batch.poll = 0
    params.cache_ram_mib = PROMPT_CACHE_MIB
    params.endpoint_metrics = params.endpoint_slots = True
    params.embedding, params.pooling_type = True, MEAN_POOLING
    params.ui = False
    params.offline = True
    server = xllamacpp.Server(params)
    sys.stdout.write(json.dumps({"url": server.listening_address, "pid": os.getpid()}) + "\n")
    sys.stdout.flush()
    while True:
        signal.pause()


def main(argv: list[str] | None = None) -> int:
    """Parses, serves; returns only where it could not start."""
    options = arguments(argv)
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, _exit_now)
    if not options.model.is_file():
        sys.stderr.write(f"llama_server: no such model file: {options.model}\n")
        return EXIT_CANNOT_SERVE
    try:
        serve(options)
    except (OSError, RuntimeError) as error:
        sys.stderr.write(f"llama_server: {options.model} on {options.host}:{options.port}: {error}\n")
        return EXIT_CANNOT_SERVE
    return 0


if __name__ == "__main__":
    sys.exit(main())
