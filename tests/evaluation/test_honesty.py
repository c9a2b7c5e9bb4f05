"""evaluate.py calls nothing private that is not: what is said of a model comes from a whole ledger that knows its checkpoint."""

import json
import math
import re
import shutil
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evaluation.private_head.run import joint_cost_of
from evaluation.sources import encode_png
from privacy.errors import PrivacyStateRefused
from privacy.plan.numbers import make_plan
from privacy.plan.request import PlanRequest
from tests.evaluation.conftest import Evaluate
from tests.evaluation.support import ROOT, exact_delta, pictures, save_digits, save_pictures, spent
from tests.privacy.ledger_files import PLAN, remove_ledger
from tests.trainer.trained_runs import CONTRADICTED, recipe, trained
from trainer.weights.open_model import open_model

PRIVATE = re.compile(r"epsilon\W{0,3}\d", re.IGNORECASE)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A private run of a captioner with its ledger."""
    run = tmp_path_factory.mktemp("runs") / "captions"
    trained(run, recipe())
    return run


def probe(run: Evaluate, checkpoint: Path, folder: Path) -> dict[str, Any]:
    source = save_pictures(folder, 12)
    return run(
        "linear-probe",
        "--checkpoint",
        checkpoint,
        "--train",
        source,
        "--test",
        source,
        "--method",
        "lars",
        "--epochs",
        2,
        "--output",
        folder / "out",
    )


def test_a_whole_ledger_is_what_states_epsilon(run: Evaluate, whole: Path, tmp_path: Path) -> None:
    record = probe(run, whole, tmp_path)
    model = record["model"]
    assert (model["formal_guarantee"], model["attested"], model["delta"]) == (True, True, 1e-5)
    assert (
        model["epsilon"] == pytest.approx(PLAN.epsilon_after(3))
        and record["formal_guarantee"] is False
    )


@pytest.mark.parametrize(("damage", "reason"), CONTRADICTED)
def test_a_ledger_that_contradicts_the_checkpoint_is_refused(
    run: Evaluate, whole: Path, tmp_path: Path, damage: Callable[[Path], None], reason: str
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(whole, copy)
    damage(copy)
    with pytest.raises(PrivacyStateRefused, match=reason):
        probe(run, copy, tmp_path)
    assert not (tmp_path / "out").exists()


def test_a_manifest_alone_proves_nothing(run: Evaluate, whole: Path, tmp_path: Path) -> None:
    """It says formal_guarantee: true, and no ledger in its run folder bears it out."""
    copy = tmp_path / "run"
    shutil.copytree(whole, copy)
    remove_ledger(copy)
    assert open_model(copy).manifest["formal_guarantee"] is True
    model = probe(run, copy, tmp_path)["model"]
    assert model["formal_guarantee"] is False and model["attested"] is False
    assert (
        model["epsilon"] is None and "there is no ledger in its run folder" in model["reasons"][0]
    )


def test_a_simulation_is_none(run: Evaluate, tmp_path: Path) -> None:
    plan = make_plan(
        PlanRequest(
            num_examples=2000,
            expected_batch_size=8,
            num_steps=6,
            noise_multiplier=4.0,
            target_delta=1e-5,
            informal_reasons=("a simulation of a larger batch",),
        )
    )
    trained(tmp_path / "run", recipe(), plan=plan)
    model = probe(run, tmp_path / "run", tmp_path)["model"]
    assert (
        model["formal_guarantee"] is False
        and model["attested"] is True
        and model["epsilon"] is None
    )
    assert model["reasons"] == ["a simulation of a larger batch"]


def test_what_people_read(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without --json: the table says whether the model has a guarantee, and epsilon only where it has."""
    monkeypatch.syspath_prepend(str(ROOT / "launch_scripts"))
    import evaluate as script

    shutil.copytree(whole, tmp_path / "run")
    remove_ledger(tmp_path / "run")
    source = save_pictures(tmp_path, 12)
    told = f"few-shot --train {source} --test {source} --shots 1 --cache {tmp_path}/f --checkpoint".split()
    for checkpoint, said in (
        (whole, "for its own training data: epsilon "),
        (tmp_path / "run", "no formal guarantee: not attested"),
    ):
        monkeypatch.setattr(sys, "argv", ["evaluate.py", *told, str(checkpoint)])
        assert script.main() == 0
        out = capsys.readouterr().out
        assert (
            said in out
            and "not private: the numbers are computed from the evaluation data without noise"
            in out
        )
        assert bool(PRIVATE.search(out)) == (checkpoint == whole)


def test_features_are_private_to_their_owner_and_say_so(
    run: Evaluate, whole: Path, tmp_path: Path
) -> None:
    source = save_pictures(tmp_path, 12)
    record = run(
        "few-shot",
        "--checkpoint",
        whole,
        "--train",
        source,
        "--test",
        source,
        "--shots",
        1,
        "--data_is_public",
    )
    assert (
        record["formal_guarantee"] is False and record["released_with_differential_privacy"] == []
    )
    (folder,) = (whole / "private/features").glob("features-*")
    assert json.loads((folder / "manifest.json").read_text())["formal_guarantee"] is False
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def head(run: Evaluate, folder: Path, *arguments: object) -> dict[str, Any]:
    common = ("private-head", "--num_classes", 10, "--output", folder, "--delta", 1e-5)
    return run(*common, *arguments)


def test_a_private_head_on_an_encoder_without_guarantee(
    run: Evaluate, whole: Path, tmp_path: Path
) -> None:
    """The head's epsilon is given the encoder, and the record, the line and head.json say what that is worth."""
    (path,) = (whole / "checkpoints").glob("step-*")
    shutil.copytree(path, tmp_path / "alone")
    source = save_pictures(tmp_path, 12)
    told = f"--train {source} --test {source} --method dp-ls --target_epsilon 1".split()
    for checkpoint, said in (
        (
            tmp_path / "alone",
            "given the encoder, which has no formal guarantee: if it has seen them, none is left",
        ),
        (
            whole,
            "given nothing: what the encoder spent is composed with the head, in case it has seen them",
        ),
    ):
        out = tmp_path / f"out-{checkpoint.name}"
        record = head(run, out, "--checkpoint", checkpoint, *told, "--cache", tmp_path / "f")
        [release] = record["released_with_differential_privacy"]
        assert release["covers"].endswith(said) and record["model"]["formal_guarantee"] == (
            checkpoint == whole
        )
        (file,) = out.glob("private_heads/*/head.json")
        assert json.loads(file.read_text())["covers"] == release["covers"]


def test_heads_of_earlier_commands_are_counted(run: Evaluate, tmp_path: Path) -> None:
    """Two commands one after the other release as much as a sweep, and the second says so; so does a head that failed."""
    train, test = save_digits(tmp_path, 300)
    told, out = ("--train", train, "--test", test, "--method", "dp-ls"), tmp_path / "out"
    assert "all_heads_together" not in head(run, out, *told, "--target_epsilon", 1)["details"]
    record = head(run, out, *told, "--target_epsilon", 2)
    together = record["details"]["all_heads_together"]
    mu = math.sqrt(sum(spent(path) ** 2 for path in out.glob("private_heads/*/ledger.jsonl")))
    assert together["num_releases"] == 2 and together["epsilon"] > 2
    assert exact_delta(mu, together["epsilon"]) == pytest.approx(1e-5, rel=1e-3)
    assert "earlier ones included" in record["notes"][0]
    failed = out / "private_heads/dp-ls-epsilon-1"
    (failed / "head.safetensors").unlink()  # charged all the same
    assert joint_cost_of(out / "private_heads").num_releases == 2
    (failed / "ledger.jsonl").write_text("x\n")
    with pytest.raises(PrivacyStateRefused):
        head(run, out, *told, "--target_epsilon", 3)
    assert not (out / "private_heads/dp-ls-epsilon-3").exists()


def test_a_picture_of_private_images_is_its_owners(
    run: Evaluate, whole: Path, tmp_path: Path
) -> None:
    images, _ = pictures(1)
    (tmp_path / "a.png").write_bytes(encode_png(images[0]))
    grid = tmp_path / "grid.png"
    run(
        "captions",
        "--checkpoint",
        whole,
        "--data",
        f"images:{tmp_path}/a.png",
        "--max_tokens",
        2,
        "--grid",
        grid,
    )
    assert stat.S_IMODE(grid.stat().st_mode) == 0o600
