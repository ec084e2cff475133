"""Events about jobs that wait: submitted, cancelled, promised devices, placed on them."""

from dataclasses import replace

from allocator.applying.runs import without_job
from allocator.events import ClaimDropped, ClaimMade, JobCancelled, JobSubmitted, RunPlaced
from allocator.loan.loan import stepped
from allocator.loan.states import LoanState, Step
from allocator.model.inventory import node_name
from allocator.model.jobs import JobState, Run, job_fault
from allocator.model.world import World


def job_submitted(world: World, event: JobSubmitted) -> World | str:
    job = event.job
    if job.id in world.jobs:
        return f"job {job.id} is there already"
    fault = job_fault(job)
    if fault:
        return f"job {job.id}: {fault}"
    job = replace(job, submitted_s=event.at_s)
    return world.evolved(jobs={**world.jobs, job.id: JobState(job, waiting_since_s=event.at_s)})


def job_cancelled(world: World, event: JobCancelled) -> World | str:
    state = world.jobs.get(event.job)
    if state is None or state.cancelled:
        return f"job {event.job} is unknown, over or cancelled already"
    if state.run is None:
        return without_job(world, event.job)
    return world.evolved(jobs={**world.jobs, event.job: replace(state, cancelled=True)})


def run_placed(world: World, event: RunPlaced) -> World | str:
    run = event.run
    state = world.jobs.get(run.job)
    if state is None or state.run is not None or state.cancelled:
        return f"run {run.id}: job {run.job} is not waiting"
    refusal = _placement_fault(world, state, run)
    if refusal:
        return f"run {run.id}: {refusal}"
    jobs = {**world.jobs, run.job: replace(state, run=run.id, attempts=state.attempts + 1)}
    claims = {name: claim for name, claim in world.claims.items() if name != run.job}
    loans = dict(world.loans)
    for name in sorted({world.loaned[device] for device in run.devices if device in world.loaned}):
        if loans[name].state is LoanState.OFFERED:
            accepted = stepped(loans[name], Step.ACCEPTED, event.at_s, empty=True)
            assert accepted is not None  # `_placement_fault` has seen that it is released
            loans[name] = accepted
        loans[name] = replace(loans[name], idle_since_s=None)
    return world.evolved(jobs=jobs, claims=claims, loans=loans, runs={**world.runs, run.id: run}, epoch=run.epoch)


def _placement_fault(world: World, state: JobState, run: Run) -> str | None:
    job = state.job
    if run.epoch <= world.epoch or run.id in world.runs:
        return f"epoch {run.epoch} was given out before"
    if run.card not in job.cards or not world.coefficients.knows(run.card):
        return f"card {run.card} is not one that the job allows, or is unknown"
    if not job.gang_min <= len(run.devices) <= job.gang_max or len(set(run.devices)) != len(run.devices):
        return f"a gang of {len(run.devices)} is not what the job asks for"
    for device in run.devices:
        fault = _device_fault(world, run, device, job.memory_gb)
        if fault:
            return f"device {device} {fault}"
    return None


def _device_fault(world: World, run: Run, device: str, memory_gb: float) -> str | None:
    node = world.nodes.get(node_name(device))
    if node is None or device not in node.device_ids:
        return "is unknown"
    if node.card != run.card:
        return f"is a {node.card}, not a {run.card}"
    if node.memory_gb < memory_gb:
        return f"has {node.memory_gb:g} GB, {memory_gb:g} are needed"
    if device in world.conditions:
        return f"is {world.conditions[device].value}"
    if device in world.holders:
        return f"is held by run {world.holders[device]}"
    if world.claimed.get(device, run.job) != run.job:
        return f"is kept for job {world.claimed[device]}"
    if device not in world.loaned:
        return None if node.pool == run.pool else f"belongs to pool {node.pool}"
    loan = world.loans[world.loaned[device]]
    if loan.borrower != run.pool:
        return f"is lent to pool {loan.borrower}"
    if loan.state is LoanState.LENT or (loan.state is LoanState.OFFERED and loan.released):
        return None
    return f"is in a loan that is {loan.state.value}"


def claim_made(world: World, event: ClaimMade) -> World | str:
    claim = event.claim
    state = world.jobs.get(claim.job)
    if state is None or state.run is not None or claim.job in world.claims:
        return f"job {claim.job} is not waiting, or has a claim"
    taken = next((device for device in claim.devices if device in world.claimed), None)
    if taken is not None:
        return f"device {taken} is kept for job {world.claimed[taken]}"
    for device in claim.devices:
        node = world.nodes.get(node_name(device))
        if node is None or node.card != claim.card or node.memory_gb < state.job.memory_gb:
            return f"device {device} is not one that job {claim.job} could use"
    unknown = next((name for name in claim.loans if name not in world.loans), None)
    if unknown is not None:
        return f"loan {unknown} is unknown"
    return world.evolved(claims={**world.claims, claim.job: claim})


def claim_dropped(world: World, event: ClaimDropped) -> World | str:
    if event.job not in world.claims:
        return f"job {event.job} has no claim"
    return world.evolved(claims={name: claim for name, claim in world.claims.items() if name != event.job})
