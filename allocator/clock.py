"""World seconds: one time that never goes back and that no clock can hold up.

Deadlines must survive a restart and must not trust a wall clock, which NTP, a suspended machine or a hand may set by
an hour. So the world has a time of its own. While the process runs it follows the monotonic clock. Over a restart it
moves by the *larger* of what wall clock and boot clock say has passed::

    world_s = last_world_s + max(0, wall - last_wall, boot - last_boot  if it is the same boot)

Whatever a clock does, the rest of a deadline can only come out shorter than it is, never longer (P66).
"""

from typing import NamedTuple


class Reading(NamedTuple):
    """Three clocks, read one after the other. `boot_id` tells one boot of the machine from the next."""

    world_s: float
    wall_s: float
    boot_s: float
    boot_id: str


def resumed(last: Reading, wall_s: float, boot_s: float, boot_id: str) -> Reading:
    """The world's time at a restart, given the last reading that was kept."""
    passed_s = wall_s - last.wall_s
    if boot_id == last.boot_id:
        passed_s = max(passed_s, boot_s - last.boot_s)
    return Reading(last.world_s + max(0.0, passed_s), wall_s, boot_s, boot_id)


def running(started: Reading, boot_s: float) -> float:
    """World seconds while the process runs: the monotonic clock alone."""
    return started.world_s + max(0.0, boot_s - started.boot_s)
