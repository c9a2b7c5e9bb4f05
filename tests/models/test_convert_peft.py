"""Adapters for peft, and merged by it, compared with what peft itself computes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from models.adapters import add_adapters, without_adapters
from models.converters import read_foreign
from models.converters.huggingface import to_vit_model
from models.converters.peft import BASE, to_peft
from models.converters.weights import WeightsError
from models.image_encoder import ImageEncoder
from models.vit import VisionTransformer
from tests.models.test_convert_huggingface import images, our_encoder, randomised, write


def adapted(rank: int, alpha: float, layers: Any) -> VisionTransformer:
    encoder = our_encoder().encoder
    add_adapters(encoder, rank=rank, alpha=alpha, layers=layers)
    encoder = randomised(encoder)
    assert isinstance(encoder, VisionTransformer)
    return encoder


def exported(folder: Path, encoder: VisionTransformer) -> Path:
    """As `export.py --format peft` writes it."""
    config, tensors = to_peft(encoder)
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    write(folder / BASE, to_vit_model(without_adapters(encoder, merged=False)))
    return folder


@torch.no_grad()
@pytest.mark.full
@pytest.mark.parametrize(("rank", "alpha", "layers"), [(1, 3.0, "attention"), (4, 8.0, "all"), (3, 0.5, "all")])
def test_peft_computes_what_ours_compute(rank: int, alpha: float, layers: str, tmp_path: Path) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    encoder = adapted(rank, alpha, layers)
    folder = exported(tmp_path / "out", encoder)
    base = transformers.ViTModel.from_pretrained(folder / BASE, add_pooling_layer=False)
    theirs = peft.PeftModel.from_pretrained(base, folder).eval()
    torch.testing.assert_close(theirs(images()).last_hidden_state, encoder(images()), atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.full
def test_adapters_of_peft_come_in_merged_by_peft(tmp_path: Path) -> None:
    """Separate adapters of query, key and value, which no fused adapter of the same rank could hold."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    base = write(tmp_path / "base", to_vit_model(our_encoder().encoder))
    model = transformers.ViTModel.from_pretrained(base, add_pooling_layer=False)
    theirs = peft.get_peft_model(model, peft.LoraConfig(r=3, lora_alpha=5, target_modules=["k_proj", "o_proj", "fc1"]))
    for name, weight in theirs.named_parameters():
        if "lora_" in name:
            nn.init.normal_(weight, std=0.1)
    expected = theirs.eval()(images()).last_hidden_state
    theirs.merge_and_unload().save_pretrained(tmp_path / "merged")
    config, parameters = read_foreign("hf", tmp_path / "merged")
    ours = ImageEncoder(config)
    ours.load_state_dict(parameters, strict=False)
    torch.testing.assert_close(ours.eval().encoder(images()), expected, atol=1e-5, rtol=1e-5)


def test_the_adapters_are_low_rank_parts_of_what_they_compute() -> None:
    """The three parts of a fused layer, put together from peft's factors, add what our adapter adds."""
    encoder = adapted(4, 8.0, "all")
    config, tensors = to_peft(encoder)
    assert (config["r"], config["lora_alpha"]) == (4, 8) and config["target_modules"] == sorted(
        ("q_proj", "k_proj", "v_proj", "o_proj", "fc1", "fc2")
    )
    where = "base_model.model.layers.1.attention"
    added = [
        2.0 * tensors[f"{where}.{name}.lora_B.weight"] @ tensors[f"{where}.{name}.lora_A.weight"]
        for name in ("q_proj", "k_proj", "v_proj")
    ]
    layer, x = encoder.blocks[1].get_submodule("attention.qkv"), torch.randn(5, 32)
    torch.testing.assert_close(layer(x), x @ (layer.weight + torch.cat(added)).T, atol=1e-5, rtol=1e-5)
    with pytest.raises(WeightsError, match="has no adapters"):
        to_peft(our_encoder().encoder)
