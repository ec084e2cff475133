"""What was learned, over a restart: one JSON file, written whole and renamed into place.

    {"format": "headrace-state", "v": 1, "saved_at_s": Unix time,
     "learner": {"name": …, "state": …}, "backends": {name: fingerprint}, "prompt_ratios": …, "lending": …}

The learner, the prompt ratios and the forecast of demand age what they take over by the wall time that has passed
since. What was learned of a backend that is now another one (its address, model or coefficients differ) is forgotten,
by its fingerprint.

A file that is not ours is never written over: it may be somebody's fleet file. One that is ours and broken is started
afresh, and said so. Nothing here stops the gateway: whatever goes wrong is a warning, and it begins without.
"""

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

import msgspec

from backends.catalog.spec import BackendSpec
from policies.learning import Learner
from router.request.prompt_ratios import PromptRatios

log = logging.getLogger("headrace.state")

FORMAT = "headrace-state"
VERSION = 1
MAX_BYTES = 256 * 1024 * 1024
RETRIES = 5


class _Envelope(msgspec.Struct):
    format: str
    v: int
    saved_at_s: float
    learner: dict[str, Any] = {}
    backends: dict[str, str] = {}
    prompt_ratios: dict[str, Any] = {}
    lending: dict[str, Any] = {}


_BEGINNING = b'{"format":"%b"' % FORMAT.encode()
"""Of each file that this module wrote, be it torn."""


class Desk(Protocol):
    """Who knows of demand and lead times (`router.lending.report.LendingDesk`)."""

    def export(self) -> dict[str, Any]:
        """What was learned, as JSON values."""

    def restore(self, saved: Mapping[str, Any], age_s: float) -> None:
        """Begin with what was learned until so long ago."""


class StateFile:
    """One process's file. `load` at the start, `save` now and then from a thread, and at the end."""

    def __init__(self, path: Path, *, wall_clock: Callable[[], float] = time.time) -> None:
        self.path = path
        self.is_foreign = False
        """The path leads to something that this module did not write; it is left alone."""
        self._wall_clock = wall_clock

    def load(self, learner: Learner, ratios: PromptRatios, specs: Iterable[BackendSpec],
             desk: Desk | None = None) -> bool:
        """Hand over what was saved; returns whether there was anything. Never raises."""
        try:
            envelope = self._read()
            if envelope is None:
                return False
            age_s = max(0.0, self._wall_clock() - envelope.saved_at_s)
            ratios.restore(envelope.prompt_ratios, age_s)
            if envelope.learner.get("name") == learner.name:
                learner.restore(envelope.learner.get("state", {}), age_s)
                now = {spec.name: fingerprint(spec) for spec in specs}
                for name, known in envelope.backends.items():
                    if now.get(name) != known:
                        learner.forget(name)
            else:
                log.info("%s was learned by another policy; only prompt sizes are taken over", self.path)
            if desk is not None:
                desk.restore(envelope.lending, age_s)
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            log.warning("%s cannot be taken over (%s); learning starts afresh", self.path, what)
            return False
        log.info("%s: took over what was learned until %.0f s ago", self.path, age_s)
        return True

    def save(self, learner: Learner, ratios: PromptRatios, specs: Iterable[BackendSpec],
             desk: Desk | None = None) -> bool:
        """Write it all; returns whether that is done. May run in a thread beside the loop. Never raises."""
        if self.is_foreign:
            return False
        try:
            content = self._encoded(learner, ratios, specs, desk)
            self._replace(content)
        except Exception as error:
            log.warning("%s cannot be written (%s: %s); requests go on", self.path, type(error).__name__, error)
            return False
        return True

    def _encoded(self, learner: Learner, ratios: PromptRatios, specs: Iterable[BackendSpec],
                 desk: Desk | None) -> bytes:
        """In a thread, a table may grow while it is copied. That is noticed, and it is copied again."""
        for attempt in range(RETRIES):
            try:
                return msgspec.json.encode(_Envelope(
                    format=FORMAT,
                    v=VERSION,
                    saved_at_s=self._wall_clock(),
                    learner={"name": learner.name, "state": learner.export()},
                    backends={spec.name: fingerprint(spec) for spec in specs},
                    prompt_ratios=ratios.export(),
                    lending={} if desk is None else desk.export(),
                ))  # fmt: skip
            except RuntimeError:  # "dictionary changed size during iteration"
                if attempt == RETRIES - 1:
                    raise
        raise AssertionError

    def _replace(self, content: bytes) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            with beside.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(self.path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                beside.unlink()

    def _read(self) -> _Envelope | None:
        """What the file says; `None`, with a warning where there is one, where it says nothing of use."""
        try:
            if self.path.stat().st_size > MAX_BYTES:
                self._refuse(f"it is over {MAX_BYTES // 2**20} MB", foreign=True)
                return None
            raw = self.path.read_bytes()
        except FileNotFoundError:
            return None
        is_ours = raw.startswith(_BEGINNING)
        try:
            envelope = msgspec.json.decode(raw, type=_Envelope)
        except (msgspec.DecodeError, RecursionError) as error:
            self._refuse(f"it is broken ({error})" if is_ours else "it is no state of Headrace", foreign=not is_ours)
            return None
        if envelope.format != FORMAT:
            self._refuse(f"its format is {envelope.format[:32]!a}", foreign=True)
            return None
        if envelope.v != VERSION:
            self._refuse(f"it is of version {envelope.v}, and this Headrace reads {VERSION}", foreign=False)
            return None
        return envelope

    def _refuse(self, why: str, *, foreign: bool) -> None:
        self.is_foreign = foreign
        then = ("It is left alone, and nothing is kept: move it away, or set state.path to another file." if foreign
                else "It will be written over.")
        log.warning("%s: %s; learning starts afresh. %s", self.path, why, then)


def fingerprint(spec: BackendSpec) -> str:
    """Names what a backend's latency rests on: the same one again has the same."""
    words = (*spec.identity, spec.card_type, str(spec.card_count), str(spec.quantization), str(spec.parallel),
             repr(spec.coefficients))
    return blake2b("\0".join(words).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
