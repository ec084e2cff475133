"""What a request asks for beyond its latency class: budgets of its own, a class by another name, its conversation.

Each budget overrides its own member of the class's, and nothing else; the first that is given counts:

    ttft_s         x-llm-d-slo-ttft-ms, x-slo-ttft-ms, body provider.preferred_max_latency, the class
    inter_token_s  x-llm-d-slo-tpot-ms, x-slo-tpot-ms, the class
    e2e_s          the class
    class          x-headrace-class, x-llm-d-inference-objective, x-gateway-inference-objective, the default
    conversation   x-session-id, x-session-affinity, body session_id, prompt_cache_key, user

Names and order of the `slo` and `objective` headers are llm-d's (`pkg/epp/metadata/consts.go` of llm-d-router,
@29cd704b): the second of each is the older one, from the Gateway API Inference Extension.
`preferred_max_latency` is OpenRouter's: seconds, as a number or by percentile. Headrace promises P99 only, so the
highest percentile that is named counts as one, and a bare number too: who keeps a time at P99 keeps it at P50.
`session_id` and its header are OpenRouter's sticky routing key, `x-session-affinity` is what OpenCode sends,
`prompt_cache_key` and the older `user` are OpenAI's. `user` names a person, not a conversation, so it comes last.

A request without any of these pays two looks at what names it has.
"""

import re
from collections.abc import Mapping
from hashlib import blake2b
from typing import NamedTuple

import msgspec

from policies.facts import Budget
from router.wire.errors import ApiError

MAX_BUDGET_S = 86_400.0
"""As for the budgets of the fleet file."""
MAX_SESSION_ID_BYTES = 256
"""A longer id is no id; OpenRouter's bound."""
TTFT_HEADERS = (b"x-llm-d-slo-ttft-ms", b"x-slo-ttft-ms")
TPOT_HEADERS = (b"x-llm-d-slo-tpot-ms", b"x-slo-tpot-ms")
CLASS_HEADER = b"x-headrace-class"
OBJECTIVE_HEADERS = (b"x-llm-d-inference-objective", b"x-gateway-inference-objective")
SESSION_HEADERS = (b"x-session-id", b"x-session-affinity")
SESSION_MEMBERS = ("session_id", "prompt_cache_key", "user")
_LATENCY_PARAM = "provider.preferred_max_latency"
_HEADERS = frozenset((*TTFT_HEADERS, *TPOT_HEADERS, *SESSION_HEADERS))
_MEMBERS = frozenset(("provider", *SESSION_MEMBERS))
_MILLISECONDS = re.compile(rb"[0-9]{1,9}(?:\.[0-9]{1,9})?")


class Wishes(NamedTuple):
    """What one request asks for. `None`: nothing of the kind."""

    ttft_s: float | None = None
    inter_token_s: float | None = None
    session_key: str | None = None
    """Names the conversation within its tenant: a digest, since ids of clients may name people."""

    @property
    def has_budget(self) -> bool:
        return self.ttft_s is not None or self.inter_token_s is not None

    def over(self, budget: Budget) -> Budget:
        """The class's budget with what the request overrides."""
        return Budget(
            ttft_s=budget.ttft_s if self.ttft_s is None else self.ttft_s,
            inter_token_s=budget.inter_token_s if self.inter_token_s is None else self.inter_token_s,
            e2e_s=budget.e2e_s,
        )


NO_WISHES = Wishes()


class _Percentiles(msgspec.Struct):
    p50: float | None = None
    p75: float | None = None
    p90: float | None = None
    p99: float | None = None


class _Provider(msgspec.Struct):
    preferred_max_latency: float | _Percentiles | None = None


_decode_provider = msgspec.json.Decoder(_Provider).decode


def wishes_of(headers: Mapping[bytes, bytes], members: Mapping[str, msgspec.Raw], tenant: str | None) -> Wishes:
    """Read the wishes of one request.

    Args:
        headers: by lower-case names.
        members: raw values of the body's top-level members.
        tenant: whose request it is; two tenants' conversations never share a key.

    Raises:
        ApiError: 400, with the header or member at fault as `param`.
    """
    in_headers = not headers.keys().isdisjoint(_HEADERS)
    in_body = not members.keys().isdisjoint(_MEMBERS)
    if not in_headers and not in_body:
        return NO_WISHES
    ttft_s = _first_budget_s(headers, TTFT_HEADERS) if in_headers else None
    inter_token_s = _first_budget_s(headers, TPOT_HEADERS) if in_headers else None
    if in_body and (provider := members.get("provider")) is not None:
        preferred_s = _preferred_max_latency_s(bytes(provider))
        ttft_s = preferred_s if ttft_s is None else ttft_s
    return Wishes(ttft_s, inter_token_s, _session_key(headers, members, tenant))


def class_asked(headers: Mapping[bytes, bytes]) -> tuple[str | None, bool]:
    """The class that the request names, and whether it must exist.

    An objective that is no class is passed over, as llm-d gives an unknown one its default priority.
    """
    named = headers.get(CLASS_HEADER)
    if named is not None:
        return named.decode("latin-1"), True
    for header in OBJECTIVE_HEADERS:
        objective = headers.get(header)
        if objective is not None:
            return objective.decode("latin-1"), False
    return None, False


def _first_budget_s(headers: Mapping[bytes, bytes], names: tuple[bytes, ...]) -> float | None:
    for name in names:
        text = headers.get(name)
        if text is not None:
            text = text.strip(b" \t")
            budget_s = float(text) / 1_000 if _MILLISECONDS.fullmatch(text) else 0.0
            if not 0.0 < budget_s <= MAX_BUDGET_S:
                header = name.decode("ascii")
                raise _bad_budget(f"The header '{header}'", "milliseconds", MAX_BUDGET_S * 1_000, header)
            return budget_s
    return None


def _preferred_max_latency_s(provider: bytes) -> float | None:
    if not provider.startswith(b"{"):
        return None  # not OpenRouter's `provider`: the engine's business
    try:
        preferred = _decode_provider(provider).preferred_max_latency
    except (msgspec.DecodeError, RecursionError):
        raise _bad_latency() from None
    if isinstance(preferred, _Percentiles):
        cutoffs_s = [preferred.p50, preferred.p75, preferred.p90, preferred.p99]
    else:
        cutoffs_s = [preferred]
    given_s = [cutoff_s for cutoff_s in cutoffs_s if cutoff_s is not None]
    if any(not 0.0 < cutoff_s <= MAX_BUDGET_S for cutoff_s in given_s):
        raise _bad_latency()
    return given_s[-1] if given_s else None


def _session_key(
    headers: Mapping[bytes, bytes], members: Mapping[str, msgspec.Raw], tenant: str | None
) -> str | None:
    for header in SESSION_HEADERS:
        text = headers.get(header)
        if text is not None and 0 < len(text) <= MAX_SESSION_ID_BYTES:
            return _digest(text, tenant)
    for member in SESSION_MEMBERS:
        raw = members.get(member)
        if raw is not None and 2 < len(raw) <= MAX_SESSION_ID_BYTES + 2:
            quoted = bytes(raw)
            if quoted.startswith(b'"'):
                return _digest(quoted[1:-1], tenant)
    return None


def _digest(session_id: bytes, tenant: str | None) -> str:
    # Without a secret, so that all worker processes and restarts agree; whoever logs it logs the id.
    owner = b"" if tenant is None else tenant.encode()
    return blake2b(b"%b\0%b" % (owner, session_id), digest_size=8).hexdigest()


def _bad_latency() -> ApiError:
    subject = f"The member '{_LATENCY_PARAM}', or each of its p50, p75, p90 and p99,"
    return _bad_budget(subject, "seconds", MAX_BUDGET_S, _LATENCY_PARAM)


def _bad_budget(subject: str, unit: str, most: float, param: str) -> ApiError:
    return ApiError(400, "invalid_budget", f"{subject} must be a number of {unit} above 0 and at most {most:.0f}.",
                    param=param)
