"""The report of an audit: named checks, each with numbers and a sentence, and one verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..errors import printable
from ..plan.limits import json_value

Outcome = Literal["ok", "violated", "inconclusive"]

CHECK_ALPHA = 1e-5
"""A random check calls a violation below this p-value. The check itself corrects it for all of its
comparisons."""
EXIT_CODES = {"consistent": 0, "violated": 5, "inconclusive": 6}


@dataclass(frozen=True)
class Check:
    """A check of an audit.

    Attributes:
        name: stable, for scripts.
        outcome: "ok", "violated", or "inconclusive" when nothing decides.
        sentence: the comparison and its outcome, for a reader without the code.
        statistic: the number that decided, if one did.
        p_value: of a random check: how often a correct run shows something at least as extreme.
        threshold: of `statistic`, or of `p_value` where it is given; of a random check it bounds
            how often a correct run is called violated.
    """

    name: str
    outcome: Outcome
    sentence: str
    statistic: float | None = None
    p_value: float | None = None
    threshold: float | None = None


def fact(
    name: str,
    good: bool,
    sentence: str,
    *,
    statistic: float | None = None,
    threshold: float | None = None,
) -> Check:
    """Returns a check without chance: it holds or it does not."""
    return Check(name, "ok" if good else "violated", sentence, statistic, None, threshold)


def random_check(
    name: str,
    p_value: float,
    sentence: str,
    *,
    statistic: float | None = None,
    alpha: float = CHECK_ALPHA,
) -> Check:
    """Returns a check that is violated when `p_value` is below `alpha`, or NaN.

    Args:
        p_value: corrected for multiplicity already.
    """
    outcome: Outcome = "ok" if p_value >= alpha else "violated"
    return Check(name, outcome, sentence, statistic, p_value, alpha)


def undecided(name: str, sentence: str) -> Check:
    """Returns a check that nothing decides."""
    return Check(name, "inconclusive", sentence)


@dataclass(frozen=True)
class AuditReport:
    """The outcome of one audit."""

    kind: str
    checks: Sequence[Check]
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """Returns "violated" after one violation, else "inconclusive" after one undecided check."""
        outcomes = {check.outcome for check in self.checks}
        if "violated" in outcomes:
            return "violated"
        return "inconclusive" if "inconclusive" in outcomes else "consistent"

    @property
    def exit_code(self) -> int:
        """Returns 0 for consistent, 5 for violated, 6 for inconclusive."""
        return EXIT_CODES[self.verdict]

    @property
    def false_alarm_rate(self) -> float:
        """Returns an upper bound on the probability that a correct run is called violated."""
        return sum(check.threshold or 0.0 for check in self.checks if check.p_value is not None)

    def failed(self) -> list[str]:
        """Returns the names of the violated checks."""
        return [check.name for check in self.checks if check.outcome == "violated"]

    def to_json(self) -> dict[str, Any]:
        """Returns plain data; numbers that JSON cannot hold become null.

        Of a schedule the outcomes alone: its numbers, p-values too, reveal how many examples took
        part, and are for `to_text`, inside the trust boundary.
        """
        fields = tuple(Check.__dataclass_fields__)
        if self.kind == "schedule":
            fields = ("name", "outcome")
        checks = [{name: getattr(check, name) for name in fields} for check in self.checks]
        report = {
            "audit": self.kind,
            "verdict": self.verdict,
            "exit_code": self.exit_code,
            "false_alarm_rate": self.false_alarm_rate,
            "violated_checks": self.failed(),
            "checks": checks,
        }
        plain: dict[str, Any] = json_value(report | self.facts)
        return plain

    def to_text(self) -> str:
        """Returns one line per check, and the verdict."""
        labels = {"ok": "ok        ", "violated": "VIOLATED  ", "inconclusive": "undecided "}
        lines = []
        for check in self.checks:
            p_value = "" if check.p_value is None else f" [p = {check.p_value:.2g}]"
            lines.append(f"{labels[check.outcome]} {check.name}: {check.sentence}{p_value}")
        for name, fact_text in self.facts.items():
            if isinstance(fact_text, str):
                lines.append(f"{name}: {fact_text}")
        alarm = "never called violated"
        if self.false_alarm_rate:
            rate = f"{self.false_alarm_rate:.0e}"
            alarm = f"called violated with probability at most {rate}"
        lines.append(f"audit {self.kind}: {self.verdict} (a correct run is {alarm})")
        return "\n".join(map(printable, lines))
