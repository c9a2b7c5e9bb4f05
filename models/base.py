"""The base of all models around a vision transformer; it draws their weights.

Initialisation is deterministic, the same on every rank and device for the same seed, as in DP-Cap
(Sander et al. 2024, https://arxiv.org/abs/2403.02506): Linear and the flattened patch convolution
Xavier uniform (Glorot & Bengio 2010) with zero biases, LayerNorm (1, 0); class token, type
embeddings and learned positions N(0, 0.02^2). Embeddings are N(0, std^2) with the std of
`DecoderConfig.embedding_std`. A parameter that several modules share is drawn once, for the first
of them.
"""

import math
from collections.abc import Callable, Collection
from typing import Any, Self

import torch
from torch import Tensor, nn

from models.config import EncoderConfig
from models.vit import VisionTransformer

EMBEDDING_STD = 0.02


class VisionModel(nn.Module):
    """A model whose parameters live in `encoder` and in parts that a subclass adds.

    The subclass's constructor ends with `_init_unless_meta`. Row i of every output depends on row i
    of the inputs alone.
    """

    encoder: VisionTransformer
    token_std = EMBEDDING_STD
    """Standard deviation of the token embedding's initial values, where there is one."""

    def __init__(self, config: Any) -> None:
        """
        Args:
            config: frozen; its `encoder` is a VitConfig.
        """
        super().__init__()
        self.config = config

    @classmethod
    def build(
        cls,
        config: Any,
        *,
        generator: torch.Generator | None = None,
        device: torch.device | str = "cpu",
        module_hook: Callable[[nn.Module], None] | None = None,
    ) -> Self:
        """Returns a model with initialised weights, each drawn once (see `init_weights`)."""
        with torch.device("meta"):
            model = cls(config)
        model.init_weights(generator, device=device, module_hook=module_hook)
        return model

    def start_at_zero(self) -> Collection[nn.Module]:
        """Returns the layers whose weight is zero in the beginning."""
        return ()

    @torch.no_grad()
    def init_weights(
        self,
        generator: torch.Generator | None = None,
        *,
        device: torch.device | str = "cpu",
        module_hook: Callable[[nn.Module], None] | None = None,
    ) -> None:
        """Overwrites all parameters and recomputes all fixed buffers, in the order of the modules.

        Modules are set one after the other, so that a model too large for one process can be
        sharded while it is built. Parameters that modules share stay shared.

        Args:
            generator: source of the random numbers; None takes torch's global CPU generator.
                Numbers are drawn in float32 on the generator's device and copied, so that dtype and
                device of the model do not matter.
            device: where parameters and buffers of the meta device get their memory.
            module_hook: called with every module as soon as its own parameters (not those of its
                children) are set, e.g. to shard them; it must not draw from the generator.
        """
        first_owners: dict[int, tuple[nn.Module, str]] = {}
        # Module -> its name of the parameter -> (first module that owns the parameter, first name).
        shared: dict[nn.Module, dict[str, tuple[nn.Module, str]]] = {}
        for module in self.modules():
            for name, parameter in module.named_parameters(recurse=False):
                owner, first_name = first_owners.setdefault(id(parameter), (module, name))
                if owner is not module:
                    shared.setdefault(module, {})[name] = (owner, first_name)
        zero_layers = self.start_at_zero()
        for module in self.modules():
            borrowed_parameters = shared.get(module, {})
            # Out of the way, so that neither `to_empty` nor `_draw` touches them a second time.
            for name in borrowed_parameters:
                module.register_parameter(name, None)
            tensors = (*module.parameters(recurse=False), *module.buffers(recurse=False))
            if any(tensor.is_meta for tensor in tensors):
                module.to_empty(device=device, recurse=False)
            _draw(module, generator, self.token_std)
            if module in zero_layers:
                module.get_parameter("weight").zero_()
            for name, (owner, first_name) in borrowed_parameters.items():
                module.register_parameter(name, owner.get_parameter(first_name))
            if module_hook is not None:
                module_hook(module)

    def _init_unless_meta(self) -> None:
        """Initialises the model, unless it is on the meta device, where tensors have no memory."""
        if not self.encoder.class_token.is_meta:
            self.init_weights()

    def blocks(self) -> list[nn.Module]:
        """Returns the repeated units in order of use, for activation checkpointing and sharding."""
        decoder = getattr(self, "decoder", None)
        decoder_blocks = () if decoder is None else decoder.blocks
        return [*self.encoder.blocks, *decoder_blocks]


def _draw(module: nn.Module, generator: torch.Generator | None, token_std: float) -> None:
    """Sets the module's own parameters and buffers, not those of its children."""

    def empty_like(tensor: Tensor) -> Tensor:
        # On the generator's device and in float32: the numbers do not depend on the model's own.
        device = "cpu" if generator is None else generator.device
        return torch.empty(tensor.shape, dtype=torch.float32, device=device)

    match module:
        case nn.LayerNorm():
            module.weight.fill_(1.0)
        case nn.Linear() | nn.Conv2d() if module.weight is not None:
            bound = math.sqrt(6.0 / sum(module.weight.flatten(1).shape))
            weight = empty_like(module.weight)
            module.weight.copy_(weight.uniform_(-bound, bound, generator=generator))
        # The weight is another module's.
        case nn.Linear() | nn.Conv2d():
            pass
        case _:
            std = token_std if isinstance(module, nn.Embedding) else EMBEDDING_STD
            for parameter in module.parameters(recurse=False):
                normals = empty_like(parameter).normal_(0.0, std, generator=generator)
                parameter.copy_(normals)
            reset_buffers = getattr(module, "reset_buffers", None)
            if callable(reset_buffers):
                reset_buffers()
            return
    if module.bias is not None:
        module.bias.zero_()


class ImageEncoder(VisionModel):
    """An encoder as other projects release it, without a decoder: for features, without a loss.

    Parameters live in `encoder`, under the names that they have in every other model.
    """

    config: EncoderConfig

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config)
        self.encoder = VisionTransformer(config.encoder)
        self._init_unless_meta()

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Returns normalised tokens (B, T, D), the class token first."""
        tokens_BTD: Tensor = self.encoder(images_BCHW)
        return tokens_BTD
