"""The command line. Each command parses its options, calls the room that does the work, and returns its exit code.

Exit codes: 0 done, 1 it went wrong or the answer is no, 2 it could not be tried. Errors are one line on standard error.
Rooms are imported inside the commands: `headrace --help` must not wait for the gateway.
"""

import asyncio
import os
import sys
from collections.abc import Awaitable
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from headrace import bench_policies
from headrace.allocator import cli as allocator_cli

app = typer.Typer(
    name="headrace", no_args_is_help=True, add_completion=False, rich_markup_mode=None,
    pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]},
    help="One OpenAI-style endpoint in front of unlike accelerators that serve the same model. Each request goes to "
         "the cheapest backend that still keeps the latency promised to its caller.",
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of text.")]
Admin = Annotated[str, typer.Option("--admin", envvar="HEADRACE_ADMIN", help="Address of the admin listener.")]
ADMIN_URL = "http://127.0.0.1:8081"
CARDS = "a100x2-bf16,l40sx2-fp8,ascend910b2x2-bf16"


def _show_version(asked: bool) -> None:
    if asked:
        version()
        raise typer.Exit


@app.callback()
def options(
    _version: Annotated[bool, typer.Option(
        "--version", is_eager=True, callback=_show_version, help="Print the version, and whether it runs compiled.",
    )] = False,
) -> None:
    """What comes before a command."""


class Engines(StrEnum):
    """What `headrace up` starts."""

    llamacpp = "llamacpp"
    simulated = "simulated"


class Demo(StrEnum):
    """What `headrace up` plays."""

    lending = "lending"


@app.command(short_help="Start three engines and the gateway; Ctrl-C ends all of it.")
def up(
    engines: Annotated[Engines, typer.Option(help="Real llama.cpp servers, or simulated cards.")] = Engines.llamacpp,
    host: Annotated[str, typer.Option(help="Address that the gateway listens on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the gateway; 0 takes a free one.")] = 8080,
    admin_port: Annotated[int, typer.Option(
        min=0, max=65535, help="Port of the admin listener; 0 takes a free one.")] = 8081,
    run_dir: Annotated[Path, typer.Option(help="Folder for the fleet file, logs and state.")] = Path(".headrace/run"),
    time_scale: Annotated[float, typer.Option(help="How many times faster than life simulated cards run.")] = 1.0,
    calibrate: Annotated[bool, typer.Option(help="Measure each engine at its first start.")] = True,
    demo: Annotated[Demo | None, typer.Option(help="Play it and end: a wave, a loan to training, the recall.")] = None,
    json: Json = False,
) -> None:
    """Start three engines of one model and the gateway before them; Ctrl-C ends all of it."""
    from headrace.up.run import UpOptions, run_up

    options = UpOptions(engines=engines.value, host=host, port=port, admin_port=admin_port, run_dir=run_dir, json=json,
                        time_scale=time_scale, calibrate=calibrate, demo="lending" if demo is Demo.lending else None)
    _finish(run_up(options))


@app.command()
def serve(
    config: Annotated[Path, typer.Option("--config", "-c", help="The fleet file.")],
    host: Annotated[str | None, typer.Option(help="Listen here instead of where the fleet file says.")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Listen on this port instead.")] = None,
    workers: Annotated[str, typer.Option(help="Processes that serve; 'auto': one for each core.")] = "1",
    json: Json = False,
) -> None:
    """Run the gateway for the fleet that a file describes."""
    from headrace.gateway.serve import run_serve, worker_count

    try:
        count = worker_count(workers)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    _finish(run_serve(config, workers=count, host=host, port=port, json=json))


keys_app = typer.Typer(name="keys", no_args_is_help=True, help="Make API keys.")
app.add_typer(keys_app)


@keys_app.command("new", short_help="Make a key: shown once, kept as a hash.")
def keys_new(
    tenant: Annotated[str, typer.Option(help="Whom the key's requests are counted to.")],
    id: Annotated[str | None, typer.Option(help="Name of the key in records; left out: one is made.")] = None,
    max_parallel: Annotated[int | None, typer.Option(
        min=1, max=1_000_000, help="Requests it may have in flight at once.")] = None,
    expires: Annotated[str | None, typer.Option(help="Date or time (RFC 3339) from which it is refused.")] = None,
    append: Annotated[Path | None, typer.Option(help="Keys file to add the row to.")] = None,
    json: Json = False,
) -> None:
    """Make an API key. The key itself is shown once; the keys file holds its hash."""
    from headrace.gateway.keys import new_key

    raise typer.Exit(new_key(tenant, key_id=id, max_parallel=max_parallel, expires=expires, append=append, json=json))


bench_app = typer.Typer(name="bench", no_args_is_help=True, help="Measure, side by side with peers.")
app.add_typer(bench_app)


@bench_app.command("gateway", short_help="The gateway beside other proxies, in one run.")
def bench_gateway(
    targets: Annotated[str, typer.Option(help="Which, by commas; left out: all.")] = "",
    workloads: Annotated[str, typer.Option(help="Which, by commas: W1, W1o, W2, W2s, W3, W4; left out: all.")] = "",
    quick: Annotated[bool, typer.Option(help="A few minutes: headrace and nginx, short runs.")] = False,
    repeat: Annotated[int | None, typer.Option(help="Repetitions, interleaved.")] = None,
    seconds: Annotated[float | None, typer.Option(help="Length of one run.")] = None,
    time_limit: Annotated[float | None, typer.Option(help="Seconds after which no further repetition begins.")] = None,
    peer_bin: Annotated[list[Path] | None, typer.Option(help="Folder with peers' programs; may be repeated.")] = None,
    report: Annotated[Path | None, typer.Option(help="Folder for the HTML report.")] = None,
    judge: Annotated[bool, typer.Option(help="Exit 1 where a goal is missed.")] = False,
    json: Json = False,
) -> None:
    """Run workloads through the gateway and other proxies, interleaved on pinned cores; docs/benchmarking.md."""
    from loadtest.bench.run import BenchOptions, run_bench

    raise typer.Exit(run_bench(BenchOptions(
        targets=tuple(filter(None, targets.split(","))), workloads=tuple(filter(None, workloads.split(","))),
        quick=quick, repeat=repeat, seconds=seconds, time_limit_s=time_limit, peer_bin=tuple(peer_bin or ()),
        report=report, judge=judge, json=json,
    )))


bench_policies.add_to(bench_app)


@app.command(short_help="Simulate policies on unlike cards, on a virtual clock.")
def sim(
    what: Annotated[str, typer.Argument(
        help="Scenarios by commas, `all`, `list`, `capacity`, `validate`, `scorecard`, `training` or `lending`.")],
    of: Annotated[str, typer.Argument(
        help="With `capacity` and `lending`: of which scenarios; with `scorecard`: which sections.")] = "",
    pool: Annotated[str, typer.Option(help="site, fitted-owned or fitted-list; site:64 is 64 backends.")] = "site",
    policies: Annotated[str, typer.Option(help="Presets by commas; NAME:SETTING=VALUE sets one.")] = "",
    seeds: Annotated[str, typer.Option(help="Such as 1-5 or 1,2,7; left out: the usual.")] = "",
    rate: Annotated[float | None, typer.Option(min=0.01, help="Requests a second instead of the usual.")] = None,
    seconds: Annotated[float | None, typer.Option(min=1, help="Seconds in which requests arrive.")] = None,
    days: Annotated[float | None, typer.Option(min=0.1, help="With `lending`: days instead of two weeks.")] = None,
    load: Annotated[float | None, typer.Option(
        min=0.05, help="With `lending`: the jobs' work over what training's own cards can do.")] = None,
    trace_dir: Annotated[Path | None, typer.Option(
        envvar="HEADRACE_TRACE_DIR", help="Folder with whole traces; left out: the extracts that are shipped.")] = None,
    bound: Annotated[bool, typer.Option("--bound", help="Hold each run against the clairvoyant bound.")] = False,
    target: Annotated[float, typer.Option(help="With `capacity`: the in-budget share to hold.")] = 0.99,
    rates: Annotated[str, typer.Option(help="With `capacity`: rates by commas instead of the usual ladder.")] = "",
    unseen: Annotated[str, typer.Option(help="With `scorecard`: seeds that nothing was tuned on.")] = "",
    subject: Annotated[str, typer.Option(help="With `scorecard`: the policy that is judged.")] = "",
    quick: Annotated[bool, typer.Option("--quick", help="With `scorecard`: a few short runs.")] = False,
    keep: Annotated[Path | None, typer.Option(
        help="With `scorecard`: folder for answers, to go on from after a break.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with charts here.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that simulate.")] = 1,
    timing: Annotated[bool, typer.Option("--timing", help="Put decision times, which vary, into the JSON.")] = False,
    json: Json = False,
) -> None:
    """Run scenarios under policies in a discrete-event world, the same to the byte from the same seed."""
    from loadtest.sim.command import SimOptions, run

    options = SimOptions(
        scenarios=_scenarios_of(what, of), pool=pool,
        policies=tuple(filter(None, policies.split(","))),
        seeds=seeds, rate_per_s=rate, seconds=seconds, days=days, load=load,
        jobs=jobs, trace_dir=trace_dir, html=html, json=json,
        bound=bound, timing=timing, target=target, rates=rates, unseen=unseen, subject=subject, quick=quick, keep=keep)
    raise typer.Exit(run(what, options))


@app.command(short_help="Measure what is promised of faults, aborts and bad input.")
def reliability(
    figures: Annotated[list[str] | None, typer.Argument(help="Which: B C E G H J T; left out: all.")] = None,
    size: Annotated[str, typer.Option(help="ci: a minute; long: a quarter of an hour and more.")] = "ci",
    json: Json = False,
) -> None:
    """Measure bytes, aborts, amplification, bad input, slow peers and held streams against their bounds."""
    from loadtest.reliability.measured import Size
    from loadtest.reliability.run import run_reliability

    if size not in list(Size):
        raise typer.BadParameter(f"must be one of {', '.join(Size)}, got {size!r}", param_hint="--size")
    raise typer.Exit(run_reliability(tuple(figures or ()), size=Size(size), as_json=json))


@app.command(short_help="Say what is wrong with a fleet file, if anything.")
def check(
    file: Annotated[Path, typer.Argument(help="The fleet file.")],
    json: Json = False,
) -> None:
    """Say whether a fleet file is right; if not, where, why, and what would be."""
    from headrace.gateway.check import check as check_file

    raise typer.Exit(check_file(file, json=json))


@app.command(short_help="Show the backends of a running gateway.")
def status(
    admin: Admin = ADMIN_URL,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Again each second until Ctrl-C.")] = False,
    json: Json = False,
) -> None:
    """Show every backend of a running gateway: health, load, price, share of the traffic."""
    from headrace.gateway.status import show_status

    raise typer.Exit(show_status(admin, json=json, watch=watch))


@app.command(short_help="Make a running gateway read its fleet file again.")
def reload(
    admin: Admin = ADMIN_URL,
    json: Json = False,
) -> None:
    """Make a running gateway read its fleet file again; a broken file changes nothing."""
    from headrace.gateway.status import request_reload

    raise typer.Exit(request_reload(admin, json=json))


@app.command(short_help="Load a gateway with streamed chats; judge the result.")
def loadtest(
    host: Annotated[str | None, typer.Option(help="Load this gateway. Default: start one with fake engines.")] = None,
    model: Annotated[str, typer.Option(help="With --host: the model to ask for.")] = "smollm2-135m-instruct",
    api_key_env: Annotated[str, typer.Option(help="With --host: environment variable with the API key.")] = "",
    users: Annotated[int, typer.Option(min=1, max=1000, help="Locust users that share the schedule.")] = 20,
    rate: Annotated[float, typer.Option(min=0.01, max=1000, help="Requests a second over all users.")] = 8.0,
    duration: Annotated[float, typer.Option(min=1, max=3600, help="Seconds in which requests start.")] = 20.0,
    prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Median prompt; by default 1,020.")] = None,
    output_tokens: Annotated[int | None, typer.Option(min=1, help="Median answer; by default 129.")] = None,
    seed: Annotated[int, typer.Option(help="Same seed, same schedule and sizes.")] = 1,
    cards: Annotated[str, typer.Option(help="Simulated cards, by comma.")] = CARDS,
    time_scale: Annotated[float, typer.Option(min=0.01, help="How many times faster than life they run.")] = 2.0,
    policy: Annotated[str, typer.Option(help="Routing policy of the gateway that is started.")] = "headrace",
    fault: Annotated[list[str] | None, typer.Option(
        help="Let a simulated card fail: 'h100x2-fp8=slow x3 from 5 to 10'. May be repeated.")] = None,
    thresholds: Annotated[Path | None, typer.Option(help="Judge by this file.")] = None,
    report: Annotated[Path | None, typer.Option(help="Keep records, charts, logs and summary here.")] = None,
    json: Json = False,
) -> None:
    """Load a gateway with streamed chats on an open schedule and judge what its callers felt."""
    from loadtest.run import LoadOptions, run_loadtest

    options = LoadOptions(host=host, model=model, api_key_env=api_key_env, users=users, rate_per_s=rate,
                          duration_s=duration, seed=seed, cards=tuple(filter(None, cards.split(","))),
                          time_scale=time_scale, policy=policy, faults=_faults(fault or []), report=report, json=json)
    options = options.with_medians(prompt_tokens, output_tokens)
    raise typer.Exit(run_loadtest(replace(options, thresholds=thresholds) if thresholds else options))


@app.command(
    "fake-engine", add_help_option=False, short_help="Run one simulated engine.",
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
def fake_engine(
    context: typer.Context,
    json: Json = False,
) -> None:
    """Run one simulated engine in the foreground (its own options: headrace fake-engine --help)."""
    # It prints its address as a line of JSON in any case, so --json has nothing to add.
    os.execv(sys.executable, [sys.executable, "-m", "loadtest.fake_engine", *context.args])  # noqa: S606


@app.command()
def version(json: Json = False) -> None:
    """Print the version, and whether it runs compiled."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as version_of

    from compiled import form

    try:
        found = version_of("headrace")
    except PackageNotFoundError:
        found = "unknown (not installed)"
    if json:
        _print_json({"version": found, "form": form()})
    else:
        print(f"{found} ({form()})")


allocator_cli.add_to(app)


def main() -> None:
    """The console script."""
    try:
        app(prog_name="headrace")
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The reader of our output left; a second complaint at exit helps nobody.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        if os.environ.get("HEADRACE_TRACEBACK"):
            raise
        while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]     # what one task of several found says more than that there was a group
        what = str(error) or type(error).__name__
        kind = "" if isinstance(error, OSError) else f"{type(error).__name__}: "
        print(f"headrace: {kind}{what} (HEADRACE_TRACEBACK=1 shows where)", file=sys.stderr)
        sys.exit(1)


def _finish(work: Awaitable[int]) -> None:
    """Run to the end on uvloop and leave with the exit code that it returns."""
    import uvloop

    async def run() -> int:
        return await work

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        raise typer.Exit(runner.run(run()))


def _scenarios_of(what: str, of: str) -> str:
    if what in ("capacity", "lending", "scorecard"):
        return of
    if of:
        raise typer.BadParameter(f"{of!r}: `{what}` takes no second word; scenarios are joined by commas, as in "
                                 "`headrace sim steady,burst`")
    return what


def _faults(given: list[str]) -> dict[str, list[str]]:
    faults: dict[str, list[str]] = {}
    for text in given:
        card, equals, fault = text.partition("=")
        if not equals or not fault.strip():
            raise typer.BadParameter(f"{text!r}: needs CARD=FAULT, such as 'h100x2-fp8=slow x3 from 5 to 10'")
        faults.setdefault(card.strip(), []).append(fault.strip())
    return faults


def _print_json(value: object) -> None:
    import json

    print(json.dumps(value), flush=True)
