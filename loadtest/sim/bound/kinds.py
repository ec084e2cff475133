"""Backends that differ in name alone, taken together: a pool of a thousand cards has a handful of kinds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from loadtest.sim.bound.instance import BadInstance, BoundBackend


@dataclass(frozen=True, slots=True)
class Kinds:
    """The distinct backends of a pool."""

    kinds: tuple[BoundBackend, ...]
    """Each under the name of its first."""
    copies: tuple[int, ...]
    kind_of: Mapping[str, int]
    """By backend name."""


def kinds_of(backends: Sequence[BoundBackend]) -> Kinds:
    """Backends of equal coefficients, limits, price and history, counted.

    Raises:
        BadInstance: there is none, or two of one name.
    """
    if not backends:
        raise BadInstance("a bound needs at least one backend")
    found: dict[BoundBackend, list[str]] = {}
    for backend in backends:
        found.setdefault(replace(backend, name=""), []).append(backend.name)
    names = [name for members in found.values() for name in members]
    if len(set(names)) < len(names):
        raise BadInstance(f"backend names repeat: {', '.join(sorted(names))}")
    return Kinds(
        kinds=tuple([replace(kind, name=members[0]) for kind, members in found.items()]),
        copies=tuple([len(members) for members in found.values()]),
        kind_of={name: at for at, members in enumerate(found.values()) for name in members},
    )
