"""The shipped cards."""

import dataclasses
import math

import pytest

from loadtest.fake_engine.cards import UnknownCard, find_card, load_cards
from loadtest.fake_engine.step import step_ms


def test_every_card_is_complete_and_plausible() -> None:
    cards = load_cards()
    assert len(cards) == 23
    for card_id, card in cards.items():
        assert card.id == card_id
        assert card.price_per_hour > 0
        assert card.coefficients.version.endswith(card_id)
        assert card.coefficients.kv_capacity_tokens == card.kv_capacity_tokens > 30_000
        for field in dataclasses.fields(card.coefficients):
            value = getattr(card.coefficients, field.name)
            if field.name == "chunk_tokens":
                assert value is None or value >= 256
                continue
            assert isinstance(value, str) or (math.isfinite(value) and value >= 0), (card_id, field.name)


def test_one_model_is_served_by_many_kinds_of_card() -> None:
    by_model: dict[str, set[str]] = {}
    for card in load_cards().values():
        by_model.setdefault(card.model, set()).add(card.hardware)
    assert len(by_model["Qwen3-32B"]) >= 5
    assert len(by_model["Qwen3-8B"]) >= 5


def test_numbers_survive_the_way_into_coefficients() -> None:
    card = find_card("h100x2-fp8")
    assert (card.devices, card.quantization, card.price_per_hour, card.price_assumed) == (2, "fp8", 5.9, False)
    # The batch at which this card keeps 50 ms per token on the Azure conversation trace is far from one sequence.
    assert step_ms(card.coefficients, 0, 0, 64, 64 * 1200) < 50


def test_an_h100_is_faster_than_an_ascend_910b2_and_an_assumed_price_says_so() -> None:
    fast, slow = find_card("h100x2-fp8"), find_card("ascend910b2x2-bf16")
    assert step_ms(fast.coefficients, 0, 0, 8, 8000) < step_ms(slow.coefficients, 0, 0, 8, 8000)
    assert slow.price_assumed


def test_unknown_and_unmeasured_cards_are_told_apart() -> None:
    with pytest.raises(UnknownCard, match="there are a100x2-bf16"):
        find_card("abacus")
    with pytest.raises(UnknownCard, match=r"not measured: prefill\.base_ms"):
        find_card("h20x1-bf16")
