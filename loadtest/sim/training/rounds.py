"""Gavel's `fifo_perf` in Gavel's rounds, to show that the jobs are Gavel's: its mean comes out as published.

Time goes in rounds of 360 s. When jobs have come or gone, though at most every 1,920 s, all jobs are dealt out anew in
order of arrival, each to the fastest card type with room; the first for which there is no room at all ends the dealing.
A job may so change its card type between two rounds, at no cost. One that ends within a round leaves its card idle to
the round's end.
"""

from allocator.units.table import Coefficients
from loadtest.sim.training.gavel import CARDS, CARDS_EACH, COUNTED, GavelJob

ROUND_S = 360.0
DEALT_EVERY_S = 1920.0


def replay_fifo_perf(jobs: tuple[GavelJob, ...], table: Coefficients) -> dict[int, float]:
    """Completion time of each counted job in seconds, by its number. `jobs` must reach past the last one's end."""
    left_unit_s: dict[int, float] = {}
    dealt: dict[int, str] = {}
    done_s: dict[int, float] = {}
    now_s, dealt_s, arrived, stale = 0.0, 0.0, 0, False
    while not set(COUNTED) <= done_s.keys():
        while jobs[arrived].arrival_s <= now_s:
            left_unit_s[arrived] = jobs[arrived].work_unit_s
            arrived, stale = arrived + 1, True
        if stale and (now_s - dealt_s >= DEALT_EVERY_S or dealt_s == 0.0):
            dealt, dealt_s, stale = _deal(sorted(left_unit_s), jobs, table), now_s, False
        running = [number for number in dealt if number in left_unit_s]
        if not running:
            now_s = jobs[arrived].arrival_s
            continue
        ends_s = []
        for number in running:
            speed = table.speed(dealt[number], jobs[number].family, 1)
            worked_s = min(ROUND_S, left_unit_s[number] / speed)
            ends_s.append(now_s + worked_s)
            left_unit_s[number] -= worked_s * speed
            if left_unit_s[number] <= 1e-6:
                done_s[number] = now_s + worked_s - jobs[number].arrival_s
                del left_unit_s[number]
                stale = True
        now_s = max(ends_s)
    return {number: done_s[number] for number in COUNTED}


def _deal(waiting: list[int], jobs: tuple[GavelJob, ...], table: Coefficients) -> dict[int, str]:
    room = dict.fromkeys(CARDS, CARDS_EACH)
    dealt: dict[int, str] = {}
    for number in waiting:
        with_room = [card for card in CARDS if room[card]]
        if not with_room:
            break
        card = max(with_room, key=lambda card: table.speed(card, jobs[number].family, 1))
        dealt[number] = card
        room[card] -= 1
    return dealt
