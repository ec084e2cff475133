"""`headrace serve`: one gateway process, or several under a parent."""

import json as json_module
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from router.app import Running
    from router.workers.parent import Serving

log = logging.getLogger("headrace.serve")


def worker_count(given: str) -> int:
    """How many processes serve, by what the command line says.

    Raises:
        ValueError: it is neither a number in range nor `auto`; the text says what it may be.
    """
    from router.workers.table import MAX_WORKERS

    try:
        count = min(MAX_WORKERS, len(os.sched_getaffinity(0))) if given == "auto" else int(given)
    except ValueError:
        count = 0
    if not 1 <= count <= MAX_WORKERS:
        raise ValueError(f"--workers {given}: needs a number from 1 to {MAX_WORKERS}, or 'auto'")
    return count


async def run_serve(config: Path, *, workers: int, host: str | None, port: int | None, json: bool) -> int:
    """Serve until a signal ends it. Returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")

    def say_ready(process: "Running | Serving") -> None:
        if json:
            ready = {
                "event": "ready", "url": process.url, "admin_url": process.admin_url, "config": str(config),
                "pid": os.getpid(), "workers": workers,
            }  # fmt: skip
            print(json_module.dumps(ready), flush=True)
        log.info("%s is served on %s/v1, operators' port is %s", config, process.url, process.admin_url)

    if workers > 1:
        from router.workers.parent import serve_workers

        return await serve_workers(config, workers, host=host, port=port, ready=say_ready)
    from router.app import serve

    return await serve(config, host=host, port=port, ready=say_ready)
