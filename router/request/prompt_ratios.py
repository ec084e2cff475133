"""How many tokens a model really counts where an average tokenizer counts one: learned online by tenant and script.

    tokens  = base_tokens · ratio                                       (`router.request.prompt_size` gives base_tokens)
    ratio   = (W·ratio of the model and script + Σ w·counted) / (W + Σ w·base)        for the tenant and script
    w       = keep^age · min(1, MAX_BASE / base)                        age in observations of that tenant and script

The sums are the tenant's evidence, in tokens, and W what the ratio above is worth against it: a new tenant is taken to
be like all, one with a dozen prompts is known by its own (empirical Bayes in its plainest form). The model's ratio
comes about in the same way, from 1. Sums rather than a mean of ratios, since long prompts are what routing depends on;
one giant prompt counts as `MAX_BASE` tokens of evidence.

A model's own tokenizer can be had instead: `PromptRatios(tokenizers={"model": count})`, where `count` takes the JSON of
the prompt and returns its tokens. It runs on the event loop, once a request, so it has microseconds; Headrace ships
none. Where it raises, the bytes decide.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any

import msgspec

from router.request.prompt_size import PromptSize, Script

log = logging.getLogger("headrace.prompts")

TokenCounter = Callable[[bytes], int]
"""JSON of a prompt → its tokens."""

MODEL_KEEP, TENANT_KEEP = 0.998, 0.98
"""What an observation is worth after the next: a memory of some 500 prompts, and of 50."""
MODEL_W, TENANT_W = 256.0, 512.0
"""Tokens of evidence that the ratio above is worth."""
MAX_BASE = 4096.0
RATIO_RANGE = (0.1, 8.0)
"""An engine that counts otherwise must not talk prompts out of its context, or into it."""
HALF_LIFE_S = 86_400.0
"""Age at which what was kept over a restart is worth half."""


class _Evidence:
    """Decayed sums of base and counted tokens."""

    __slots__ = ("base", "counted")

    def __init__(self, base: float = 0.0, counted: float = 0.0) -> None:
        self.base = base
        self.counted = counted

    def ratio(self, above: float, worth: float) -> float:
        return (worth * above + self.counted) / (worth + self.base)

    def add(self, base: float, counted: float, keep: float) -> None:
        self.base = keep * self.base + base
        self.counted = keep * self.counted + counted


class PromptRatios:
    """The ratios of one gateway process. Holds numbers only, for `max_tenants` tenants and scripts at most: those that
    were heard of last.
    """

    def __init__(self, *, tokenizers: Mapping[str, TokenCounter] | None = None, max_tenants: int = 4096) -> None:
        self._counters = dict(tokenizers or {})
        self._max_tenants = max_tenants
        self._models: dict[tuple[str, Script], _Evidence] = {}
        self._tenants: OrderedDict[tuple[str, str, Script], _Evidence] = OrderedDict()

    def __len__(self) -> int:
        """Tenants and scripts that are remembered."""
        return len(self._tenants)

    def tokens(self, model: str, tenant: str | None, size: PromptSize, prompt: msgspec.Raw | bytes) -> int:
        """Tokens of one prompt, at least 1. `prompt` is its JSON, copied only where a tokenizer wants it."""
        if self._counters and (counter := self._counters.get(model)) is not None:
            try:
                return max(1, int(counter(bytes(prompt))))
            except Exception:
                log.exception("the tokenizer of %s failed: its bytes decide from now on", model)
                del self._counters[model]
        if not size.is_text:
            return max(1, round(size.base_tokens))
        return max(1, round(size.base_tokens * self.ratio(model, tenant, size.script)))

    def ratio(self, model: str, tenant: str | None, script: Script) -> float:
        """Counted over base tokens; 1 where nothing is known."""
        of_model = self._models.get((model, script))
        if of_model is None:
            return 1.0
        ratio = of_model.ratio(1.0, MODEL_W)
        if tenant is not None and (of_tenant := self._tenants.get((model, tenant, script))) is not None:
            return of_tenant.ratio(ratio, TENANT_W)
        return ratio

    def observe(self, model: str, tenant: str | None, size: PromptSize, prompt_tokens: int) -> None:
        """The engine counted so many tokens (`usage.prompt_tokens`); no positive number says nothing."""
        if not size.is_text or prompt_tokens <= 0:
            return
        low, high = RATIO_RANGE
        base = min(size.base_tokens, MAX_BASE)
        counted = base * min(high, max(low, prompt_tokens / size.base_tokens))
        self._models.setdefault((model, size.script), _Evidence()).add(base, counted, MODEL_KEEP)
        if tenant is not None:
            key = (model, tenant, size.script)
            self._tenants.setdefault(key, _Evidence()).add(base, counted, TENANT_KEEP)
            self._tenants.move_to_end(key)
            if len(self._tenants) > self._max_tenants:
                self._tenants.popitem(last=False)

    def export(self) -> dict[str, Any]:
        """All that was learned, as JSON values."""
        return {
            "models": [[*key, cell.base, cell.counted] for key, cell in list(self._models.items())],
            "tenants": [[*key, cell.base, cell.counted] for key, cell in list(self._tenants.items())],
        }

    def restore(self, state: Mapping[str, Any], age_s: float) -> None:
        """Take over an exported state that is `age_s` old; entries that make no sense are passed over."""
        worth = 0.5 ** (max(0.0, age_s) / HALF_LIFE_S)
        for entry in _entries(state, "models", 4):
            if (cell := _cell(entry, worth)) is not None:
                self._models[(entry[0], Script(entry[1]))] = cell
        for entry in _entries(state, "tenants", 5)[-self._max_tenants :]:
            if (cell := _cell(entry, worth)) is not None:
                self._tenants[(entry[0], entry[1], Script(entry[2]))] = cell


_SCRIPTS = frozenset(Script)


def _entries(state: Mapping[str, Any], name: str, width: int) -> list[list[Any]]:
    entries = state.get(name)
    if not isinstance(entries, list):
        return []
    return [entry for entry in entries if isinstance(entry, list) and len(entry) == width
            and all(isinstance(word, str) for word in entry[:-2]) and entry[-3] in _SCRIPTS]


def _cell(entry: list[Any], worth: float) -> _Evidence | None:
    base, counted = entry[-2:]
    if not all(isinstance(figure, int | float) and isfinite(figure) for figure in (base, counted)) or base <= 0:
        return None
    low, high = RATIO_RANGE
    return _Evidence(worth * base, worth * counted) if low <= counted / base <= high else None
