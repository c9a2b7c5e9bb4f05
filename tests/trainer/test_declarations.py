"""Data are public by declaration only, and a declaration is of the data that it was made for (contract 12)."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.distributed.ranks import ROOT
from tests.e2e.launch import alone, train_arguments
from trainer.config.recipe import load_config, resolve_recipe

pytestmark = pytest.mark.usefixtures("trusted_models")

DECLARING = """
name = "declaring"
model = { size = "pico" }
optimizer = { peak_lr = 1e-3 }
train = { num_steps = 2, micro_batch_size = 2 }
data = { shards = "theirs/*.tar", provenance = "synthetic", deduplication = "by hash" }
heldout = { shards = "theirs/heldout.tar", is_public = true }
privacy = { expected_batch_size = 4, noise_multiplier = 1.0, max_examples_per_owner = 3 }
"""

NAMINGS = {
    "data.shards": ["data.shards=mine/*.tar"],
    "heldout.shards": ["heldout.shards=mine/heldout.tar"],
    "both": ["data.shards=mine/*.tar", "heldout.shards=mine/heldout.tar"],
    "another caption": ["data.caption_field=notes"],
    "another label": ["data.label_field=diagnosis"],
    "the whole section": ['heldout={shards = "mine/heldout.tar"}'],
}


def said(recipe: Path, overrides: Sequence[str] = ()) -> list[str]:
    return resolve_recipe(recipe, overrides).publicity_lines(load_config(recipe, overrides))


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "declaring.toml"
    path.write_text(DECLARING)
    return path


@pytest.mark.parametrize("naming", NAMINGS)
def test_whoever_names_data_declares_them(naming: str, recipe: Path) -> None:
    names, before, after = NAMINGS[naming], ["train.seed=1"], ["train.compile=false"]
    for order in itertools.permutations([*names, *before, *after]):
        config = load_config(recipe, order)
        assert config.heldout is not None and not config.heldout.is_public
        other_training_data = any(name.startswith("data.") for name in names)
        assert config.data.provenance == ("private" if other_training_data else "synthetic")
        assert (config.data.deduplication is None) == other_training_data
        assert (config.privacy.max_examples_per_owner is None) == other_training_data


def test_said_again_it_counts(recipe: Path) -> None:
    more = ["heldout.is_public=true", "data.provenance=public", "data.deduplication=by eye"]
    for order in itertools.permutations([*NAMINGS["both"], *more]):
        config = load_config(recipe, order)
        assert config.heldout is not None and config.heldout.is_public
        assert (config.data.provenance, config.data.deduplication) == ("public", "by eye")
    whole = load_config(recipe, ['heldout={shards = "mine.tar", is_public = true}'])
    assert whole.heldout is not None and whole.heldout.is_public


def test_the_recipe_s_own_data_stay_as_it_declares_them(recipe: Path) -> None:
    for overrides in (
        [],
        ["train.num_steps=1"],
        ["data.shards=theirs/*.tar", "heldout.shards=theirs/heldout.tar"],
    ):
        config = load_config(recipe, overrides)
        assert config.heldout is not None and config.heldout.is_public
        assert (config.data.provenance, config.privacy.max_examples_per_owner) == ("synthetic", 3)


def test_the_line_says_what_is_public_and_who_declared_it(recipe: Path) -> None:
    own = said(recipe)
    assert own == [
        "public: training data theirs/*.tar",
        f"  (data.provenance = synthetic, declared by {recipe})",
        "public: held-out data theirs/heldout.tar",
        f"  (heldout.is_public = true, declared by {recipe})",
    ]
    other = said(recipe, NAMINGS["both"])
    assert other[:2] == [
        "private: training data mine/*.tar (data.provenance = private, the default)",
        "private: held-out data mine/heldout.tar (heldout.is_public = false, the default)",
    ]
    assert (
        str(recipe) in other[2]
        and "ignored, because" in other[2]
        and "heldout.is_public" in other[3]
    )
    again = said(recipe, [*NAMINGS["both"], "heldout.is_public=true"])
    assert again[0].startswith("private: training data mine/*.tar (")
    assert again[1:3] == [
        "public: held-out data mine/heldout.tar",
        "  (heldout.is_public = true, declared by the command line)",
    ]
    declared = said(recipe, ["heldout.is_public=false", "data.provenance=private"])
    assert str(declared).count("declared by the command line") == 2 and "public: " not in [
        line[:8] for line in declared
    ]


def test_pictures_of_one_s_own_heldout_data_stay_private_at_a_start_and_a_resume(
    tmp_path: Path,
) -> None:
    """The quickstart recipe declares its held-out data public; those that the command line names are somebody's own."""
    (tmp_path / "mine.tar").write_bytes((ROOT / "data/demo/heldout-00000.tar").read_bytes())
    run_dir = tmp_path / "run"
    arguments = train_arguments(
        run_dir, "--engine", "local", f"heldout.shards={tmp_path}/mine.tar", "train.num_steps=2"
    )
    for more, code in ((["train.max_minutes=1e-9"], 7), ([], 0)):
        done = alone([*arguments, *more])
        assert done.returncode == code, done.stderr
        lines = [
            line for line in done.stdout.splitlines() if line.startswith(("public: ", "private: "))
        ]
        assert len(lines) == 2 and f"private: held-out data {tmp_path}/mine.tar" in " ".join(
            done.stdout.split()
        )
    public = [
        p
        for p in run_dir.rglob("*")
        if p.is_file() and "private" not in p.relative_to(run_dir).parts
    ]
    public.remove(run_dir / "verify.py")  # the same for every run
    assert list((run_dir / "private").glob("samples-*.png"))
    assert "blind_loss" in (run_dir / "private/heldout.jsonl").read_text()
    assert "heldout/blind_loss" in (run_dir / "private/metrics.jsonl").read_text()
    assert not [
        p.name for p in public if b"blind" in p.read_bytes() or b"shuffled" in p.read_bytes()
    ]
    assert not [p.name for p in public if p.suffix == ".png" or p.name == "heldout.jsonl"]
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert lines and not [key for line in lines for key in line if key.startswith("heldout")]
