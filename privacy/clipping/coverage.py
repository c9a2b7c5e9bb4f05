"""Who clips which parameter: every trainable one is claimed by exactly one rule, or training refuses to start (contract 3).

Three ways to be claimed: the module that owns the parameter has a rule for its type; or the parameter is a raw one (class
token, positions, layer scale) that the module's forward reads, and then raw.py splits its use by example or refuses it at the
first forward; or, for a parameter that several modules share, all of its owners have a claim, and their contributions add up.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from ..errors import PrivacyConfigError
from .rules import RULES, register_lazily
from .sharded import kind_of


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
        return kind_of(self.module) not in RULES


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
    owners = []
    for path, module in model.named_modules():
        refuse_unsupported(module, path)
        parameters = {name: canonical[id(p)] for name, p in module.named_parameters(recurse=False) if p.requires_grad}
        if parameters or depends_on_mode(module):
            owners.append(Claim(module, path, parameters))
    claimed = {name for claim in owners for name in claim.parameters.values()}
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    missing = trainable - claimed
    if missing:
        raise PrivacyConfigError(f"no clipping rule covers the parameter {min(missing)}; freeze it or add a rule")
    for name in trainable:
        if 0 in shapes[name]:
            raise PrivacyConfigError(f"the parameter {name} of shape {tuple(shapes[name])} has no elements; freeze it")
    return owners


def refuse_unsupported(module: nn.Module, path: str) -> None:
    """Raises `PrivacyConfigError` if the module, in its present mode, cannot be trained per example."""
    reason = unsupported_reason(module)
    if reason is not None:
        names = [f"{path}.{name}".lstrip(".") for name, p in module.named_parameters(recurse=False) if p.requires_grad]
        what = f"{type(module).__name__}, trains {', '.join(names)}" if names else type(module).__name__
        raise PrivacyConfigError(f"layer {path or 'root'} ({what}) is refused: {reason}")


def unsupported_reason(module: nn.Module) -> str | None:
    """Why this module is refused and what to use instead, or None. Modes (training, eval) count as they are now."""
    match module:  # These are wrong even with frozen parameters: an example's gradient would depend on the others.
        case nn.modules.batchnorm._BatchNorm() if module.training or module.running_mean is None:
            return "it mixes the examples of a batch (use LayerNorm or GroupNorm)"
        case nn.modules.dropout._DropoutNd() if module.training and module.p > 0:
            return "its mask depends on the place of an example in the batch (set p = 0, or call model.eval())"
        case nn.MultiheadAttention() if module.training and module.dropout > 0:
            return "its dropout mask depends on the place of an example in the batch (set dropout = 0)"
        case nn.modules.instancenorm._InstanceNorm() if module.training and module.track_running_stats:
            return (
                "it keeps running statistics of its examples, which would leave the run without noise (use GroupNorm)"
            )
        case nn.Embedding() | nn.EmbeddingBag() if module.max_norm is not None:
            return "max_norm shrinks the rows that examples look up, which would leave the run without noise (max_norm = None)"
    if not any(p.requires_grad for p in module.parameters(recurse=False)):
        return None
    match module:
        case nn.modules.batchnorm._BatchNorm():
            return "its parameters cannot be trained per example (use LayerNorm or GroupNorm)"
        case nn.MultiheadAttention():
            return (
                "it reads its weights without calling its layers (use nn.Linear for query, key, value and output around "
                "F.scaled_dot_product_attention)"
            )
        case nn.ParameterList() | nn.ParameterDict():
            return "its parameters are read without calling it (make them attributes of the module that uses them)"
        case nn.Embedding() if module.scale_grad_by_freq or module.sparse:
            return "scale_grad_by_freq and sparse embeddings are not supported"
        case nn.modules.instancenorm._InstanceNorm():
            return "no clipping rule covers it (use GroupNorm)"
        case nn.EmbeddingBag():
            return "no clipping rule covers it (use nn.Embedding and sum or mean over its tokens)"
        case nn.RNNBase() | nn.RNNCellBase():
            return "no clipping rule covers it (build the cell of nn.Linear layers, or freeze it)"
        case nn.Bilinear():
            return "no clipping rule covers it (use nn.Linear on the outer product of its inputs, or freeze it)"
        case _ if nn.utils.parametrize.is_parametrized(module):
            return "its weights are computed by a parametrization (remove it with parametrize.remove_parametrizations)"
        case _ if kind_of(module) not in RULES and kind_of(module).__module__.startswith("torch.nn."):
            return "no clipping rule covers it; add a rule (docs/extending.md) or freeze its parameters"
        case _:
            return None


def depends_on_mode(module: nn.Module) -> bool:
    """Whether `model.train()` could turn a supported module into an unsupported one."""
    return isinstance(module, (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd, nn.MultiheadAttention))
