"""LoRA adapters for peft (https://github.com/huggingface/peft) over a ViTModel; without peft.

peft has the way back: `model.merge_and_unload().save_pretrained(DIR)` adds adapters into a
ViTModel, which is then imported. Our fused qkv has one adapter, W + (alpha / r) U D. peft has one
for each of query, key and value: each gets the same D and its rows of U, so that both compute the
same numbers.
"""

from typing import Any

from torch import Tensor

from models.classifier import AdaptedLinear
from models.converters.weights import WeightsError
from models.vit import VisionTransformer

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
BASE = "base"
_PREFIX = "base_model.model."
_LAYERS = {
    "attention.qkv": ("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    "attention.out": ("attention.o_proj",),
    "mlp.up": ("mlp.fc1",),
    "mlp.down": ("mlp.fc2",),
}
"""Our layers, and what they are in a ViTModel of transformers 5 in memory, which is where peft
looks for them."""


def to_peft(encoder: VisionTransformer) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns (adapter_config.json, tensors) of an encoder's adapters.

    The encoder itself belongs into the folder `base` inside.

    Raises:
        WeightsError: the encoder has none.
    """
    tensors: dict[str, Tensor] = {}
    adapted_layers: dict[str, AdaptedLinear] = {}
    for number, block in enumerate(encoder.blocks):
        for ours, theirs in _LAYERS.items():
            layer = block.get_submodule(ours)
            if not isinstance(layer, AdaptedLinear):
                continue
            for name, up in zip(theirs, layer.adapter_up.weight.chunk(len(theirs)), strict=True):
                path = f"{_PREFIX}layers.{number}.{name}"
                tensors[f"{path}.lora_A.weight"] = layer.adapter_down.weight.detach().clone()
                tensors[f"{path}.lora_B.weight"] = up.detach().clone()
                adapted_layers[name.rpartition(".")[2]] = layer
    if not adapted_layers:
        raise WeightsError(
            "this model was trained without adapters, so peft does not apply: use --format hf"
        )
    # All adapters of a model have one rank and one alpha.
    layer = next(iter(adapted_layers.values()))
    rank = layer.adapter_down.out_features
    alpha = layer.scale * rank
    config = {
        "peft_type": "LORA",
        "bias": "none",
        "r": rank,
        "lora_alpha": round(alpha) if alpha.is_integer() else alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(adapted_layers),
        "base_model_name_or_path": BASE,
        "task_type": None,
        "inference_mode": True,
    }
    return config, tensors
