"""What changes between two fleet files, setting by setting. Holds no secrets, since the configuration holds none."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from router.config.fleet_file import FleetConfig
from router.config.sections import BackendSection

MOST_NAMED = 8
"""Of a kind, in one line of a log."""
_NEEDS_RESTART = ("listen", "admin", "decision_log", "state", "limits.max_connections", "timeouts.receive_",
                  "timeouts.drain_s")


@dataclass(frozen=True, slots=True)
class SettingChange:
    """One setting, before and after; `None` is a setting that was not there."""

    path: str
    before: Any
    after: Any


@dataclass(frozen=True, slots=True)
class BackendChange:
    """A backend that is in both files, under one name."""

    name: str
    settings: tuple[SettingChange, ...]
    is_replaced: bool
    """Its identity changed (`BackendSpec.identity`): its live state starts anew, streams of the old one run out."""


@dataclass(frozen=True, slots=True)
class FleetDiff:
    """All that changes. Backends are matched by name; their order means nothing."""

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    changed: tuple[BackendChange, ...] = ()
    settings: tuple[SettingChange, ...] = ()
    """Outside of backends."""
    needs_restart: tuple[str, ...] = ()
    """Settings that a running gateway cannot take over, as its sockets are bound, and that differ from what it started
    with: whether by this change or by an earlier one."""

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed or self.settings)

    def in_short(self) -> str:
        """What changes, in a line without values; empty where nothing does."""
        changed = [f"{one.name} ({_listed([change.path for change in one.settings])})" for one in self.changed]
        kinds = [("added ", list(self.added)), ("removed ", list(self.removed)), ("changed ", changed),
                 ("", [change.path for change in self.settings])]  # fmt: skip
        return "; ".join(f"{word}{_listed(names)}" for word, names in kinds if names)


NO_CHANGE = FleetDiff()


def diff_fleets(before: FleetConfig | None, after: FleetConfig, started: FleetConfig | None = None) -> FleetDiff:
    """What going from `before` to `after` changes; from nothing, every backend is added. The process started with
    `started`, or with `before`."""
    if before is None:
        return FleetDiff(added=tuple(sorted(backend.name for backend in after.backends)))
    old = {backend.name: backend for backend in before.backends}
    new = {backend.name: backend for backend in after.backends}
    settings = tuple(_changes(_settings_outside_backends(before), _settings_outside_backends(after)))
    return FleetDiff(
        added=tuple(sorted(new.keys() - old.keys())),
        removed=tuple(sorted(old.keys() - new.keys())),
        changed=tuple(_backend_change(old[name], new[name])
                      for name in sorted(old.keys() & new.keys()) if old[name] != new[name]),
        settings=settings,
        needs_restart=restart_owed(before if started is None else started, after),
    )


def restart_owed(started: FleetConfig, after: FleetConfig) -> tuple[str, ...]:
    """Settings of `after` that only a restart brings in."""
    changes = _changes(_settings_outside_backends(started), _settings_outside_backends(after))
    return tuple(change.path for change in changes if change.path.startswith(_NEEDS_RESTART))


def _listed(names: Sequence[str]) -> str:
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _backend_change(before: BackendSection, after: BackendSection) -> BackendChange:
    changes = tuple(_changes(dict(_flat(before.model_dump())), dict(_flat(after.model_dump()))))
    identities = [before.spec(None).identity, after.spec(None).identity]
    return BackendChange(before.name, changes, is_replaced=identities[0] != identities[1])


def _settings_outside_backends(config: FleetConfig) -> dict[str, Any]:
    dump = config.model_dump(exclude={"backends"}, exclude_none=True)
    # The policy's parts are ordered and may repeat, so they are compared as lists rather than by name.
    policy = dump.pop("policy")
    return dict(_flat(dump)) | {f"policy.{key}": value for key, value in policy.items() if value != {}}


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Nested settings → (dotted path, value); items that have names go by them, so that order means nothing."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(item, f"{path}.{key}" if path else key)
    elif isinstance(value, tuple) and value and all(isinstance(item, Mapping) and "name" in item for item in value):
        for item in value:
            yield from _flat(item, f"{path}[{item['name']}]")
    else:
        yield path, value


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[SettingChange]:
    for path in sorted(before.keys() | after.keys()):
        if before.get(path) != after.get(path):
            yield SettingChange(path, before.get(path), after.get(path))
