"""What may leave a run, by type (contract 12).

`Private[T]` and `Public[T]` are boxes without a common type. Whatever is computed from training data without noise, or read from
a clock or a memory meter, is made as a `Private`; only writers of private/ and the console take it. Writers of public files take
`Public` alone, which states why its value may be public. A plain number fits neither, so mypy refuses a value about which
nobody has decided. Neither box has a JSON form: one that reaches a ledger or a manifest is a TypeError, not a leak.

    >>> loss = Private(0.25)
    >>> print(loss, loss.inside())
    Private(...) 0.25
    >>> Public(1e-3, Reason.SCHEDULE).because.value
    'it follows from public settings and the number of the step'

`git grep "Public("` lists every decision that something may be published, and PUBLISHED every name under which it is.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Generic, NoReturn, TypeVar

T = TypeVar("T")


class Reason(Enum):
    """Why a value may leave the run."""

    NOISED = "it is computed from noised sums"
    SETTINGS = "it is a public setting, the same in every step"
    SCHEDULE = "it follows from public settings and the number of the step"
    CHARGED = "it is computed from the ledger"
    DECLARED = "whoever names the data declares them public"


_HELDOUT = (
    "loss",
    "accuracy",
    "shuffled_loss",
    "loss_of_average",
    "blind_loss",
    "blind_accuracy",
    "samples",
    *(f"blind_{table}_loss" for table in ("unigram", "bigram", "whole_caption")),
)
_EVALUATIONS = ("aro", "captions", "dense", "few-shot", "linear-probe", "private-head", "zero-shot")
PUBLISHED = {
    "optimizer/lr": Reason.SCHEDULE,
    "optimizer/noised_grad_norm": Reason.NOISED,
    "privacy/charged_attempts": Reason.CHARGED,
    "privacy/epsilon": Reason.CHARGED,
    "where the training loss is": Reason.SETTINGS,
    **dict.fromkeys((f"heldout/{name}" for name in _HELDOUT), Reason.DECLARED),
}
"""Every name of `metrics.jsonl` and `tensorboard/`, and what its values are computed from. `privacy/verify.py` has a list of its
own, and calls any other name a violation. Evaluations, which are no part of a run, add names of their kind to `evaluation/`."""


def reason_of(name: str) -> Reason | None:
    """Why values of this name may be published; None for a name that nobody has decided about."""
    return Reason.DECLARED if name.partition("/")[0] in _EVALUATIONS else PUBLISHED.get(name)


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Private(Generic[T]):
    """A value that one example can change without noise: by what it holds, or by the time and memory that it takes."""

    _value: T

    def inside(self) -> T:
        """The value, for what stays inside the trust boundary: files of private/ and the console."""
        return self._value

    def __repr__(self) -> str:
        """Says nothing about the value, wherever it is printed."""
        return "Private(...)"

    def __bool__(self) -> NoReturn:
        """A decision that everybody sees cannot depend on it."""
        raise TypeError("a private value decides nothing outside of the trust boundary")


@dataclass(frozen=True, slots=True)
class Public(Generic[T]):
    """A value that may leave the run, and why."""

    value: T
    because: Reason
