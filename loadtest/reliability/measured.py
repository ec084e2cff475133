"""What a figure gives: values beside their bounds."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import ceil
from operator import eq, ge, le


class Size(StrEnum):
    """How long a figure may take: seconds in CI, minutes on the day of a release."""

    CI = "ci"
    LONG = "long"


@dataclass(frozen=True, slots=True)
class Measured:
    """One value and its bound; `bound=None` where it is told for the record only."""

    figure: str
    what: str
    value: float
    unit: str = ""
    bound: float | None = None
    relation: str = "<="

    @property
    def holds(self) -> bool:
        """Whether the value keeps its bound."""
        return self.bound is None or RELATIONS[self.relation](self.value, self.bound)

    def line(self) -> str:
        """For people."""
        value = f"{self.value:,.4g}" if self.value != int(self.value) else f"{self.value:,.0f}"
        told = f"{self.figure}  {self.what}: {value} {self.unit}".rstrip()
        if self.bound is None:
            return told
        return f"{told} ({self.relation} {self.bound:,g}) {'ok' if self.holds else 'MISSED'}"


RELATIONS = {"<=": le, ">=": ge, "==": eq}


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of them do not exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[max(0, ceil(share * len(ordered)) - 1)] if ordered else 0.0
