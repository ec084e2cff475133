"""The measured cards that a fake engine can play. `cards.SOURCES.md` says where each number comes from."""

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from backends.catalog.spec import Coefficients


@dataclass(frozen=True, slots=True)
class Card:
    """One model on so many devices of one kind, in one precision, under one engine."""

    id: str
    """Such as `h100x2-fp8`."""
    model: str
    """The model it was measured with."""
    hardware: str
    devices: int
    quantization: str
    engine: str
    price_per_hour: float
    """USD for all devices together."""
    price_assumed: bool
    """True where no public price was found and the figure is ours."""
    kv_capacity_tokens: int
    coefficients: Coefficients
    notes: tuple[str, ...] = ()


class UnknownCard(LookupError):
    """No such card, or one whose measurements do not suffice; the message lists what there is."""


@cache
def _document() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(files(__package__).joinpath("cards.json").read_text(encoding="utf-8"))
    return document


@cache
def load_cards() -> dict[str, Card]:
    """All complete cards by id, in the order of the file."""
    document = _document()
    return {row["id"]: _card(row, document["version"]) for row in document["cards"]}


def find_card(card_id: str) -> Card:
    """The card of that id.

    Raises:
        UnknownCard: there is none, or too little of it was measured.
    """
    cards = load_cards()
    if card_id in cards:
        return cards[card_id]
    for row in _document()["incomplete"]:
        if row["id"] == card_id:
            raise UnknownCard(f"card {card_id!r} cannot be simulated: not measured: {', '.join(row['missing'])}")
    raise UnknownCard(f"no card {card_id!r}; there are {', '.join(cards)}")


def _card(row: dict[str, Any], version: str) -> Card:
    coefficients = Coefficients(
        version=f"{version}/{row['id']}",
        source=row["provenance"],
        prefill_base_ms=row["prefill"]["base_ms"],
        prefill_ms_per_token=row["prefill"]["ms_per_token"],
        prefill_ms_per_pair=row["prefill"]["ms_per_pair"],
        decode_base_ms=row["decode"]["base_ms"],
        decode_ms_per_seq=row["decode"]["ms_per_seq"],
        decode_ms_per_seq_token=row["decode"]["ms_per_seq_token"],
        first_token_overhead_ms=row["first_token_overhead_ms"],
        kv_capacity_tokens=row["kv_capacity_tokens"],
    )
    return Card(
        id=row["id"],
        model=row["model"],
        hardware=row["hardware"],
        devices=row["devices"],
        quantization=row["quantization"],
        engine=row["engine"],
        price_per_hour=row["price_per_hour"],
        price_assumed=row["price_assumed"],
        kv_capacity_tokens=row["kv_capacity_tokens"],
        coefficients=coefficients,
        notes=tuple(row["notes"]),
    )
