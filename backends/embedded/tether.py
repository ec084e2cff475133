"""Runs a command that the kernel kills when its parent dies, even by SIGKILL.

``python tether.py PARENT_PID COMMAND...`` sets the parent-death signal and becomes the command: the setting survives
`execve`. A program so started needs to know nothing of it. The file runs on its own, without site-packages, so that it
adds some 20 ms to a start.

The kernel sends the signal when the *thread* that forked ends (prctl(2), PR_SET_PDEATHSIG), so a child must be
started from a thread that lives as long as its process.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
EXIT_ORPHANED = 70
EXIT_NOT_FOUND = 127


def die_with_parent(parent_pid: int) -> None:
    """Has this process SIGKILLed when its parent dies; exits where the parent is already gone. Linux only, else no-op.

    Raises OSError where the kernel refuses.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    # The parent may have died between fork and prctl; nothing would tell us then.
    if os.getppid() != parent_pid:
        os._exit(EXIT_ORPHANED)


def main(arguments: list[str]) -> None:
    """Becomes `arguments[1:]` once tied to the process `arguments[0]`."""
    parent_pid, command = int(arguments[0]), arguments[1:]
    die_with_parent(parent_pid)
    try:
        os.execvp(command[0], command)  # noqa: S606  no shell is wanted
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        os._exit(EXIT_NOT_FOUND)


if __name__ == "__main__":
    main(sys.argv[1:])
