"""Deterministic initialisation, the same on every rank and device for the same seed.

As in DP-Cap (Sander et al. 2024, https://arxiv.org/abs/2403.02506): Linear and the flattened patch convolution Xavier
uniform (Glorot & Bengio 2010) with zero biases, LayerNorm (1, 0); class token, type embeddings and
learned positions N(0, 0.02^2). Embeddings are N(0, std^2) with the std of `DecoderConfig.embedding_std`. A parameter that
several modules share is drawn once, for the first of them.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

EMBEDDING_STD = 0.02

After = Callable[[nn.Module], None]
"""Called with every module as soon as its own parameters (not those of its children) are set."""


@torch.no_grad()
def init_weights(
    model: nn.Module,
    generator: torch.Generator | None = None,
    *,
    token_std: float = EMBEDDING_STD,
    device: torch.device | str = "cpu",
    after: After | None = None,
) -> None:
    """Overwrite every parameter and recompute every fixed buffer of `model`, in the order of its modules.

    One module after the other, so that a model too large for one process can be sharded while it is built. Parameters that
    modules share stay shared.

    Args:
        generator: source of the random numbers; None takes torch's global CPU generator. Numbers are drawn in float32
            on the generator's device and copied, so that dtype and device of the model do not matter.
        token_std: standard deviation of `nn.Embedding` weights.
        device: where what is still on the meta device is made.
        after: e.g. shards the module; it must not draw from the generator.
    """
    first: dict[int, tuple[nn.Module, str]] = {}
    # Module -> name there -> (the first module that owns the parameter, name there).
    shared: dict[nn.Module, dict[str, tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            owner, first_name = first.setdefault(id(parameter), (module, name))
            if owner is not module:
                shared.setdefault(module, {})[name] = owner, first_name
    for module in model.modules():
        borrowed = shared.get(module, {})
        for name in borrowed:
            module.register_parameter(name, None)
        if any(t.is_meta for t in (*module.parameters(recurse=False), *module.buffers(recurse=False))):
            module.to_empty(device=device, recurse=False)
        _init_module(module, generator, token_std)
        for name, (owner, first_name) in borrowed.items():
            module.register_parameter(name, owner.get_parameter(first_name))
        if after is not None:
            after(module)


def _init_module(module: nn.Module, generator: torch.Generator | None, token_std: float) -> None:
    """The module's own parameters and buffers, not those of its children."""
    device = torch.device("cpu") if generator is None else generator.device

    def normal_(tensor: Tensor, std: float) -> None:
        sample = torch.empty(tensor.shape, dtype=torch.float32, device=device)
        tensor.copy_(sample.normal_(0.0, std, generator=generator))

    if isinstance(module, nn.Linear | nn.Conv2d | nn.LayerNorm):
        if isinstance(module, nn.LayerNorm):
            module.weight.fill_(1.0)
        elif module.weight is not None:
            num_out, num_in = module.weight.flatten(1).shape
            bound = math.sqrt(6.0 / (num_in + num_out))
            sample = torch.empty(module.weight.shape, dtype=torch.float32, device=device)
            module.weight.copy_(sample.uniform_(-bound, bound, generator=generator))
        if module.bias is not None:
            module.bias.zero_()
        return
    if isinstance(module, nn.Embedding):
        normal_(module.weight, token_std)
        return
    for parameter in module.parameters(recurse=False):
        normal_(parameter, EMBEDDING_STD)
    if callable(reset_buffers := getattr(module, "reset_buffers", None)):
        reset_buffers()
