"""Claims of rules on parameters: one for each, or training refuses to start (contract 3).

A parameter has a claim in one of four ways: the module that owns it has a rule for its type; or the
module's forward reads it itself, and raw_parameters.py gives every example a copy; or several
modules share it, all of them have a claim, and their contributions add up; or the self-check has
given it to a module around it, which is differentiated per example as a whole (fallback.py).
"""

from collections.abc import Mapping

import torch
from torch import nn

from ..errors import PrivacyConfigError
from ..ranks.fsdp import is_dtensor, kind_of
from .fallback import Claim, Uncovered, plan_of
from .raw_parameters import is_copied, is_table
from .rules import RULES, register_lazily

HARMLESS = {
    "__init__",
    "__module__",
    "__doc__",
    "__qualname__",
    "__annotations__",
    "__firstlineno__",
    "__static_attributes__",
    "__constants__",
    "extra_repr",
    "reset_parameters",
    "__repr__",
    "__parameters__",
    "__orig_bases__",
}
"""Names that a subclass may define and still compute what its base class does."""
BY_MODE = (
    nn.modules.batchnorm._BatchNorm,
    nn.modules.dropout._DropoutNd,
    nn.MultiheadAttention,
    nn.RNNBase,
)
"""Modules that `model.train()` could turn from supported into unsupported ones."""


def rule_of(module: nn.Module) -> type[nn.Module] | None:
    """Returns the class whose clipping rule is the module's; None without a rule.

    It is the module's own class, or one whose whole behaviour that class inherits.
    """
    overrides: set[str] = set()
    for kind in kind_of(module).__mro__:
        if kind in RULES:
            return None if any(hasattr(kind, name) for name in overrides) else kind
        overrides |= vars(kind).keys() - HARMLESS
    return None


def claims(model: nn.Module, shapes: Mapping[str, torch.Size]) -> list[Claim]:
    """Returns the claims on every trainable parameter; those of the fallback come first.

    Args:
        model: the module whose parameters are trained.
        shapes: full shape by canonical name (an engine may hold the parameters in shards).

    Raises:
        PrivacyConfigError: naming all modules that cannot be clipped per example, or a parameter;
            `Uncovered`, where the fallback might do; or the fallback has weights that are held in
            shards.
    """
    register_lazily()
    canonical = {id(p): name for name, p in model.named_parameters()}
    plan = plan_of(model)
    owners = []
    # Modules that the fallback differentiates as a whole.
    for path in dict.fromkeys(plan.covers.values()):
        module = model.get_submodule(path)
        covered_names: dict[str, str] = {}
        for local, parameter in module.named_parameters():
            name = canonical[id(parameter)]
            if not parameter.requires_grad or plan.covers.get(name) != path:
                continue
            if is_dtensor(parameter) or parameter.shape != shapes[name]:
                raise PrivacyConfigError(
                    f"{name} is in {path or 'the model'}, which is differentiated per example as a "
                    "whole, and that takes whole weights: train unsharded, or freeze it"
                )
            covered_names[local] = name
        if covered_names:
            owners.append(Claim(module, path, covered_names, plan, is_whole=True))
    covered = {name for claim in owners for name in claim.parameters.values()}
    refusals: list[tuple[str, list[str]]] = []
    for path, module in model.named_modules():
        parameters = {
            name: canonical[id(p)]
            for name, p in module.named_parameters(recurse=False)
            if p.requires_grad
        }
        uncovered = {local: name for local, name in parameters.items() if name not in covered}
        reason = mixing_reason(module)
        # Names for the fallback; empty where it cannot help.
        to_lift: list[str] = []
        if reason is None and uncovered:
            reason = reason_without_rule(module)
            if reason is not None:
                to_lift = [path] if path else [*uncovered.values()]
            elif rule_of(module) is None:
                for local, name in uncovered.items():
                    has_copies = is_copied(shapes[name]) or is_table(module, local)
                    if not has_copies and name not in plan.layouts:
                        to_lift.append(name)
                if to_lift:
                    reason = (
                        "its forward reads them itself (use nn.Linear for a matrix, shape "
                        "(1, 1, n) for what is added to all tokens, or a rule for its type: "
                        "docs/extending.md)"
                    )
        if reason is not None:
            refusals.append((refusal(module, path, reason), to_lift))
        if parameters or isinstance(module, BY_MODE):
            owners.append(Claim(module, path, parameters, plan))
    if refusals:
        lines = [line for line, _ in refusals]
        message = lines[0]
        if len(lines) > 1:
            message = f"{len(lines)} layers are refused: " + "; ".join(lines)
        if not all(names for _, names in refusals):
            raise PrivacyConfigError(message)
        raise Uncovered(message, [name for _, names in refusals for name in names])
    claimed = {name for claim in owners for name in claim.parameters.values()}
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    missing = trainable - claimed
    if missing:
        raise PrivacyConfigError(
            f"no clipping rule covers the parameter {min(missing)}; freeze it or add a rule"
        )
    for name in trainable:
        if 0 in shapes[name]:
            raise PrivacyConfigError(
                f"the parameter {name} of shape {tuple(shapes[name])} has no elements; freeze it"
            )
    return owners


def refusal(module: nn.Module, path: str, reason: str) -> str:
    """Returns the line that refuses a module."""
    names = []
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.requires_grad:
            names.append(f"{path}.{name}".lstrip("."))
    description = type(module).__name__
    if names:
        description += f", trains {', '.join(names)}"
    return f"layer {path or 'root'} ({description}) is refused: {reason}"


def mixing_reason(module: nn.Module) -> str | None:
    """Returns why an example's gradient would depend on the others, or on chance; or None.

    It holds even with frozen parameters, and says what to do. Modes (training, eval) count as they
    are now.
    """
    match module:
        case nn.modules.batchnorm._BatchNorm() if module.training or module.running_mean is None:
            return (
                "it mixes the examples of a batch (use LayerNorm or GroupNorm; fix(model) "
                "replaces it)"
            )
        case nn.modules.dropout._DropoutNd() if module.training and module.p > 0:
            return (
                "its mask depends on the place of an example in the batch (set p = 0, or call "
                "model.eval())"
            )
        case nn.MultiheadAttention() | nn.RNNBase() if module.training and module.dropout > 0:
            return (
                "its dropout mask depends on the place of an example in the batch (set dropout = 0)"
            )
        case nn.modules.instancenorm._InstanceNorm() if (
            module.training and module.track_running_stats
        ):
            return (
                "it keeps running statistics of its examples, which would leave the run without "
                "noise (use GroupNorm)"
            )
        case nn.Embedding() | nn.EmbeddingBag() if module.max_norm is not None:
            return (
                "max_norm shrinks the rows that examples look up, which would leave the run "
                "without noise (max_norm = None)"
            )
    return None


def reason_without_rule(module: nn.Module) -> str | None:
    """Returns why no rule covers the parameters that the module itself trains; or None.

    It says what to do where the fallback does not cover them either.
    """
    if not any(p.requires_grad for p in module.parameters(recurse=False)):
        return None
    match module:
        case nn.MultiheadAttention():
            return (
                "it reads its weights without calling its layers (use nn.Linear for query, key, "
                "value and output around F.scaled_dot_product_attention)"
            )
        case nn.ParameterList() | nn.ParameterDict():
            return (
                "its parameters are read without calling it (make them attributes of the module "
                "that uses them)"
            )
        case nn.Embedding() | nn.EmbeddingBag() if module.scale_grad_by_freq or module.sparse:
            return "scale_grad_by_freq and sparse embeddings are not supported"
        case _ if nn.utils.parametrize.is_parametrized(module):
            return (
                "its weights are computed by a parametrization (remove it with "
                "parametrize.remove_parametrizations)"
            )
        case _ if rule_of(module) is None and kind_of(module).__module__.startswith("torch.nn."):
            return (
                "no clipping rule covers it; add a rule (docs/extending.md) or freeze its "
                "parameters"
            )
        case _:
            return None
