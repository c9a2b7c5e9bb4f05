"""A privacy card that holds everything that a card can hold, with one text in every place that takes any."""

import types
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from pydantic import BaseModel

from privacy.accounting import accountants
from privacy.card import ledger_card as report
from privacy.card.ledger_card import make_card, read_snapshot
from privacy.card.model import PrivacyCard

PLAN = {
    "max_grad_norm": 1.0,
    "num_examples": 2000,
    "noise_multiplier": 4.0,
    "sensitivity_slack": 1e-3,
    "sample_rate": 0.05,
    "expected_batch_size": 100,
    "cap": 180,
}
NUMBERS: dict[str, Any] = {
    "delta": 1e-5,
    "noise_tail_delta": 1e-15,
    "attempts_charged": 4,
    "charged": 4,
    "allowed": 10,
    "epsilon_rdp": 1.5,
    "epsilon_group": {"2": 2.5, "5": 6.5},
    "true_positive": {"0.01": 0.02},
    "advantage": 0.1,
    "curve": ((1e-5, 1e-4), (0.01, 0.02), (1.0, 1.0)),
    "loss": 6.5,
    "blind_loss": 5.75,
    "shuffled_loss": 7.25,
}
"""Where a field's number means something; others are 3 or 1.25."""


def privacy_card(path: Path | str) -> PrivacyCard:
    """The card of the run whose ledger is at `path`, from the ledger alone (a few seconds)."""
    return make_card(read_snapshot(path), str(path))


def without_surroundings(patched: pytest.MonkeyPatch) -> None:
    """What surrounds the claims takes most of a card's time."""
    patched.setattr(report, "risk_of", lambda *_: {"advantage": 0.0, "true_positive_rates": []})
    patched.setattr(report, "epsilon_of_several", lambda *_: None)
    patched.setattr(accountants, "epsilon_prv", lambda *_: (None, None, None))
    patched.setattr(accountants, "epsilon_replace_one", lambda *_: None)


def full_card(
    text: str, *, with_head: bool = False, statement: str = "A statement.", key: str = "option"
) -> PrivacyCard:
    """
    Args:
        text: every name, path and word from a file.
        statement: every statement.
        key: every name of a value whose names are free.
    """
    sibling = {
        "name": text,
        "time_utc": text,
        "is_this_run": True,
        "chosen_after_outputs": False,
        "epsilon": 0.5,
    }
    given: dict[str, Any] = NUMBERS | {
        "reasons": (),
        "warnings": (statement,),
        "statement": statement,
        "released": statement,
        "sampling": statement,
        "opened": {
            "format": 1,
            "time_utc": text,
            "commit": text,
            "accountant": text,
            "key_commitment": text,
            "data_hmac": text,
            "shared_ledger": text,
            "max_examples_per_owner": 3,
            "head": {"method": text, "num_classes": 3, "covers": text, key: text},
        },
        "plan": {**PLAN, "sampling": text},
        "releases": ({"name": text, "std": 6.0, "sensitivity": 1.5, "count": 3},),
        "last_checkpoint": {"step": 3, "path": text, "digest": text},
        "packages": {key: text},
        "facts": {key: text, "start": {key: text}},
        "shared_ledger": {
            "epsilon": 5.0,
            "delta": 1e-4,
            "unit": text,
            "accounting": text,
            "epsilon_reserved": 1.5,
            "runs": [sibling],
            "informal_runs": [{"name": text, "reason": text}],
        },
    }

    if not with_head:
        del given["opened"]["head"]

    def value(kind: Any, name: str) -> Any:
        if name in given:
            return given[name]
        origin, parts = get_origin(kind), get_args(kind)
        if origin is Annotated:
            return value(parts[0], name)
        if origin in (Union, types.UnionType):
            return value(next(part for part in parts if part is not type(None)), name)
        if origin is tuple:
            return tuple(value(part, "") for part in parts if part is not Ellipsis) * (
                2 if name == "runs" else 1
            )
        if origin is Literal:
            return parts[0]
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return part_of(kind)
        return {bool: True, int: 3, float: 1.25}.get(kind, text)

    def part_of(kind: type[BaseModel]) -> Any:
        values = {name: value(field.annotation, name) for name, field in kind.model_fields.items()}
        if kind.__name__ == "Session":  # of a commit the page shows the first letters
            values["commit"] = "c0ffee"
        return kind(**values)

    card: PrivacyCard = part_of(PrivacyCard)
    return card
