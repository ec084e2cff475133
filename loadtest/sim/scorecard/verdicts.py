"""What came of the claims: a finding for the tuning seeds, one for unseen ones, and both together."""

from collections.abc import Sequence
from dataclasses import dataclass

from loadtest.sim.scorecard.claims import Claim, Finding
from loadtest.sim.scorecard.grids import Grid
from loadtest.sim.scorecard.sample import Sample
from loadtest.sim.scorecard.table import Section


@dataclass(frozen=True, slots=True)
class Verdict:
    """One claim. It holds where it holds under each set of seeds."""

    claim: Claim
    findings: tuple[Finding, ...]
    """In the order of the samples; one only where the claim is not about seeds."""

    @property
    def holds(self) -> bool:
        return all(finding.holds for finding in self.findings)


@dataclass(frozen=True, slots=True)
class Scorecard:
    """All of it."""

    subject: str
    seconds: float
    samples: tuple[Sample, ...]
    code: str
    """Hash of what the figures were computed with."""
    sections: tuple[tuple[Section, tuple[Verdict, ...]], ...]
    grids: tuple[Grid, ...]

    @property
    def holding(self) -> int:
        return sum(verdict.holds for _, verdicts in self.sections for verdict in verdicts)

    @property
    def claims(self) -> int:
        return sum(len(verdicts) for _, verdicts in self.sections)

    def as_json(self) -> dict[str, object]:
        names = [sample.name for sample in self.samples]
        return {
            "subject": self.subject, "seconds": self.seconds, "code": self.code,
            "seeds": {sample.name: list(sample.seeds) for sample in self.samples},
            "holding": self.holding, "claims": self.claims,
            "sections": [{
                "name": section.name, "title": section.title,
                "claims": [{
                    "says": verdict.claim.says, "goal": verdict.claim.goal, "source": verdict.claim.source,
                    "holds": verdict.holds,
                    **{name: finding.as_json() for name, finding in zip(names, verdict.findings, strict=False)},
                } for verdict in verdicts],
            } for section, verdicts in self.sections],
            "tables": [grid.as_json() for grid in self.grids],
        }


def judge(section: Section, samples: Sequence[Sample]) -> tuple[Verdict, ...]:
    """Each of its claims, all of whose tasks are answered."""
    return tuple(Verdict(claim, tuple([claim.judge(sample) for sample in (samples if claim.by_seeds else samples[:1])]))
                 for claim in section.claims)
