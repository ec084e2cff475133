"""Turns what became of requests into beliefs: the writing side of `policies.beliefs`.

Per attempt: its prediction is noted when it is sent and held against what came. The residual of the first token, of
the pace and of the end go to the tails of its backend, the first two also to what corrects its calibration; its
prefill to the backend's arrivals and its queue; its pace while it runs to the drift; its length and whether its budget
was kept to its class; its prompt to the backend's cache.

What a failure teaches: a first token that never came in time was later than this, so it counts as that late. A client
that left and a backend that could not be reached say nothing about speed.

All calls are O(1) in requests and backends (amortised: tables are made anew every 20 samples).
"""

from math import sqrt
from statistics import median
from typing import Any, ClassVar

from backends.catalog.spec import Coefficients
from backends.catalog.views import BackendView
from policies.attempts import FailureCause
from policies.beliefs.backend import BackendBelief, Streams
from policies.beliefs.classes import ClassBelief
from policies.beliefs.pool import PoolBelief
from policies.chance import end_sd_s
from policies.estimate import SD_RATIO, Estimate, predict
from policies.facts import RequestFacts
from policies.footing import coefficients_of, footing, gaps_s
from policies.learners.ccr import state
from policies.learning import End, Sent
from policies.policy import Priced

STAND_IN_FACTOR = 1.5
"""A backend that nobody measured is taken for one that is slower than the middle of its pool by this."""
CACHE_SHARE_OF_KV = 0.35
"""First guess of the part of a KV cache that prefixes live in; the rest is held by running sequences."""
LATE = frozenset({FailureCause.FIRST_TOKEN_TIMEOUT, FailureCause.HEAD_TIMEOUT})


class _Note:
    """What the learner keeps of one attempt."""

    __slots__ = ("age_tokens", "backend", "estimate", "kind", "known_tokens", "new_tokens", "prefill_part", "slack_s",
                 "streams")  # fmt: skip

    def __init__(self, backend: BackendBelief, kind: ClassBelief, estimate: Estimate) -> None:
        self.backend = backend
        self.kind = kind
        self.estimate = estimate
        self.new_tokens = 0
        """Prompt tokens that have to be computed, as believed."""
        self.known_tokens = 0
        self.age_tokens = 0.0
        self.prefill_part = 0.0
        """Of the predicted time to the first token, the part that is this prompt's own prefill."""
        self.streams: Streams | None = None
        self.slack_s = 0.0


class CcrLearner:
    """See the module's text."""

    name: ClassVar[str] = "ccr"

    def __init__(self) -> None:
        self.pool = PoolBelief()
        self.backends: dict[str, BackendBelief] = {}
        self._measured: dict[str, dict[str, Coefficients]] = {}
        """By model and backend: what stand-ins are made of."""

    def expect_output(self, facts: RequestFacts) -> int:
        lengths, expected = self.pool.lengths_of(facts), float(facts.expected_output_tokens)
        if lengths is not None and lengths.outputs > 0.0:
            expected = lengths.expected_output_tokens
        cap = facts.max_output_tokens
        return max(1, round(expected if cap is None or cap > expected else cap))

    def sent(self, facts: RequestFacts, priced: Priced, now: float) -> Sent:
        view = priced.backend
        belief = self._backend(view.spec.name)
        kind = self.pool.made_class_of(facts)
        estimate = priced.estimate or predict(facts, view, now)
        note = _Note(belief, kind, estimate)
        if facts.session_key is not None or facts.prefix_keys:
            note.known_tokens, note.age_tokens = belief.cache.known(facts)
        prompt, cached = facts.prompt_tokens, estimate.cached_tokens
        note.new_tokens = prompt - cached
        ground = footing(view, now)
        own_s = ground.slow_s * note.new_tokens * (
            ground.prefill_ms_per_token + ground.half_ms_per_pair * (prompt + cached))
        note.prefill_part = own_s / estimate.ttft_s if estimate.ttft_s > 0.0 else 0.0
        c = coefficients_of(view)
        work_ms = note.new_tokens * (c.prefill_ms_per_token + 0.5 * c.prefill_ms_per_pair * (prompt + cached))
        belief.arrivals.add(work_ms / 1000.0, now)
        belief.cached_ahead_tokens += cached
        if facts.stream:   # what is no stream is silent to its end, however well it does
            if not belief.open_requests:
                belief.heard(now)   # silence begins with the first request that could break it
            belief.open_requests += 1
            belief.waiting.sent(note.new_tokens, now)
        self._stands_in_line(note, facts, facts.waited_s + estimate.ttft_s)
        belief.version += 1
        self.pool.sent(facts, view.spec.name, priced.price)
        self._measure(view, belief)
        return Sent(view.spec.name, facts, now, notes=note)

    def first_token(self, sent: Sent, now: float) -> None:
        note: _Note = sent.notes
        if sent.first_token_at_s is not None:
            return
        sent.first_token_at_s = now
        belief, facts = note.backend, sent.facts
        ttft_s = max(0.0, now - sent.sent_at_s)
        belief.ttft.observe(_residual(ttft_s, note.estimate.ttft_s, note.estimate.ttft_sd_s))
        belief.prefill.observe(ttft_s, note.estimate.ttft_s, note.prefill_part)
        belief.waits.observe(facts.prompt_tokens, ttft_s)
        belief.cached_ahead_tokens -= note.estimate.cached_tokens
        belief.prefills_done.add(note.new_tokens, now)
        if facts.stream:
            belief.waiting.through(note.new_tokens, now)
        belief.cache.passed(facts, note.new_tokens, facts.prompt_tokens)
        self._has_slack(note, facts, facts.waited_s + ttft_s)
        belief.heard(now)
        belief.version += 1

    def paced(self, sent: Sent, view: BackendView, gap_s: float, tokens: int, now: float) -> None:
        note: _Note = sent.notes
        belief = note.backend
        sent.paced_tokens += tokens
        if tokens > 0:
            fewest, most = belief.prefills_done.since(now - gap_s * tokens)
            most += max(0, view.in_flight_prefill_tokens - belief.cached_ahead_tokens)
            least_s, most_s = gaps_s(view, fewest / tokens, most / tokens, now)
            belief.drift.observe(gap_s, least_s, most_s, gap_s * tokens, now)
        belief.heard(now)
        belief.version += 1

    def ended(self, sent: Sent, end: End, now: float) -> None:
        note: _Note = sent.notes
        belief, facts = note.backend, sent.facts
        if facts.stream:
            belief.open_requests -= 1
        first_at_s = sent.first_token_at_s
        if note.streams is not None:
            note.streams.count -= 1
            note.streams.slack_s = max(0.0, note.streams.slack_s - note.slack_s) if note.streams.count > 0 else 0.0
        if first_at_s is None:
            belief.cached_ahead_tokens -= note.estimate.cached_tokens
            if facts.stream:
                belief.waiting.gone(note.new_tokens)
            if end.failure in LATE:
                waited_s = now - sent.sent_at_s
                belief.ttft.observe(_residual(waited_s, note.estimate.ttft_s, note.estimate.ttft_sd_s))
                belief.waits.observe(facts.prompt_tokens, waited_s)
                note.kind.judge(True)
        if end.failure is None:
            self._whole(sent, note, end, now)
        if end.failure is None or first_at_s is not None:
            belief.heard(now)
        belief.version += 1

    def belief(self, backend: str, now: float) -> BackendBelief:
        return self._backend(backend)

    def pool_belief(self, now: float) -> PoolBelief:
        return self.pool

    def forget(self, backend: str) -> None:
        self.backends.pop(backend, None)
        for measured in self._measured.values():
            measured.pop(backend, None)

    def export(self) -> dict[str, Any]:
        return state.export(self.pool, self.backends)

    def restore(self, state_: Any, age_s: float) -> None:
        state.restore(state_, age_s, self.pool, self._backend)

    def _backend(self, name: str) -> BackendBelief:
        known = self.backends.get(name)
        if known is None:
            known = self.backends[name] = BackendBelief(self.pool.tails)
        return known

    def _whole(self, sent: Sent, note: _Note, end: End, now: float) -> None:
        """A whole answer came."""
        belief, facts, estimate, tokens = note.backend, sent.facts, note.estimate, end.output_tokens
        note.kind.lengths.answered(tokens)
        first_at_s = sent.first_token_at_s
        took_s = now - sent.sent_at_s
        if first_at_s is not None and tokens > 1:
            pace_s = (now - first_at_s) / (tokens - 1)
            belief.decode.observe(pace_s, estimate.tpot_s, 1.0)
            belief.paces.observe(facts.prompt_tokens, pace_s)
            belief.pace.observe(_residual(pace_s, estimate.tpot_s, _pace_sd_s(facts, estimate, tokens)))
        belief.end.observe(_residual(took_s, estimate.e2e_s, end_sd_s(facts, estimate, note.kind.lengths.spread)))
        note.kind.judge(missed(sent, tokens, now))
        if facts.session_key is not None or facts.prefix_keys:
            belief.cache.passed(facts, tokens, facts.prompt_tokens + tokens)
            if end.cached_tokens is not None:
                belief.cache.corrected(estimate.cached_tokens, note.known_tokens, note.age_tokens, end.cached_tokens)

    def _stands_in_line(self, note: _Note, facts: RequestFacts, first_s: float) -> None:
        """Whoever comes after it can crowd it from now on, whether it has its first token by then or not."""
        note.streams = note.backend.streams.setdefault(note.kind, Streams())
        note.streams.count += 1
        self._has_slack(note, facts, first_s)

    def _has_slack(self, note: _Note, facts: RequestFacts, first_s: float) -> None:
        """Its first token comes, or has come, `first_s` after the request did."""
        if note.streams is not None and facts.budget.ttft_s is not None:
            slack_s = max(0.0, facts.budget.ttft_s - first_s)
            note.streams.slack_s = max(0.0, note.streams.slack_s + slack_s - note.slack_s)
            note.slack_s = slack_s

    def _measure(self, view: BackendView, belief: BackendBelief) -> None:
        """Keep what stand-ins are made of, and make one where it is needed."""
        spec = view.spec
        measured = self._measured.setdefault(spec.model, {})
        c = spec.coefficients
        if c is None:
            if measured and belief.stand_in is None:
                belief.stand_in = stand_in(list(measured.values()))
        elif measured.get(spec.name) is not c:
            measured[spec.name] = c
            if c.kv_capacity_tokens:
                belief.cache.assume(CACHE_SHARE_OF_KV * c.kv_capacity_tokens)


def missed(sent: Sent, output_tokens: int, now: float) -> bool:
    """Whether an answer that is whole now missed its budget: first token, last token's deadline, or end.

    One that is no stream has no first token of its own.
    """
    facts, budget = sent.facts, sent.facts.budget
    first_at_s = now if sent.first_token_at_s is None else sent.first_token_at_s
    waited_s = facts.waited_s
    first_s, last_s = first_at_s - sent.sent_at_s + waited_s, now - sent.sent_at_s + waited_s
    if budget.ttft_s is not None and first_s > budget.ttft_s and sent.first_token_at_s is not None:
        return True
    if budget.inter_token_s is not None:
        from_s = first_s if budget.ttft_s is None else budget.ttft_s
        if last_s > from_s + max(0, output_tokens - 1) * budget.inter_token_s:
            return True
    return budget.e2e_s is not None and last_s > budget.e2e_s


def stand_in(measured: list[Coefficients]) -> Coefficients:
    """Coefficients for a backend that nobody measured: the pool's median, half as slow again."""
    def middle(name: str) -> float:
        return STAND_IN_FACTOR * float(median([getattr(each, name) for each in measured]))

    return Coefficients(
        version="stand-in", source=f"median of {len(measured)} measured backends, times {STAND_IN_FACTOR}",
        prefill_base_ms=middle("prefill_base_ms"), prefill_ms_per_token=middle("prefill_ms_per_token"),
        prefill_ms_per_pair=middle("prefill_ms_per_pair"), decode_base_ms=middle("decode_base_ms"),
        decode_ms_per_seq=middle("decode_ms_per_seq"), decode_ms_per_seq_token=middle("decode_ms_per_seq_token"),
        host_ms=middle("host_ms"), first_token_overhead_ms=middle("first_token_overhead_ms"))


def _residual(observed_s: float, predicted_s: float, sd_s: float) -> float:
    """In standard deviations; not a number where nothing finite was predicted."""
    return (observed_s - predicted_s) / sd_s if sd_s > 0.0 and predicted_s < 1e9 else float("nan")


def _pace_sd_s(facts: RequestFacts, estimate: Estimate, tokens: int) -> float:
    """What the predicted deviation of the pace would have been, had the answer's length been known."""
    spread_s = SD_RATIO * estimate.tpot_s
    spread = spread_s * spread_s
    stalls = estimate.tpot_sd_s * estimate.tpot_sd_s - spread
    return sqrt(spread + max(0.0, stalls) * max(1, facts.expected_output_tokens) / tokens)
