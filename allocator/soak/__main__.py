"""`python -m allocator.soak`: many seeds of random events against the invariants, with progress and a verdict.

Exit code 0 where nothing was broken, 1 where something was: the seeds are named, and each can be run alone with
`--first SEED --seeds 1`.
"""

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from allocator.soak.machine import Seed, run_seed

COUNTED = ("events", "placed", "lent", "recalled", "returned", "overdue", "reclaimed")


def main(arguments: list[str] | None = None) -> int:
    """Runs the seeds; returns the exit code."""
    options = _parser().parse_args(arguments)
    started_s, totals, broken = time.monotonic(), Counter[str](), list[Seed]()
    shown_s, live = 0.0, sys.stderr.isatty()
    done = 0
    for done, result in enumerate(_results(options), 1):
        totals.update({name: getattr(result, name) for name in COUNTED})
        if result.found:
            broken.append(result)
        passed_s = time.monotonic() - started_s
        if passed_s - shown_s >= (1.0 if live else 15.0) or done == options.seeds:
            shown_s = passed_s
            left_s = passed_s / done * (options.seeds - done)
            print(f"{chr(13) if live else ''}{done}/{options.seeds} seeds, {len(broken)} broken, "
                  f"{totals['events']} events, {done / passed_s:.1f} seeds/s, {left_s:.0f} s left   ",
                  end="" if live else "\n", file=sys.stderr, flush=True)
    if live:
        print(file=sys.stderr)
    passed_s = time.monotonic() - started_s
    if options.json:
        print(json.dumps({
            "scenario": "allocator_soak", "first_seed": options.first, "seeds": done, "steps": options.steps,
            "seconds": round(passed_s, 1), "broken": len(broken), **totals,
            "found": {str(result.seed): result.found[:5] for result in broken[:20]}}))
    else:
        print(f"{done} seeds x {options.steps} steps in {passed_s:.0f} s: {len(broken)} broken. "
              + ", ".join(f"{totals[name]} {name}" for name in COUNTED))
        for result in broken[:20]:
            print(f"seed {result.seed}: {result.found[0]}")
    return 1 if broken else 0


def _results(options: argparse.Namespace) -> Iterator[Seed]:
    seeds = range(options.first, options.first + options.seeds)
    run = partial(run_seed, steps=options.steps)
    if options.workers <= 1:
        yield from map(run, seeds)
        return
    with ProcessPoolExecutor(options.workers) as pool:
        yield from pool.map(run, seeds, chunksize=4)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m allocator.soak", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="how many (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the first of them (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="happenings a seed (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="one JSON row on standard output")
    return parser


if __name__ == "__main__":
    sys.exit(main())
