"""Values that may leave a run, and values that may not, by type (contract 12).

`Private[T]` and `Public[T]` are boxes without a common type. A value that is computed from training
data without noise, or read from a clock or a memory meter, is a `Private`; only writers of private/
and the console take it. Writers of public files take only a `Public`, which states the reason. A
plain number fits neither, so mypy refuses an undecided value. Neither box has a JSON form: a box
that reaches a ledger or a manifest is a TypeError, not a leak.

    >>> loss = Private(0.25)
    >>> print(loss, loss.inside())
    Private(...) 0.25
    >>> Public(1e-3, Reason.SCHEDULE).because.value
    'it follows from public settings and the number of the step'

`git grep "Public("` lists every decision to publish, and PUBLISHED every published name.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Generic, NoReturn, TypeVar

T = TypeVar("T")


class Reason(Enum):
    """The reason why a value may leave the run."""

    NOISED = "it is computed from noised sums"
    SETTINGS = "it is a public setting, the same in every step"
    SCHEDULE = "it follows from public settings and the number of the step"
    CHARGED = "it is computed from the ledger"
    DECLARED = "the owner of the run declares these data public"


_HELDOUT = (
    "loss",
    "accuracy",
    "shuffled_loss",
    "loss_of_average",
    "blind_loss",
    "blind_accuracy",
    "samples",
    "blind_unigram_loss",
    "blind_bigram_loss",
    "blind_whole_caption_loss",
)
_EVALUATIONS = ("aro", "captions", "dense", "few-shot", "linear-probe", "private-head", "zero-shot")
PUBLISHED = {
    "optimizer/lr": Reason.SCHEDULE,
    "optimizer/noised_grad_norm": Reason.NOISED,
    "privacy/charged_attempts": Reason.CHARGED,
    "privacy/epsilon": Reason.CHARGED,
    "where the training loss is": Reason.SETTINGS,
}
PUBLISHED |= {f"heldout/{name}": Reason.DECLARED for name in _HELDOUT}
"""Every name of `metrics.jsonl` and `tensorboard/`, and the reason why its values are public.

`privacy/verify.py` has a list of its own, and calls any other name a violation. Evaluations, which
are not part of a run, add names of their kind to `evaluation/`.
"""


def reason_of(name: str) -> Reason | None:
    """Returns why values of this name may be published, or None if that is not decided."""
    if name.partition("/")[0] in _EVALUATIONS:
        return Reason.DECLARED
    return PUBLISHED.get(name)


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Private(Generic[T]):
    """A value that one example can change without noise: by its content, or its time and memory."""

    _value: T

    def inside(self) -> T:
        """Returns the value, for use inside the trust boundary: files of private/, the console."""
        return self._value

    def __repr__(self) -> str:
        """Returns a text without the value."""
        return "Private(...)"

    def __bool__(self) -> NoReturn:
        """Refuses a decision that depends on the value, since observers would see the decision."""
        raise TypeError("a private value decides nothing outside of the trust boundary")


@dataclass(frozen=True, slots=True)
class Public(Generic[T]):
    """A value that may leave the run, and the reason."""

    value: T
    because: Reason
