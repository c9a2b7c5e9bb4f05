"""Adapters for peft and from it, compared with what peft itself computes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from models.adapters import add_adapters, without_adapters
from models.converters import read_foreign
from models.converters.huggingface import to_vit_model
from models.converters.peft import BASE, deltas, to_peft
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
def features(folder: Path) -> Tensor:
    """Of the encoder that we import."""
    config, parameters = read_foreign("peft", folder)
    model = ImageEncoder(config)
    model.load_state_dict(parameters, strict=False)
    found = model.eval().encoder(images())
    assert isinstance(found, Tensor)
    return found


@torch.no_grad()
@pytest.mark.parametrize(("rank", "alpha", "layers"), [(1, 3.0, "attention"), (4, 8.0, "all"), (3, 0.5, "all")])
def test_ours_come_back_merged(rank: int, alpha: float, layers: str, tmp_path: Path) -> None:
    encoder = adapted(rank, alpha, layers)
    found = features(exported(tmp_path / "out", encoder))
    torch.testing.assert_close(found, encoder(images()), atol=1e-5, rtol=1e-5)
    plain = without_adapters(encoder, merged=False)(images())
    assert (found - plain).abs().max() > 1e-2, "the adapters do something"


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
@pytest.mark.parametrize(
    "target", [["q_proj", "v_proj"], ["k_proj", "o_proj", "fc1", "fc2"], ["q_proj", "k_proj", "v_proj"]]
)
@pytest.mark.parametrize("rslora", [False, True])
def test_we_compute_what_peft_computes(target: list[str], rslora: bool, tmp_path: Path) -> None:
    """Separate adapters of query, key and value, which no fused adapter of the same rank could hold."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    base = write(tmp_path / "base", to_vit_model(our_encoder().encoder))
    model = transformers.ViTModel.from_pretrained(base, add_pooling_layer=False)
    theirs = peft.get_peft_model(model, peft.LoraConfig(r=3, lora_alpha=5, target_modules=target, use_rslora=rslora))
    for name, weight in theirs.named_parameters():
        if "lora_" in name:
            nn.init.normal_(weight, std=0.1)
    theirs.eval().save_pretrained(tmp_path / "lora")
    config = json.loads((tmp_path / "lora/adapter_config.json").read_text())
    config["base_model_name_or_path"] = "../base"
    (tmp_path / "lora/adapter_config.json").write_text(json.dumps(config))
    torch.testing.assert_close(features(tmp_path / "lora"), theirs(images()).last_hidden_state, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("use_dora", True, "only plain LoRA"),
        ("bias", "all", "only plain LoRA"),
        ("peft_type", "IA3", "only plain LoRA"),
        ("modules_to_save", ["classifier"], "only plain LoRA"),
        ("rank_pattern", {"fc1": 2}, "only plain LoRA"),
        ("r", 5, "no partner of rank 5"),
        ("r", 0, "no rank"),
        ("lora_alpha", float("nan"), "no number"),
        ("lora_alpha", None, "no number"),
        ("base_model_name_or_path", "google/vit", "is no folder here"),
        ("base_model_name_or_path", None, "is no folder here"),
    ],
)
def test_other_adapters_are_refused(key: str, value: Any, line: str, tmp_path: Path) -> None:
    folder = exported(tmp_path / "out", adapted(2, 4.0, "attention"))
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(WeightsError, match=line):
        read_foreign("peft", folder)


def test_factors_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    folder = exported(tmp_path / "out", adapted(2, 4.0, "attention"))
    path, first = folder / "adapter_model.safetensors", "base_model.model.layers.0.attention.q_proj.lora_A.weight"
    whole = load_file(path)
    assert len(deltas(folder)) == 4 * len(our_encoder().encoder.blocks)
    for change, line in (
        ({first: whole[first][:, :-1].contiguous()}, "to which an adapter belongs"),
        ({first.replace("layers.0", "layers.9"): whole[first].clone()}, "no partner"),
        ({"base_model.model.layers.0.lora_magnitude_vector": torch.zeros(3)}, "no factor"),
    ):
        save_file(whole | change, path)
        with pytest.raises(WeightsError, match=line):
            read_foreign("peft", folder)
    with pytest.raises(WeightsError, match="has no adapters"):
        to_peft(our_encoder().encoder)
