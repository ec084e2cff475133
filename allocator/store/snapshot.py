"""A world as bytes and back, exactly: MessagePack, which keeps infinities and keys that are tuples.

The bytes are for the version of the program that wrote them; one that cannot read them replays the journal instead.
"""

from dataclasses import fields
from typing import Final

import msgspec

from allocator.model.world import World

_FIELDS: Final = tuple(field.name for field in fields(World) if field.name != "memo")
_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(World)


class BadSnapshot(ValueError):
    """Bytes that hold no world of this version of the program."""


def to_bytes(world: World) -> bytes:
    return _ENCODER.encode({name: getattr(world, name) for name in _FIELDS})


def from_bytes(data: bytes) -> World:
    """The world in these bytes.

    Raises:
        BadSnapshot: there is none that this version of the program can read.
    """
    try:
        return _DECODER.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError) as problem:
        raise BadSnapshot(f"not a snapshot of this version: {problem}") from problem
