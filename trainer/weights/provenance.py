"""What is known of the weights that a run started from, in one or two sentences."""

from collections.abc import Mapping
from typing import Any

from models.adapters import is_adapter

IMPORTED = "imported"


def initialisation_statement(facts: Mapping[str, Any]) -> str:
    """
    Args:
        facts: of a manifest; only `initialisation` is looked at.
    """
    start = facts.get("initialisation")
    start = start if isinstance(start, dict) else {"kind": start}
    if start.get("kind") == "random":
        return "None: the model was initialised at random."
    if start.get("kind") == IMPORTED:
        return imported_statement(start)
    if start.get("kind") != "checkpoint":
        return "The model was not initialised at random: the data behind its initial weights is outside of the claim."
    weights = f"The initial weights{_but(start.get('at_random'))}"
    origin = f"{weights} are those of step {start.get('step')} of run {start.get('run')!r}"
    before = start.get("before_that")
    if isinstance(before, dict) and before.get("kind") == IMPORTED:
        who = f"whoever imported them declared the data behind them {start.get('training_data')}"
        return f"{origin}: {who}. {imported_statement(before)}"
    behind = f" Before that: {initialisation_statement({'initialisation': before})}" if _is_a_run(before) else ""
    if start.get("training_data") in ("public", "synthetic"):
        return f"{origin}, trained on data that its recipe declares {start['training_data']}.{behind}"
    guarantee = start.get("guarantee") or {}
    if not guarantee:
        return f"{origin}, trained on private data without a guarantee that a ledger proves.{behind}"
    return (
        f"{origin}, trained on private data with epsilon {guarantee.get('epsilon')} at delta {guarantee.get('delta')} of "
        "its own. Where its data and this run's overlap, the two compose: this card's epsilon alone is not the total."
        f"{behind}"
    )


def _but(at_random: Any) -> str:
    """What of the model did not come from the start: parts by their outermost module, and adapters, which lie inside of parts."""
    names = [str(name) for name in at_random] if isinstance(at_random, list) else []
    parts = sorted({name.partition(".")[0] for name in names if not is_adapter(name)})
    left_out = [f"those of {', '.join(parts)}"] if parts else []
    if any(is_adapter(name) for name in names):
        left_out.append("the low-rank adapters")
    return f" (all but {' and '.join(left_out)}, which began anew)" if left_out else ""


def _is_a_run(start: Any) -> bool:
    return isinstance(start, dict) and start.get("kind") == "checkpoint"


def imported_statement(start: Mapping[str, Any]) -> str:
    """Of weights that come from elsewhere: nothing about them is attested."""
    claim = f" Stated with the import: {start['claim']!r}." if start.get("claim") else ""
    return (
        f"Imported from the {start.get('format')} file {start.get('file')!r} (SHA-256 {str(start.get('sha256'))[:16]}...): "
        f"what its authors claim of its privacy is not attested by anything here.{claim}"
    )
