"""The commands about the allocator, for `headrace.cli` to take in. They only parse options and hand over."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

ALLOCATOR_URL = "http://127.0.0.1:8082"
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of text.")]
Url = Annotated[str, typer.Option("--allocator", envvar="HEADRACE_ALLOCATOR", help="Address of the allocator's API.")]
Job = Annotated[str, typer.Argument(help="Name of the job.")]

jobs_app = typer.Typer(name="jobs", no_args_is_help=True, help="Submit, show and cancel training jobs.")


@jobs_app.command("submit", short_help="Hand a job file to the allocator.")
def jobs_submit(
    file: Annotated[Path, typer.Argument(help="The job file; docs/allocator-service.md.")],
    allocator: Url = ALLOCATOR_URL, json: Json = False,
) -> None:
    """Hand a job file to the allocator. The same file twice is one job."""
    from headrace.allocator.commands import submit

    raise typer.Exit(submit(allocator, file, json=json))


@jobs_app.command("list", short_help="Jobs that wait or run.")
def jobs_list(
    history: Annotated[bool, typer.Option("--history", help="Also what became of the others.")] = False,
    allocator: Url = ALLOCATOR_URL, json: Json = False,
) -> None:
    """Show every job that waits, with why, or runs, with where."""
    from headrace.allocator.commands import list_jobs

    raise typer.Exit(list_jobs(allocator, history=history, json=json))


@jobs_app.command("show", short_help="All about one job.")
def jobs_show(name: Job, allocator: Url = ALLOCATOR_URL, json: Json = False) -> None:
    """Show a job, its run and its past."""
    from headrace.allocator.commands import show_job

    raise typer.Exit(show_job(allocator, name, json=json))


@jobs_app.command("cancel", short_help="Stop a job.")
def jobs_cancel(name: Job, allocator: Url = ALLOCATOR_URL, json: Json = False) -> None:
    """Take a job out of its queue; where it runs, it may save first."""
    from headrace.allocator.commands import cancel_job

    raise typer.Exit(cancel_job(allocator, name, json=json))


@jobs_app.command("why", short_help="Why a job waits.")
def jobs_why(name: Job, allocator: Url = ALLOCATOR_URL, json: Json = False) -> None:
    """Name the first thing that would have to change for a job to start."""
    from headrace.allocator.commands import why_job

    raise typer.Exit(why_job(allocator, name, json=json))


def allocate(
    config: Annotated[Path, typer.Option("--config", "-c", help="The allocator file.")],
    check: Annotated[bool, typer.Option("--check", help="Only say whether the file is right.")] = False,
    audit: Annotated[bool, typer.Option("--audit", help="Only hold its journal against the invariants.")] = False,
    json: Json = False,
) -> None:
    """Run the allocator: it lends idle inference capacity to training jobs and calls it back on time."""
    from headrace.allocator.serve import run_allocate, run_audit

    if audit:
        raise typer.Exit(run_audit(config, json=json))
    raise typer.Exit(asyncio.run(run_allocate(config, json=json, check=check)))


def pools(allocator: Url = ALLOCATOR_URL, json: Json = False) -> None:
    """Show the pools: devices by card, what is used, free, lent and borrowed."""
    from headrace.allocator.commands import pools as show_pools

    raise typer.Exit(show_pools(allocator, json=json))


def loans(
    history: Annotated[bool, typer.Option("--history", help="Every step of loans, the oldest first.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="With --history: the latest so many steps.")] = 100,
    allocator: Url = ALLOCATOR_URL, json: Json = False,
) -> None:
    """Show the loans that are out, with their deadlines; or the past."""
    from headrace.allocator.commands import loans as show_loans

    raise typer.Exit(show_loans(allocator, history=history, limit=limit, json=json))


def recall(
    target: Annotated[str, typer.Argument(help="A loan, by its backend's name, or a lending pool.")],
    deadline: Annotated[float | None, typer.Option(min=0.1, help="Seconds; left out: the promised grace.")] = None,
    replicas: Annotated[int | None, typer.Option(min=1, help="Of a pool: so many, for the least lost work.")] = None,
    emergency: Annotated[bool, typer.Option("--emergency", help="Less than the promised grace is allowed.")] = False,
    allocator: Url = ALLOCATOR_URL, json: Json = False,
) -> None:
    """Call lent devices back. Jobs on them may save; whoever still stands at the deadline is killed."""
    from headrace.allocator.commands import recall as call_back

    raise typer.Exit(call_back(allocator, target, deadline_s=deadline, replicas=replicas, emergency=emergency,
                               json=json))


def supply(
    pool: Annotated[str, typer.Argument(help="An inference pool.")],
    card: Annotated[str, typer.Argument(help="A card type of it.")],
    lendable: Annotated[int, typer.Option(min=0, help="Whole replicas that may be lent, lent ones included.")],
    spare: Annotated[int | None, typer.Option(help="Whole replicas that may stay away; left out: as many.")] = None,
    allocator: Url = ALLOCATOR_URL, json: Json = False,
) -> None:
    """Say what an inference pool can do without. Ends what a recall keeps back; with a router it is an upper limit."""
    from headrace.allocator.commands import supply as tell_supply

    raise typer.Exit(tell_supply(allocator, pool, card, lendable=lendable, spare=spare, json=json))


def cordon(
    targets: Annotated[list[str], typer.Argument(metavar="NODE|DEVICE...", help="Nodes, or devices as `node:index`.")],
    undo: Annotated[bool, typer.Option("--undo", help="They may be used again.")] = False,
    allocator: Url = ALLOCATOR_URL, json: Json = False,
) -> None:
    """Take devices out of use: what runs there may end, nothing new starts."""
    from headrace.allocator.commands import cordon as take_out

    raise typer.Exit(take_out(allocator, targets, undo=undo, json=json))


def quota(allocator: Url = ALLOCATOR_URL, json: Json = False) -> None:
    """Show what queues are promised, use, have borrowed, and may still take."""
    from headrace.allocator.commands import quota as show_quota

    raise typer.Exit(show_quota(allocator, json=json))


def top(
    once: Annotated[bool, typer.Option("--once", help="Print one frame and leave.")] = False,
    interval: Annotated[float, typer.Option(min=0.2, help="Seconds between two frames.")] = 1.0,
    allocator: Url = ALLOCATOR_URL, json: Json = False,
) -> None:
    """Watch pools, loans on a time line, and the queue."""
    from headrace.allocator.top import run_top

    raise typer.Exit(run_top(allocator, once=once, interval_s=interval, json=json))


def add_to(app: typer.Typer) -> None:
    """Adds all of these to the command line."""
    app.command(short_help="Run the allocator of training capacity.")(allocate)
    app.add_typer(jobs_app)
    app.command(short_help="Show the allocator's pools.")(pools)
    app.command(short_help="Show what is lent, and until when.")(loans)
    app.command(short_help="Call lent devices back by a deadline.")(recall)
    app.command(short_help="Say what inference can do without.")(supply)
    app.command(short_help="Take devices out of use, or back.")(cordon)
    app.command(short_help="Show what queues are promised and use.")(quota)
    app.command(short_help="Watch pools, loans and the queue live.")(top)
