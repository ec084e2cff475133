"""`headrace allocate`: one allocator process."""

import json as json_module
import logging
import sys
from pathlib import Path

from allocator.lender.choosing import lender_for
from allocator.model.declared import oddities
from allocator.service.app import Ready, StartError, serve
from allocator.service.config import Declared
from allocator.service.service import BadFile, open_store
from allocator.store.audit import faults
from allocator.store.journal import Journal
from allocator.store.schema import StoreError
from headrace.allocator.file import lines_of, load_allocator
from settings.source import ConfigError


async def run_allocate(path: Path, *, json: bool, check: bool) -> int:
    """Serve until a signal ends it; with `check`, only say whether the file is right. Returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)    # the router is asked with every round
    try:
        declared = load_allocator(path)
    except ConfigError as error:
        for line in lines_of(error.problems):
            print(line, file=sys.stderr)
        return 1
    if check:
        _say_usable(path, declared, json)
        return 0

    def load() -> Declared:
        try:
            return load_allocator(path)
        except ConfigError as error:
            raise BadFile(lines_of(error.problems)) from None

    def say_ready(ready: Ready) -> None:
        if json:
            print(json_module.dumps({"event": "ready", "url": ready.url, "pid": ready.pid, "config": str(path)}),
                  flush=True)
        else:
            print(f"the allocator answers on {ready.url}; headrace top shows it", flush=True)

    try:
        await serve(path, declared, load, lender_for, say_ready)
    except (StartError, StoreError) as error:
        print(f"headrace allocate: {error}", file=sys.stderr)
        return 1
    return 0


def run_audit(path: Path, *, json: bool) -> int:
    """Hold the journal of a file against every invariant; reads only. Returns the exit code: 1 for one with faults."""
    try:
        declared = load_allocator(path)
        file = declared.journal_file
        if file is not None and not file.exists():      # opening it would make one
            raise StoreError(f"there is no journal {file}: no allocator has led with this file yet")
        database = open_store(declared)
    except ConfigError as error:
        for line in lines_of(error.problems):
            print(line, file=sys.stderr)
        return 1
    except StoreError as error:
        print(f"headrace allocate: {error}", file=sys.stderr)
        return 1
    try:
        journal = Journal(database)
        count, found = len(journal.events()), [str(fault) for fault in faults(journal)]
    except StoreError as error:
        print(f"headrace allocate: {error}", file=sys.stderr)
        return 1
    finally:
        database.dispose()
    if json:
        print(json_module.dumps({"ok": not found, "events": count, "faults": found[:1000]}))
    else:
        print("\n".join([*found, f"{count} events, {len(found)} faults"]))
    return 1 if found else 0


def _say_usable(path: Path, declared: Declared, json: bool) -> None:
    odd = oddities(declared.declaration, declared.nodes, declared.coefficients)
    if json:
        print(json_module.dumps({"ok": True, "file": str(path), "config": declared.declaration.version,
                                 "coefficients": declared.coefficients.version, "hints": odd}))
    else:
        print(f"{path}: usable; config {declared.declaration.version}, coefficients {declared.coefficients.version}")
        print("".join(f"hint: {one}\n" for one in odd), end="")
