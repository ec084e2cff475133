"""What an engine last said of its own load. Unknown is `None`, never 0: a missing series must not look idle."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoadSample:
    """One scrape of one engine. Counters are cumulative since the engine started."""

    taken_at_s: float
    """Monotonic time at which the scrape was answered."""
    running_requests: int | None = None
    waiting_requests: int | None = None
    kv_usage_ratio: float | None = None
    """Share of KV cache in use, 0 to 1."""
    kv_capacity_tokens: int | None = None
    prompt_tokens_total: float | None = None
    generated_tokens_total: float | None = None
    prefix_cache_hit_ratio: float | None = None
    preemptions_total: float | None = None

    def age_s(self, now: float) -> float:
        """Seconds since the scrape, never negative."""
        return max(0.0, now - self.taken_at_s)

    @property
    def is_blank(self) -> bool:
        """True where the page carried no series that we know: the dialect or the engine's version is off."""
        return all(
            value is None
            for value in (self.running_requests, self.waiting_requests, self.kv_usage_ratio,
                          self.prompt_tokens_total, self.generated_tokens_total)
        )
