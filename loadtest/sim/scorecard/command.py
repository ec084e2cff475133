"""`headrace sim scorecard`: plans the runs, drives them, judges, and says what came out."""

from collections.abc import Sequence
from importlib.util import find_spec

from loadtest.sim.command import SEEDS, WRONG, SimOptions, check_length, refuse, usual_policies
from loadtest.sim.run import SimError, parse_seeds, policy_spec, say, trace_dir
from loadtest.sim.scorecard import showing
from loadtest.sim.scorecard.cases import PEERS, TUNED
from loadtest.sim.scorecard.claims import Claim
from loadtest.sim.scorecard.driving import drive, expected_cpu_s
from loadtest.sim.scorecard.grids import Grid, grids
from loadtest.sim.scorecard.keeping import Shelf, fingerprint
from loadtest.sim.scorecard.sample import Sample
from loadtest.sim.scorecard.shares import AsMuchAs, Kept, others
from loadtest.sim.scorecard.table import QUICK_PEERS, Section, quick_sections, sections
from loadtest.sim.scorecard.tasks import Answer, Task
from loadtest.sim.scorecard.verdicts import Scorecard, judge

SUBJECT = "headrace"
UNSEEN = "11-15"
QUICK_SECONDS, QUICK_SEEDS, QUICK_UNSEEN = 60.0, "1", "11"


def run_scorecard(options: SimOptions) -> int:
    """The command. Exit code 0: every claim holds; 1: some do not; 2: it could not take place."""
    try:
        card = score(options)
    except WRONG as error:
        return refuse(error)
    if options.html:
        showing.write(card, options.html)
    showing.show(card, json=options.json, report=options.html)
    return 0 if card.holding == card.claims else 1


def score(options: SimOptions) -> Scorecard:
    """The scorecard. Raises `SimError` and its like before anything has run."""
    chosen = _sections(options)
    claims = [claim for section in chosen for claim in section.claims]
    if find_spec("highspy") is None and any(section.name == "bound" for section in chosen):
        raise SimError("the bound needs highspy: pip install 'headrace[bound]', or name other sections")
    samples, answers = _samples(options)
    code = fingerprint()
    tasks, cpu_s = expected_cpu_s(claims, samples)
    say(f"scorecard of {samples[0].subject}: {len(claims)} claims, up to {tasks} runs, about {cpu_s / 60:.1f} minutes "
        f"of one core; processes: {options.jobs}; code {code}")
    drive(claims, samples, answers, options.jobs, Shelf(options.keep, code) if options.keep else None)
    if fingerprint() != code:
        say("the code has changed while it ran: figures may come from both; run it again")
    return Scorecard(samples[0].subject, samples[0].seconds, samples, code,
                     tuple((section, judge(section, samples)) for section in chosen), _grids(claims, samples))


def _grids(claims: Sequence[Claim], samples: Sequence[Sample]) -> tuple[Grid, ...]:
    """What the claims about shares have run: the policy that is judged first."""
    kept = [claim for claim in claims if isinstance(claim, Kept | AsMuchAs)]
    cases = tuple(dict.fromkeys(claim.case for claim in kept))
    peers = dict.fromkeys(peer for claim in kept for peer in others(samples[0], claim.peers))
    return grids(samples, cases, (samples[0].subject, *peers))


def _samples(options: SimOptions) -> tuple[tuple[Sample, ...], dict[Task, Answer]]:
    """Tuning and unseen seeds, over the same answers."""
    subject = options.subject or SUBJECT
    policy_spec(subject)
    seeds = parse_seeds(options.seeds or (QUICK_SEEDS if options.quick else SEEDS))
    unseen = parse_seeds(options.unseen or (QUICK_UNSEEN if options.quick else UNSEEN))
    if both := sorted(set(seeds) & set(unseen)):
        raise SimError(f"unseen: seed {both[0]} is among the tuning seeds, too")
    seconds = QUICK_SECONDS if options.quick and options.seconds is None else options.length_s
    check_length(seconds)
    folder, answers = trace_dir(options.trace_dir), dict[Task, Answer]()
    return tuple(Sample(name, numbers, seconds, subject, answers, folder)
                 for name, numbers in (("tuning", seeds), ("unseen", unseen))), answers


def _sections(options: SimOptions) -> tuple[Section, ...]:
    """Those that are asked for, against the peers that are asked for. Raises `SimError`."""
    given = usual_policies(options.policies) if options.policies else ()
    known = quick_sections(given or QUICK_PEERS) if options.quick else sections(given or PEERS, () if given else TUNED)
    names = tuple(filter(None, map(str.strip, options.scenarios.split(","))))
    return _named(known, names) if names else known


def _named(known: Sequence[Section], names: Sequence[str]) -> tuple[Section, ...]:
    by_name = {section.name: section for section in known}
    for name in names:
        if name not in by_name:
            raise SimError(f"no section {name!r} of the scorecard: there are {', '.join(by_name)}")
    return tuple(section for section in known if section.name in names)
