"""Beliefs that outlive a restart, as JSON values.

Kept: drift, corrections, tails, cache capacity, output lengths and weights. Not kept: what is in flight, who holds
which session, and which prompts are cached. Age tells on them: drift fades as it does in idleness, counts halve every
hour, and so do the logarithms of corrections.
"""

from collections.abc import Callable, Hashable, Mapping
from math import exp, isfinite, log
from typing import Any

from policies.beliefs.backend import BackendBelief
from policies.beliefs.classes import ClassBelief
from policies.beliefs.drift import faded
from policies.beliefs.pool import MAX_CLASSES, PoolBelief
from policies.facts import Budget

VERSION = 1
HALF_LIFE_S = 3600.0
TAILS = ("ttft", "pace", "end")


def export(pool: PoolBelief, backends: Mapping[str, BackendBelief]) -> dict[str, Any]:
    """Everything worth keeping. Tables are copied at one stroke, so that a thread may ask while they grow."""
    return {
        "v": VERSION,
        "pool": {name: getattr(pool.tails, name).export() for name in TAILS},
        "classes": [{"key": list(kind.key), "budget": [kind.budget.ttft_s, kind.budget.inter_token_s,
                                                       kind.budget.e2e_s], **kind.export()}
                    for kind in list(pool.classes.values())],
        "lengths": [{"key": list(key), **lengths.export()} for key, lengths in list(pool.lengths.items())],
        "backends": {name: {"drift": belief.drift.log_ratio, "prefill": belief.prefill.log_factor,
                            "decode": belief.decode.log_factor, "cache_tokens": belief.cache.capacity_tokens
                            if belief.cache.learned else None,
                            **{tail: getattr(belief, tail).export() for tail in TAILS}}
                     for name, belief in list(backends.items())},
    }


def restore(state: Mapping[str, Any], age_s: float, pool: PoolBelief,
            backend: Callable[[str], BackendBelief]) -> None:
    """Take over what `export` gave, `age_s` ago. What makes no sense is passed over."""
    if not isinstance(state, Mapping) or state.get("v") != VERSION:
        return
    age_s = max(0.0, age_s) if isfinite(age_s) else HALF_LIFE_S * 100
    kept = exp(-log(2) * min(age_s / HALF_LIFE_S, 100.0))
    tails = state.get("pool")
    if isinstance(tails, Mapping):
        for name in TAILS:
            getattr(pool.tails, name).restore(tails.get(name), kept)
    for row in _rows(state.get("lengths")):
        key = _key(row)
        if len(key) == 2 and len(pool.lengths) < MAX_CLASSES:
            pool.made_lengths(key).restore(row, kept)
    for row in _rows(state.get("classes")):
        _restore_class(row, kept, pool)
    named = state.get("backends")
    for name, row in named.items() if isinstance(named, Mapping) else ():
        if isinstance(row, Mapping) and isinstance(name, str):
            _restore_backend(row, kept, age_s, backend(name))


def _rows(value: object) -> list[Mapping[str, Any]]:
    return [row for row in value if isinstance(row, Mapping)] if isinstance(value, list) else []


def _key(row: Mapping[str, Any]) -> tuple[Hashable, ...]:
    """The row's key; empty where it makes no sense."""
    key = row.get("key")
    if not isinstance(key, list) or not all(each is None or isinstance(each, str | int | float) for each in key):
        return ()
    return tuple(key)


def _restore_class(row: Mapping[str, Any], kept: float, pool: PoolBelief) -> None:
    key, promised = _key(row), row.get("budget")
    if len(key) < 2 or not isinstance(promised, list) or len(promised) != 3:
        return
    if not all(each is None or isinstance(each, int | float) for each in promised):
        return
    if len(pool.classes) < MAX_CLASSES or key in pool.classes:
        lengths = pool.made_lengths(key[:2])
        pool.classes.setdefault(key, ClassBelief(key, Budget(*promised), lengths)).restore(row, kept)


def _restore_backend(row: Mapping[str, Any], kept: float, age_s: float, belief: BackendBelief) -> None:
    for name in TAILS:
        getattr(belief, name).restore(row.get(name), kept)
    for correction, off in ((belief.prefill, row.get("prefill")), (belief.decode, row.get("decode"))):
        if isinstance(off, int | float) and isfinite(off):
            correction.set(kept * off)
    drift, cache_tokens = row.get("drift"), row.get("cache_tokens")
    if isinstance(drift, int | float) and isfinite(drift):
        belief.drift.set(log(max(1e-3, faded(exp(max(-3.0, min(3.0, drift))), age_s))))
    if isinstance(cache_tokens, int | float) and 0 < cache_tokens < 1e9:
        belief.cache.capacity_tokens, belief.cache.learned = float(cache_tokens), True
    belief.version += 1
