"""Which weights of this program a private run has trained: in them the epsilons of two runs add up, and one ledger states a part.

Weights are known by themselves and by their values, so that a copy of a model (copy.deepcopy, load_state_dict, a trained encoder
in another model) is known too. Other programs know nothing of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ..clipping.sharded import is_dtensor
from ..errors import PrivacyConfigError
from .fingerprint import fingerprint, of_whole

MOST = 1 << 18
"""Values that are remembered, about 40 MiB; the oldest go first."""
FEWEST = 4
"""Numbers of a tensor that is known by its values: those of fewer may be equal by chance."""


@dataclass(frozen=True)
class Origin:
    """The run that a tensor comes from.

    Attributes:
        line: number ("seq") and hash of the ledger's line that charges it; empty on ranks other than 0.
    """

    run_dir: Path
    line: Mapping[str, Any]


_BY_TENSOR: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_BY_VALUE: dict[int, Origin] = {}


def note(trained: Mapping[str, Tensor], before: Sequence[int], after: Sequence[int], origin: Origin) -> None:
    """A step has changed these tensors; the fingerprints of the whole tensors before and after it."""
    for tensor, old, new in zip(trained.values(), before, after, strict=True):
        _BY_TENSOR[tensor] = origin
        if new != old and tensor.numel() >= FEWEST:  # an unchanged one may be what every model begins with
            _BY_VALUE.pop(new, None)
            _BY_VALUE[new] = origin
    while len(_BY_VALUE) > MOST:
        del _BY_VALUE[next(iter(_BY_VALUE))]


def origin_of(model: nn.Module, run_dir: Path) -> Origin | None:
    """What this folder's run last made of these weights; None where no run of this program has trained them. Collective.

    Raises:
        PrivacyConfigError: the run of another folder has trained one of them.
    """
    parameters = dict(model.named_parameters())
    is_sharded = any(is_dtensor(p) for p in parameters.values())  # then other ranks may remember what this one does not
    values = of_whole(parameters, fingerprint(parameters)) if _BY_VALUE or is_sharded else [0] * len(parameters)
    newest: Origin | None = None
    for (name, p), value in zip(parameters.items(), values, strict=True):
        found = _BY_TENSOR.get(p) or (_BY_VALUE.get(value) if p.numel() >= FEWEST else None)
        if found is None:
            continue
        if found.run_dir != run_dir:
            raise PrivacyConfigError(
                f"{name} was trained by the private run {found.run_dir}: what both runs spend adds up in it, and the ledger of "
                f"{run_dir} would state a part; go on in the same run folder, or begin with a new model"
            )
        if newest is None or found.line.get("seq", 0) > newest.line.get("seq", 0):
            newest = found
    return newest


def require_ledger(origin: Origin | None, ledger: Path) -> None:
    """On one rank, before a ledger is made.

    Raises:
        PrivacyConfigError: weights of this folder's run are there, and its ledger is not.
    """
    if origin is not None and not ledger.exists():
        raise PrivacyConfigError(
            f"this model was trained by the private run {origin.run_dir}, whose ledger {ledger} is gone: a new one would not "
            "state what was spent; put the folder back, or begin with a new model"
        )
