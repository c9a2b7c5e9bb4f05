"""The published format of the privacy card, and what its type refuses."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from privacy.card.model import Accounting, Attempts, PrivacyCard
from privacy.card.schema import schema_text
from tests.privacy.cards import full_card

SCHEMA = Path(__file__).parents[2] / "docs/schemas/privacy_card.schema.json"


def test_the_published_schema_is_that_of_the_model() -> None:
    assert SCHEMA.read_text() == schema_text(), "python -m privacy.card.schema > docs/schemas/privacy_card.schema.json"


def test_the_schema_describes_every_key_and_takes_no_other() -> None:
    schema = json.loads(schema_text())
    for name, part in {**schema["$defs"], "PrivacyCard": schema}.items():
        if part.get("type") != "object":
            continue
        assert part["description"], name
        assert part["additionalProperties"] is False or name == "Head", name
        assert set(part["required"]) == set(part["properties"]), name
        for key, value in part["properties"].items():
            assert value.get("description"), f"{name}.{key}"


@pytest.mark.parametrize("with_head", [False, True])
def test_a_card_comes_back_from_its_json(with_head: bool) -> None:
    card = full_card("a name", with_head=with_head)
    assert PrivacyCard.model_validate_json(card.to_json()) == card
    assert card.to_json().isascii() and "\n" not in card.to_json()


@given(st.sampled_from(("accounting", "released", "provenance", None)), st.text(min_size=1))
def test_an_unknown_key_is_refused(place: str | None, key: str) -> None:
    data = json.loads(full_card("a name").to_json())
    part = data if place is None else data[place]
    if key not in part:
        part[key] = 1
        with pytest.raises(ValidationError):
            PrivacyCard.model_validate(data)


EPSILONS = [name for name in Accounting.model_fields if "epsilon" in name] + ["attack"]


@pytest.mark.parametrize("field", EPSILONS)
def test_contract_11_a_card_without_a_guarantee_cannot_hold_what_is_computed_from_epsilon(field: str) -> None:
    formal = full_card("a name")
    value = getattr(formal.accounting, field)
    assert value not in (None, ()), "the card of the test holds everything"
    numbers = {"delta": 1e-5, "accountant_at_opening": None, "accountant": "a", "statement": "b"}
    nothing = Accounting(
        **numbers, accountant_python="3", max_examples_per_owner=None,
        attempts=Attempts(charged=1, allowed=2, done=1, repeats=0, torn_lines=0, torn_lines_charged=0),
    )  # fmt: skip
    informal = formal.updated(
        formal_guarantee=False, reasons=("why",), epsilon=None, accounting=nothing, composition=None
    )
    with pytest.raises(ValidationError, match="holds no epsilon"):
        informal.updated(accounting=nothing.updated(**{field: value}))
    with pytest.raises(ValidationError, match="holds no epsilon"):
        informal.updated(epsilon=1.0)
    with pytest.raises(ValidationError, match="holds no epsilon"):
        informal.updated(composition=formal.composition)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_an_epsilon_that_is_no_number_is_null_and_any_other_such_number_is_refused(value: float) -> None:
    card = full_card("a name")
    assert card.updated(epsilon=value).epsilon is None
    with pytest.raises(ValidationError):
        card.updated(delta=value)
