"""Opening checkpoints for evaluation: the right one, of the model that its manifest states, without changing anything."""

import shutil
from pathlib import Path

import pytest
import torch

from privacy.checkpoints.read import Checkpoint, checkpoint_name
from tests.trainer.trained_runs import recipe, trained
from trainer.config.recipe import InitSection
from trainer.errors import ConfigError
from trainer.weights.initial_weights import find_checkpoint
from trainer.weights.open_model import open_model

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def captioner(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A private run of a captioner; its run folder."""
    run = tmp_path_factory.mktemp("runs") / "captions"
    trained(run, recipe())
    return run


def test_damaged_checkpoints_are_passed_over_with_a_word_and_never_repaired(
    captioner: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(captioner, run)
    (good,) = (run / "checkpoints").glob("step-*")
    shutil.copytree(good, run / "checkpoints" / checkpoint_name(9))
    (run / "checkpoints" / "LATEST").write_text(checkpoint_name(9))
    weights = run / "checkpoints" / checkpoint_name(9) / "rank-00000-of-00001.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    before = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert open_model(run).path == good
    said = capsys.readouterr().err
    assert (
        said.startswith(f"warning: {weights} is missing or damaged")
        and f"; {good.name} is opened" in said
    )
    with pytest.raises(
        ConfigError, match="is missing or damaged"
    ):  # nobody trains from an older one unasked
        find_checkpoint(InitSection(checkpoint=str(run)), ROOT)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == before
    (run / "config.toml").unlink()
    assert open_model(good).manifest["step"] == 3  # the embedded tokenizer is its tokenizer
    shutil.rmtree(good)
    with pytest.raises(ConfigError, match="none of the 1 checkpoints"):
        open_model(run)


def test_a_captioner_opens_with_its_own_tokenizer_only(captioner: Path, tmp_path: Path) -> None:
    (path,) = (captioner / "checkpoints").glob("step-*")
    other = tmp_path / "tokenizer.json"
    other.write_text((ROOT / "data/tokenizer/tokenizer.json").read_text() + " ")
    with pytest.raises(ConfigError, match="the tokenizer that it was trained with"):
        open_model(path, tokenizer=other)


def test_the_model_is_the_one_of_the_manifest(captioner: Path) -> None:
    """Also where the recipe in the run folder has changed since."""
    opened = open_model(captioner, dtype=torch.float64)
    assert not opened.model.training and opened.model.encoder.norm.weight.dtype == torch.float64
    stated = opened.manifest["model"]
    assert opened.task.facts()["model"] == stated and stated["encoder"]["width"] == 32
    recipe_file = captioner / "config.toml"
    text = recipe_file.read_text()
    recipe_file.write_text(text.replace("encoder_width = 32", "encoder_width = 64"))
    assert recipe_file.read_text() != text
    assert open_model(captioner).task.facts()["model"] == stated
    recipe_file.write_text(text)
    loss_B = opened.model(**opened.task.synthetic_inputs(2))
    assert loss_B.shape == (2,) and bool(loss_B.isfinite().all())


def test_weights_that_are_no_numbers_are_refused(
    captioner: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = Checkpoint.load_weights

    def diverged(self: Checkpoint, model: torch.nn.Module, *, average: bool = False) -> None:
        load(self, model, average=average)
        next(model.parameters()).data.view(-1)[0] = torch.nan

    monkeypatch.setattr(Checkpoint, "load_weights", diverged)
    with pytest.raises(ConfigError, match=r"class_token.*NaN or infinite"):
        open_model(captioner)
