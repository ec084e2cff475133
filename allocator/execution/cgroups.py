"""Control groups, version 2: the one fence that no process leaves by itself. Standard library only.

They are used where somebody gave us a part of the tree to rule. systemd marks such a part with the attribute
`user.delegate` (systemd.io/CGROUP_DELEGATION: one writer per subtree); `Delegate=yes` in the allocator's unit is all it
takes, beside `KillMode=process`, without which a restart of the allocator would end what it runs.
"""

import contextlib
import os
from pathlib import Path

DELEGATED = ("user.delegate", "trusted.delegate")


def delegated_parent() -> Path | None:
    """This process's own group, where it is delegated to us and writable."""
    own = _own_group()
    if own is None or not os.access(own / "cgroup.procs", os.W_OK):
        return None
    for attribute in DELEGATED:
        with contextlib.suppress(OSError):
            if os.getxattr(own, attribute) == b"1":
                return own
    return None


def mount_point() -> Path | None:
    """Where version 2 is mounted, alone or beside version 1 (proc_pid_mountinfo(5))."""
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        head, _, tail = line.partition(" - ")
        if tail.startswith("cgroup2 "):
            return Path(head.split()[4])
    return None


def _own_group() -> Path | None:
    mount = mount_point()
    if mount is None:
        return None
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        if line.startswith("0::/"):
            return mount / line.removeprefix("0::/")
    return None


def enter(group: Path) -> None:
    """Moves the calling process, of one thread, into the group. Raises OSError."""
    (group / "cgroup.procs").write_text("0")


def members(group: Path) -> frozenset[int]:
    """Ids of all processes in the group and below it; none where the group is gone, which it can only be when empty.

    Raises OSError where it cannot be read.
    """
    found: set[int] = set()
    for folder in (group, *_below(group)):
        with contextlib.suppress(FileNotFoundError):
            found.update(map(int, (folder / "cgroup.procs").read_text().split()))
    return frozenset(found)


def kill(group: Path) -> bool:
    """SIGKILLs all in the group in one stroke, forks under way included; False where Linux cannot (before 5.14)."""
    try:
        (group / "cgroup.kill").write_text("1")
    except OSError:
        return False
    return True


def remove(group: Path) -> bool:
    """Removes the empty group; False where something is left in it."""
    try:
        for folder in (*reversed(_below(group)), group):
            folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _below(group: Path) -> list[Path]:
    return sorted(path for path in group.rglob("*") if path.is_dir())
