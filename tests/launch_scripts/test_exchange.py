"""export.py under attack: official files as they may come, captioners by transformers' own loading, every bit back, and no
guarantee that is none."""

import argparse
import json
import pickle
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor

from privacy.plan import make_plan
from privacy.plan_request import PlanRequest
from tests.launch_scripts.conftest import Run
from tests.launch_scripts.test_export import DPCAP, EPSILON, VIP, statements
from tests.models import test_convert_dpcap as dpcap
from tests.models.test_convert_vip import Payload, published
from tests.trainer.trained_runs import recipe, trained
from trainer.weights.open_model import open_model


def words(folder: Path) -> Path:
    """A tokenizer as large as the made captioner's vocabulary."""
    names = ["[PAD]", "[CLS]", "[SEP]", *(f"word{number}" for number in range(dpcap.V - 3))]
    Tokenizer(WordLevel({name: number for number, name in enumerate(names)}, "[PAD]")).save(str(folder / "words.json"))
    return folder / "words.json"


def as_trained(state: dict[str, Tensor]) -> dict[str, Any]:
    """What a training script saves next to the weights."""
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight])
    with torch.enable_grad():
        weight.sum().backward()
    optimizer.step()
    return {
        "model": OrderedDict(state), "optimizer": optimizer.state_dict(), "epoch": 7, "scaler": {"scale": 65536.0},
        "args": argparse.Namespace(lr=0.1, output_dir="./out", betas=(0.9, 0.95)), "steps": [1, 2], "done": False,
    }  # fmt: skip


def wrapped(prefix: str) -> Callable[[dict[str, Tensor]], dict[str, Any]]:
    return lambda state: {"model": {prefix + name: value for name, value in state.items()}}


COMING: dict[str, Callable[[dict[str, Tensor]], dict[str, Any]]] = {
    "as trained": as_trained,
    "data parallel": wrapped("module."),
    "per-example gradients in data parallel": wrapped("_module.module."),
    "compiled": wrapped("_orig_mod."),
    "without a key": lambda state: dict(state),
    "half precision": lambda state: {"model": {n: v.bfloat16() if "type" not in n else v for n, v in state.items()}},
}


@pytest.mark.parametrize("way", COMING)
@torch.no_grad()
def test_official_files_as_they_may_come(way: str, command: Run, tmp_path: Path) -> None:
    """Buffers, optimizer states and wrappers' prefixes change nothing in what the imported models compute."""
    images_BCHW, tokens_BL = dpcap.pairs()
    torch.save(COMING[way](dpcap.checkpoint()), tmp_path / "dpcap.pth")
    told = (*DPCAP, "--tokenizer", words(tmp_path))
    command("--import", "dpcap", tmp_path / "dpcap.pth", tmp_path / "captioner", *told)
    opened = open_model(tmp_path / "captioner", dtype=torch.float64)
    released = dpcap.Released(dpcap.checkpoint())
    tolerance = 0.2 if way == "half precision" else 1e-5
    found = opened.model(images_BCHW, tokens_BL, output="logits")
    assert (found - released.logits(images_BCHW, tokens_BL)).abs().max() < tolerance
    torch.save(COMING[way](published()), tmp_path / "vip.pth")
    command("--import", "vip", tmp_path / "vip.pth", tmp_path / "mae", *VIP)
    own = dict(open_model(tmp_path / "mae").model.named_parameters())
    expected = published()["blocks.1.mlp.fc1.weight"]
    if way == "half precision":
        expected = expected.bfloat16().float()
    assert torch.equal(own["encoder.blocks.1.mlp.up.weight"], expected)


def test_a_prefix_of_some_names_is_none() -> None:
    """Only what all names share is a wrapper's."""
    from models.converters.weights import without_wrappers

    state = {"module.a": torch.ones(1), "b": torch.ones(1)}
    assert without_wrappers(state).keys() == state.keys() and without_wrappers({}) == {}
    assert without_wrappers({"module.module.a": torch.ones(1)}).keys() == {"a"}


def without(name: str) -> Callable[[dict[str, Tensor]], dict[str, Any]]:
    return lambda state: {"model": {n: v for n, v in state.items() if n != name}}


def with_one(name: str, value: Any) -> Callable[[dict[str, Tensor]], dict[str, Any]]:
    return lambda state: {"model": state | {name: value}}


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (without("decoder_image_type_embedding"), "lacks decoder_image_type_embedding"),
        (with_one("decoder.layers.1.self_attn.c_attn.weight", torch.ones(2, 3)), "c_attn.weight has shape (2, 3), but"),
        (with_one("norm.weight", torch.full((dpcap.D,), torch.nan)), "norm.weight holds NaN or infinity"),
        (with_one("norm.weight", "text"), "entry 'norm.weight' is a str, but tensors were expected"),
        (lambda _: {"model": {}}, "holds no dictionary of tensors"),
        (lambda state: {"state_dict": state}, "entry 'state_dict' is a dict"),
    ],
)  # fmt: skip
def test_other_structures_are_one_line(
    change: Callable[[dict[str, Tensor]], dict[str, Any]], line: str, command: Run, tmp_path: Path
) -> None:
    torch.save(change(dpcap.checkpoint()), tmp_path / "x.pth")
    told = (*DPCAP, "--tokenizer", words(tmp_path))
    assert line in command("--import", "dpcap", tmp_path / "x.pth", tmp_path / "out", *told, code=2)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["vip", "dpcap", "hf"])
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_code_in_a_file_does_not_run(kind: str, command: Run, tmp_path: Path) -> None:
    trace, folder = tmp_path / "ran", tmp_path / "folder"
    folder.mkdir()
    torch.save({"model": {"cls_token": Payload(trace)}}, folder / "pytorch_model.bin")
    (folder / "bare.pth").write_bytes(pickle.dumps({"model": Payload(trace)}))
    config = {"model_type": "vit", "hidden_size": 8, "patch_size": 4, "image_size": 8, "num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    files = [folder] if kind == "hf" else [folder / "pytorch_model.bin", folder / "bare.pth"]
    for file in files:
        line = command("--import", kind, file, tmp_path / "out", code=2)
        assert "is not loaded, since such a file could run code" in line
    assert not trace.exists() and not (tmp_path / "out").exists()


def bits(path: Path) -> dict[str, Tensor]:
    return {n: p.detach().view(torch.int32) for n, p in open_model(path).model.named_parameters()}


KINDS = {
    "captioner": recipe,
    "masked_autoencoder": lambda: recipe("masked_autoencoder"),
    "classifier": lambda: recipe(
        "classifier", "encoder_depth = 1, encoder_width = 32, patch_size = 4, num_classes = 3"
    ),
    "adapters": lambda: recipe(
        "classifier",
        'encoder_depth = 1, encoder_width = 32, patch_size = 4, num_classes = 3, trainable = "adapters", adapter_rank = 2',
    ),
}


@pytest.mark.parametrize(
    "kind",
    ["masked_autoencoder", "captioner", *(pytest.param(k, marks=pytest.mark.full) for k in ("classifier", "adapters"))],
)
def test_every_bit_comes_back(kind: str, command: Run, tmp_path: Path) -> None:
    """By our names for every kind; through transformers' files too where these hold the whole model."""
    trained(tmp_path / "run", KINDS[kind]())
    before = bits(tmp_path / "run")
    ways = [("safetensors", "")] + ([("hf", "masked_autoencoder")] if kind == "masked_autoencoder" else [])
    for way, inner in ways:
        command("--checkpoint", tmp_path / "run", "--format", way, tmp_path / way)
        command("--import", way, tmp_path / way / inner, tmp_path / f"{way}-back")
        after = bits(tmp_path / f"{way}-back")
        assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)
        assert open_model(tmp_path / f"{way}-back").manifest["formal_guarantee"] is False


@pytest.mark.parametrize("form", ["hf", *(pytest.param(f, marks=pytest.mark.full) for f in ("safetensors", "timm"))])
def test_a_simulation_is_never_called_private(form: str, command: Run, tmp_path: Path) -> None:
    reason = "a simulation of a larger batch"
    plan = make_plan(PlanRequest(num_examples=2000, expected_batch_size=8, num_steps=6, noise_multiplier=4.0, target_delta=1e-5,
                     informal_reasons=(reason,)))  # fmt: skip
    trained(tmp_path / "run", recipe(), plan=plan)
    said = command("--checkpoint", tmp_path / "run", "--format", form, tmp_path / "out")
    text = statements(tmp_path / "out")
    assert "formal_guarantee: false" in said and reason in said and reason in text
    assert not EPSILON.search(said) and not EPSILON.search(text) and "differential-privacy]" not in text
    assert "formal_guarantee: true" not in text and '"formal_guarantee": true' not in text
    assert "No epsilon is claimed" in text and '"formal_guarantee": false' in text


def test_weights_from_safetensors_with_a_prefix(command: Run, tmp_path: Path) -> None:
    save_file({f"module.{name}": value for name, value in published().items()}, tmp_path / "vip.safetensors")
    command("--import", "vip", tmp_path / "vip.safetensors", tmp_path / "out", *VIP)
    assert open_model(tmp_path / "out").manifest["model"]["kind"] == "masked_autoencoder"
