"""Databases for the tests of the allocator's store: SQLite in a folder, and a real PostgreSQL of the test's own."""

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

from sqlalchemy import Engine

from allocator.apply import consider
from allocator.clock import Reading
from allocator.events import Event
from allocator.model.world import World
from allocator.plan import plan
from allocator.soak.outside import happening, random_world, replies
from allocator.store.history import moves
from allocator.store.journal import Entry, Journal
from allocator.store.leadership import Candidate, Term
from tests.processes import free_port

FOLDERS = ("/usr/lib/postgresql", "/usr/local/pgsql")


def postgres_folder() -> Path | None:
    """Where PostgreSQL's own programs are: Debian keeps them out of PATH."""
    found = shutil.which("pg_ctl")
    if found is not None:
        return Path(found).resolve().parent
    for folder in FOLDERS:
        programs = sorted(Path(folder).glob("**/bin/pg_ctl"))
        if programs:
            return programs[-1].parent
    return None


@contextlib.contextmanager
def postgres() -> Iterator[str]:
    """A server on loopback with its data in a folder of its own; yields the address of a database."""
    programs = postgres_folder()
    assert programs is not None
    # The server refuses to run as root, and pytest's folders are for their owner alone.
    user = "nobody" if os.geteuid() == 0 else None
    folder = Path(tempfile.mkdtemp(prefix="headrace-postgres-", dir="/tmp"))
    if user is not None:
        shutil.chown(folder, user)
    data, port = folder / "data", free_port()
    settings = ["listen_addresses=127.0.0.1", f"port={port}", "unix_socket_directories=", "fsync=off",
                "max_connections=20", "shared_buffers=16MB"]

    def run(program: str, *arguments: str) -> None:
        done = subprocess.run([str(programs / program), "-D", str(data), *arguments], user=user, cwd="/",
                              capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{program}: {done.stdout}{done.stderr}"

    try:
        run("initdb", "-U", "headrace", "-A", "trust", "--no-sync", "-E", "UTF8", "--locale=C")
        run("pg_ctl", "-l", str(folder / "log"), "-o", " ".join(f"-c {setting}" for setting in settings), "-w", "-t",
            "60", "start")
        try:
            yield f"postgresql://headrace@127.0.0.1:{port}/postgres"
        finally:
            run("pg_ctl", "-m", "immediate", "-w", "stop")
    finally:
        shutil.rmtree(folder)


def lead(database: Engine, holder: str = "a", ttl_s: float = 0.0) -> Term:
    """The next term, for whoever asks."""
    candidate = Candidate(database, f"http://{holder}", ttl_s, holder=holder)
    term = candidate.try_to_lead()
    assert term is not None
    return term


def a_reading(world_s: float = 0.0) -> Reading:
    return Reading(world_s, 1e9 + world_s, 100.0 + world_s, "this boot")


@dataclass
class Past:
    """A random life of a random cluster: the worlds and the entries between them."""

    first: World
    worlds: list[World]
    batches: list[list[Entry]]


def a_past(seed: int, steps: int) -> Past:
    """What the soak machine does, kept as a journal would keep it."""
    rng = Random(seed)
    first, opening = random_world(rng)
    past = Past(first, [first], [])
    world, now_s = first, 0.0
    for count in range(steps):
        now_s += rng.choice((0.5, 5.0, 40.0))
        given = opening if count == 0 else [*replies(world, now_s, rng), *happening(world, now_s, rng, count)]
        world = _step(past, world, given)
        world = _step(past, world, list(plan(world, now_s).events))
    return past


def _step(past: Past, world: World, events: list[Event]) -> World:
    entries = []
    for event in events:
        after = consider(world, event)
        if isinstance(after, World):
            entries.append(Entry(event, tuple(moves(world, event, after))))
            world = after
    if entries:
        past.batches.append(entries)
        past.worlds.append(world)
    return world


def write(journal: Journal, term: Term, past: Past) -> list[int]:
    """Writes a past; returns the number of the last event of each batch."""
    restored = journal.restore(term, lambda: past.first)
    seqs = [restored.seq]
    for entries, world in zip(past.batches, past.worlds[1:], strict=True):
        seqs.append(journal.append(term, seqs[-1], entries, a_reading(world.now_s), world))
    return seqs
