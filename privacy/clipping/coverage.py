"""Who clips which parameter: every trainable one is claimed by exactly one rule, or training refuses to start (contract 3).

Three ways to be claimed: the module that owns the parameter has a rule for its type; or the parameter is a raw one (class
token, positions, layer scale) that the module's forward reads, and then raw.py splits its use by example or refuses it at the
first forward; or, for a parameter that several modules share, all of its owners have a claim, and their contributions add up.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from privacy.clipping.rules import RULES, register_lazily, unsupported_reason
from privacy.clipping.rules.unsupported import depends_on_mode
from privacy.errors import PrivacyConfigError


@dataclass(frozen=True)
class Claim:
    """A module together with the trainable parameters that it owns directly: local name -> canonical name.

    A layer whose mode decides whether it is supported (dropout) has a claim without parameters, so that the recorder asks
    again at every forward.
    """

    module: nn.Module
    path: str
    parameters: dict[str, str]

    @property
    def is_raw(self) -> bool:
        return type(self.module) not in RULES


def claims(model: nn.Module, shapes: Mapping[str, torch.Size]) -> list[Claim]:
    """Finds the claims on every trainable parameter.

    Args:
        model: the module whose parameters are trained.
        shapes: full shape by canonical name (an engine may hold the parameters themselves in shards).

    Raises:
        PrivacyConfigError: naming the first module or parameter that cannot be clipped per example.
    """
    register_lazily()
    canonical = {id(p): name for name, p in model.named_parameters()}
    found = [c for c in _claims(model, canonical) if c.parameters or depends_on_mode(c.module)]
    claimed = {name for claim in found for name in claim.parameters.values()}
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    missing = trainable - claimed
    if missing:
        raise PrivacyConfigError(f"no clipping rule covers the parameter {min(missing)}; freeze it or add a rule")
    for name in trainable:
        if 0 in shapes[name]:
            raise PrivacyConfigError(f"the parameter {name} of shape {tuple(shapes[name])} has no elements; freeze it")
    return found


def refuse_unsupported(module: nn.Module, path: str) -> None:
    """Raises `PrivacyConfigError` if the module, in its present mode, cannot be trained per example."""
    reason = unsupported_reason(module)
    if reason is not None:
        own = [f"{path}.{name}".lstrip(".") for name, p in module.named_parameters(recurse=False) if p.requires_grad]
        what = f"{type(module).__name__}, trains {', '.join(own)}" if own else type(module).__name__
        raise PrivacyConfigError(f"layer {path or 'root'} ({what}) is refused: {reason}")


def _claims(model: nn.Module, canonical: Mapping[int, str]) -> Iterator[Claim]:
    for path, module in model.named_modules():
        refuse_unsupported(module, path)
        own = {name: canonical[id(p)] for name, p in module.named_parameters(recurse=False) if p.requires_grad}
        yield Claim(module, path, own)
