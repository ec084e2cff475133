"""The account of a lending demo: what became of every request, and the life of every loan. Pure: times come with it."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from allocator.loan.states import LoanState

PROMISES = {"ttft_s": "ttft_s", "inter_token_s": "pace_s", "e2e_s": "e2e_s"}
"""A budget of a latency class → what is held against it: of each request its first token, its mean time per token after
that, and its end."""
SETTLING_S = 5.0
"""So long after a replica is back, requests still count as sent during its recall."""


@dataclass(slots=True)
class Loan:
    """One loan. Times are monotonic seconds, `None` where that has not come."""

    backend: str
    epoch: int
    offered_s: float
    lent_s: float | None = None
    recalled_s: float | None = None
    recall_reason: str = ""
    let_go_s: float | None = None
    """The job is gone from the devices, by proof."""
    serving_s: float | None = None
    """The router sends requests there again."""
    was_overdue: bool = False

    @property
    def was_recalled_and_is_back(self) -> bool:
        return self.recalled_s is not None and self.serving_s is not None

    def moved(self, became: str, now: float, reason: str) -> None:
        """The allocator's word."""
        match became:
            case LoanState.LENT:
                self.lent_s = self.lent_s or now
            case LoanState.RECALL_REQUESTED:
                self.recalled_s, self.recall_reason = self.recalled_s or now, self.recall_reason or reason
            case LoanState.RETURNING:
                self.let_go_s = now
            case LoanState.OVERDUE | LoanState.LOST:
                self.was_overdue = True

    def document(self, began_s: float) -> dict[str, Any]:
        def since(at_s: float | None) -> float | None:
            return None if at_s is None else round(at_s - began_s, 2)

        def took(first_s: float | None, last_s: float | None) -> float | None:
            return None if first_s is None or last_s is None else round(last_s - first_s, 2)

        return {
            "backend": self.backend, "epoch": self.epoch, "offered_at_s": since(self.offered_s),
            "lent_at_s": since(self.lent_s), "recalled_at_s": since(self.recalled_s),
            "recall_reason": self.recall_reason, "serving_at_s": since(self.serving_s),
            "lent_for_s": took(self.lent_s, self.recalled_s or self.let_go_s),
            "recall_to_let_go_s": took(self.recalled_s, self.let_go_s),
            "recall_to_serving_s": took(self.recalled_s, self.serving_s), "was_overdue": self.was_overdue,
        }


@dataclass(slots=True)
class Account:
    """Grows while the demo runs."""

    budget: Mapping[str, Any]
    began_s: float = 0.0
    requests: list[Mapping[str, Any]] = field(default_factory=list)
    loans: list[Loan] = field(default_factory=list)
    steps: int | None = None
    """Of the training job, as far as it was saved."""

    def take(self, line: Mapping[str, Any]) -> None:
        """A request has ended (`loadtest.tide.line_of`)."""
        self.requests.append(line)

    def loan_moved(self, backend: str, epoch: int, became: str, now: float, reason: str) -> Loan:
        """A loan has another state; returns what is known of it."""
        loan = next((loan for loan in reversed(self.loans) if (loan.backend, loan.epoch) == (backend, epoch)), None)
        if loan is None:
            loan = Loan(backend, epoch, now)
            self.loans.append(loan)
        loan.moved(became, now, reason)
        return loan

    def serves_again(self, backend: str, now: float) -> Loan | None:
        """The router has taken a backend back; returns the loan that this ends, where there was one."""
        for loan in reversed(self.loans):
            if loan.backend == backend and loan.serving_s is None:
                loan.serving_s = now
                return loan
        return None

    @property
    def failures(self) -> Counter[str]:
        return Counter(str(line["failure"]) for line in self.requests if line["failure"])

    def p99(self, lines: Iterable[Mapping[str, Any]] | None = None) -> dict[str, float | None]:
        """By what is held against a budget, of requests that were answered."""
        chosen = [line for line in (self.requests if lines is None else lines) if not line["failure"]]
        return {measured: quantile([line[measured] for line in chosen if line[measured] is not None], 0.99)
                for measured in PROMISES.values()}

    def during_recalls(self) -> list[Mapping[str, Any]]:
        """Requests that were sent while a replica was on its way back, and shortly after."""
        spans = [(loan.recalled_s, loan.serving_s + SETTLING_S) for loan in self.loans
                 if loan.recalled_s is not None and loan.serving_s is not None]
        return [line for line in self.requests if any(first <= line["clock_s"] <= last for first, last in spans)]

    def document(self) -> dict[str, Any]:
        """All of it as JSON values. `ok`: nothing failed, P99 kept every budget, and a recall was kept."""
        p99 = self.p99()
        kept = {name: found is not None and found <= self.budget[name] for name, measured in PROMISES.items()
                if self.budget.get(name) is not None for found in (p99[measured],)}
        recalled = [loan for loan in self.loans if loan.was_recalled_and_is_back]
        during = self.during_recalls()
        failed = sum(self.failures.values())
        return {
            "demo": "lending",
            "ok": bool(not failed and kept and all(kept.values()) and recalled
                       and not any(loan.was_overdue for loan in self.loans)),
            "requests": len(self.requests), "failed": failed, "failures": dict(self.failures),
            "budget": {name: self.budget[name] for name in kept}, "p99": _rounded(p99), "p99_kept": kept,
            "requests_during_recalls": len(during), "p99_during_recalls": _rounded(self.p99(during)),
            "served_by": dict(Counter(str(line["backend"]) for line in self.requests)),
            "loans": [loan.document(self.began_s) for loan in self.loans], "training_steps": self.steps,
        }


def quantile(values: list[float], share: float) -> float | None:
    """The nearest-rank quantile; `None` of nothing."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None


def _rounded(found: Mapping[str, float | None]) -> dict[str, float | None]:
    return {name: None if value is None else round(value, 4) for name, value in found.items()}
