"""What single settings cannot see: names that collide, references that lead nowhere, budgets that contradict.

`contradictions` make a file unusable. `doubts` are warnings: the file works, though perhaps not as was meant.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from backends.engines import DIALECTS
from settings.problems import Finding, nearest
from settings.source import Loc, SourceDocument, quoted

if TYPE_CHECKING:
    from router.config.fleet_file import FleetConfig
    from router.config.sections import BackendSection


def contradictions(config: "FleetConfig") -> Iterator[Finding]:
    """All that makes the parts of a file unfit for each other."""
    yield from _model_names(config)
    yield from _repeated(("latency_classes",), [latency_class.name for latency_class in config.latency_classes])
    yield from _repeated(("backends",), [backend.name for backend in config.backends])
    classes = [latency_class.name for latency_class in config.latency_classes]
    if config.default_latency_class not in classes:
        yield Finding(("default_latency_class",), f"names no latency class: {quoted(config.default_latency_class)}",
                      nearest(config.default_latency_class, classes))
    models = {model.name for model in config.models}
    aliases = {alias: model.name for model in config.models for alias in model.aliases}
    for index, backend in enumerate(config.backends):
        if backend.model in aliases and backend.model not in models:
            yield Finding(("backends", index, "model"), f"{quoted(backend.model)} is an alias",
                          f"use the model's name, {quoted(aliases[backend.model])}")
        elif backend.model not in models:
            yield Finding(("backends", index, "model"), f"names no model of this file: {quoted(backend.model)}",
                          nearest(backend.model, models))
        if backend.engine not in DIALECTS:
            yield Finding(("backends", index, "engine"), f"is not a known engine: {quoted(backend.engine)}",
                          nearest(backend.engine, DIALECTS))
    for index, name in enumerate(config.hedging.latency_classes):
        if name not in classes:
            yield Finding(("hedging", "latency_classes", index), f"names no latency class: {quoted(name)}",
                          nearest(name, classes))
    yield from _times(config)
    yield from _reserved(config)
    if config.admin.port and config.admin.port == config.listen.port:
        yield Finding(("admin", "port"), f"is the port that clients use, {config.listen.port}",
                      "give the admin listener a port of its own, such as 8081")


def _model_names(config: "FleetConfig") -> Iterator[Finding]:
    taken: dict[str, str] = {}
    for index, model in enumerate(config.models):
        if model.name in taken:
            yield Finding(("models", index, "name"), f"{quoted(model.name)} is already {taken[model.name]}",
                          "every model needs a name of its own")
        taken.setdefault(model.name, f"the name of models[{index}]")
    for index, model in enumerate(config.models):
        for position, alias in enumerate(model.aliases):
            if alias in taken:
                yield Finding(("models", index, "aliases", position), f"{quoted(alias)} is already {taken[alias]}",
                              "a name may lead to one model only")
            taken.setdefault(alias, f"an alias of models[{index}]")


def _repeated(section: Loc, names: list[str]) -> Iterator[Finding]:
    first: dict[str, int] = {}
    for index, name in enumerate(names):
        if name in first:
            yield Finding((*section, index, "name"), f"{quoted(name)} is already {section[0]}[{first[name]}]",
                          "names must be unique")
        first.setdefault(name, index)


def _times(config: "FleetConfig") -> Iterator[Finding]:
    for index, latency_class in enumerate(config.latency_classes):
        if latency_class.ttft_s and latency_class.e2e_s and latency_class.ttft_s > latency_class.e2e_s:
            yield Finding(("latency_classes", index, "ttft_s"),
                          f"must be ≤ e2e_s, got {latency_class.ttft_s:g} > {latency_class.e2e_s:g}")
    # A default that exceeds a limit given in the file is no contradiction: the limit simply ends it first.
    for phase in ("connect_s", "first_token_s", "inter_token_s"):
        phase_s, total_s = getattr(config.timeouts, phase), config.timeouts.total_s
        if phase in config.timeouts.model_fields_set and phase_s and total_s and phase_s > total_s:
            yield Finding(("timeouts", phase), f"must be ≤ timeouts.total_s, got {phase_s:g} > {total_s:g}")
    base_s, max_s = config.health.base_ejection_s, config.health.max_ejection_s
    if "base_ejection_s" in config.health.model_fields_set and base_s > max_s:
        yield Finding(("health", "base_ejection_s"), f"must be ≤ health.max_ejection_s, got {base_s:g} > {max_s:g}")


def _reserved(config: "FleetConfig") -> Iterator[Finding]:
    total = 0.0
    for index, latency_class in enumerate(config.latency_classes):
        total += latency_class.reserved_share
        if latency_class.reserved_share and total > 1 + 1e-9:
            yield Finding(("latency_classes", index, "reserved_share"),
                          f"takes the reserved shares of all classes to {total:g}, and there is 1 to share out",
                          "what is left over is open to every class: reserve only what must be free at once")
            return


def doubts(config: "FleetConfig", document: SourceDocument) -> Iterator[Finding]:
    """What an operator would want to be asked about."""
    if not document.ends_with_newline:
        yield Finding((), "the last line has no line end: the file may have been cut short")
    by_model: dict[str, list[tuple[int, BackendSection]]] = defaultdict(list)
    for index, backend in enumerate(config.backends):
        by_model[backend.model].append((index, backend))
    for index, model in enumerate(config.models):
        serving = by_model[model.name]
        if not serving:
            yield Finding(("models", index), f"no backend serves {quoted(model.name)}: its requests are answered 404",
                          "add a backend with this model, or remove the model")
        elif all(backend.weight == 0 for _, backend in serving):
            yield Finding(("models", index), f"every backend of {quoted(model.name)} has weight 0: all drain, and "
                                             "its requests are answered 503")
    yield from _backend_doubts(config, by_model)
    yield from _class_doubts(config)
    if config.hedging.enabled:
        yield from _hedging_doubts(config, by_model)


def _class_doubts(config: "FleetConfig") -> Iterator[Finding]:
    limits = config.limits
    unreserved = 1 - sum(latency_class.reserved_share for latency_class in config.latency_classes)
    for index, latency_class in enumerate(config.latency_classes):
        share, waiting = latency_class.reserved_share, latency_class.max_queue
        if share and share * limits.max_in_flight < 1:
            yield Finding(("latency_classes", index, "reserved_share"),
                          f"of limits.max_in_flight, {limits.max_in_flight}, is not one request: nothing is reserved")
        if not share and unreserved * limits.max_in_flight < 1:
            yield Finding(("latency_classes", index), "finds all of limits.max_in_flight reserved for other classes: "
                                                      "its requests are answered 429", "reserve less for the others")
        if waiting is not None and waiting > limits.max_waiting:
            yield Finding(("latency_classes", index, "max_queue"),
                          f"is more than limits.max_waiting, {limits.max_waiting}, and never reached")


def _hedging_doubts(
    config: "FleetConfig", by_model: dict[str, list[tuple[int, "BackendSection"]]]
) -> Iterator[Finding]:
    hedging, classes = config.hedging, {entry.name: entry for entry in config.latency_classes}
    for index, name in enumerate(hedging.latency_classes):
        if classes[name].ttft_s is None and classes[name].e2e_s is None:
            yield Finding(("hedging", "latency_classes", index),
                          f"{quoted(name)} promises neither ttft_s nor e2e_s: only requests that bring a budget of "
                          "their own are hedged")
    if not hedging.budget_ratio and not hedging.budget_floor_per_s:
        yield Finding(("hedging",), "has a budget of nothing: no request is hedged",
                      "give a budget_ratio, such as 0.02, or leave enabled out")
    if all(len(siblings) < 2 for siblings in by_model.values()):
        yield Finding(("hedging",), "finds no model with a second backend: no request is hedged")


def _backend_doubts(
    config: "FleetConfig", by_model: dict[str, list[tuple[int, "BackendSection"]]]
) -> Iterator[Finding]:
    for siblings in by_model.values():
        if any(backend.price_per_hour > 0 for _, backend in siblings):
            for index, backend in siblings:
                if "price_per_hour" not in backend.model_fields_set:
                    yield Finding(("backends", index), "has no price_per_hour: it counts as free, and is preferred to "
                                                       "every priced backend", "give the price of its cards")
    seen: dict[tuple[str, str], int] = {}
    for index, backend in enumerate(config.backends):
        layout, cards = backend.parallel, backend.card.count
        used = layout.tp * layout.pp * layout.dp
        if used != cards and "parallel" in backend.model_fields_set:
            yield Finding(("backends", index, "parallel"),
                          f"tp·pp·dp = {used} cards, but card.count is {cards}")
        engine = (backend.url, backend.served_model_name or backend.model)
        if engine in seen:
            yield Finding(("backends", index, "url"), f"is the same engine and model as backends[{seen[engine]}]: its "
                                                      "load will be counted apart")
        seen.setdefault(engine, index)
