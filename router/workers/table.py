"""Memory that the worker processes of one gateway share: a table with a row for each process.

One writer per row, and anyone sums the columns. Nobody waits for anybody: there is no lock and no message, and a reader
is never more than an instant behind. Cells are 8 bytes wide and 8-byte aligned, and are read and written in native
format, so that each load and each store is one instruction on x86-64 and aarch64 and no cell is ever seen half written.
Several cells together may be: who publishes a group of them announces it through the row's generation, which every
reader compares before and after it reads.

Layout, in cells::

    table   magic, rows, then one generation per row: it changes with whatever a reader keeps in mind of the row
    row     header: epoch, state, pid, heartbeat, requests, slots in use, configuration, listener;
                    2 cells per latency class: which it is, its requests in flight
            loads:  4 cells per backend: what is in flight there, in the order of `leases.Books`
            slots:  24 cells per backend: which it is, its health, its last probe and sample, see `Slot`
            keys:   2 cells per API key with a limit: which it is, its requests in flight
            models: 2 cells per model: which it is, its requests that have ended

Backends have slots of their writer's own choosing, and each row says which identity stands in which slot. So two
processes that run on different configurations for a moment still read each other rightly: a reader looks the identity
up, and reads nothing where it is not there. Where all rows agree, which is the rule, rows are summed whole.

The memory is anonymous (`memfd_create`), handed down as a file descriptor, and gone with its last process. What a
process never touched takes no memory.
"""

import mmap
import os
import tempfile
from collections.abc import Iterator
from enum import IntEnum
from hashlib import blake2b

CELL_BYTES = 8
PAGE_CELLS = 512
MAGIC = 0x4845414452414345
MAX_ROWS = 256
MAX_WORKERS = MAX_ROWS // 4
"""Rows are left for successors, and for those that still drain."""
SLOTS = 16_384
LOAD_CELLS = 4
LOAD_BYTES = LOAD_CELLS * CELL_BYTES
SLOT_CELLS = 24
KEYS = 16_384
CLASSES = 240
"""Latency classes that a row has room for, those of earlier configurations among them; a fleet file has 100 at most."""
_GENERATIONS = 8
_TABLE_CELLS = PAGE_CELLS
_LOADS = PAGE_CELLS
_SLOTS = _LOADS + SLOTS * LOAD_CELLS
_KEYS = _SLOTS + SLOTS * SLOT_CELLS
MODELS = 1_024
"""Models that a row has room for, those of earlier configurations among them."""
_MODELS = _KEYS + KEYS * 2
ROW_CELLS = _MODELS + MODELS * 2


class RowState(IntEnum):
    """What the process of a row is doing. Requests are counted while it serves or drains."""

    EMPTY = 0
    STARTING = 1
    SERVING = 2
    DRAINING = 3


class Header(IntEnum):
    """Cells of a row's header."""

    EPOCH = 0
    """Number of the process among all that were started; rows are used again, epochs are not."""
    STATE = 1
    PID = 2
    HEARTBEAT_S = 3
    """Monotonic time of its last sign of life, a float."""
    IN_FLIGHT = 4
    """Client requests that it holds."""
    SLOTS_USED = 5
    """Slots below this may hold something."""
    CONFIG = 6
    """Its configuration's hash, as a number."""
    LISTENER = 7
    """Which of the listening sockets is its own."""
    CLASSES = 16
    """First of two cells for each latency class that it has met: which it is, its requests admitted."""


class Slot(IntEnum):
    """Cells of what a process publishes of one backend; those that end in `_S` and samples are floats, NaN unknown."""

    IDENTITY = 0
    HEALTH_STATE = 1
    HEALTH_CAUSE = 2
    HEALTH_SINCE_S = 3
    HEALTH_UNTIL_S = 4
    EJECTIONS = 5
    BACKOFF_UNTIL_S = 6
    DRIFT = 7
    PROBES = 8
    """Probes published so far."""
    PROBE_OK = 9
    PROBE_SLOW = 10
    SAMPLES = 11
    """Samples published so far."""
    SAMPLE = 12
    """First of ten: the fields of `LoadSample` in their order, then `in_flight_at_sample`."""


SAMPLE_FIELDS = 10


def identity_of(*words: str) -> int:
    """A name in 62 bits, never 0: two names in a fleet of thousands share one with a chance below 10⁻¹¹."""
    digest = blake2b("\0".join(words).encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2 or 1


class Row:
    """One process's row. Only that process writes it, but for the parent once the process is dead."""

    __slots__ = ("_generations", "_start_bytes", "floats", "header", "index", "keys", "load_bytes", "loads",
                 "models", "slot_floats", "slots")  # fmt: skip

    def __init__(self, memory: mmap.mmap, index: int) -> None:
        start = _TABLE_CELLS + index * ROW_CELLS
        whole = memoryview(memory)[start * CELL_BYTES : (start + ROW_CELLS) * CELL_BYTES]
        cells, floats = whole.cast("q"), whole.cast("d")
        self.index = index
        self.header = cells[:PAGE_CELLS]
        self.floats = floats[:PAGE_CELLS]
        """The header's cells as floats."""
        self.loads = cells[_LOADS:_SLOTS]
        self.load_bytes = whole[_LOADS * CELL_BYTES : _SLOTS * CELL_BYTES]
        self.slots = cells[_SLOTS:_KEYS]
        self.slot_floats = floats[_SLOTS:_KEYS]
        self.keys = cells[_KEYS:_MODELS]
        self.models = cells[_MODELS:]
        self._start_bytes = start * CELL_BYTES
        self._generations = memoryview(memory).cast("q")[_GENERATIONS : _GENERATIONS + MAX_ROWS]

    @property
    def state(self) -> RowState:
        return RowState(self.header[Header.STATE])

    @property
    def counts(self) -> bool:
        """Whether what stands here is part of the sum."""
        return self.header[Header.STATE] >= RowState.SERVING

    def announce(self) -> None:
        """Make readers look anew at everything that they keep in mind of this row."""
        self._generations[self.index] += 1

    def begin(self, epoch: int, pid: int, listener: int, now: float) -> None:
        """Take an empty row; the process serves once it says so."""
        self.header[Header.EPOCH] = epoch
        self.header[Header.PID] = pid
        self.header[Header.LISTENER] = listener
        self.floats[Header.HEARTBEAT_S] = now
        self.enter(RowState.STARTING)

    def enter(self, state: RowState) -> None:
        self.header[Header.STATE] = state
        self.announce()

    def load_cells(self, slot: int) -> memoryview:
        """The books of one slot."""
        return self.loads[slot * LOAD_CELLS : (slot + 1) * LOAD_CELLS]

    def identities(self) -> dict[int, int]:
        """Slot by identity, of the slots that are in use."""
        used = min(self.header[Header.SLOTS_USED], SLOTS)
        cells = self.slots
        found = {cells[slot * SLOT_CELLS]: slot for slot in range(used)}
        found.pop(0, None)
        return found


class Table:
    """All rows. Made once by the parent, attached by each worker through the descriptor it inherits."""

    def __init__(self, handle: int, *, rows: int) -> None:
        if not 0 < rows <= MAX_ROWS:
            raise ValueError(f"a table has 1 to {MAX_ROWS} rows, not {rows}")
        self.handle = handle
        self._memory = mmap.mmap(handle, size_bytes(rows))
        cells = memoryview(self._memory).cast("q")
        self.generations = cells[_GENERATIONS : _GENERATIONS + rows]
        self.rows = tuple(Row(self._memory, index) for index in range(rows))

    @classmethod
    def create(cls, rows: int) -> "Table":
        """A new table, all zero."""
        if not 0 < rows <= MAX_ROWS:
            raise ValueError(f"a table has 1 to {MAX_ROWS} rows, not {rows}")
        handle = _anonymous_file()
        os.ftruncate(handle, size_bytes(rows))
        table = cls(handle, rows=rows)
        head = memoryview(table._memory).cast("q")
        head[0], head[1] = MAGIC, rows
        return table

    @classmethod
    def attach(cls, handle: int) -> "Table":
        """The table behind an inherited descriptor.

        Raises:
            ValueError: it is no table.
        """
        head = memoryview(os.pread(handle, 16, 0)).cast("q")
        if len(head) < 2 or head[0] != MAGIC:
            raise ValueError(f"descriptor {handle} holds no table of workers")
        return cls(handle, rows=head[1])

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def clear(self, index: int) -> None:
        """Zero the row of a process that is dead: all that it held is gone with it. The parent alone may do this."""
        row = self.rows[index]
        row.enter(RowState.EMPTY)
        start, length = row._start_bytes, ROW_CELLS * CELL_BYTES
        try:
            self._memory.madvise(mmap.MADV_REMOVE, start, length)  # gives the pages back, too
        except (AttributeError, OSError):
            page = bytes(PAGE_CELLS * CELL_BYTES)
            for offset in range(start, start + length, len(page)):
                self._memory[offset : offset + len(page)] = page
        row.announce()


def size_bytes(rows: int) -> int:
    """Address space of a table. Pages that nobody has written take no memory."""
    return (_TABLE_CELLS + rows * ROW_CELLS) * CELL_BYTES


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("headrace-workers")
    with tempfile.TemporaryFile(prefix="headrace-workers") as file:
        return os.dup(file.fileno())
