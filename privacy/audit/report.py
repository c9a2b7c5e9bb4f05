"""What an audit says: named checks, each with its numbers and one sentence, and a verdict over all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..errors import printable
from ..limits import finite

Outcome = Literal["ok", "violated", "inconclusive"]
Verdict = Literal["consistent", "violated", "inconclusive"]

CHECK_ALPHA = 1e-5
"""A random check calls a violation below this p-value, corrected inside the check for everything that it looks at."""
MAX_RANDOM_CHECKS = 50
"""No audit has more random checks than this, so that a correct run fails an audit with probability below 5e-4."""

EXIT_CODES: dict[Verdict, int] = {"consistent": 0, "violated": 5, "inconclusive": 6}


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        name: stable, for scripts.
        outcome: "ok", "violated", or "inconclusive" when there was nothing to decide with.
        sentence: what was compared, and what came out, for a reader without the code.
        statistic: the number that decided, if there is one.
        p_value: of a random check: how often a correct run shows something at least as extreme.
        threshold: what `statistic`, or `p_value` where there is one, was held against.
        false_alarm: how often, at most, a correct run is called violated by this check.
        details: further plain numbers.
    """

    name: str
    outcome: Outcome
    sentence: str
    statistic: float | None = None
    p_value: float | None = None
    threshold: float | None = None
    false_alarm: float = 0.0
    details: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        numbers = {"statistic": self.statistic, "p_value": self.p_value, "threshold": self.threshold}
        return {"name": self.name, "outcome": self.outcome, **numbers, "sentence": self.sentence, **self.details}


def fact(name: str, good: bool, sentence: str, **numbers: Any) -> Check:
    """A check without chance: it holds or it does not."""
    known = {key: numbers.pop(key) for key in ("statistic", "threshold") if key in numbers}
    return Check(name, "ok" if good else "violated", sentence, **known, details=numbers)


def random_check(name: str, p_value: float, sentence: str, *, statistic: float | None = None, **details: Any) -> Check:
    """A violation when `p_value`, already corrected for multiplicity, is below CHECK_ALPHA."""
    bad = not p_value >= CHECK_ALPHA  # a NaN is no evidence of health
    return Check(name, "violated" if bad else "ok", sentence, statistic, p_value, CHECK_ALPHA, CHECK_ALPHA, details)


def undecided(name: str, sentence: str, **details: Any) -> Check:
    return Check(name, "inconclusive", sentence, details=details)


@dataclass(frozen=True)
class AuditReport:
    """The outcome of one audit."""

    kind: str
    checks: tuple[Check, ...]
    facts: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, kind: str, checks: Sequence[Check], **facts: Any) -> AuditReport:
        if sum(check.p_value is not None for check in checks) > MAX_RANDOM_CHECKS:
            raise AssertionError("more random checks than the stated false-alarm rate allows")
        return cls(kind, tuple(checks), facts)

    @property
    def verdict(self) -> Verdict:
        """One violation decides; otherwise whatever could not be decided is said."""
        outcomes = {check.outcome for check in self.checks}
        if "violated" in outcomes:
            return "violated"
        return "inconclusive" if "inconclusive" in outcomes else "consistent"

    @property
    def exit_code(self) -> int:
        """0 consistent, 5 violated, 6 inconclusive."""
        return EXIT_CODES[self.verdict]

    @property
    def false_alarm_rate(self) -> float:
        """Upper bound on the probability that a correct run is called violated."""
        return sum(check.false_alarm for check in self.checks)

    def failed(self) -> list[str]:
        """Names of the violated checks."""
        return [check.name for check in self.checks if check.outcome == "violated"]

    def to_json(self) -> dict[str, Any]:
        """Plain data; numbers that JSON cannot hold become null.

        Of a schedule the outcomes alone: its numbers, p-values too, tell how many examples took part, and are for `to_text`,
        inside the trust boundary.
        """
        checks = [check.to_json() for check in self.checks]
        if self.kind == "schedule":
            checks = [{"name": check["name"], "outcome": check["outcome"]} for check in checks]
        body = {
            "audit": self.kind,
            "verdict": self.verdict,
            "exit_code": self.exit_code,
            "false_alarm_rate": self.false_alarm_rate,
            "violated_checks": self.failed(),
            "checks": checks,
            **self.facts,
        }
        plain: dict[str, Any] = finite(body)
        return plain

    def to_text(self) -> str:
        """One line per check, and the verdict."""
        mark = {"ok": "ok        ", "violated": "VIOLATED  ", "inconclusive": "undecided "}
        lines = [f"{mark[check.outcome]} {check.name}: {check.sentence}{_numbers(check)}" for check in self.checks]
        notes = [f"{name}: {value}" for name, value in self.facts.items() if isinstance(value, str)]
        alarm = f"a correct run is called violated with probability at most {self.false_alarm_rate:.0e}"
        return "\n".join(map(printable, [*lines, *notes, f"audit {self.kind}: {self.verdict} ({alarm})"]))


def _numbers(check: Check) -> str:
    return "" if check.p_value is None else f" [p = {check.p_value:.2g}]"
