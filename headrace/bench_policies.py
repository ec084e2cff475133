"""`headrace bench policies`, for `headrace.cli` to take in. It only parses options and hands over."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

POLICIES = "headrace,round_robin,least_inflight,p2c,weighted_least_request"


class Engines(StrEnum):
    """What is started where no fleet is named."""

    llamacpp = "llamacpp"
    simulated = "simulated"


def bench_policies(
    policies: Annotated[str, typer.Option(
        help="Presets by commas, NAME:SETTING=VALUE sets one; the others are held against the first.")] = POLICIES,
    fleet: Annotated[Path | None, typer.Option(help="Fleet file of engines that run; left out: start some.")] = None,
    engines: Annotated[Engines, typer.Option(help="Which to start: llama.cpp, or simulated cards.")] = Engines.llamacpp,
    time_scale: Annotated[float, typer.Option(min=0.01, help="How many times faster than life those run.")] = 1.0,
    minutes: Annotated[float, typer.Option(min=0.1, help="Time for all of it: as many rounds as fit.")] = 10.0,
    rounds: Annotated[int | None, typer.Option(min=1, help="At most so many rounds after the warm-up.")] = None,
    block: Annotated[float, typer.Option(min=1, help="Seconds of arrivals that a policy gets in its turn.")] = 12.0,
    load: Annotated[float, typer.Option(min=0.01, help="Share of what the engines carry by calibration.")] = 0.5,
    rate: Annotated[float | None, typer.Option(min=0.01, help="Requests a second instead.")] = None,
    scale: Annotated[float, typer.Option(min=0.1, help="Prompts and answers so many times as long as usual.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Same seed, same arrivals, sizes and texts.")] = 1,
    report: Annotated[Path | None, typer.Option(help="Keep rows, outcomes, logs and decision records here.")] = None,
    judge: Annotated[bool, typer.Option(help="Exit 1 where the goal is missed.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of text.")] = False,
) -> None:
    """Send the same requests through a gateway under each policy, on engines that run; docs/real-engines.md."""
    from loadtest.live.run import PoliciesOptions, run_policies

    raise typer.Exit(run_policies(PoliciesOptions(
        policies=tuple(filter(None, map(str.strip, policies.split(",")))), fleet=fleet, engines=engines.value,
        time_scale=time_scale, minutes=minutes, rounds=rounds, block_s=block, load=load, rate_per_s=rate, scale=scale,
        seed=seed, report=report, judge=judge, json=json)))


def add_to(bench: typer.Typer) -> None:
    """Put the command among those of `headrace bench`."""
    bench.command("policies", short_help="Policies on real engines, same arrivals.")(bench_policies)
