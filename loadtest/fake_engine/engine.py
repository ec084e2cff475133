"""One fake engine: its options, and the live parts that the routes share."""

import asyncio
import itertools
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from hmac import compare_digest

from starlette.types import Scope

from loadtest.fake_engine import wire
from loadtest.fake_engine.cards import Card, find_card
from loadtest.fake_engine.driver import EngineDriver, TokenStream
from loadtest.fake_engine.faults import BadFault, Fault, FaultKind, death_s, find_active
from loadtest.fake_engine.metrics_page import render_page
from loadtest.fake_engine.step import EngineLimits
from loadtest.fake_engine.wire import ApiError, InferenceRequest


@dataclass(frozen=True, slots=True)
class FakeEngineOptions:
    """What one fake engine is. The output length is drawn where a request gives no cap: lognormal, by default with the
    median and spread of the Azure LLM inference trace 2023 (conversation)."""

    card: str = "h100x2-fp8"
    served_model_name: str = "fake"
    time_scale: float = 1.0
    """How many times faster than the card it runs."""
    seed: int = 0
    slots: int = 256
    """Sequences that run at once (vLLM: max_num_seqs)."""
    max_num_batched_tokens: int = 2048
    context_tokens: int = 32_768
    kv_capacity_tokens: int | None = None
    """The card's own where none is given."""
    chunked_prefill: bool = True
    prefix_cache: bool = False
    """On, a prompt whose beginning was seen before skips that part, as with vLLM's automatic prefix caching."""
    noise_sigma: float = 0.03
    """Spread of the lognormal noise on step times."""
    output_median_tokens: int = 129
    output_spread: float = 0.86
    faults: tuple[Fault, ...] = ()
    api_key: str | None = None


class FakeEngine:
    """The engine's live parts, as the routes share them."""

    def __init__(self, options: FakeEngineOptions, die: Callable[[], None] | None) -> None:
        self.options = options
        self.card: Card = find_card(options.card)
        self.kv_capacity_tokens = options.kv_capacity_tokens or self.card.kv_capacity_tokens
        self.driver = EngineDriver(
            self.card.coefficients,
            EngineLimits(
                kv_capacity_tokens=self.kv_capacity_tokens,
                max_num_seqs=options.slots,
                max_num_batched_tokens=max(options.max_num_batched_tokens, options.slots),
                chunked_prefill=options.chunked_prefill,
            ),
            time_scale=options.time_scale,
            noise_sigma=options.noise_sigma,
            seed=options.seed,
        )
        self.context_tokens = min(options.context_tokens, self.kv_capacity_tokens)
        self.in_flight = 0
        self.closing = asyncio.Event()
        self.created = int(time.time())
        self.frozen_page: bytes | None = None
        self._lengths = random.Random(f"lengths {options.seed}")
        self._fault_dice = random.Random(f"faults {options.seed}")
        self._numbers = itertools.count(1)
        self._die = die
        self._death: asyncio.TimerHandle | None = None
        self.check_faults(options.faults)

    def check_faults(self, faults: tuple[Fault, ...]) -> None:
        """Raises BadFault where a death is due in a process that is not this engine's own to end."""
        if death_s(faults) is not None and self._die is None:
            raise BadFault("this engine shares its process and cannot die")

    def set_faults(self, faults: tuple[Fault, ...]) -> None:
        """Replaces the schedule of faults; its times count from now on.

        Raises:
            BadFault: see `check_faults`; the old schedule stays.
        """
        self.check_faults(faults)
        death = death_s(faults)
        if self._death is not None:
            self._death.cancel()
            self._death = None
        self.driver.set_faults(faults)
        if death is not None and self._die is not None:
            self._death = asyncio.get_running_loop().call_later(death, self._die)

    def close(self) -> None:
        """Ends all that is under way, as vLLM does on SIGTERM: streams finish cleanly, with `abort` for a reason."""
        self.closing.set()
        self.driver.abort_all()

    def fault(self, kind: FaultKind) -> Fault | None:
        """The fault of that kind that hits now, if one does."""
        if not self.driver.faults:
            return None
        return find_active(self.driver.faults, kind, self.driver.fault_time_s, self._fault_dice.random())

    def response_id(self, prefix: str, scope: Scope) -> str:
        """vLLM's: the caller's x-request-id where there is one."""
        for name, value in scope["headers"]:
            if name == b"x-request-id":
                return f"{prefix}-{value.decode('latin-1')}"
        return f"{prefix}-{self.options.seed:x}-{next(self._numbers):08x}"

    def check_key(self, scope: Scope) -> None:
        """Raises ApiError 401 where a key is required and not given."""
        key = self.options.api_key
        if key is None:
            return
        given = dict(scope["headers"]).get(b"authorization", b"")
        if not compare_digest(given, b"Bearer " + key.encode()):
            raise ApiError(401, "AuthenticationError", "Unauthorized")

    def check_model(self, model: str) -> None:
        """Raises ApiError 404 where another model is asked for. No name at all means this one, as in vLLM."""
        if model and model != self.options.served_model_name:
            raise ApiError(404, "NotFoundError", f"The model `{model}` does not exist.", "model")

    def plan_output(self, request: InferenceRequest) -> tuple[int, str]:
        """How many tokens to generate, and the finish reason.

        Raises:
            ApiError: 400 where prompt and output exceed the context.
        """
        room = self.context_tokens - request.prompt_tokens
        if room < (request.max_tokens or 1):
            raise wire.bad_request(
                f"This model's maximum context length is {self.context_tokens} tokens. However, you requested "
                f"{request.max_tokens or 0} output tokens and your prompt contains {request.prompt_tokens} input "
                "tokens. Please reduce the length of the input prompt or the number of requested output tokens.",
                "input_tokens",
            )
        if request.max_tokens is not None:
            return request.max_tokens, "length"
        options = self.options
        drawn = round(self._lengths.lognormvariate(math.log(options.output_median_tokens), options.output_spread))
        return (max(1, drawn), "stop") if drawn <= room else (room, "length")

    def submit(self, request: InferenceRequest, label: str, output_tokens: int, finish_reason: str) -> TokenStream:
        block = self.driver.state.limits.prefix_block_tokens
        keys = wire.prefix_keys(request.prompt, block) if self.options.prefix_cache else ()
        return self.driver.submit(
            label, request.prompt_tokens, output_tokens,
            finish_reason=finish_reason, prefix_keys=keys, each_token=request.stream,
        )

    def metrics_page(self) -> bytes:
        if self.fault(FaultKind.FREEZE_METRICS):
            self.frozen_page = self.frozen_page or self._render()
            return self.frozen_page
        self.frozen_page = None
        return self._render()

    def _render(self) -> bytes:
        lie = self.fault(FaultKind.LIE_METRICS) is not None
        return render_page(self.driver.state, self.driver.metrics, self.options.served_model_name, lie_idle=lie)
