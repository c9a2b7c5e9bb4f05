"""Fine-tuning from labelled shards to a held-out accuracy, and starting from a captioner's or a masked autoencoder's encoder."""

import fcntl
import json
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

from data.index.build import build_index
from data.index.tar_writer import write_shard
from data.reading.loader import eval_batches
from evaluation.sources import encode_png
from models.captioner import build_captioner
from models.classifier import build_classifier, is_adapter
from models.config import captioner_config
from models.masked_autoencoder import build_masked_autoencoder
from privacy.checkpoints.read import Checkpoint, checkpoint_name, open_checkpoint
from privacy.checkpoints.write import CheckpointWriter, Retention
from tests.e2e.launch import alone
from tests.models.test_classifier import tiny
from tests.models.test_masked_autoencoder import tiny as tiny_autoencoder_config
from trainer.config.machine import load_machine_settings
from trainer.config.recipe import InitSection, OptimizerSection, load_config
from trainer.engines.local import LocalEngine
from trainer.errors import ConfigError
from trainer.ranks.discovery import Ranks
from trainer.run.start import train
from trainer.weights.initial_weights import load_start
from trainer.weights.open_model import open_model
from trainer.weights.provenance import initialisation_statement

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "tests/trainer/classification.toml"
MACHINE = load_machine_settings(ROOT / "ds_configs" / "zero1.json")
NUM_HELDOUT = 300

pytestmark = pytest.mark.usefixtures("trusted_models", "one_rank")


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """public.tar, private.tar and heldout.tar of scikit-learn's digits, enlarged to 16 pixels; two public labels are bad."""
    folder = tmp_path_factory.mktemp("digits")
    pictures, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    heldout, training = order[:NUM_HELDOUT], order[NUM_HELDOUT:]

    def examples(chosen: np.ndarray) -> Any:
        for i in chosen.tolist():
            picture = (pictures[i].reshape(8, 8) * 15).astype(np.uint8).repeat(2, 0).repeat(2, 1)
            yield f"digit-{i:04d}", {"png": encode_png(picture), "cls": str(labels[i]).encode()}

    bad = [("bad-0", {"cls": b"3"}), ("bad-1", {**next(examples(training))[1], "cls": b"ten"})]
    write_shard(folder / "public.tar", [*examples(training[:1000]), *bad])
    write_shard(folder / "private.tar", examples(training[1000:]))
    write_shard(folder / "heldout.tar", examples(heldout))
    return folder


def of(digits: Path, name: str, *more: str) -> list[str]:
    """Data that are declared public, unless `more` says otherwise."""
    named = [f"data.shards={digits}/{name}.tar", f"heldout.shards={digits}/heldout.tar"]
    declared = ["data.provenance=public", "heldout.is_public=true"]
    return [
        *named,
        *(d for d in declared if not any(o.startswith(d.partition("=")[0]) for o in more)),
        *more,
    ]


@pytest.fixture(scope="module")
def trained(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder: 120 steps of `train.py` without privacy."""
    run = tmp_path_factory.mktemp("runs") / "digits"
    told = f"--ds_config ds_configs/zero1.json --engine local --recipe {RECIPE} --run_dir {run}"
    result = alone([*told.split(), *of(digits, "public")])
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    assert "held-out cross-entropy after step 120: " in result.stdout
    return run


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_it_learns_and_counts_bad_labels(trained: Path, digits: Path) -> None:
    """And what opens is what was reported."""
    first, last = lines(trained / "evaluation/heldout.jsonl")
    assert first["loss"] == pytest.approx(np.log(10), rel=1e-4) and first["accuracy"] < 0.25
    assert last["accuracy"] > 0.5 and last["loss"] < 1.6, "ten classes: chance is 0.1"
    assert 0.09 < last["blind_accuracy"] < 0.2 and last["blind_loss"] == pytest.approx(
        np.log(10), rel=0.05
    )
    said = [own for own, _ in last["captions"]]
    assert len(said) == 2 and all(re.fullmatch("class [0-9]", text) for text in said)
    public = {key for line in lines(trained / "metrics.jsonl") for key in line}
    private = lines(trained / "private/metrics.jsonl")
    assert {"heldout/accuracy", "heldout/loss", "heldout/blind_loss"} <= public
    assert not any(key.startswith("train/") for key in public)
    seen, bad = (
        sum(line.get(f"train/{key}", 0) for line in private)
        for key in ("batch_size", "undecodable_examples")
    )
    assert 0 < bad < 0.01 * seen, "two of 1,002 examples"
    opened, table = (
        open_model(trained),
        build_index([digits / "heldout.tar"], trained / "reopened-index"),
    )
    (batch,) = eval_batches(table, opened.task.make_example(train=False), NUM_HELDOUT)
    with torch.no_grad():
        predicted = opened.model(batch.inputs["images_BCHW"], output="logits").argmax(1)
    accuracy = float((predicted == batch.inputs["labels_B"]).float().mean())
    assert accuracy == pytest.approx(last["accuracy"], abs=1e-6)


@pytest.fixture
def in_this_process(
    one_rank: torch.device, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Path, list[str]], int]:
    monkeypatch.setattr(
        fcntl, "flock", lambda *arguments: None
    )  # held until the process ends, and this one resumes

    def run(run_dir: Path, overrides: list[str]) -> int:
        return train(
            load_config(RECIPE, overrides), MACHINE, "local", run_dir, ROOT, Ranks(), one_rank
        )

    return run


PRIVATE = [
    "privacy.enabled=true",
    "privacy.noise_multiplier=4.0",
    "privacy.target_delta=1e-4",
    'data.provenance="private"',
    "heldout.is_public=false",
    "train.num_steps=2",
    "train.checkpoint_every=1",
    "optimizer.weight_decay=0.1",
    "schedule.warmup_steps=0",
    "init.parts=encoder",
    "train.ema_decay=0.5",
    "train.keep_checkpoints=3",
]


def with_overrides(**changes: Any) -> str:
    shape = load_config(RECIPE).model.overrides
    inner = ", ".join(f"{key} = {json.dumps(value)}" for key, value in {**shape, **changes}.items())
    return f"model.overrides={{{inner}}}"


@pytest.mark.parametrize("mode", [pytest.param("last_layer", marks=pytest.mark.full), "adapters"])
def test_private_training_of_a_part_stops_resumes_and_leaves_the_rest(
    mode: str, trained: Path, digits: Path, tmp_path: Path, in_this_process: Any
) -> None:
    """The checkpoint is whole without the run that it started from; nothing that is not public leaves private/."""
    run, start = tmp_path / "run", open_checkpoint(trained).path
    overrides = of(
        digits, "private", *PRIVATE, f"init.checkpoint={start}", with_overrides(trainable=mode)
    )
    assert in_this_process(run, [*overrides, "train.max_minutes=1e-9"]) == 7
    waiting = Checkpoint(run / "checkpoints" / checkpoint_name(0))
    elsewhere = [o for o in overrides if not o.startswith("init.checkpoint")] + [
        "init.checkpoint=nowhere"
    ]
    assert in_this_process(run, elsewhere) == 0, "a resume needs no start"
    ended, source = Checkpoint(run / "checkpoints" / checkpoint_name(2)), Checkpoint(start)
    encoder = {name for name in source.shapes if name.startswith("encoder.")}
    assert ended.frozen == waiting.frozen == encoder
    for name in encoder:
        assert torch.equal(ended.full("param", name), source.full("param", name)), name
    trainable = set(ended.shapes) - encoder
    assert trainable == {n for n in ended.shapes if n.startswith("head.") or is_adapter(n)}
    assert all(not torch.equal(ended.full("param", n), waiting.full("param", n)) for n in trainable)
    held = {(kind, name) for kind, name in ended._pieces if name in encoder}
    assert {kind for kind, _ in held} == {"param"}, "no moments and no average of frozen weights"
    for use_average in (False, True):
        model = open_model(run, use_average=use_average).model
        kind = "average" if use_average else "param"
        assert torch.equal(model.head.weight, ended.full(kind, "head.weight"))
        assert torch.equal(model.encoder.norm.weight, source.full("param", "encoder.norm.weight"))
    assert (
        not (run / "evaluation/heldout.jsonl").exists() and (run / "private/heldout.jsonl").exists()
    )
    assert not any("heldout" in key for line in lines(run / "metrics.jsonl") for key in line)
    assert any("heldout/accuracy" in line for line in lines(run / "private/metrics.jsonl"))


RECIPES = sorted((ROOT / "recipes").glob("finetune_*.toml"))


def test_a_frozen_encoder_needs_a_start(digits: Path, tmp_path: Path, in_this_process: Any) -> None:
    with pytest.raises(ConfigError, match=r"would stay at random: give init\.checkpoint"):
        in_this_process(
            tmp_path / "run", of(digits, "public", with_overrides(trainable="last_layer"))
        )


SHAPE = {
    "image_size": 16,
    "patch_size": 8,
    "encoder_width": 24,
    "encoder_depth": 2,
    "encoder_num_heads": 2,
}


def captioner() -> tuple[nn.Module, Any]:
    config = captioner_config("pico", **SHAPE, decoder_depth=1, vocab_size=30)
    return build_captioner(config, generator=torch.Generator().manual_seed(1)), config


def autoencoder() -> tuple[nn.Module, Any]:
    config = tiny_autoencoder_config(**SHAPE)
    return build_masked_autoencoder(config, generator=torch.Generator().manual_seed(1)), config


ENCODER = InitSection(checkpoint="x", parts="encoder")


@pytest.mark.parametrize("make", [captioner, autoencoder])
@pytest.mark.parametrize("mode", ["all", "last_layer", "adapters"])
def test_the_encoder_of_either_model_starts_a_classifier(
    make: Any, mode: str, tmp_path: Path
) -> None:
    """Every tensor of a part that the card excepts began anew, and every other one is the source's."""
    source, config = make()
    engine = LocalEngine(source, OptimizerSection(peak_lr=1e-3), MACHINE, torch.device("cpu"))
    facts = {
        "run": "before",
        "initialisation": {"kind": "random", "seed": 1},
        "model": asdict(config),
    }
    CheckpointWriter(tmp_path, Retention(1)).save(0, engine.state(), engine.shapes, facts)
    checkpoint = Checkpoint(tmp_path / checkpoint_name(0))
    own = tiny(trainable=mode, encoder_qkv_bias=config.encoder.qkv_bias)
    model = build_classifier(own, generator=torch.Generator().manual_seed(7))
    fresh = load_start(checkpoint, ENCODER, model)
    images = torch.randn(2, 3, 16, 16)
    assert torch.equal(model.encoder(images), source.encoder(images)), "adapters start as nothing"
    facts = {
        "kind": "checkpoint",
        "run": "before",
        "step": 0,
        "training_data": "synthetic",
        "at_random": fresh,
    }
    said = initialisation_statement({"initialisation": facts})
    excepted = re.search(
        r"\(all but (?:those of ([^)]*?))?(?: and )?(the low-rank adapters)?, which", said
    )
    assert excepted is not None, said
    parts, except_adapters = set((excepted[1] or "").split(", ")), excepted[2] is not None
    assert except_adapters == (mode == "adapters")
    for name, parameter in model.named_parameters():
        is_source = name in checkpoint.shapes and torch.equal(
            parameter, checkpoint.full("param", name)
        )
        is_excepted = except_adapters if is_adapter(name) else name.partition(".")[0] in parts
        assert is_source != is_excepted, f"{name}: {said}"
        assert (name in fresh) == (name.startswith("head.") or is_adapter(name))
