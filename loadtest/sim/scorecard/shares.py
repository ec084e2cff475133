"""Claims about the share of requests in budget, and about peers that keep more, or as much for less."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from loadtest.sim.run import Job
from loadtest.sim.scorecard.cases import Case
from loadtest.sim.scorecard.claims import Finding, percent
from loadtest.sim.scorecard.estimates import Estimate
from loadtest.sim.scorecard.sample import Sample

NEAR = 0.005
"""In-budget share below ours within which a peer counts as good as ours."""
SHOWN = 4


def all_jobs(sample: Sample, cases: Sequence[Case], peers: Sequence[str]) -> list[Job]:
    """Of the policy that is judged and of all others."""
    return [job for case in cases for policy in (sample.subject, *others(sample, peers))
            for job in sample.jobs(case, policy)]


def others(sample: Sample, peers: Sequence[str]) -> list[str]:
    """The peers without the policy that is judged."""
    return [peer for peer in peers if peer != sample.subject]


@dataclass(frozen=True, slots=True)
class AtLeast:
    """A claim that a figure of one case reaches a goal, with the peers' beside it."""

    case: Case
    at_least: float
    source: str
    peers: tuple[str, ...]
    by_seeds: ClassVar[bool] = True

    def tasks(self, sample: Sample) -> list[Job]:
        return all_jobs(sample, [self.case], self.peers)


@dataclass(frozen=True, slots=True)
class Kept(AtLeast):
    """At least so many are in budget."""

    @property
    def says(self) -> str:
        return f"{self.case}: in budget"

    @property
    def goal(self) -> str:
        return f">= {percent(self.at_least)}"

    def judge(self, sample: Sample) -> Finding:
        share = sample.share(self.case)
        # As printed: the plan's figures are rounded, and nobody should read 99.60 % as less than 99.6.
        kept = round(share.mean, 4) >= self.at_least
        return Finding(kept, share.text(100, 2, " %"), share, self._beside(sample))

    def _beside(self, sample: Sample) -> str:
        """The peer that keeps most, in the same runs."""
        peers = others(sample, self.peers)
        if not peers:
            return ""
        best = max(peers, key=lambda peer: sample.share(self.case, peer).mean)
        ahead = _ahead(sample, self.case, best).text(100, 2, sign=True)
        kept = percent(sample.share(self.case, best).mean, 2)
        return f"best peer {best} {kept}: ours {ahead} points{_dearer(sample, self.case, best)}"


@dataclass(frozen=True, slots=True)
class AsMuchAs(AtLeast):
    """A rule whose figures elsewhere are goals here keeps no more in the same runs, by more than one standard error of
    the difference, seed by seed.

    `peers` is that rule alone, and `at_least` what it kept elsewhere, which is shown and not judged.
    """

    @property
    def says(self) -> str:
        return f"{self.case}: in budget, over {self.peers[0]}"

    @property
    def goal(self) -> str:
        return ">= 0 within 1 se"

    def judge(self, sample: Sample) -> Finding:
        (rule,) = self.peers
        ahead = _ahead(sample, self.case, rule)
        ours, its = (percent(sample.share(self.case, policy).mean, 2) for policy in (sample.subject, rule))
        return Finding(ahead.mean >= -(ahead.se or 0.0), ahead.text(100, 2, " points", sign=True), ahead,
                       f"{ours}, {rule} {its}{_dearer(sample, self.case, rule)}; the plan's {percent(self.at_least)}")


def _ahead(sample: Sample, case: Case, policy: str) -> Estimate:
    """Our in-budget share less its, paired by seed."""
    gap = sample.share_gap(case, policy)
    return Estimate(-gap.mean, gap.se)


def _dearer(sample: Sample, case: Case, policy: str) -> str:
    """What ours costs more than its, where both kept anything."""
    saved = sample.saving(case, policy)
    return "" if saved is None else f", cost {-100 * saved.mean:+.1f} %"


class Offence(NamedTuple):
    """A peer that does what none is to do."""

    peer: str
    case: Case
    gap: Estimate
    """Its in-budget share less ours."""
    saving: Estimate | None
    """What ours saves."""

    def __str__(self) -> str:
        cost = "" if self.saving is None else f" at cost {100 * self.saving.mean:+.1f} %"
        return f"{self.peer} {self.gap.text(100, 2, sign=True)} points{cost} ({self.case})"


@dataclass(frozen=True, slots=True)
class AgainstPeers:
    """A claim about every case beside every peer."""

    who: str
    cases: tuple[Case, ...]
    peers: tuple[str, ...]
    source: str
    by_seeds: ClassVar[bool] = True

    def tasks(self, sample: Sample) -> list[Job]:
        return all_jobs(sample, self.cases, self.peers)

    def _judge(self, offences: Sequence[Offence]) -> Finding:
        """None is to be found. The worst come first."""
        named = "; ".join(map(str, offences[:SHOWN]))
        more = f"; {len(offences) - SHOWN} more" if len(offences) > SHOWN else ""
        return Finding(not offences, f"{len(offences)} of {len(self.cases) * len(self.peers)}",
                       Estimate(float(len(offences)), None), named + more)

    def _pairs(self, sample: Sample) -> Iterator[Offence]:
        for case in self.cases:
            for peer in others(sample, self.peers):
                yield Offence(peer, case, sample.share_gap(case, peer), sample.saving(case, peer))


@dataclass(frozen=True, slots=True)
class Unbeaten(AgainstPeers):
    """No peer has more in budget, by more than one standard error, paired by seed."""

    @property
    def says(self) -> str:
        return f"{self.who} with more in budget, cases: {len(self.cases)}"

    @property
    def goal(self) -> str:
        return "none beyond 1 se"

    def judge(self, sample: Sample) -> Finding:
        found = [one for one in self._pairs(sample) if one.gap.mean > (one.gap.se or 0.0)]
        return self._judge(sorted(found, key=lambda one: -one.gap.mean))


@dataclass(frozen=True, slots=True)
class NotUndercut(AgainstPeers):
    """No peer is cheaper and within half a point of the in-budget share."""

    @property
    def says(self) -> str:
        return f"{self.who} cheaper and within {100 * NEAR:g} points, cases: {len(self.cases)}"

    @property
    def goal(self) -> str:
        return "none"

    def judge(self, sample: Sample) -> Finding:
        found = [(one.saving.mean, one) for one in self._pairs(sample)
                 if one.saving is not None and one.saving.mean < 0.0 and one.gap.mean >= -NEAR]
        return self._judge([one for _, one in sorted(found, key=lambda pair: pair[0])])
