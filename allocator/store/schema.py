"""The tables, and how a database is opened: SQLite in a file beside the service, or PostgreSQL for two allocators.

    journal     what happened, one event a row, never changed; `seq` counts without gaps
    moves       what the events did to jobs and loans, for questions about the past; follows from the journal
    snapshots   the world after `seq`, so that a restart need not replay everything
    leader      one row: who may write, in which term

A commit is on the disk before anything is done about it: SQLite with `synchronous = FULL`, PostgreSQL by its default.
"""

import contextlib
import os
from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Engine,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    create_engine,
    event,
    insert,
    inspect,
    select,
)
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, IntegrityError, NoSuchModuleError, SQLAlchemyError

FORMAT: Final = 1
"""Of the tables. A program that finds another one stops."""
READS: Final = "headrace_reads"
"""Execution option of a transaction that only reads."""
DRIVERS: Final = {"sqlite": "sqlite+pysqlite", "postgresql": "postgresql+psycopg", "postgres": "postgresql+psycopg"}

tables = MetaData()

journal = Table(
    "headrace_journal", tables,
    Column("seq", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=False),
    Column("term", Integer, nullable=False),
    Column("at_s", Float(53), nullable=False),
    Column("wall_s", Float(53), nullable=False),
    Column("boot_s", Float(53), nullable=False),
    Column("boot_id", String(64), nullable=False),
    Column("kind", String(64), nullable=False),
    Column("subject", String(256), nullable=False),
    Column("event", Text, nullable=False),
    Column("attached", Text),
    Index("headrace_journal_subject", "subject", "seq"),
)
moves = Table(
    "headrace_moves", tables,
    Column("id", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True),
    Column("seq", BigInteger, nullable=False),
    Column("what", String(16), nullable=False),
    Column("name", String(256), nullable=False),
    Column("epoch", Integer, nullable=False),
    Column("was", String(32), nullable=False),
    Column("became", String(32), nullable=False),
    Column("at_s", Float(53), nullable=False),
    Column("wall_s", Float(53), nullable=False),
    Column("reason", String(64), nullable=False),
    Column("figures", Text, nullable=False),
    Index("headrace_moves_name", "what", "name", "id"),
    Index("headrace_moves_time", "what", "at_s"),
)
snapshots = Table(
    "headrace_snapshots", tables,
    Column("seq", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=False),
    Column("world", LargeBinary, nullable=False),
)
leader = Table(
    "headrace_leader", tables,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("format", Integer, nullable=False),
    Column("term", Integer, nullable=False),
    Column("holder", String(256), nullable=False),
    Column("url", String(256), nullable=False),
    Column("renewals", BigInteger, nullable=False),
)


class StoreError(Exception):
    """The store cannot be used now; the text says why and what to do."""


def open_database(url: str) -> Engine:
    """The database at an address such as `sqlite:///allocator.db` or `postgresql://user@host/name`, its tables made.

    Raises:
        StoreError: the address is none, the driver is not installed, or the database does not answer.
    """
    address = _address(url)
    shown = address.render_as_string(hide_password=True)
    try:
        engine = create_engine(address, **_options(address))
    except ImportError as error:
        raise StoreError(f"{shown}: the driver {error.name} is not installed; pip install 'headrace[postgres]'"
                         ) from error
    if address.get_backend_name() == "sqlite":
        _make_private(address)
        event.listen(engine, "connect", _prepare_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
    try:
        _make_tables(engine)
    except SQLAlchemyError as error:
        raise StoreError(f"{shown}: {reason_of(error)}") from error
    return engine


def _address(url: str) -> URL:
    try:
        address = make_url(url)
        backend = address.get_backend_name()
        if backend not in DRIVERS:
            raise StoreError(f"a {backend} database cannot be the store; use sqlite:///FILE or postgresql://…")
        return address.set(drivername=DRIVERS[backend])
    except (ArgumentError, NoSuchModuleError, ValueError):
        # The text is not quoted: it may hold a password.
        raise StoreError("the address of the store is not a URL such as sqlite:///allocator.db or "
                         "postgresql://user@host/name") from None


def _options(address: URL) -> dict[str, Any]:
    if address.get_backend_name() == "sqlite":
        return {}
    # A statement that waits for a dead network must not hold a recall for long.
    return {"pool_pre_ping": True, "pool_size": 3, "connect_args": {
        "connect_timeout": 5, "keepalives_idle": 5, "keepalives_interval": 2, "keepalives_count": 3,
        "options": "-c statement_timeout=10000 -c lock_timeout=5000"}}


def _make_private(address: URL) -> None:
    """Requests are kept whole, and somebody will put a secret into one: the file is for its owner alone."""
    if address.database:
        with contextlib.suppress(OSError):      # SQLite says it better
            os.close(os.open(address.database, os.O_CREAT | os.O_WRONLY, 0o600))


def _prepare_sqlite(connection: Any, _: object) -> None:
    connection.isolation_level = None       # transactions begin where `_begin_sqlite` says, not where pysqlite guesses
    for pragma in ("journal_mode = WAL", "synchronous = FULL", "busy_timeout = 5000"):
        connection.execute(f"PRAGMA {pragma}")


def _begin_sqlite(connection: Connection) -> None:
    reads = connection.get_execution_options().get(READS, False)
    connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")


def _make_tables(engine: Engine) -> None:
    if not inspect(engine).has_table(leader.name):
        try:
            with engine.begin() as connection:
                tables.create_all(connection)
                connection.execute(insert(leader).values(
                    id=1, format=FORMAT, term=0, holder="", url="", renewals=0))
        except (IntegrityError, SQLAlchemyError):
            if not inspect(engine).has_table(leader.name):      # else another allocator was faster
                raise
    with engine.connect().execution_options(**{READS: True}) as connection:
        found = connection.execute(select(leader.c.format)).scalar_one()
    if found != FORMAT:
        raise StoreError(f"the store has tables of format {found}, this program writes format {FORMAT}; use the "
                         "version of Headrace that made them, or another database")


def reason_of(error: SQLAlchemyError) -> str:
    """The database's own words, on one line."""
    original = getattr(error, "orig", None) or error
    return " ".join(str(original).split()) or type(error).__name__
