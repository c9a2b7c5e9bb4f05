"""What an audit says: named checks, each with its numbers and one sentence, and a verdict over all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..errors import printable
from ..plan.limits import finite

Outcome = Literal["ok", "violated", "inconclusive"]

CHECK_ALPHA = 1e-5
"""A random check calls a violation below this p-value, corrected inside the check for everything that it looks at."""
EXIT_CODES = {"consistent": 0, "violated": 5, "inconclusive": 6}


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        name: stable, for scripts.
        outcome: "ok", "violated", or "inconclusive" when there was nothing to decide with.
        sentence: what was compared, and what came out, for a reader without the code.
        statistic: the number that decided, if there is one.
        p_value: of a random check: how often a correct run shows something at least as extreme.
        threshold: what `statistic`, or `p_value` where there is one, was held against; of a random check it bounds how often a
            correct run is called violated.
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
    """A check without chance: it holds or it does not."""
    return Check(name, "ok" if good else "violated", sentence, statistic, None, threshold)


def random_check(
    name: str,
    p_value: float,
    sentence: str,
    *,
    statistic: float | None = None,
    alpha: float = CHECK_ALPHA,
) -> Check:
    """A violation when `p_value`, already corrected for multiplicity, is below `alpha`; a NaN is no evidence of health."""
    return Check(
        name, "ok" if p_value >= alpha else "violated", sentence, statistic, p_value, alpha
    )


def undecided(name: str, sentence: str) -> Check:
    """A check that had nothing to decide with."""
    return Check(name, "inconclusive", sentence)


@dataclass(frozen=True)
class AuditReport:
    """The outcome of one audit."""

    kind: str
    checks: Sequence[Check]
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
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
        return sum(check.threshold or 0.0 for check in self.checks if check.p_value is not None)

    def failed(self) -> list[str]:
        """Names of the violated checks."""
        return [check.name for check in self.checks if check.outcome == "violated"]

    def to_json(self) -> dict[str, Any]:
        """Plain data; numbers that JSON cannot hold become null.

        Of a schedule the outcomes alone: its numbers, p-values too, tell how many examples took part, and are for `to_text`,
        inside the trust boundary.
        """
        told = ("name", "outcome") if self.kind == "schedule" else tuple(Check.__dataclass_fields__)
        body = {"audit": self.kind, "verdict": self.verdict, "exit_code": self.exit_code}
        body |= {"false_alarm_rate": self.false_alarm_rate, "violated_checks": self.failed()}
        checks = [{name: getattr(check, name) for name in told} for check in self.checks]
        plain: dict[str, Any] = finite({**body, "checks": checks, **self.facts})
        return plain

    def to_text(self) -> str:
        """One line per check, and the verdict."""
        mark, lines = (
            {"ok": "ok        ", "violated": "VIOLATED  ", "inconclusive": "undecided "},
            [],
        )
        for check in self.checks:
            p_value = "" if check.p_value is None else f" [p = {check.p_value:.2g}]"
            lines.append(f"{mark[check.outcome]} {check.name}: {check.sentence}{p_value}")
        lines += [
            f"{name}: {value}" for name, value in self.facts.items() if isinstance(value, str)
        ]
        rate = self.false_alarm_rate
        alarm = f"a correct run is {f'called violated with probability at most {rate:.0e}' if rate else 'never called violated'}"
        return "\n".join(map(printable, [*lines, f"audit {self.kind}: {self.verdict} ({alarm})"]))
