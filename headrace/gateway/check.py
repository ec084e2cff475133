"""`headrace check`: is this fleet file usable, and if not, which line is wrong and what would be right."""

import json as json_format
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from router.config.fleet_file import ConfigError, LoadedFleet, Problem, load_fleet
from router.config.sections import BackendSection, LatencyClassSection


def check(path: Path, *, json: bool = False, environ: Mapping[str, str] | None = None) -> int:
    """Print what is wrong with the file, or a summary of the fleet. Returns the exit code: 0 usable, 1 not.

    Environment variables that the file names must be set (`environ`, by default this process's): a fleet whose keys
    are missing would not start. As JSON it prints one object: `ok`, `file`, `config_hash`, `problems`, `warnings`.
    """
    try:
        loaded = load_fleet(path, os.environ if environ is None else environ)
    except ConfigError as error:
        _report(path, None, error.problems, json)
        return 1
    _report(path, loaded, (), json)
    return 0


def _report(path: Path, loaded: LoadedFleet | None, problems: tuple[Problem, ...], json: bool) -> None:
    if json:
        sys.stdout.write(json_format.dumps({
            "ok": loaded is not None,
            "file": str(path),
            "config_hash": loaded.config_hash if loaded else None,
            "problems": [asdict(problem) for problem in problems],
            "warnings": [asdict(warning) for warning in loaded.warnings] if loaded else [],
        }) + "\n")
        return
    # A pipe has no width; tables are then as wide as they need to be.
    console = Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=200)
    if loaded is None:
        for problem in problems:
            _print_problem(console, problem, "red")
        console.print(f"\n{len(problems)} problem{'s' * (len(problems) != 1)}: this file cannot be used.", style="bold")
        return
    _print_summary(console, loaded)
    for warning in loaded.warnings:
        _print_problem(console, warning, "yellow", "warning: ")
    count = f", {len(loaded.warnings)} warning{'s' * (len(loaded.warnings) != 1)}" if loaded.warnings else ""
    verdict = Text(f"{path}: usable{count}; configuration {loaded.config_hash}", style="bold green")
    console.print(verdict, soft_wrap=True)


def _print_problem(console: Console, problem: Problem, style: str, prefix: str = "") -> None:
    console.print(Text(str(problem)[: -len(problem.message)]) + Text(prefix + problem.message, style=style),
                  soft_wrap=True)
    if problem.hint:
        console.print(Text(f"    {problem.hint}", style="dim"), soft_wrap=True)


def _print_summary(console: Console, loaded: LoadedFleet) -> None:
    config = loaded.config
    models = _table("model", "aliases", "backends")
    for model in config.models:
        serving = sum(backend.model == model.name for backend in config.backends)
        models.add_row(model.name, ", ".join(model.aliases) or "–", str(serving))

    backends = _table("backend", "model", "engine", "card", "quantization", "layout", f"{config.currency}/h", "weight",
                      "coefficients")
    for backend, spec in zip(config.backends, loaded.specs, strict=True):
        backends.add_row(backend.name, backend.model, backend.engine, f"{spec.card_count} × {spec.card_type}",
                         backend.quantization or "–", str(spec.parallel), f"{backend.price_per_hour:.2f}",
                         _weight(backend), spec.coefficients.version if spec.coefficients else "assumed")

    classes = _table("latency class", "TTFT P99", "inter-token P99", "E2E P99")
    for latency_class in config.latency_classes:
        is_default = latency_class.name == config.default_latency_class
        classes.add_row(latency_class.name + " (default)" * is_default, *_budget(latency_class))

    policy = _table("policy", loaded.pipeline.name)
    policy.add_row("filters", ", ".join(part.name for part in loaded.pipeline.filters) or "–")
    policy.add_row("prices", " + ".join(part.name for part in loaded.pipeline.prices) or "–")
    policy.add_row("picker", loaded.pipeline.picker.name)
    for table in (models, backends, classes, policy):
        console.print(table)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _weight(backend: BackendSection) -> str:
    return f"{backend.weight:g}" if backend.weight else "0 (drains)"


def _budget(latency_class: LatencyClassSection) -> list[str]:
    budget = latency_class.budget()
    times_s = (budget.ttft_s, budget.inter_token_s, budget.e2e_s)
    return ["–" if time_s is None else f"{time_s:g} s" for time_s in times_s]
