"""Layers that cannot be trained with per-example clipping, each with what to use instead."""

from torch import nn

from privacy.clipping.rules.registry import RULES


def unsupported_reason(module: nn.Module) -> str | None:
    """Why this module is refused, or None. Modes (training, eval) count as they are now."""
    return _mixing_reason(module) or (_untrainable_reason(module) if _is_trained(module) else None)


def depends_on_mode(module: nn.Module) -> bool:
    """Whether `model.train()` could turn a supported module into an unsupported one."""
    return isinstance(module, (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd, nn.MultiheadAttention))


def _is_trained(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters(recurse=False))


def _mixing_reason(module: nn.Module) -> str | None:
    """What is wrong even with frozen parameters: example i's gradient would depend on the others, or on its place."""
    match module:
        case nn.modules.batchnorm._BatchNorm() if module.training or module.running_mean is None:
            return "it mixes the examples of a batch (use LayerNorm or GroupNorm)"
        case nn.modules.dropout._DropoutNd() if module.training and module.p > 0:
            return "its mask depends on the place of an example in the batch (set p = 0, or call model.eval())"
        case nn.MultiheadAttention() if module.training and module.dropout > 0:
            return "its dropout mask depends on the place of an example in the batch (set dropout = 0)"
        case _:
            return None


def _untrainable_reason(module: nn.Module) -> str | None:
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
        case nn.Embedding() if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
            return "max_norm, scale_grad_by_freq and sparse embeddings are not supported"
        case nn.modules.instancenorm._InstanceNorm() | nn.EmbeddingBag():
            return "no clipping rule covers it (use GroupNorm or Embedding)"
        case _ if nn.utils.parametrize.is_parametrized(module):
            return "its weights are computed by a parametrization (remove it with parametrize.remove_parametrizations)"
        case _ if type(module) not in RULES and type(module).__module__.startswith("torch.nn."):
            return "no clipping rule covers it; add a rule (docs/add_a_rule.md) or freeze its parameters"
        case _:
            return None
