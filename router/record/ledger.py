"""The decision log: one line of JSON for each request, written off the request's path.

A request's end costs one append to a bounded queue. The loop's next turn, in which the answer is on its way, makes
lines of what waits, `SLICE_RECORDS` at a time. A thread takes the lines away every `BATCH_INTERVAL_S` and writes them:
it is asleep but for a few system calls a batch, in all of which it lets go of the interpreter. Were it to make the
lines as well, two threads that compute would hand the interpreter's lock to and fro at each socket event
(docs/decisions/0007-decision-record.md).

The queue never blocks: while it is full, new records are dropped and counted. Nor does the disk: what it refuses is
lost and counted, said in the log once a minute, and tried anew with the next batch.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from time import monotonic

import msgspec

from router.record.decision_record import record_of
from router.record.log_file import LogFile
from router.request.exchange import Exchange

log = logging.getLogger("headrace.ledger")

BATCH_INTERVAL_S = 0.05
SLICE_RECORDS = 16
"""Half a millisecond of the loop's time."""
COMPLAIN_EVERY_S = 60.0
_encode_into = msgspec.json.Encoder().encode_into


class Ledger:
    """Writes decision records to a file. Belongs to one process, where it must be made (a fork loses the thread), and
    is appended to by one thread of it.

    Args:
        later: runs a function in the next turn of whatever loop the appending thread has; at once where there is none.
        path: the file; its folder is made where there is none.
        max_bytes: size that the file grows to before it moves aside as `<name>.1`. One batch may take it over.
        keep_files: files that moved aside and are kept.
        queue_records: records that may wait; one more is dropped.
        clock: monotonic seconds, the clock of the records' times.
        wall_clock: Unix seconds.
    """

    def __init__(
        self,
        path: Path,
        *,
        max_bytes: int = 256 * 1024 * 1024,
        keep_files: int = 8,
        queue_records: int = 4096,
        later: Callable[[Callable[[], None]], object] = lambda encode: encode(),
        clock: Callable[[], float] = monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.written = 0
        """Records in the file."""
        self.dropped = 0
        """Records that found the queue full, or came after the end."""
        self.failed = 0
        """Records that could not be encoded or written."""
        self._queue: deque[Exchange] = deque()
        self._queue_records = queue_records
        self._later = later
        self._called = False
        """The loop has been asked to make lines."""
        self._lock = threading.Lock()
        """Over the two that follow; held for a slice or for a swap, never for a write."""
        self._lines = bytearray()
        self._line_count = 0
        self._clock = clock
        self._wall_clock = wall_clock
        self._file = LogFile(path, max_bytes=max_bytes, keep_files=keep_files)
        self._closing = threading.Event()
        self._ended = False
        self._reopen = False
        self._complained_at_s = -COMPLAIN_EVERY_S
        self._unsaid = 0
        """Failures since the last complaint."""
        self._refused = False
        """The last write failed."""
        self._thread = threading.Thread(target=self._run, name="decision-log", daemon=True)
        self._thread.start()

    @property
    def path(self) -> Path:
        return self._file.path

    @property
    def waiting(self) -> int:
        """Records that are not with the thread yet."""
        return len(self._queue) + self._line_count

    def append(self, exchange: Exchange) -> None:
        """Hand over a request that has ended. Never waits, never raises."""
        if self._ended or len(self._queue) + self._line_count >= self._queue_records:
            self.dropped += 1
            return
        self._queue.append(exchange)
        if not self._called:
            self._called = True
            self._later(self._make_lines)

    def reopen(self) -> None:
        """Let go of the file before the next batch, for who has moved it and wants its last byte now."""
        self._reopen = True

    def close(self, timeout_s: float = 5.0) -> bool:
        """Write what waits, sync, and end; blocks for `timeout_s` at most. Records that come later are dropped.

        Returns:
            Whether all of it is done. What is not stays unwritten with the process's end.
        """
        self._ended = True
        while self._queue:
            self._make_lines()
        self._closing.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.error("%s: not all written in %g s; %d records are lost", self.path, timeout_s, len(self._queue))
            return False
        return True

    # --- the loop ---------------------------------------------------------------------------------------------------

    def _make_lines(self) -> None:
        """Of a slice of what waits; the rest has its own turn."""
        self._called = False
        queue, wall_offset_s = self._queue, self._wall_clock() - self._clock()
        with self._lock:
            for _ in range(min(len(queue), SLICE_RECORDS)):
                self._line_count += self._encode(queue.popleft(), wall_offset_s, self._lines)
        if queue and not self._ended:
            self._called = True
            self._later(self._make_lines)

    def _encode(self, exchange: Exchange, wall_offset_s: float, lines: bytearray) -> int:
        end = len(lines)
        try:
            _encode_into(record_of(exchange, wall_offset_s), lines, end)
        except Exception as error:  # one odd record must not end the log
            del lines[end:]
            self._complain(error, 1)
            return 0
        lines += b"\n"
        return 1

    # --- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing.wait(BATCH_INTERVAL_S):
            self._write_batch()
        self._write_batch()
        try:
            self._file.sync()
        except OSError as error:
            self._complain(error, 0)
        self._file.close()

    def _write_batch(self) -> None:
        """All lines that wait now."""
        if self._reopen:
            self._reopen = False
            self._file.close()
        with self._lock:
            lines, count = self._lines, self._line_count
            self._lines, self._line_count = bytearray(), 0
        if count:
            self._flush(lines, count)

    def _flush(self, lines: bytearray, records: int) -> None:
        try:
            self._file.write(lines)
        except (OSError, ValueError) as error:
            self._refused = True
            self._complain(error, records)
            return
        self.written += records
        if self._refused:
            self._refused = False
            log.info("%s is written again; %d records were lost since the last word of it", self.path, self._unsaid)
            self._unsaid = 0

    def _complain(self, error: Exception, records: int) -> None:
        self.failed += records
        self._unsaid += records
        now = self._clock()
        if now - self._complained_at_s < COMPLAIN_EVERY_S:
            return
        self._complained_at_s = now
        what = f"{type(error).__name__}: {error}" if isinstance(error, OSError) else type(error).__name__
        log.error("%s cannot be written (%s); %d records are lost, requests go on", self.path, what, self._unsaid)
        self._unsaid = 0
