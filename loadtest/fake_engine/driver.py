"""Runs the physics against the clock and wakes whoever waits for a token.

One task drives the whole engine. Engine time runs `time_scale` times as fast as the clock. A timer that fires late
delays the tokens of one iteration, not the schedule: the next iteration starts where the last one ended in engine
time, and late ones are caught up without sleeping.
"""

import asyncio
import random
import time
from collections import deque
from collections.abc import Hashable

from backends.catalog.spec import Coefficients
from loadtest.fake_engine.faults import Fault, slow_factor
from loadtest.fake_engine.metrics_page import EngineMetrics
from loadtest.fake_engine.step import (
    EngineLimits,
    SequenceRequest,
    StepResult,
    TokenEventKind,
    cancel,
    new_engine,
    next_step_s,
    step,
    submit,
)

LEDGER_LENGTH = 20_000
ABORTED = "abort"


class TokenStream:
    """One sequence as its request handler sees it. Times are seconds of the clock since the engine started."""

    __slots__ = (
        "_each_token", "_waiter", "cancelled_at_s", "finish_reason", "finished_at_s", "first_token_at_s", "id", "label",
        "output_tokens", "prompt_tokens", "received_at_s", "tokens",
    )

    def __init__(
        self, sequence_id: int, label: str, prompt_tokens: int, output_tokens: int, finish_reason: str,
        received_at_s: float, each_token: bool,
    ) -> None:
        self.id = sequence_id
        self.label = label
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.finish_reason = finish_reason
        self.received_at_s = received_at_s
        self.first_token_at_s: float | None = None
        self.finished_at_s: float | None = None
        self.cancelled_at_s: float | None = None
        self.tokens = 0
        """Tokens generated so far."""
        self._each_token = each_token
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_over(self) -> bool:
        return self.finished_at_s is not None or self.cancelled_at_s is not None

    @property
    def is_aborted(self) -> bool:
        """The engine ended it, not the client."""
        return self.cancelled_at_s is not None and self.finish_reason == ABORTED

    @property
    def is_abandoned(self) -> bool:
        """The client left: nobody wants an answer."""
        return self.cancelled_at_s is not None and self.finish_reason != ABORTED

    async def wait_beyond(self, seen_tokens: int) -> None:
        """Returns once there are more than `seen_tokens` tokens, or no more to come. One waiter at a time."""
        while self.tokens <= seen_tokens and not self.is_over:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    async def wait_over(self) -> None:
        """Returns once the sequence has finished or was cancelled."""
        while not self.is_over:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def add_token(self) -> None:
        self.tokens += 1
        if self._each_token:
            self.wake()

    def as_row(self) -> dict[str, object]:
        """The ledger's line."""
        return {
            "id": self.label,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "received_at_s": self.received_at_s,
            "first_token_at_s": self.first_token_at_s,
            "finished_at_s": self.finished_at_s,
            "cancelled_at_s": self.cancelled_at_s,
            "tokens_emitted": self.tokens,
        }


class EngineDriver:
    """One engine in real time: submit, cancel, and a task that runs `run()`."""

    def __init__(
        self, coefficients: Coefficients, limits: EngineLimits, *, time_scale: float = 1.0, noise_sigma: float = 0.0,
        seed: int = 0, faults: tuple[Fault, ...] = (),
    ) -> None:
        if time_scale <= 0 or noise_sigma < 0:
            raise ValueError("time_scale must be over 0 and noise_sigma at least 0")
        self.state = new_engine(coefficients, limits)
        self.metrics = EngineMetrics()
        self.ledger: deque[TokenStream] = deque(maxlen=LEDGER_LENGTH)
        self._time_scale = time_scale
        self._noise_sigma = noise_sigma
        self._noise = random.Random(seed)
        self._streams: dict[Hashable, TokenStream] = {}
        self._emitting: dict[Hashable, TokenStream] = {}
        """Streams that get a token in each iteration that decodes."""
        self._submitted = 0
        self._work = asyncio.Event()
        self._started_s = time.monotonic()
        self._delivered_at_s = 0.0
        self.set_faults(faults)

    @property
    def elapsed_s(self) -> float:
        """Seconds of the clock since the engine started."""
        return time.monotonic() - self._started_s

    @property
    def fault_time_s(self) -> float:
        """Seconds since the schedule of faults was set."""
        return self.elapsed_s - self._faults_set_s

    def set_faults(self, faults: tuple[Fault, ...]) -> None:
        """Replaces the schedule; its times count from now on."""
        self.faults = faults
        self._faults_set_s = self.elapsed_s

    def submit(
        self, label: str, prompt_tokens: int, output_tokens: int, *, finish_reason: str = "length",
        prefix_keys: tuple[Hashable, ...] = (), each_token: bool = True,
    ) -> TokenStream:
        """Queues a sequence. `each_token` False wakes the waiter at the first token and at the end only.

        Raises:
            TooLarge: it exceeds the engine's KV cache.
        """
        self._submitted += 1
        now = self.elapsed_s
        request = SequenceRequest(
            id=self._submitted, prompt_tokens=prompt_tokens, output_tokens=output_tokens,
            arrival_s=now * self._time_scale, prefix_keys=prefix_keys,
        )
        self.state = submit(self.state, request)
        stream = TokenStream(
            self._submitted, label, prompt_tokens, output_tokens, finish_reason, now, each_token
        )
        self._streams[stream.id] = stream
        self.ledger.append(stream)
        self._work.set()
        return stream

    def cancel(self, stream: TokenStream) -> None:
        """Drops a sequence and frees its memory at once; nothing happens where it is over already."""
        if stream.is_over:
            return
        self.state = cancel(self.state, stream.id)
        stream.cancelled_at_s = self.elapsed_s
        del self._streams[stream.id]
        self._emitting.pop(stream.id, None)
        stream.wake()

    def abort_all(self) -> None:
        """Ends every sequence where it stands, with the finish reason `abort`."""
        for stream in list(self._streams.values()):
            stream.finish_reason = ABORTED
            self.cancel(stream)

    async def run(self) -> None:
        """Drives the engine until the task is cancelled."""
        while True:
            start_s = next_step_s(self.state)
            if start_s is None:
                self._work.clear()
                await self._work.wait()
                continue
            if start_s > self.state.busy_until_s:
                await self._sleep_until(start_s)
                start_s = next_step_s(self.state)
                if start_s is None or start_s > self.elapsed_s * self._time_scale:
                    continue
            # The state is one iteration ahead of what clients have seen; `_deliver` catches up when its time has come.
            self.state, result = step(self.state, start_s, self._step_factor())
            await self._sleep_until(result.ended_at_s)
            self._deliver(result)

    def _step_factor(self) -> float:
        factor = slow_factor(self.faults, self.fault_time_s) if self.faults else 1.0
        return factor * self._noise.lognormvariate(0.0, self._noise_sigma) if self._noise_sigma else factor

    async def _sleep_until(self, engine_time_s: float) -> None:
        # At least one turn of the loop even when late, so that writers and new requests get theirs.
        await asyncio.sleep(max(0.0, engine_time_s / self._time_scale - self.elapsed_s))

    def _deliver(self, result: StepResult) -> None:
        now = self.elapsed_s
        for event in result.events:
            if event.kind is TokenEventKind.PREEMPTED:
                self._emitting.pop(event.id, None)
        if result.decode_seqs:
            for stream in self._emitting.values():
                stream.add_token()
            self.metrics.decoded(len(self._emitting), now - self._delivered_at_s)
        self._delivered_at_s = now
        self.metrics.stepped(result.prefill_tokens + result.decode_seqs)
        for event in result.events:
            arrived = self._streams.get(event.id)
            if arrived is not None and event.kind is not TokenEventKind.PREEMPTED:
                self._apply(event.kind, arrived, now)

    def _apply(self, kind: TokenEventKind, stream: TokenStream, now: float) -> None:
        if kind is TokenEventKind.FINISHED:
            stream.finished_at_s = now
            del self._streams[stream.id]
            self._emitting.pop(stream.id, None)
            self.metrics.finished(stream.finish_reason, now - stream.received_at_s)
        else:
            self._emitting[stream.id] = stream
            stream.tokens += 1
            if kind is TokenEventKind.FIRST_TOKEN:
                stream.first_token_at_s = now
                self.metrics.first_token(stream.prompt_tokens, now - stream.received_at_s)
            else:
                self.metrics.generation_tokens += 1
        stream.wake()
