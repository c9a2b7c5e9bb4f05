"""LoRA adapters of peft (https://github.com/huggingface/peft) over a ViTModel; nothing here needs peft.

Our fused qkv has one adapter, W + (alpha / r) U D. peft has one for each of query, key and value: the same D stands in all three,
and each takes its rows of U, so that both compute the same numbers.
"""

import json
import math
from pathlib import Path
from typing import Any

from torch import Tensor

from models.adapters import AdaptedLinear
from models.converters.weights import WeightsError, read_weights
from models.vit import VisionTransformer

CONFIG, WEIGHTS, BASE = "adapter_config.json", "adapter_model.safetensors", "base"
_PREFIX = "base_model.model."
_LAYERS = {
    "attention.qkv": ("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    "attention.out": ("attention.o_proj",),
    "mlp.up": ("mlp.fc1",),
    "mlp.down": ("mlp.fc2",),
}
"""Our layers, and what they are in a ViTModel of transformers 5 in memory, which is where peft looks for them."""
_NEUTRAL = {"peft_type": "LORA", "bias": "none"}
_ABSENT = (
    "modules_to_save", "use_dora", "fan_in_fan_out", "rank_pattern", "alpha_pattern", "lora_bias", "use_qalora",
    "target_parameters", "trainable_token_indices", "layer_replication",
)  # fmt: skip
"""What an adapter that can be added into its weights does not have."""


def to_peft(encoder: VisionTransformer) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(adapter_config.json, tensors) of an encoder's adapters, over a base in the folder `base` inside.

    Raises:
        WeightsError: the encoder has none.
    """
    tensors: dict[str, Tensor] = {}
    found: dict[str, AdaptedLinear] = {}
    for number, block in enumerate(encoder.blocks):
        for ours, theirs in _LAYERS.items():
            layer = block.get_submodule(ours)
            if not isinstance(layer, AdaptedLinear):
                continue
            for name, up in zip(theirs, layer.adapter_up.weight.chunk(len(theirs)), strict=True):
                where = f"{_PREFIX}layers.{number}.{name}"
                tensors[f"{where}.lora_A.weight"] = layer.adapter_down.weight.detach().clone()
                tensors[f"{where}.lora_B.weight"] = up.detach().clone()
                found[name.rpartition(".")[2]] = layer
    if not found:
        raise WeightsError('this encoder has no adapters (model.overrides.trainable = "adapters"): export it as hf')
    layer = next(iter(found.values()))
    rank = layer.adapter_down.out_features
    config = {
        **_NEUTRAL,
        "r": rank,
        "lora_alpha": round(alpha) if (alpha := layer.scale * rank).is_integer() else alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(found),
        "base_model_name_or_path": BASE,
        "task_type": None,
        "inference_mode": True,
    }
    return config, tensors


def base_of(folder: Path) -> Path:
    """The folder of the model under an adapter, as its adapter_config.json names it.

    Raises:
        WeightsError: no such file, or it names no folder of this machine.
    """
    named = _config(folder).get("base_model_name_or_path")
    base = folder / str(named)  # an absolute path stands for itself
    if not named or not base.is_dir():
        raise WeightsError(
            f"{folder / CONFIG}: base_model_name_or_path {named!r} is no folder here: write the base model's "
            "local folder there"
        )
    return base


def deltas(folder: Path) -> dict[str, Tensor]:
    """What the adapters add to the weights of the base: its name in memory -> (out, in).

    Raises:
        WeightsError: another kind of adapter than plain LoRA, or names and shapes that do not fit together.
    """
    config = _config(folder)
    for key, plain in (*_NEUTRAL.items(), *((key, None) for key in _ABSENT)):
        if config.get(key) != plain and (plain or config[key]):
            raise WeightsError(
                f"{folder / CONFIG}: {key} = {config.get(key)!r}: only plain LoRA can be added into weights"
            )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, (int, float)) or not math.isfinite(alpha):
        raise WeightsError(f"{folder / CONFIG}: r = {rank!r} and lora_alpha = {alpha!r} are no rank and no number")
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    state, found = read_weights(folder / WEIGHTS), {}
    for name, down in state.items():
        layer, is_down, _ = name.removeprefix(_PREFIX).partition(".lora_A.")
        if is_down:
            up = state.get(name.replace(".lora_A.", ".lora_B."))
            if up is None or down.dim() != 2 or up.dim() != 2 or down.shape[0] != rank or up.shape[1] != rank:
                raise WeightsError(f"{folder / WEIGHTS}: {name} has no partner of rank {rank}")
            found[f"{layer}.weight"] = scale * up.float() @ down.float()
    if len(state) != 2 * len(found):
        unknown = next(
            (name for name in state if ".lora_A." not in name and ".lora_B." not in name), next(iter(state), None)
        )
        raise WeightsError(f"{folder / WEIGHTS}: {unknown} is no factor of a LoRA adapter")
    return found


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / CONFIG).read_text())
    except (OSError, ValueError) as error:
        raise WeightsError(f"{folder} is no folder that peft saved: {CONFIG}: {error}") from error
    if not isinstance(config, dict):
        raise WeightsError(f"{folder / CONFIG} is no JSON object")
    return config
