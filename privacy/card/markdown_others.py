"""Sections of the card about other runs and other files: tuning, shared ledger, pre-training, audits, utility."""

from __future__ import annotations

from collections.abc import Sequence

from privacy.card.text import Card, cell, code, epsilon_text, facts, stated_text, table_of


def tuning(card: Card) -> str:
    tuning = card["tuning"]
    stated = stated_text(tuning["stated"], "not stated by the recipe")
    return f"{tuning['statement']}\n\nTuning: {stated}.\n\n{_shared(tuning['shared_ledger'])}"


def _shared(shared: Card) -> str:
    if shared["identity"] is None:
        return "Shared ledger and sibling runs: the ledger names none."
    identity = (
        f"Shared ledger of the data owner: {code(shared['identity'])} (hash of its first line, in the run's ledger)."
    )
    found = shared["summary"]
    if found is None:
        return f"{identity} It could not be read from here, so its sibling runs are unknown."
    total = (
        f"Of a total of epsilon {found['epsilon']:g} at delta {found['delta']:.6g} for {cell(found['unit'])}, all "
        f"runs together reserved {epsilon_text(found['epsilon_reserved'])} (by {cell(found['accounting'])})."
    )
    head = ("run", "reserved (UTC)", "epsilon alone", "chosen after outputs of others")
    rows = [
        (
            f"{cell(run['name'])}{' (this run)' if run['is_this_run'] else ''}",
            cell(run["time_utc"]),
            epsilon_text(run["epsilon"]),
            "yes" if run["chosen_after_outputs"] else "no",
        )
        for run in found["runs"]
    ]
    informal = [f"{cell(run['name'])} ({cell(run['reason'])})" for run in found.get("informal_runs", ())]
    others = (
        f"\n\n**{len(informal)} more runs on the same data have no guarantee**, and no epsilon here covers them: "
        f"{'; '.join(informal)}."
        if informal
        else ""
    )
    return f"{identity} {total}\n\n{table_of(head, rows)}{others}"


def public_data(card: Card) -> str:
    found = card["public_data"]
    if "file" not in found:
        statement: str = found["statement"]
        return statement
    attested = "matches the SHA-256 in the ledger" if found["attested"] else "**not attested**"
    rows = [(cell(name), _fact(value)) for name, value in found["facts"].items()]
    return f"{found['statement']} From `{cell(found['file'])}` ({attested}):\n\n{facts(rows)}"


def _fact(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{cell(name)} {code(item)}" for name, item in value.items())
    return code(value)


def audit(card: Card) -> str:
    audits = card.get("audits")
    if not audits:
        return "No audit result is in `report/`. `launch_scripts/audit.py` makes one."
    head = ("file", "audit", "verdict", "date (UTC)", "violated checks")
    rows = [
        (
            code(found["file"]),
            cell(found["kind"]),
            _verdict(found),
            _audit_date(found),
            _names(found["violated_checks"]),
        )
        for found in audits
    ]
    return f"**Not attested.** The verdicts are what these files say.\n\n{table_of(head, rows)}"


def _verdict(found: Card) -> str:
    verdict = cell(found["verdict"]) if found["verdict"] == "consistent" else f"**{cell(found['verdict'])}**"
    return verdict if found["of_this_ledger"] else f"{verdict} (of another, or an unstated, state of the ledger)"


def _audit_date(found: Card) -> str:
    return "not stated" if found["date_utc"] is None else cell(found["date_utc"])


def _names(names: Sequence[str]) -> str:
    return ", ".join(code(name) for name in names) or "none"


def utility(card: Card) -> str:
    utility = card.get("utility")
    if utility is None:
        return "No other file was read."
    parts = [f"**Not attested.** {utility['statement']}", _heldout(utility), _samples(utility)]
    return "\n\n".join(part for part in parts if part)


def _heldout(utility: Card) -> str:
    if not utility["heldout_loss"]:
        return "Held-out loss: no public record; if it was measured, it is private."
    points = utility["heldout_loss"]
    shown = points if len(points) <= 12 else [points[0], points[-1]]
    rows = [(f"{point['step']:,}", _number(point["loss"])) for point in shown]
    table = table_of(("after step", "held-out loss"), rows)
    return f"From `{cell(utility['heldout_file'])}` (the recipe declared the held-out data public):\n\n{table}"


def _samples(utility: Card) -> str:
    found = utility["samples"]
    if found is None:
        return ""
    return f"Samples of held-out examples after step {found['step']:,}: `{cell(found['file'])}`."


def _number(value: float | None) -> str:
    return "not a number" if value is None else f"{value:.4f}"
