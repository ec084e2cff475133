"""What a router publishes under `GET /admin/lending`, as far as the allocator reads it."""

import msgspec


class BadPublication(ValueError):
    """The answer is no publication; the text says why."""


class Published(msgspec.Struct, frozen=True):
    """One backend."""

    name: str
    stage: str
    """`serving`, `draining`, `released` or `returning`."""
    epoch: int
    in_flight: int
    lendable: bool
    may_stay_away: bool
    return_s: float
    """Load and warm-up, as long as it is counted on to take."""
    capacity_per_s: float | None = None
    """Requests per second within the P99 budgets; `None` where unknown."""
    detail: str = ""


class Model(msgspec.Struct, frozen=True):
    """One model. `None`: unknown."""

    model: str
    surplus_per_s: float | None = None


class Publication(msgspec.Struct, frozen=True):
    """One router at one time."""

    version: int
    backends: tuple[Published, ...]
    models: tuple[Model, ...] = ()

    def of(self, name: str) -> Published | None:
        return next((backend for backend in self.backends if backend.name == name), None)


_decode = msgspec.json.Decoder(Publication).decode
_decode_backend = msgspec.json.Decoder(Published).decode


def read(body: bytes) -> Publication:
    """Raises BadPublication."""
    try:
        return _decode(body)
    except msgspec.DecodeError as problem:
        raise BadPublication(f"this is no publication of a router: {problem}") from problem


def read_backend(body: bytes) -> Published:
    """One backend's part, as its levers answer. Raises BadPublication."""
    try:
        return _decode_backend(body)
    except msgspec.DecodeError as problem:
        raise BadPublication(f"this is no backend of a publication: {problem}") from problem
