"""The decision log: one line of JSON for each request, written off the request's path.

A request's end costs one append to a bounded queue. Everything else (the record, its JSON, the file) is the business of
one thread, which wakes every `BATCH_INTERVAL_S`. The queue never blocks: while it is full, new records are dropped and
counted. Nor does the disk: what it refuses is lost and counted, said in the log once a minute, and tried anew with the
next batch.

Python runs one thread at a time, and one that computes is made to stop only after 5 ms. So the thread encodes
`SLICE_RECORDS` at a time, less than a millisecond, and then sleeps for one: the loop, where it has something to do,
goes first. Slices of 8 would hold the loop up for less, and cost it half as much again in changes of threads.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from time import monotonic

import msgspec

from router.decision_record import SettledRequest, record_of
from router.log_file import LogFile

log = logging.getLogger("headrace.ledger")

BATCH_INTERVAL_S = 0.05
SLICE_RECORDS = 64
PAUSE_S = 0.001
FLUSH_BYTES = 256 * 1024
COMPLAIN_EVERY_S = 60.0
_encode_into = msgspec.json.Encoder().encode_into


class Ledger:
    """Writes decision records to a file. Belongs to one process, where it must be made (a fork loses the thread), and
    is appended to by one thread of it.

    Args:
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
        clock: Callable[[], float] = monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.written = 0
        """Records in the file."""
        self.dropped = 0
        """Records that found the queue full, or came after the end."""
        self.failed = 0
        """Records that could not be encoded or written."""
        self._queue: deque[SettledRequest] = deque()
        self._queue_records = queue_records
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
        """Records in the queue."""
        return len(self._queue)

    def append(self, settled: SettledRequest) -> None:
        """Hand over a request that has ended. Never waits, never raises."""
        queue = self._queue
        if len(queue) >= self._queue_records or self._ended:
            self.dropped += 1
        else:
            queue.append(settled)

    def reopen(self) -> None:
        """Let go of the file before the next batch, for who has moved it and wants its last byte now."""
        self._reopen = True

    def close(self, timeout_s: float = 5.0) -> bool:
        """Write what waits, sync, and end; blocks for `timeout_s` at most. Records that come later are dropped.

        Returns:
            Whether all of it is done. What is not stays unwritten with the process's end.
        """
        self._ended = True
        self._closing.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.error("%s: not all written in %g s; %d records are lost", self.path, timeout_s, len(self._queue))
            return False
        return True

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
        """Everything that waits now. What comes meanwhile is the next batch's, so that this one ends."""
        if self._reopen:
            self._reopen = False
            self._file.close()
        wall_offset_s = self._wall_clock() - self._clock()
        lines, records = bytearray(), 0
        left = len(self._queue)
        while left > 0:
            for _ in range(min(left, SLICE_RECORDS)):
                records += self._encode(self._queue.popleft(), wall_offset_s, lines)
            left -= SLICE_RECORDS
            if len(lines) >= FLUSH_BYTES:
                self._flush(lines, records)
                lines, records = bytearray(), 0
            if not self._closing.is_set():
                time.sleep(PAUSE_S)
        self._flush(lines, records)

    def _encode(self, settled: SettledRequest, wall_offset_s: float, lines: bytearray) -> int:
        end = len(lines)
        try:
            _encode_into(record_of(settled, wall_offset_s), lines, end)
        except Exception as error:  # one odd record must not end the log
            del lines[end:]
            self._complain(error, 1)
            return 0
        lines += b"\n"
        return 1

    def _flush(self, lines: bytearray, records: int) -> None:
        if not records:
            return
        try:
            self._file.write(bytes(lines))
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
