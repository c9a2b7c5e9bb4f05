"""export.py: what it writes, every bit back, official files as they may come, and a guarantee only where a ledger proves it."""

import argparse
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor

from models.classifier import without_adapters
from privacy.accounting.rounding import rounded_up
from privacy.plan.numbers import make_plan
from privacy.plan.request import PlanRequest
from tests.launch_scripts.conftest import Run
from tests.models.released import (
    OF_ENCODER,
    Released,
    V,
    arguments,
    dpcap_file,
    masks,
    pairs,
    vip_file,
)
from tests.privacy.ledger_files import NUMBERS, PLAN, remove_ledger
from tests.trainer.trained_runs import CONTRADICTED, SECRET, recipe, trained
from trainer.config.recipe import InitSection
from trainer.errors import ConfigError
from trainer.weights.initial_weights import find_checkpoint, initialisation_facts, load_start
from trainer.weights.open_model import open_model

ROOT = Path(__file__).resolve().parents[2]
EPSILON = re.compile(r"epsilon\W{0,3}\d", re.IGNORECASE)
ADAPTERS = 'encoder_depth = 1, encoder_width = 32, patch_size = 4, num_classes = 3, trainable = "adapters", adapter_rank = 2'


@pytest.fixture(scope="module")
def captioner(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A private run of a captioner; its run folder."""
    run = tmp_path_factory.mktemp("runs") / "captions"
    trained(run, recipe())
    return run


def statements(folder: Path) -> str:
    """Everything that people and programs read of a folder, without the source that is copied into it."""
    files = [
        p for p in folder.rglob("*") if p.suffix in (".md", ".json") and p.name != "tokenizer.json"
    ]
    return "\n".join(path.read_text() for path in files)


def images() -> Tensor:
    return torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def test_a_captioner_for_transformers(captioner: Path, command: Run, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    out = tmp_path / "out"
    said = command("--checkpoint", captioner, "--format", "hf", out)
    ours = open_model(captioner).model
    theirs = transformers.ViTModel.from_pretrained(out, add_pooling_layer=False).eval()
    features = theirs(images()).last_hidden_state
    torch.testing.assert_close(features, ours.encoder(images()), atol=1e-5, rtol=1e-5)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(out / "captioner")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (
        ours.config.bos_id,
        ours.config.eos_id,
    )
    # The claim is the ledger's, rounded up, and the whole card is there.
    epsilon = PLAN.epsilon_after(3)
    assert f"epsilon {rounded_up(epsilon)} at delta 1e-05, from its ledger" in said
    readme = (out / "README.md").read_text()
    assert f"formal_guarantee: true, epsilon {rounded_up(epsilon)} at delta 1e-05" in readme
    for words_of_it in (
        "## Privacy card",
        "initialised at random",
        "not a VisionEncoderDecoderModel",
    ):
        assert words_of_it in readme
    assert json.loads((out / "privacy_card.json").read_text())["epsilon"] == pytest.approx(epsilon)
    about = json.loads((out / "config.json").read_text())["about"]
    assert about["attested"] and about["training_data"] == {"provenance": "private"}
    card = pytest.importorskip("huggingface_hub").ModelCard.load(out / "README.md")
    assert (
        card.data.library_name == "transformers"
        and card.data.pipeline_tag == "image-feature-extraction"
    )
    assert (
        "differential-privacy" in card.data.tags and card.data.to_dict()["formal_guarantee"] is True
    )
    # Nothing of private/, and no path of this machine.
    for file in (path.read_bytes() for path in out.rglob("*") if path.is_file()):
        assert SECRET.encode() not in file and str(captioner.parent).encode() not in file


def test_the_exported_captioner_needs_nothing_of_the_project(
    captioner: Path, command: Run, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    command("--checkpoint", captioner, "--format", "safetensors", out)
    ours = open_model(captioner).model
    tokens_BL = torch.randint(0, 4000, (2, 8), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = ours(images(), tokens_BL, output="logits")
    save_file({"images": images(), "tokens": tokens_BL}, tmp_path / "inputs.safetensors")
    code = (  # as the model card says
        "import sys; from pathlib import Path; sys.path.insert(0, '.'); from models.converters.native import load_model\n"
        "from safetensors.torch import load_file, save_file\nx = load_file('../inputs.safetensors')\n"
        "logits = load_model(Path('.'))(x['images'], x['tokens'], output='logits').detach()\n"
        "save_file({'logits': logits}, '../logits.safetensors')\n"
        "assert not {'data', 'trainer', 'privacy', 'transformers'} & sys.modules.keys()\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {
        "OMP_NUM_THREADS": "1"
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=out,
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    torch.testing.assert_close(
        load_file(tmp_path / "logits.safetensors")["logits"], expected, atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize(("damage", "reason"), CONTRADICTED)
def test_a_ledger_that_contradicts_the_checkpoint_is_refused(
    captioner: Path, command: Run, tmp_path: Path, damage: Callable[[Path], None], reason: str
) -> None:
    """Whoever denies the ledger around a checkpoint gets no weights under the words "not attested"."""
    run = tmp_path / "run"
    shutil.copytree(captioner, run)
    damage(run)
    said = command("--checkpoint", run, "--format", "hf", tmp_path / "out", code=4)
    assert reason in said and not EPSILON.search(said) and not (tmp_path / "out").exists()


def test_without_a_ledger_nothing_is_attested(
    captioner: Path, command: Run, tmp_path: Path
) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    shutil.copytree(captioner, run)
    remove_ledger(run)
    said = command("--checkpoint", run, "--format", "hf", out)
    assert "there is no ledger in its run folder" in said and "no epsilon is stated" in said
    text = statements(out)
    assert (
        "Not attested" in text
        and "there is no ledger" in text
        and "formal_guarantee: false" in text
    )
    assert not EPSILON.search(text) and not EPSILON.search(said)
    assert not (out / "privacy_card.json").exists()


@pytest.mark.parametrize(
    "form", ["hf", *(pytest.param(f, marks=pytest.mark.full) for f in ("safetensors", "timm"))]
)
def test_a_simulation_is_never_called_private(form: str, command: Run, tmp_path: Path) -> None:
    reason = "a simulation of a larger batch"
    plan = make_plan(
        PlanRequest(**NUMBERS | {"expected_batch_size": 8}, informal_reasons=(reason,))
    )
    trained(tmp_path / "run", recipe(), plan=plan)
    said = command("--checkpoint", tmp_path / "run", "--format", form, tmp_path / "out")
    text = statements(tmp_path / "out")
    assert "formal_guarantee: false" in said and reason in said and reason in text
    assert (
        not EPSILON.search(said)
        and not EPSILON.search(text)
        and "differential-privacy]" not in text
    )
    assert "formal_guarantee: true" not in text and '"formal_guarantee": true' not in text
    assert "No epsilon is claimed" in text and '"formal_guarantee": false' in text


def bits(path: Path) -> dict[str, Tensor]:
    return {n: p.detach().view(torch.int32) for n, p in open_model(path).model.named_parameters()}


KINDS = {
    "captioner": recipe,
    "masked_autoencoder": lambda: recipe("masked_autoencoder"),
    "adapters": lambda: recipe("classifier", ADAPTERS),
}


@pytest.mark.parametrize(
    "kind",
    [
        "captioner",
        "masked_autoencoder",
        pytest.param("classifier", marks=pytest.mark.full),
        "adapters",
    ],
)
@torch.no_grad()
def test_every_bit_comes_back(kind: str, command: Run, tmp_path: Path) -> None:
    """By our names for every kind; through transformers' files too where these hold the whole model."""
    trained(tmp_path / "run", KINDS[kind]())
    before = bits(tmp_path / "run")
    ways = [("safetensors", "")] + (
        [("hf", "masked_autoencoder")] if kind == "masked_autoencoder" else []
    )
    for way, inner in ways:
        command("--checkpoint", tmp_path / "run", "--format", way, tmp_path / way)
        command("--import", way, tmp_path / way / inner, tmp_path / f"{way}-back")
        after = bits(tmp_path / f"{way}-back")
        assert after.keys() == before.keys() and all(
            torch.equal(after[name], before[name]) for name in before
        )
        assert open_model(tmp_path / f"{way}-back").manifest["formal_guarantee"] is False
    if kind == "adapters":  # merged, for programs that know none
        transformers = pytest.importorskip("transformers")
        command("--checkpoint", tmp_path / "run", "--format", "hf", tmp_path / "hf")
        theirs = transformers.ViTModel.from_pretrained(
            tmp_path / "hf", add_pooling_layer=False
        ).eval()
        features = open_model(tmp_path / "run").model.encoder(images())
        torch.testing.assert_close(
            theirs(images()).last_hidden_state, features, atol=1e-5, rtol=1e-5
        )
    if kind == "masked_autoencoder":
        command(
            "--checkpoint",
            tmp_path / "run",
            "--format",
            "hf",
            tmp_path / "average",
            "--use_average",
        )
        command(
            "--import", "hf", tmp_path / "average/masked_autoencoder", tmp_path / "average-back"
        )
        average, plain = (open_model(tmp_path / name).model for name in ("average-back", "run"))
        assert torch.equal(average.encoder.norm.bias, plain.encoder.norm.bias + 1)


@torch.no_grad()
def test_adapters_go_out_for_peft_and_their_base_comes_back(command: Run, tmp_path: Path) -> None:
    """What they compute is compared with peft in tests/models/test_converters.py; here, what is said of them."""
    trained(
        tmp_path / "run", recipe("classifier", ADAPTERS), training_data={"provenance": "public"}
    )
    out = tmp_path / "out"
    command("--checkpoint", tmp_path / "run", "--format", "peft", out)
    assert {path.name for path in out.iterdir()} >= {
        "README.md",
        "privacy_card.json",
        "adapter_config.json",
        "base",
    }
    said = command("--import", "hf", out / "base", tmp_path / "back")
    assert "data declared public" in said, "an export says whose data are in it"
    found = open_model(tmp_path / "back").model.encoder(images())
    ours = without_adapters(open_model(tmp_path / "run").model.encoder, merged=False)
    torch.testing.assert_close(found, ours(images()))
    said = command("--import", "hf", out / "base", tmp_path / "other", "--provenance", "private")
    assert "data declared private" in said, "after others trained it further"


@torch.no_grad()
def test_an_official_checkpoint_becomes_one_of_ours(command: Run, tmp_path: Path) -> None:
    state = vip_file()
    torch.save({"model": state}, tmp_path / "vip.pth")
    said = command(
        "--import",
        "vip",
        tmp_path / "vip.pth",
        tmp_path / "start",
        *arguments("vip"),
        "--claim",
        "eps 8, they say",
    )
    assert "not attested by a ledger" in said and "no private run starts from it" in said
    opened = open_model(tmp_path / "start")
    images_BCHW, mask_BP = pairs()[0].float(), masks()
    loss_B = opened.model(images_BCHW, mask_BP)
    expected = Released(state).reconstruction_loss(images_BCHW[0], mask_BP[0])
    assert float(loss_B[0]) == pytest.approx(expected, rel=1e-5)
    start = opened.manifest["initialisation"]
    assert (
        start["kind"] == "imported"
        and start["file"] == "vip.pth"
        and start["claim"] == "eps 8, they say"
    )
    # A run takes its weights; a private one only if their data are declared public.
    config = recipe()
    section = InitSection(checkpoint=str(tmp_path / "start"), parts="encoder")
    table: Any = type("Table", (), {"entries": []})
    with pytest.raises(
        ConfigError, match=r"imported from vip.pth.*import it again with --provenance"
    ):
        initialisation_facts(config, find_checkpoint(section, ROOT), table)
    command(
        "--import",
        "vip",
        tmp_path / "vip.pth",
        tmp_path / "public",
        *arguments("vip"),
        "--provenance",
        "public",
    )
    checkpoint = find_checkpoint(InitSection(checkpoint=str(tmp_path / "public")), ROOT)
    facts = initialisation_facts(config, checkpoint, table)
    assert facts["training_data"] == "public" and facts["before_that"]["kind"] == "imported"
    task = opened.task
    fresh = task.build(torch.Generator().manual_seed(9))
    assert load_start(checkpoint, InitSection(checkpoint="x"), fresh) == []
    assert torch.equal(fresh(images_BCHW, mask_BP), loss_B)
    # What is exported of it says so.
    command("--checkpoint", tmp_path / "start", "--format", "hf", tmp_path / "out")
    text = statements(tmp_path / "out")
    assert "Not attested" in text and "vip.pth" in text and "formal_guarantee: false" in text


def words(folder: Path) -> Path:
    """A tokenizer as large as the made captioner's vocabulary."""
    names = ["[PAD]", "[CLS]", "[SEP]", *(f"word{number}" for number in range(V - 3))]
    Tokenizer(WordLevel({name: number for number, name in enumerate(names)}, "[PAD]")).save(
        str(folder / "words.json")
    )
    return folder / "words.json"


def test_an_official_captioner_needs_its_tokenizer(command: Run, tmp_path: Path) -> None:
    torch.save({"model": dpcap_file()}, tmp_path / "dpcap.pth")
    told = ("--import", "dpcap", tmp_path / "dpcap.pth", tmp_path / "start", *arguments("dpcap"))
    assert "give its tokenizer.json with --tokenizer" in command(*told, code=2)
    line = command(*told, "--tokenizer", ROOT / "data/tokenizer/tokenizer.json", code=2)
    assert "tokens, but the weights 110" in line
    tokenizer = words(tmp_path)
    command(*told, "--tokenizer", tokenizer)
    tokenizer.unlink()  # the checkpoint has its own copy
    opened = open_model(tmp_path / "start", dtype=torch.float64)
    assert (opened.model.config.pad_id, opened.model.config.bos_id, opened.model.config.eos_id) == (
        0,
        1,
        2,
    )
    raw = opened.task.make_example(train=False)
    assert raw.tokenizer.decode([1, 3, 4, 2]) == "word0 word1"


def wrapped(prefix: str) -> Callable[[dict[str, Tensor]], dict[str, Any]]:
    return lambda state: {"model": {prefix + name: value for name, value in state.items()}}


COMING: dict[str, Callable[[dict[str, Tensor]], dict[str, Any]]] = {
    "as trained": lambda state: {
        "model": OrderedDict(state),
        "epoch": 7,
        "scaler": {"scale": 65536.0},
        "steps": [1, 2],
        "done": False,
        "optimizer": {
            "state": {0: {"step": torch.tensor(1.0), "exp_avg": torch.zeros(3)}},
            "param_groups": [{"lr": 0.1}],
        },
        "args": argparse.Namespace(lr=0.1, output_dir="./out", betas=(0.9, 0.95)),
    },
    "data parallel": wrapped("module."),
    "per-example gradients in data parallel": wrapped("_module.module."),
    "compiled": wrapped("_orig_mod."),
    "without a key": lambda state: dict(state),
    "half precision": lambda state: {
        "model": {n: v.bfloat16() if "type" not in n else v for n, v in state.items()}
    },
}


@pytest.mark.parametrize("way", COMING)
@torch.no_grad()
def test_official_files_as_they_may_come(way: str, command: Run, tmp_path: Path) -> None:
    """Buffers, optimizer states and wrappers' prefixes change nothing in what the imported models compute."""
    images_BCHW, tokens_BL = pairs()
    torch.save(COMING[way](dpcap_file()), tmp_path / "dpcap.pth")
    told = (*arguments("dpcap"), "--tokenizer", words(tmp_path))
    command("--import", "dpcap", tmp_path / "dpcap.pth", tmp_path / "captioner", *told)
    opened = open_model(tmp_path / "captioner", dtype=torch.float64)
    tolerance = 0.2 if way == "half precision" else 1e-5
    found = opened.model(images_BCHW, tokens_BL, output="logits")
    assert (found - Released(dpcap_file()).logits(images_BCHW, tokens_BL)).abs().max() < tolerance
    torch.save(COMING[way](vip_file()), tmp_path / "vip.pth")
    command("--import", "vip", tmp_path / "vip.pth", tmp_path / "mae", *arguments("vip"))
    own = dict(open_model(tmp_path / "mae").model.named_parameters())
    expected = vip_file()["blocks.1.mlp.fc1.weight"]
    if way == "half precision":
        expected = expected.bfloat16().float()
    assert torch.equal(own["encoder.blocks.1.mlp.up.weight"], expected)


def in_parts(state: dict[str, Tensor], folder: Path, name: str) -> None:
    """As transformers and DeepSpeed's zero_to_fp32.py write what is larger than one file shall be."""
    pattern = name.replace(".", "{suffix}.")
    shards = split_torch_state_dict_into_shards(
        state, filename_pattern=pattern, max_shard_size=4000
    )
    assert shards.is_sharded
    for file, names in shards.filename_to_tensors.items():
        part = {key: state[key] for key in names}
        save_file(part, folder / file) if name.endswith(".safetensors") else torch.save(
            part, folder / file
        )
    index = {"metadata": shards.metadata, "weight_map": shards.tensor_to_filename}
    (folder / f"{name}.index.json").write_text(json.dumps(index))


FOLDERS: dict[str, Callable[[dict[str, Tensor], Path], object]] = {
    "zero_to_fp32": lambda state, folder: torch.save(state, folder / "pytorch_model.bin"),
    "zero_to_fp32 in parts": lambda state, folder: in_parts(state, folder, "pytorch_model.bin"),
    "safetensors in parts": lambda state, folder: in_parts(state, folder, "model.safetensors"),
}


@pytest.mark.parametrize("way", FOLDERS)
def test_folders_of_other_programs(way: str, command: Run, tmp_path: Path) -> None:
    """What DeepSpeed and transformers leave on the disk holds the same numbers as one file does."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    FOLDERS[way](vip_file(), folder)
    with pytest.raises(ConfigError, match=r"weights of another form.*--import"):
        find_checkpoint(InitSection(checkpoint=str(folder)), ROOT)
    command("--import", "vip", folder, tmp_path / "mae", *arguments("vip"))
    own = dict(
        open_model(
            find_checkpoint(InitSection(checkpoint=str(tmp_path / "mae")), ROOT).path
        ).model.named_parameters()
    )
    assert torch.equal(own["encoder.blocks.1.mlp.up.weight"], vip_file()["blocks.1.mlp.fc1.weight"])
    assert len(open_model(tmp_path / "mae").manifest["initialisation"]["sha256"]) == 64


class Payload:
    """Unpickled by a careless loader, it leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("kind", ["vip", "dpcap", "hf"])
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_code_in_a_file_does_not_run(kind: str, command: Run, tmp_path: Path) -> None:
    trace, folder = tmp_path / "ran", tmp_path / "folder"
    folder.mkdir()
    torch.save({"model": {"cls_token": Payload(trace)}}, folder / "pytorch_model.bin")
    (folder / "bare.pth").write_bytes(pickle.dumps({"model": Payload(trace)}))
    config = {
        "model_type": "vit",
        "hidden_size": 8,
        "patch_size": 4,
        "image_size": 8,
        "num_hidden_layers": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    files = [folder] if kind == "hf" else [folder / "pytorch_model.bin", folder / "bare.pth"]
    for file in files:
        told = [] if kind == "hf" else arguments(kind)
        line = command("--import", kind, file, tmp_path / "out", *told, code=2)
        assert "is not loaded: it could run code" in line
    assert not trace.exists() and not (tmp_path / "out").exists()


def test_an_encoder_alone_for_programs_that_read_timm(command: Run, tmp_path: Path) -> None:
    state = vip_file(decoder=False)
    torch.save(state, tmp_path / "vip.pth")
    command(
        "--import", "vip", tmp_path / "vip.pth", tmp_path / "start", *arguments("vip", OF_ENCODER)
    )
    command("--checkpoint", tmp_path / "start", "--format", "timm", tmp_path / "timm")
    again = load_file(tmp_path / "timm/model.safetensors")
    assert again.keys() == state.keys() and all(
        torch.equal(again[name], state[name]) for name in state
    )
    held = torch.load(tmp_path / "timm/model.pth", weights_only=True)["model"]
    assert held.keys() == again.keys() and all(
        torch.equal(held[name], again[name]) for name in held
    )


def test_bad_input_is_one_line(captioner: Path, command: Run, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "kept").write_text("x")
    broken = tmp_path / "broken.pth"
    torch.save({"model": {k: v for k, v in vip_file().items() if k != "norm.bias"}}, broken)
    out = tmp_path / "out"
    hf, nano = (
        ("--checkpoint", captioner, "--format", "hf"),
        ("--import", "vip", broken, out, "--size", "vip_nano"),
    )
    none, full = tmp_path / "none", tmp_path / "full"
    for line, told in {
        "one of the arguments --checkpoint --import is required": (out,),
        "--checkpoint needs --format, one of hf, peft, safetensors, timm": (
            "--checkpoint",
            captioner,
            out,
        ),
        "invalid choice: 'onnx'": ("--checkpoint", captioner, "--format", "onnx", out),
        "OUT expected, got 0 paths": hf,
        "FILE and OUT expected, got 1 paths": ("--import", "vip", out),
        "--provenance is for --import": (*hf, "--provenance", "public", out),
        "--format is for --checkpoint": ("--import", "vip", "--format", "hf", broken, out),
        "model size 'vip_huge'": ("--import", "vip", broken, out, "--size", "vip_huge"),
        "unknown model field 'heads'": (*nano, "--override", "heads=2"),
        "depth must be a int, got ''": (*nano, "--override", "encoder_depth"),
        "exists and is not empty": (*hf, full),
        "neither a checkpoint nor a run folder": ("--checkpoint", none, "--format", "hf", out),
        "contains neither model.safetensors nor pytorch_model.bin": (
            "--import",
            "vip",
            full,
            out,
            *arguments("vip"),
        ),
        "there is no weight file": ("--import", "vip", none, out, *arguments("vip")),
        "is not a folder that transformers saved": ("--import", "hf", full, out),
        "is not an exported model": ("--import", "safetensors", full, out),
        "lacks norm.bias": ("--import", "vip", broken, out, *arguments("vip")),
        "give --size, e.g. vip_base, because tensors do not state all of a model": (
            "--import",
            "vip",
            broken,
            out,
        ),
    }.items():
        assert line in command(*told, code=2)
    assert not out.exists() and [p.name for p in (tmp_path / "full").iterdir()] == ["kept"]
    assert not list(tmp_path.glob(".*"))  # nothing half-written stays
