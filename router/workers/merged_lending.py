"""Lending where several worker processes serve: one publication, and orders that all workers take or none.

Every worker counts the demand of all (`router.workers.demand`), so the leader's figures are everybody's. Stages are
each worker's own: a backend is released once every worker has let it go, and serves once every one has it back.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from router.lending.stages import Stage


class LendingOrder(NamedTuple):
    """To let a backend go, or to take it back."""

    verb: str
    """`release` or `return`."""
    epoch: int


_LEAST_FIRST = (Stage.DRAINING, Stage.RETURNING, Stage.RELEASED, Stage.SERVING)
"""The stage that holds where workers differ: whoever still drains or returns is waited for."""


def merge_publications(documents: Sequence[dict[str, Any]], version: int) -> dict[str, Any]:
    """One publication: the leader's, which is the first, with every worker's stages and open requests."""
    entries = {entry["name"]: [entry] for entry in documents[0]["backends"]}
    for document in documents[1:]:
        for entry in document["backends"]:
            if entry["name"] in entries:
                entries[entry["name"]].append(entry)
    return {**documents[0], "version": version, "backends": [merge_backend(each) for each in entries.values()]}


def merge_backend(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One backend's part of it."""
    stages = {Stage(entry["stage"]) for entry in entries}
    stage = next(each for each in _LEAST_FIRST if each in stages)
    if stage is Stage.RELEASED and len(stages) > 1:
        stage = Stage.RETURNING     # some have it back, some are about to
    held_by = [entry for entry in entries if entry["stage"] == stage.value] or list(entries)
    return {
        **entries[0],
        "stage": stage.value,
        "for_s": min(entry["for_s"] for entry in held_by),
        "detail": next((entry["detail"] for entry in held_by if entry["detail"]), ""),
        "epoch": max(entry["epoch"] for entry in entries),
        "in_flight": sum(entry["in_flight"] for entry in entries),
        "drain_s": max(entry["drain_s"] for entry in entries),
        "return_s": max((entry["return_s"] for entry in entries if entry["returns_measured"]),
                        default=entries[0]["return_s"]),
        "returns_measured": max(entry["returns_measured"] for entry in entries),
    }
