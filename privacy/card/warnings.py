"""What an auditor should not overlook: the warnings at the head of the privacy card."""

from __future__ import annotations

from typing import Any

from privacy.card.numbers import LARGEST_DETAILED_EPSILON
from privacy.plan import PrivacyPlan

NO_MIRROR = "The ledger has no mirror: a rollback of the whole folder would not be detected."
TOO_LARGE = "so large an epsilon protects nothing in practice; curves and other neighbours are left out"


def card_warnings(plan: PrivacyPlan, card: dict[str, Any], *, unterminated: bool, mirrored: bool) -> list[str]:
    """One line each; `unterminated` and `mirrored` are about the ledger's file."""
    numbers, n = card["accounting"], plan.num_examples
    found = []
    if plan.target_delta > 1 / n:
        found.append(f"delta {plan.target_delta:g} is above 1/n = {1 / n:.3g}: it would allow publishing some examples")
    if plan.formal_guarantee and numbers["epsilon"] is None:
        found.append("the accountant finds no finite epsilon at this delta")
    if (numbers["epsilon"] or 0.0) > LARGEST_DETAILED_EPSILON:
        found.append(TOO_LARGE)
    if not _consistent(numbers):
        found.append("the claim is not between the PRV lower and the RDP upper bound (both leave out the cap)")
    if unterminated:
        found.append(
            "the ledger ends inside a line (a crash, or a write under way); it is charged if it may be an attempt"
        )
    if not mirrored:
        found.append(NO_MIRROR[0].lower() + NO_MIRROR[1:-1])
    return found + _code_warnings(card["provenance"], numbers)


def _code_warnings(provenance: dict[str, Any], numbers: dict[str, Any]) -> list[str]:
    found, sessions = [], provenance["sessions"]
    modified = [str(number) for number, session in enumerate(sessions, start=1) if session["modified"]]
    if modified:
        found.append(f"uncommitted changes in session {', '.join(modified)}: the commit does not identify the code")
    if len({session["commit"] for session in sessions} | {provenance["commit"]}) > 1 and sessions:
        found.append("the sessions ran different commits of the code, or not all commits are known")
    if numbers["accountant_at_opening"] not in (None, numbers["accountant"]):
        found.append(f"planned with {numbers['accountant_at_opening']}, this card uses {numbers['accountant']}")
    return found


def _consistent(numbers: dict[str, Any]) -> bool:
    """RDP >= claim >= PRV lower, with the slack of RDP's finite list of orders (a thousandth)."""
    claim, rdp, prv = numbers["epsilon"], numbers["epsilon_rdp"], numbers["epsilon_prv"]
    if claim is None:
        return True
    below_rdp = rdp is None or claim <= rdp * (1 + 1e-3) + 1e-3
    return below_rdp and (prv is None or prv[0] <= claim)
