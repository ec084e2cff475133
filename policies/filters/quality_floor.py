"""No coarser weights than the caller, or the operator, accepts.

A quantized model is another model: cheaper, and a little worse. The floor is in bits a weight, and a backend's bits are
read off the name of its quantization: `bf16` and `fp16` 16, `fp8`, `int8`, `w8a8` and `q8_0` 8, `q4_k_m`, `awq` and
`nvfp4` 4. A backend that names none serves the weights as they were published, and passes; one of which the name says
nothing does not pass a floor, for nobody knows whether it is kept.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from backends.catalog.spec import BackendSpec
from backends.catalog.views import BackendView, FleetView
from policies.facts import RequestFacts
from policies.filters import Rejection
from policies.spec import setting

AS_PUBLISHED_BITS = 16.0
FOUR_BITS = ("awq", "gptq", "nf4", "marlin")
NO_FLEET = FleetView(())
FIRST_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class QualityFloor:
    """Keeps the backends whose weights have at least so many bits; the caller's floor or the operator's."""

    name: ClassVar[str] = "quality_floor"
    floor_bits: float = setting(0.0, "Fewest bits a weight may have, whatever the caller accepts.", at_least=0)

    def __call__(self, facts: RequestFacts, backend: BackendView, fleet: FleetView, now: float) -> str | None:
        floor = facts.quality_floor_bits
        if floor is None or floor < self.floor_bits:
            floor = self.floor_bits
        if not floor > 0.0:
            return None
        return None if weight_bits(backend.spec) >= floor else Rejection.QUALITY_TOO_LOW

    def passing(self, facts: RequestFacts, views: Sequence[BackendView], now: float) -> Sequence[BackendView]:
        if facts.quality_floor_bits is None and self.floor_bits == 0.0:
            return views
        return [view for view in views if self(facts, view, NO_FLEET, now) is None]


def weight_bits(spec: BackendSpec) -> float:
    """Bits a weight; 0 where the quantization's name does not say."""
    name = spec.quantization
    if name is None:
        return AS_PUBLISHED_BITS
    found = FIRST_NUMBER.search(name)
    if found is not None and 1 <= int(found.group()) <= 32:
        return float(found.group())
    return 4.0 if name.lower().startswith(FOUR_BITS) else 0.0
