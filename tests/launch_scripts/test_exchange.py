"""export.py under attack: official files as they may come, captioners by transformers' own loading, every bit back, and no
guarantee that is none."""

import argparse
import json
import pickle
import shutil
import sys
import types
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor

from data.examples.transforms import eval_image
from evaluation.captions import CaptionWriter
from evaluation.sources import encode_png
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


@torch.no_grad()
def test_decoders_with_biases_say_their_activation(command: Run, tmp_path: Path) -> None:
    """The release's have ReLU, and no tensor tells: without a word nothing is written."""
    images_BCHW, tokens_BL = dpcap.pairs()
    state = dpcap.with_biases(dpcap.checkpoint())
    torch.save({"model": state}, tmp_path / "dpcap.pth")
    source = ("--import", "dpcap", tmp_path / "dpcap.pth", tmp_path / "captioner", "--tokenizer", words(tmp_path))
    place = DPCAP.index("--decoder_activation")
    told = [*DPCAP[:place], *DPCAP[place + 2 :]]
    assert "no tensor tells --decoder_activation, and its shapes" in command(*source, *told, code=2)
    assert not (tmp_path / "captioner").exists()
    command(*source, *told, "--decoder_activation", "relu")
    model = open_model(tmp_path / "captioner", dtype=torch.float64).model
    expected = dpcap.Released(state, torch.relu).loss(images_BCHW, tokens_BL)
    assert (model(images_BCHW, tokens_BL, tokens_BL != 0) - expected).abs().max() < 1e-5


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
        (without("blocks.1.norm2.bias"), "lacks blocks.1.norm2.bias"),
        (without("decoder.layers.0.multihead_attn.kv_proj.weight"), "lacks decoder.layers.0.multihead_attn.kv_proj.weight"),
        (without("decoder_image_type_embedding"), "lacks decoder_image_type_embedding"),
        (with_one("head.weight", torch.ones(2, 2)), "has unknown head.weight"),
        (with_one("decoder.layers.1.self_attn.c_attn.weight", torch.ones(2, 3)), "c_attn.weight has shape (2, 3), but"),
        (with_one("text_decoder_pos_embed", torch.ones(1, 9, 5)), "text_decoder_pos_embed has shape (1, 9, 5)"),
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
    ["masked_autoencoder", *(pytest.param(k, marks=pytest.mark.full) for k in ("captioner", "classifier", "adapters"))],
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


@pytest.mark.parametrize(
    ("way", "inner"), [("hf", "captioner"), pytest.param("safetensors", ".", marks=pytest.mark.full)]
)
@torch.no_grad()
def test_a_captioner_by_automatic_loading(
    way: str, inner: str, command: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same captions from transformers' classes alone, and the same losses; our own package of that name stays what it is."""
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    trained(tmp_path / "run", recipe())
    opened = open_model(tmp_path / "run")
    pixels = np.random.default_rng(0).integers(0, 256, (3, 20, 20, 3), dtype=np.uint8)
    pictures = [Image.fromarray(image) for image in pixels]
    ours_BCHW = np.stack([eval_image(encode_png(image), 16) for image in pixels])
    folder = tmp_path / way / inner
    command("--checkpoint", tmp_path / "run", "--format", way, tmp_path / way)
    shutil.copytree(folder, tmp_path / f"elsewhere-{way}")  # nothing of the place where it was made
    folder, package = tmp_path / f"elsewhere-{way}", sys.modules["models"]
    model = transformers.AutoModel.from_pretrained(folder, trust_remote_code=True)
    assert sys.modules["models"] is package and str(folder) not in sys.path and not model.training
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    inputs = processor(pictures, return_tensors="pt")
    assert np.abs(inputs["pixel_values"].numpy() - ours_BCHW).max() < 1e-5
    for options, told in (({}, {}), ({"method": "beam", "num_beams": 3}, {"num_beams": 3})):
        expected = CaptionWriter(opened.model, opened.task.make_example(train=False).tokenizer, **options)(ours_BCHW)  # type: ignore
        found = tokenizer.batch_decode(model.generate(**inputs, **told), skip_special_tokens=True)
        assert found == [caption.text for caption in expected] and any(found)
    told: list[float] = []
    search = model._search.beam_captions
    watched = types.SimpleNamespace(
        beam_captions=lambda *a, **k: (told.append(k["length_penalty"]), search(*a, **k))[1]
    )
    monkeypatch.setattr(model, "_search", watched)
    model.generate(**inputs, num_beams=2, max_new_tokens=2)
    model.generate(**inputs, num_beams=2, max_new_tokens=2, length_penalty=0.5)
    assert told == [1.0, 0.5]
    tokens, mask = opened.task.make_example(train=False).tokenizer.encode("a red circle", 8)  # type: ignore[attr-defined]
    tokens_BL, mask_BL = (torch.from_numpy(x)[None].expand(3, -1) for x in (tokens, mask))
    said = model(inputs["pixel_values"], tokens_BL, mask_BL.long())
    torch.testing.assert_close(
        said.loss, opened.model(torch.from_numpy(ours_BCHW), tokens_BL, mask_BL), atol=1e-5, rtol=1e-5
    )
    text = (tmp_path / way / "README.md").read_text()
    assert "trust_remote_code=True" in text and "## Privacy card" in text


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


def test_weights_from_safetensors_with_a_prefix(command: Run, tmp_path: Path) -> None:
    save_file({f"module.{name}": value for name, value in published().items()}, tmp_path / "vip.safetensors")
    command("--import", "vip", tmp_path / "vip.safetensors", tmp_path / "out", *VIP)
    assert open_model(tmp_path / "out").manifest["model"]["kind"] == "masked_autoencoder"
