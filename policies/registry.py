"""The table of everything a policy can be made of, and the building of one.

A new filter, price, picker, preset or learner is one new file and one line here, or in the `roster` of the balancers
that policies are compared with. Parts from outside the tree join through `Registry.joined_with`, in the same table and
under the same checks.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from difflib import get_close_matches
from math import isfinite
from typing import Any, Literal, TypeVar

from policies import bounded_miss, cheapest_feasible, headrace
from policies.baselines import roster
from policies.filters.alive import Alive
from policies.filters.backing_off import BackingOff
from policies.filters.fits_context import FitsContext
from policies.filters.quality_floor import QualityFloor
from policies.filters.serves_model import ServesModel
from policies.learners.ccr.learner import CcrLearner
from policies.learners.miss_bounds import MissBounds
from policies.learning import Learner, NoLearner
from policies.pickers.bounded_miss import BoundedMiss
from policies.pickers.chance_constrained import ChanceConstrained
from policies.pickers.cheapest import Cheapest
from policies.policy import Pipeline
from policies.prices.drain_time import DrainTime
from policies.prices.lateness import Lateness
from policies.prices.request_cost import RequestCost
from policies.spec import PartSpec, PolicyError, PolicySpec, Preset, Setting, setting

__all__ = ["BUILT_IN", "PartDoc", "PartSpec", "PolicyError", "PolicySpec", "Registry", "SettingDoc",
           "build_learner", "build_pipeline", "describe"]

Kind = Literal["filter", "price", "picker", "preset", "learner"]
Part = type[Any]
"""A frozen dataclass whose fields are settings, whose `name` is a class variable, and whose instances are callable."""

Path = tuple[str | int, ...]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Registry:
    """Parts and presets by name."""

    filters: Mapping[str, Part] = field(default_factory=dict)
    prices: Mapping[str, Part] = field(default_factory=dict)
    pickers: Mapping[str, Part] = field(default_factory=dict)
    presets: Mapping[str, Preset] = field(default_factory=dict)
    learners: Mapping[str, Callable[[], Learner]] = field(default_factory=dict)
    """What makes a fresh learner. Each router, replay and simulated gateway owns one of its own."""

    def joined_with(self, other: "Registry") -> "Registry":
        """Both tables in one. Raises ValueError where a name stands in both: nobody replaces a part silently."""
        return Registry(
            _joined("filter", self.filters, other.filters), _joined("price", self.prices, other.prices),
            _joined("picker", self.pickers, other.pickers), _joined("preset", self.presets, other.presets),
            _joined("learner", self.learners, other.learners),
        )


def _joined(kind: Kind, ours: Mapping[str, T], theirs: Mapping[str, T]) -> Mapping[str, T]:
    if both := sorted(ours.keys() & theirs.keys()):
        raise ValueError(f"{kind} {', '.join(both)} is registered twice")
    return {**ours, **theirs}


def _named(*parts: T) -> Mapping[str, T]:
    return {part.name: part for part in parts}  # type: ignore[attr-defined]


BUILT_IN = Registry(
    filters=_named(ServesModel, Alive, FitsContext, BackingOff, QualityFloor),
    prices=_named(RequestCost, DrainTime, Lateness),
    pickers=_named(ChanceConstrained, Cheapest, BoundedMiss, *roster.PICKERS),
    presets=_named(headrace.PRESET, cheapest_feasible.PRESET, bounded_miss.PRESET, *roster.PRESETS),
    learners=_named(CcrLearner, MissBounds, *roster.LEARNERS),
)


@dataclass(frozen=True, slots=True)
class _PipelineSettings:
    """Settings of the pipeline itself."""

    margin: float = setting(
        2.0, "A backend keeps a budget where this many times its predicted mean does.", at_least=0)


def build_pipeline(spec: PolicySpec, registry: Registry = BUILT_IN) -> Pipeline:
    """The policy ready to run.

    Raises PolicyError for an unknown preset, part or setting, a value of the wrong type or out of range, a part named
    twice, and a preset setting that no part in use has or that several have. A preset of which a part was replaced
    goes by the name `custom`.
    """
    preset = _known("preset", registry.presets, spec.name or headrace.PRESET.name, ("name",))
    filters = preset.filters if spec.filters is None else spec.filters
    prices = preset.prices if spec.prices is None else spec.prices
    picker = preset.picker if spec.picker is None else spec.picker
    chosen = [
        *_chosen("filter", registry.filters, filters, "filters"),
        *_chosen("price", registry.prices, prices, "prices"),
        _Choice("picker", _known("picker", registry.pickers, picker.name, ("picker", "name")), picker, ("picker",)),
    ]
    of_pipeline, of_parts = _shared_out(spec.settings, chosen)
    built = [choice.build(settings) for choice, settings in zip(chosen, of_parts, strict=True)]
    margin = preset.margin
    if of_pipeline:
        margin = _checked(_PipelineSettings, of_pipeline, ("settings",), "the pipeline").margin
    replaced = spec.name is None or spec.filters is not None or spec.prices is not None or spec.picker is not None
    count = len(filters)
    prices_built, picker_built = tuple(built[count:-1]), built[-1]
    weighs = getattr(picker_built, "weighs", False)
    return Pipeline(
        "custom" if replaced else preset.name, tuple(built[:count]), prices_built, picker_built, margin,
        weighs=weighs,
        lazy=weighs and bool(prices_built) and not any(getattr(part, "predicts", True) for part in prices_built),
        sample=getattr(picker_built, "sample", None) if weighs else None)


def build_learner(spec: PolicySpec, registry: Registry = BUILT_IN) -> Learner:
    """A fresh learner for the policy: the one that its preset names, else one that learns nothing.

    A preset of which parts were replaced keeps its learner; a part that finds the belief of another learner on a view
    goes on without.

    Raises PolicyError for an unknown preset, and for a preset that names an unknown learner.
    """
    preset = _known("preset", registry.presets, spec.name or headrace.PRESET.name, ("name",))
    if preset.learner is None:
        return NoLearner()
    return _known("learner", registry.learners, preset.learner, ("name",))()


@dataclass(frozen=True, slots=True)
class _Choice:
    """A part that the policy uses, and where in the policy section it stands."""

    kind: Kind
    part: Part
    spec: PartSpec
    path: Path

    def build(self, preset_settings: Mapping[str, Setting]) -> Any:
        built = _checked(self.part, self.spec.settings, self.path, f"{self.kind} {self.spec.name}")
        if not preset_settings:
            return built
        both = {**self.spec.settings, **preset_settings}
        return _checked(self.part, both, ("settings",), f"{self.kind} {self.spec.name}")


def _chosen(kind: Kind, table: Mapping[str, Part], specs: Sequence[PartSpec], section: str) -> list[_Choice]:
    names = [spec.name for spec in specs]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise PolicyError((section, index, "name"), f"{kind} {name!r} is listed twice")
    return [_Choice(kind, _known(kind, table, spec.name, (section, index, "name")), spec, (section, index))
            for index, spec in enumerate(specs)]


def _shared_out(
    settings: Mapping[str, Setting], chosen: Sequence[_Choice]
) -> tuple[Mapping[str, Setting], Sequence[Mapping[str, Setting]]]:
    """The preset's settings, each given to the one owner that has it: the pipeline, or one of the parts."""
    of_pipeline: dict[str, Setting] = {}
    of_parts: list[dict[str, Setting]] = [{} for _ in chosen]
    names = [[each.name for each in fields(choice.part)] for choice in chosen]
    margin_names = [each.name for each in fields(_PipelineSettings)]
    for key, value in settings.items():
        owners = [index for index, own in enumerate(names) if key in own]
        if key in margin_names:
            of_pipeline[key] = value
        elif len(owners) == 1:
            of_parts[owners[0]][key] = value
        elif owners:
            who = ", ".join(f"{chosen[index].kind} {chosen[index].spec.name}" for index in owners)
            raise PolicyError(("settings", key), f"{key!r} is a setting of {who}: set it on the part that you mean")
        else:
            known = margin_names + [name for own in names for name in own]
            raise PolicyError(("settings", key), f"no part of this policy has a setting {_unknown(key, known)}")
    return of_pipeline, of_parts


def _known(kind: Kind, table: Mapping[str, T], name: str, path: Path) -> T:
    if name not in table:
        raise PolicyError(path, f"there is no {kind} {_unknown(name, table)}")
    return table[name]


def _unknown(name: str, known: Iterable[str]) -> str:
    """The name, the closest known one if any is close, and all that are known."""
    names = sorted(known)
    close = get_close_matches(name, names, n=1)
    meant = f"; did you mean {close[0]!r}?" if close else ""
    return f"{name!r}{meant} (known: {', '.join(names) or 'none'})"


def _checked(part: Part, settings: Mapping[str, Setting], path: Path, owner: str) -> Any:
    """The part with these settings, each of the declared type and in its range."""
    declared = {each.name: each for each in fields(part)}
    values: dict[str, Setting] = {}
    for key, value in settings.items():
        where = (*path, key)
        if key not in declared:
            raise PolicyError(where, f"{owner} has no setting {_unknown(key, declared)}")
        values[key] = _typed(value, declared[key].type, where)
        low, high = declared[key].metadata["at_least"], declared[key].metadata["at_most"]
        number = values[key]
        if low is not None and number < low:
            raise PolicyError(where, f"must be at least {low}, got {value!r}")
        if high is not None and number > high:
            raise PolicyError(where, f"must be at most {high}, got {value!r}")
    return part(**values)


def _typed(value: object, wanted: object, where: Path) -> Any:
    # In Python a bool is an int; in a fleet file `true` for a number is a slip.
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if wanted is float and is_number and isfinite(value):  # type: ignore[arg-type]
        return float(value)  # type: ignore[arg-type]
    if wanted is int and is_number and isinstance(value, int):
        return value
    if wanted in (bool, str) and type(value) is wanted:
        return value
    words = {float: "a finite number", int: "a whole number", bool: "true or false", str: "text"}
    raise PolicyError(where, f"must be {words[wanted]}, got {value!r}")  # type: ignore[index]


@dataclass(frozen=True, slots=True)
class SettingDoc:
    """One setting, for the documentation."""

    name: str
    type: str
    default: Setting | None
    doc: str


@dataclass(frozen=True, slots=True)
class PartDoc:
    """One row of the documentation: a part or a preset."""

    kind: Kind
    name: str
    doc: str
    settings: tuple[SettingDoc, ...] = ()


def describe(registry: Registry = BUILT_IN) -> tuple[PartDoc, ...]:
    """Everything a policy can be made of: kind, name, one line of what it does, its settings with their defaults."""
    tables: tuple[tuple[Kind, Mapping[str, Part]], ...] = (
        ("filter", registry.filters), ("price", registry.prices), ("picker", registry.pickers))
    parts = [PartDoc(kind, name, (part.__doc__ or "").partition("\n")[0], _setting_docs(part))
             for kind, table in tables for name, part in table.items()]
    presets = [PartDoc("preset", name, preset.doc, _preset_settings(preset, registry))
               for name, preset in registry.presets.items()]
    return (*parts, *presets)


def _setting_docs(part: Part) -> tuple[SettingDoc, ...]:
    def row(declared: Field[Any]) -> SettingDoc:
        kind = getattr(declared.type, "__name__", str(declared.type))
        return SettingDoc(declared.name, kind, declared.default, declared.metadata["doc"])  # type: ignore[arg-type]

    return tuple([row(declared) for declared in fields(part)])


def _preset_settings(preset: Preset, registry: Registry) -> tuple[SettingDoc, ...]:
    """What the preset's `settings` take: `margin`, and the settings of its parts as the preset sets them."""
    margin = _setting_docs(_PipelineSettings)[0]
    rows = [SettingDoc(margin.name, margin.type, preset.margin, margin.doc)]
    parts = [(registry.filters, spec) for spec in preset.filters]
    parts += [(registry.prices, spec) for spec in preset.prices]
    for table, spec in (*parts, (registry.pickers, preset.picker)):
        rows += [SettingDoc(row.name, row.type, spec.settings.get(row.name, row.default), row.doc)
                 for row in _setting_docs(table[spec.name])]
    return tuple(rows)
