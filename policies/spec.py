"""How a policy is written down: parts by name with their settings, and the presets made of them.

A part (filter, price or picker) is a frozen dataclass whose fields are its settings; `setting` declares one with its
default, its meaning and its range, so that the fleet file, the error messages and the documentation all read the
same line.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Setting = float | int | str | bool


def setting(default: Any, doc: str, *, at_least: float | None = None, at_most: float | None = None) -> Any:
    """A dataclass field that is a setting: its meaning with the unit, and the range that makes sense."""
    return field(default=default, metadata={"doc": doc, "at_least": at_least, "at_most": at_most})


class PolicyError(ValueError):
    """A policy that cannot be built. `path` leads to the culprit inside the policy section of the fleet file."""

    def __init__(self, path: tuple[str | int, ...], message: str) -> None:
        super().__init__(message)
        self.path = path
        self.message = message


@dataclass(frozen=True, slots=True)
class PartSpec:
    """One part by name, with the settings that differ from its defaults."""

    name: str
    settings: Mapping[str, Setting] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """A policy as the fleet file gives it: a preset, parts in full, or a preset with some parts replaced.

    `None` for a list of parts means those of the preset, and of `headrace` where no preset is named. `settings` are
    the preset's: `margin`, and any setting that exactly one of the parts in use has.
    """

    name: str | None = "headrace"
    filters: tuple[PartSpec, ...] | None = None
    prices: tuple[PartSpec, ...] | None = None
    picker: PartSpec | None = None
    settings: Mapping[str, Setting] = field(default_factory=dict)


STANDARD_FILTERS = (
    PartSpec("serves_model"), PartSpec("alive"), PartSpec("fits_context"), PartSpec("backing_off"),
)


@dataclass(frozen=True, slots=True)
class Preset:
    """A policy that ships under a name of its own."""

    name: str
    doc: str
    picker: PartSpec
    prices: tuple[PartSpec, ...] = ()
    filters: tuple[PartSpec, ...] = STANDARD_FILTERS
    margin: float | None = None
    """See `Pipeline.margin`."""
    learner: str | None = None
    """Who remembers for its parts between requests (`Registry.learners`); `None`: each decision stands alone."""
