"""A file of lines that grows to a size, moves aside, and keeps so many of its predecessors.

Several processes may write to one path. Each write holds the file's lock, appends whole lines, and first looks whether
the path still leads to the file that is open: whoever moved it (another process, logrotate, an operator), the next line
goes where the path leads now. A write that fails half way is taken back, so that no line is ever torn.

Nothing is synced but at the end: a line is in the kernel's hands once `write` returns, which a crash of the process
does not undo; a loss of power may cost what the kernel had not yet written, half a minute's worth by Linux's defaults.
"""

import contextlib
import fcntl
import os
from pathlib import Path


class LogFile:
    """Belongs to one thread. Opened by the first write, and again after an error, so that it heals by itself."""

    def __init__(self, path: Path, *, max_bytes: int, keep_files: int) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._keep_files = keep_files
        self._handle: int | None = None

    def write(self, lines: bytes | bytearray) -> None:
        """Append whole lines; the file moves aside first where they would take it over `max_bytes`.

        Raises:
            OSError: nothing of them is in the file.
        """
        try:
            handle = self._locked()
            size_bytes = os.fstat(handle).st_size
            if size_bytes and size_bytes + len(lines) > self._max_bytes:
                self._rotate()
                handle = self._locked()
                size_bytes = os.fstat(handle).st_size
            try:
                _write_all(handle, lines)
            except OSError:
                os.ftruncate(handle, size_bytes)
                raise
            fcntl.flock(handle, fcntl.LOCK_UN)
        except OSError:
            self.close()
            raise

    def sync(self) -> None:
        """Wait until what was written would survive a loss of power."""
        if self._handle is not None:
            os.fsync(self._handle)

    def close(self) -> None:
        """Let go of the file, and of its lock. The next write opens it again."""
        if self._handle is not None:
            with contextlib.suppress(OSError):
                os.close(self._handle)
            self._handle = None

    def _locked(self) -> int:
        """The file that the path leads to, open and locked."""
        while True:
            if self._handle is None:
                self._handle = self._open()
            fcntl.flock(self._handle, fcntl.LOCK_EX)
            if self._leads_here(self._handle):
                return self._handle
            self.close()

    def _open(self) -> int:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        try:
            return os.open(self.path, flags, 0o640)
        except FileNotFoundError:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            return os.open(self.path, flags, 0o640)

    def _leads_here(self, handle: int) -> bool:
        try:
            there, here = os.stat(self.path), os.fstat(handle)
        except FileNotFoundError:
            return False
        return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)

    def _rotate(self) -> None:
        """`decisions.jsonl` → `.1` → `.2` …; the oldest goes. Done under the lock of the file that moves."""
        for number in range(self._keep_files, 0, -1):
            source = self._numbered(number - 1)
            with contextlib.suppress(FileNotFoundError):
                os.replace(source, self._numbered(number))
        if self._keep_files == 0:
            os.unlink(self.path)
        self.close()

    def _numbered(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}") if number else self.path


def _write_all(handle: int, data: bytes | bytearray) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(handle, rest):]
