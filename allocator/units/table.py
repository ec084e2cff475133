"""Coefficients keyed (card, family): how fast one card runs one family of work, the reference card being 1.

Cards of unlike types do not add up, and one scalar a card is not enough: over the 26 job types of Gavel's measured
table a V100 is worth between 0.66 and 11.6 K80. So the key is the pair, with the card's scalar (geometric mean over
the families) where a family was not measured, and its spread to say how far that may be off::

    coefficient(card, family)    = steps_per_s(card, family, 1) / steps_per_s(reference, family, 1)
    speed(card, family, devices) = steps_per_s(card, family, devices) / steps_per_s(reference, family, 1)
    charged units                = Σ devices · seconds · coefficient(card, family, version)

A charge uses the coefficient, so that nobody pays less for scaling badly; an estimate of time uses the speed. A family
may name a variant in brackets, "ResNet-50 (batch size 64)": unmeasured variants fall back to the family, and an
unmeasured family to the card's scalar. A gang size between measured ones scales from the next smaller.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite

LARGEST_COEFFICIENT = 1e4
"""Beyond this a coefficient is a slip of the pen: no two cards in one cluster are that far apart."""


class BadCoefficients(ValueError):
    """A table that must not be used; the message lists every fault in it."""


@dataclass(frozen=True, slots=True)
class CardUnits:
    """One card type: `scalar` for families that were not measured, `spread` (≥ 1) the factor it is within for most."""

    scalar: float
    spread: float = 1.0


@dataclass(frozen=True, slots=True)
class Coefficients:
    """One version of the table. Nothing in it changes: a correction is a new version."""

    version: str
    reference: str
    source: str
    cards: Mapping[str, CardUnits]
    speeds: Mapping[str, Mapping[str, Mapping[int, float]]]
    """family → card → devices → speed of a packed gang. A measured 0 says: this card cannot run it at that size."""
    spread_out: Mapping[str, Mapping[str, Mapping[int, float]]]
    """The same for gangs over several nodes, where measured."""

    def knows(self, card: str) -> bool:
        """Whether the card type is in the table at all. One that is not is never used: an alias may be half as big."""
        return card in self.cards

    def coefficient(self, card: str, family: str) -> float:
        """Units of one device of this card at this family; 0 where the card is unknown."""
        sizes = self._sizes(self.speeds, card, family)
        if sizes and sizes.get(1, 0.0) > 0.0:
            return sizes[1]
        known = self.cards.get(card)
        return known.scalar if known else 0.0

    def speed(self, card: str, family: str, devices: int, *, spread_out: bool = False) -> float:
        """Units per second of a gang; 0 where the card is unknown or was measured not to run it."""
        if spread_out and devices > 1:
            sizes = self._sizes(self.spread_out, card, family)
            if sizes and (speed := _at_size(sizes, devices)) is not None:
                return speed
        sizes = self._sizes(self.speeds, card, family)
        if sizes and (speed := _at_size(sizes, devices)) is not None:
            return speed
        return devices * self.coefficient(card, family)

    def scalar(self, card: str) -> float:
        """Units of one device where no family is in view: capacity, nominal quota. 0 where the card is unknown."""
        known = self.cards.get(card)
        return known.scalar if known else 0.0

    @staticmethod
    def _sizes(table: Mapping[str, Mapping[str, Mapping[int, float]]], card: str,
               family: str) -> Mapping[int, float] | None:
        cards = table.get(family)
        if cards is None or card not in cards:
            cards = table.get(family.split(" (", 1)[0])
        return cards.get(card) if cards else None


def _at_size(sizes: Mapping[int, float], devices: int) -> float | None:
    if devices in sizes:
        return sizes[devices]
    below = [size for size in sizes if size < devices]
    if not below:
        return None
    nearest = max(below)
    return sizes[nearest] * devices / nearest


def check(table: Coefficients) -> Coefficients:
    """The table itself where it may be used.

    Raises:
        BadCoefficients: a value that is not finite, not positive or beyond all reason; a family with an unknown card; a
            reference card that is missing or not worth 1.
    """
    faults = []
    for card, units in table.cards.items():
        faults += _faults_of(f"card {card}: scalar", units.scalar)
        if not (isfinite(units.spread) and units.spread >= 1.0):
            faults.append(f"card {card}: spread {units.spread} must be a finite number of at least 1")
    for family, cards in (*table.speeds.items(), *table.spread_out.items()):
        for card, sizes in cards.items():
            if card not in table.cards:
                faults.append(f"family {family}: card {card} is not among the cards; is it an alias?")
            for devices, speed in sizes.items():
                if devices < 1:
                    faults.append(f"family {family}, card {card}: a gang of {devices}")
                faults += _faults_of(f"family {family}, card {card} x{devices}", speed / max(devices, 1), zero=True)
    reference = table.cards.get(table.reference)
    if reference is None or reference.scalar != 1.0:
        faults.append(f"reference card {table.reference!r} must be among the cards, with scalar 1")
    if not table.version:
        faults.append("a table needs a version: every charge names it")
    if faults:
        raise BadCoefficients(f"coefficients {table.version!r} cannot be used: " + "; ".join(faults))
    return table


def _faults_of(what: str, value: float, *, zero: bool = False) -> list[str]:
    if isfinite(value) and (0.0 < value <= LARGEST_COEFFICIENT or (zero and value == 0.0)):
        return []
    return [f"{what} is {value}, must be finite, above 0 and at most {LARGEST_COEFFICIENT:g}"]


def drift(active: Coefficients, fresh: Coefficients, tolerance: float = 0.2) -> tuple[str, ...]:
    """What a fresh table moves by more than `tolerance` (0.2: by a fifth), in words; also what it no longer knows.

    An alarm and a question to the operator, never a silent change: activating a version is an event of its own.
    """
    found = [f"card {card} is no longer in the table" for card in active.cards if card not in fresh.cards]
    pairs = [(f"card {card}", units.scalar, fresh.cards[card].scalar)
             for card, units in active.cards.items() if card in fresh.cards]
    for family, cards in active.speeds.items():
        for card, sizes in cards.items():
            now = fresh.speeds.get(family, {}).get(card, {}).get(1)
            if now is not None and 1 in sizes:
                pairs.append((f"{family} on {card}", sizes[1], now))
    for what, before, after in pairs:
        if abs(after - before) > tolerance * before:
            found.append(f"{what}: {before:.4g} in {active.version}, {after:.4g} in {fresh.version}")
    return tuple(found)
