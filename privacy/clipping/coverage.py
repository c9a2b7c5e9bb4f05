"""Who clips which parameter: every trainable one is claimed by exactly one rule, or training refuses to start (contract 3).

Three ways to be claimed: the module that owns the parameter has a rule for its type; or the parameter is a raw one (class
token, positions) with a leading dimension of 1, which the model uses by broadcasting along the batch; or, for a parameter
that several modules share, both of its owners have a claim, and their contributions add up.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from privacy.clipping.rules import RULES, unsupported_reason
from privacy.errors import PrivacyConfigError


@dataclass(frozen=True)
class Claim:
    """A module together with the trainable parameters that it owns directly: local name -> canonical name."""

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
    canonical = {id(p): name for name, p in model.named_parameters()}
    found = [c for c in _claims(model, canonical) if c.parameters]
    for claim in found:
        if claim.is_raw:
            _check_raw(claim, shapes)
    claimed = {name for claim in found for name in claim.parameters.values()}
    missing = {name for name, p in model.named_parameters() if p.requires_grad} - claimed
    if missing:
        raise PrivacyConfigError(f"no clipping rule covers the parameter {min(missing)}; freeze it or add a rule")
    return found


def _claims(model: nn.Module, canonical: Mapping[int, str]) -> Iterator[Claim]:
    for path, module in model.named_modules():
        reason = unsupported_reason(module)
        if reason is not None:
            raise PrivacyConfigError(f"layer {path or 'root'} ({type(module).__name__}) is refused: {reason}")
        own = {
            name: canonical[id(p)] for name, p in module.named_parameters(recurse=False) if p.requires_grad
        }
        yield Claim(module, path, own)


def _check_raw(claim: Claim, shapes: Mapping[str, torch.Size]) -> None:
    for local, name in claim.parameters.items():
        shape = shapes[name]
        if len(shape) < 2 or shape[0] != 1:
            raise PrivacyConfigError(
                f"no clipping rule covers the parameter {name} of shape {tuple(shape)} "
                f"in {type(claim.module).__name__}.{local}: add a rule for this layer, freeze the parameter, "
                "or give it a leading dimension of 1 that broadcasts along the batch"
            )
