"""Starting from another run's weights: what is taken, what is resized, and which starts a private run refuses."""

import shutil
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from models.captioner import build_captioner
from models.config import CaptionerConfig, captioner_config
from privacy.checkpoints.read import Checkpoint, checkpoint_name
from privacy.checkpoints.write import CheckpointWriter, Retention
from privacy.errors import NotRecorded, PrivacyStateRefused
from privacy.ledger.ledger import Ledger
from privacy.plan.numbers import PrivacyPlan
from tests.privacy.ledger_files import PLAN, take_step
from trainer.config.machine import load_machine_settings
from trainer.config.recipe import InitSection, OptimizerSection, RunConfig, load_config
from trainer.engines.local import LocalEngine
from trainer.errors import ConfigError
from trainer.weights.initial_weights import (
    find_checkpoint,
    initialisation_facts,
    load_start,
    training_data_facts,
)
from trainer.weights.provenance import initialisation_statement

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.usefixtures("one_rank")

RANDOM = {"kind": "random", "seed": 0}


def config_of(**changes: Any) -> CaptionerConfig:
    shape = {
        "image_size": 16,
        "patch_size": 4,
        "vocab_size": 30,
        "encoder_depth": 1,
        "decoder_depth": 1,
    }
    return captioner_config("pico", **{**shape, "encoder_position": "learned", **changes})


def write(folder: Path, facts: dict[str, Any], seed: int = 1) -> Checkpoint:
    model = build_captioner(config_of(), generator=torch.Generator().manual_seed(seed))
    machine = load_machine_settings(ROOT / "ds_configs" / "zero1.json")
    engine = LocalEngine(model, OptimizerSection(peak_lr=1e-3), machine, torch.device("cpu"))
    writer = CheckpointWriter(folder / "checkpoints", Retention(1), published=lambda *_: None)
    writer.save(
        0, engine.state(), engine.shapes, {"run": "before", "initialisation": RANDOM, **facts}
    )
    return Checkpoint(folder / "checkpoints" / checkpoint_name(0))


def recipe(*overrides: str) -> RunConfig:
    return load_config(ROOT / "tests/trainer/clip_art.toml", overrides)


def table(*digests: str) -> Any:
    return SimpleNamespace(entries=[SimpleNamespace(sha256=digest * 8) for digest in digests])


def position_in_ledger(
    folder: Path, plan: PrivacyPlan = PLAN, num_steps: int = 1
) -> dict[str, Any]:
    """Of the step 0 that `write` states, in the new ledger of a run that goes on for so many steps."""
    ledger = Ledger.create(
        folder / "ledger.jsonl", {"plan": plan.frozen_fields(), "key_commitment": "ab" * 32}
    )
    ledger.start_session({})
    seq, line_hash = ledger.position()
    for step in range(1, num_steps + 1):
        take_step(ledger, step)
    ledger.release()
    return {"ledger": {"seq": seq, "hash": line_hash}}


SYNTHETIC = {
    "formal_guarantee": False,
    "training_data": {"provenance": "synthetic", "shards": ["aaaaaaaa" * 2]},
}
PRIVATE = {"formal_guarantee": False, "training_data": {"provenance": "private"}}


def test_the_encoder_alone_fits_another_decoder(tmp_path: Path) -> None:
    checkpoint = write(tmp_path, SYNTHETIC)
    model = build_captioner(config_of(decoder_depth=2), generator=torch.Generator().manual_seed(7))
    fresh = load_start(checkpoint, InitSection(checkpoint="x", parts="encoder"), model)
    source = dict(
        build_captioner(config_of(), generator=torch.Generator().manual_seed(1)).named_parameters()
    )
    for name, parameter in model.named_parameters():
        assert (name in fresh) != name.startswith("encoder.")
        if name not in fresh:
            assert torch.equal(parameter, source[name])
    with pytest.raises(ConfigError, match=r'has no decoder.blocks.1.*init.parts = "encoder"'):
        load_start(checkpoint, InitSection(checkpoint="x"), model)
    whole = build_captioner(config_of(), generator=torch.Generator().manual_seed(7))
    assert load_start(checkpoint, InitSection(checkpoint="x"), whole) == []
    assert all(torch.equal(value, source[name]) for name, value in whole.named_parameters())


def test_learned_positions_are_interpolated(tmp_path: Path) -> None:
    checkpoint = write(tmp_path, SYNTHETIC)
    model = build_captioner(config_of(image_size=32), generator=torch.Generator().manual_seed(7))
    load_start(checkpoint, InitSection(checkpoint="x", parts="encoder"), model)
    old, new = (
        checkpoint.full("param", "encoder.position.table"),
        model.encoder.position.table.detach(),
    )
    assert new.shape == (1, 65, 64) and torch.equal(new[:, 0], old[:, 0])
    grid = old[:, 1:].view(1, 4, 4, 64).permute(0, 3, 1, 2)
    expected = (
        torch.nn.functional.interpolate(grid, (8, 8), mode="bicubic")
        .permute(0, 2, 3, 1)
        .flatten(1, 2)
    )
    assert torch.equal(new[:, 1:], expected)
    # Its coarse shape is the old one's.
    assert (
        torch.corrcoef(
            torch.stack([new[0, 1:].mean(1).view(8, 8)[::2, ::2].flatten(), old[0, 1:].mean(1)])
        )[0, 1]
        > 0.7
    )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"decoder_num_heads": 2}, "decoder.num_heads is 4, the model's is 2"),
        ({"decoder_norm_position": "pre"}, "decoder.norm_position is 'post', the model's is 'pre'"),
        ({"decoder_norm_eps": 1e-2}, "decoder.norm_eps is 1e-05"),
        ({"encoder_num_heads": 2}, "the encoder's num_heads"),
    ],
)
def test_weights_of_equal_shape_and_another_meaning_are_refused(
    tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    checkpoint = write(tmp_path, {**SYNTHETIC, "model": asdict(config_of())})
    model = build_captioner(config_of(**changes))
    with pytest.raises(ConfigError, match=says):
        load_start(checkpoint, InitSection(checkpoint="x"), model)
    if "encoder_num_heads" not in changes:
        load_start(checkpoint, InitSection(checkpoint="x", parts="encoder"), model)


def test_another_vocabulary_of_the_same_size_is_refused(tmp_path: Path) -> None:
    checkpoint = write(tmp_path, {**SYNTHETIC, "tokenizer_sha256": "a" * 64})
    model = build_captioner(config_of())
    with pytest.raises(ConfigError, match="another tokenizer"):
        load_start(checkpoint, InitSection(checkpoint="x"), model, "b" * 64)
    load_start(checkpoint, InitSection(checkpoint="x"), model, "a" * 64)
    load_start(checkpoint, InitSection(checkpoint="x", parts="encoder"), model, "b" * 64)


def test_a_run_folder_stands_for_its_newest_checkpoint(tmp_path: Path) -> None:
    checkpoint = write(tmp_path, SYNTHETIC)
    for path in (str(tmp_path), str(checkpoint.path)):
        assert find_checkpoint(InitSection(checkpoint=path), ROOT).path == checkpoint.path
    with pytest.raises(ConfigError, match="neither a checkpoint nor a run folder"):
        find_checkpoint(InitSection(checkpoint=str(tmp_path / "nothing")), ROOT)


def test_weights_of_unprotected_private_data_are_refused(tmp_path: Path) -> None:
    checkpoint = write(tmp_path, PRIVATE)
    with pytest.raises(ConfigError, match="trained on private data, and no ledger"):
        initialisation_facts(recipe(), checkpoint, table("b"))
    unclaimed = recipe("privacy.enabled=false")
    assert initialisation_facts(unclaimed, checkpoint, table("b"))["guarantee"] is None


def test_they_are_refused_behind_a_public_link_too(tmp_path: Path) -> None:
    before = {
        "kind": "checkpoint",
        "run": "first",
        "training_data": "private",
        "guarantee": None,
        "before_that": RANDOM,
    }
    checkpoint = write(tmp_path, {**SYNTHETIC, "initialisation": before})
    with pytest.raises(ConfigError, match="run first trained on private data"):
        initialisation_facts(recipe(), checkpoint, table("b"))


def public_link(*shards: str, before: dict[str, Any] = RANDOM) -> dict[str, Any]:
    of_run = {"kind": "checkpoint", "run": "a", "step": 1, "training_data": "public"}
    return of_run | {"shards": [*shards], "before_that": before}


@pytest.mark.parametrize(
    "start",
    [
        public_link("bbbbbbbb" * 2),
        public_link(before=public_link("bbbbbbbb" * 2)),
        {
            "kind": "imported",
            "file": "x",
            "exported": {
                "initialisation": public_link("bbbbbbbb" * 2),
                "training_data": {"provenance": "public"},
            },
        },
    ],
)
def test_own_data_are_refused_however_far_back_they_were_declared_public(
    tmp_path: Path, start: dict[str, Any]
) -> None:
    """A on these data as if they were public, B from A on others, C private on these: the chain remembers A's shards."""
    checkpoint = write(tmp_path, {**SYNTHETIC, "initialisation": start})
    facts = initialisation_facts(recipe(), checkpoint, table("c"))
    assert facts["before_that"] == start and facts["shards"] == ["aaaaaaaa" * 2], (
        "a later start sees both"
    )
    for own in ("bbbbbbbb", "aaaaaaaa"):  # the second is a shard of the checkpoint's own run
        with pytest.raises(
            ConfigError,
            match="or a run behind it, was trained on shards of this run's private data",
        ):
            initialisation_facts(recipe(), checkpoint, table("c", own))


@pytest.mark.parametrize("start", [None, "random", {"kind": "unheard of"}])
def test_a_start_from_nobody_knows_what_is_refused(tmp_path: Path, start: Any) -> None:
    with pytest.raises(ConfigError, match="does not say what its weights started from"):
        initialisation_facts(
            recipe(), write(tmp_path, {**SYNTHETIC, "initialisation": start}), table("b")
        )


def test_data_that_were_private_stay_private_at_a_resume(tmp_path: Path) -> None:
    before = write(tmp_path, PRIVATE)
    with pytest.raises(ConfigError, match=r"data\.provenance is synthetic, but .* as private"):
        training_data_facts(recipe('data.provenance="synthetic"'), table("a"), before)
    assert training_data_facts(recipe(), table("a"), write(tmp_path / "b", SYNTHETIC)) == {
        "provenance": "private"
    }


def test_the_card_names_every_run_behind_a_start(tmp_path: Path) -> None:
    """A public second run does not hide that the first one spent epsilon on private data."""
    spent = {"epsilon": 3.25, "delta": 1e-6}
    first = {
        "kind": "checkpoint",
        "run": "a",
        "training_data": "private",
        "guarantee": spent,
        "before_that": RANDOM,
    }
    facts = initialisation_facts(
        recipe(), write(tmp_path, {**SYNTHETIC, "initialisation": first}), table("b")
    )
    said = initialisation_statement({"initialisation": facts})
    assert "run 'before', trained on data that its recipe declares synthetic. Before that: " in said
    assert "epsilon 3.250 at delta 1e-06" in said and "The two compose" in said
    unproved = initialisation_statement({"initialisation": {**first, "guarantee": None}})
    assert "without a guarantee that a ledger proves" in unproved and "epsilon" not in unproved


def test_a_private_start_states_its_epsilon(tmp_path: Path) -> None:
    checkpoint = write(
        tmp_path, {**PRIVATE, "formal_guarantee": True, **position_in_ledger(tmp_path)}
    )
    facts = initialisation_facts(recipe(), checkpoint, table("b"))
    assert facts["guarantee"] == {
        "epsilon": pytest.approx(PLAN.epsilon_after(1)),
        "delta": PLAN.target_delta,
    }
    copied = tmp_path / "elsewhere" / "checkpoints" / checkpoint.path.name
    shutil.copytree(checkpoint.path, copied)
    with pytest.raises(ConfigError, match="no ledger"):
        initialisation_facts(recipe(), Checkpoint(copied), table("b"))
    lines = (tmp_path / "ledger.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "ledger.jsonl").write_text("".join([*lines[:1], *lines[2:]]))
    with pytest.raises(PrivacyStateRefused):
        initialisation_facts(recipe(), checkpoint, table("b"))
    (tmp_path / "ledger.jsonl").unlink()
    with pytest.raises(ConfigError, match="no ledger"):
        initialisation_facts(recipe(), checkpoint, table("b"))


def test_a_simulation_proves_nothing(tmp_path: Path) -> None:
    """Neither by its own manifest nor, should that claim more, by its ledger."""
    for claimed in (False, True):
        (folder := tmp_path / str(claimed)).mkdir()
        position = position_in_ledger(folder, replace(PLAN, informal_reasons=("simulation",)))
        checkpoint = write(folder, {**PRIVATE, **position, "formal_guarantee": claimed})
        with pytest.raises(
            NotRecorded if claimed else ConfigError, match="contradict" if claimed else "no ledger"
        ):
            initialisation_facts(recipe(), checkpoint, table("b"))


@pytest.mark.parametrize(
    "position", [None, {"seq": 1, "hash": "ab" * 32}, {"seq": 99, "hash": "ab" * 32}]
)
def test_the_ledger_of_another_run_proves_nothing(
    tmp_path: Path, position: dict[str, Any] | None
) -> None:
    position_in_ledger(tmp_path, num_steps=0)
    for claim in (PRIVATE, SYNTHETIC):
        checkpoint = write(tmp_path, {**claim, "formal_guarantee": True, "ledger": position})
        with pytest.raises(NotRecorded, match="is not the one that the ledger recorded"):
            initialisation_facts(recipe(), checkpoint, table("b"))


def test_hashes_of_private_shards_are_not_published() -> None:
    assert training_data_facts(recipe(), table("a")) == {"provenance": "private"}
    stated = training_data_facts(recipe('data.provenance="synthetic"'), table("a", "b"))
    assert stated["shards"] == ["aaaaaaaa", "bbbbbbbb"]
