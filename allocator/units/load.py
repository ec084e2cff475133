"""Reads a versioned table of coefficients: the one that is shipped (Gavel's measurements), or a file of the operator's.

This is the one room of the allocator's core that opens a file. Format: see `gavel.json` beside it.
"""

from functools import cache
from importlib.resources import files
from typing import Any

import msgspec

from allocator.units.table import BadCoefficients, CardUnits, Coefficients, check

SHIPPED = "gavel.json"


@cache
def shipped() -> Coefficients:
    """Gavel's table of 26 job types on V100, P100 and K80 (see `SOURCES.md`); the reference is the V100."""
    return parse(files("allocator.units").joinpath(SHIPPED).read_bytes(), SHIPPED)


def load(path: str) -> Coefficients:
    """The table in a file.

    Raises:
        BadCoefficients: the file cannot be read, is no such table, or holds values that must not be used.
    """
    try:
        with open(path, "rb") as file:
            text = file.read()
    except OSError as problem:
        raise BadCoefficients(f"coefficients file {path}: {problem.strerror or problem}") from problem
    return parse(text, path)


def parse(text: bytes, name: str = "coefficients") -> Coefficients:
    """The table in JSON text; `name` says in a message where it came from.

    Raises:
        BadCoefficients: see `load`.
    """
    try:
        document = msgspec.json.decode(text, type=_Document)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as problem:
        raise BadCoefficients(f"{name}: {problem}") from problem
    return check(Coefficients(
        version=document.version, reference=document.reference, source=document.source, cards=document.cards,
        speeds=document.speeds, spread_out=document.spread_out))


class _Document(msgspec.Struct, forbid_unknown_fields=True):
    version: str
    reference: str
    source: str
    cards: dict[str, CardUnits]
    speeds: dict[str, dict[str, dict[int, float]]]
    spread_out: dict[str, dict[str, dict[int, float]]] = {}
    licence: str = ""
    notes: Any = None
