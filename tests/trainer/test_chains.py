"""What weights carry that started from those of a private run: the charges of both, in card, export and verify.py."""

import contextlib
import fcntl
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data.index.build import build_index
from evaluation.private_head.rows import Rows
from evaluation.private_head.run import joint_cost_of, train_head
from evaluation.results import ModelFacts
from privacy import verify
from privacy.accounting.rounding import rounded_up
from privacy.card.model import PrivacyCard
from privacy.card.run_card import write_card
from privacy.errors import PrivacyConfigError, PrivacyStateRefused
from privacy.ledger.claim import composed_epsilon, read_copies
from privacy.ledger.records import read_ledger
from tests.privacy.cards import without_surroundings
from tests.privacy.ledger_epsilon import recompute
from tests.privacy.published import read_metrics
from trainer.audit.canaries import run_audit, write_canaries
from trainer.card_of_run import build_card
from trainer.config.machine import load_machine_settings
from trainer.config.recipe import load_config
from trainer.errors import ConfigError
from trainer.publish import publish
from trainer.ranks.discovery import Ranks
from trainer.run import start as training
from trainer.run.dry_run import dry_run
from trainer.weights.export import export
from trainer.weights.initial_weights import ledgers_of
from trainer.weights.open_model import open_model

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.usefixtures("trusted_models", "one_rank")
SAME, OTHER = "data/demo/train-00000.tar", "data/demo/train-00001.tar"


def run(
    folder: Path, *changes: str, shards: str = SAME, steps: int = 2, is_dry: bool = False
) -> int:
    config = load_config(
        ROOT / "recipes/tiny.toml",
        [
            f"data.shards={shards}",
            "heldout.num_examples=2",
            "heldout.num_captions=0",
            "heldout.is_public=true",
            "privacy.clipping_mode=bookkeeping",
            f"train.num_steps={steps}",
            f"name={folder.name}",
            *changes,
        ],
    )
    machine = load_machine_settings(ROOT / "ds_configs/zero1.json")
    start = dry_run if is_dry else training.train
    return start(config, machine, "local", folder, ROOT, Ranks(), torch.device("cpu"))


def spent(chain: dict[str, Path], *names: str, delta: float) -> float:
    """Epsilon of these runs together, from their ledgers and dp-accounting alone."""
    return float(recompute(*(chain[name] / "ledger.jsonl" for name in names), delta=delta)[1])


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory, one_rank: torch.device) -> dict[str, Path]:
    """A run, and one from its weights on the same shard."""
    folder = tmp_path_factory.mktemp("chain")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(fcntl, "flock", lambda *arguments: None)  # held until the process ends
        assert run(folder / "first", "privacy.target_delta=1e-6") == 0
        with (folder / "console.txt").open("w") as console, contextlib.redirect_stdout(console):
            assert run(folder / "second", f"init.checkpoint={folder / 'first'}", steps=3) == 0
        without_surroundings(patched)
        write_card(folder / "second", build_card(folder / "second"))
    return {name: folder / name for name in ("first", "second", "console.txt")}


@pytest.fixture(scope="module")
def third(chain: dict[str, Path]) -> Path:
    """A run from the second one's weights on another shard, whose recipe declares that disjoint."""
    folder = chain["second"].parent / "third"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(fcntl, "flock", lambda *arguments: None)
        disjoint = (f"init.checkpoint={chain['second']}", "init.disjoint_data=true")
        assert run(folder, *disjoint, shards=OTHER, steps=1) == 0
    write_card(folder, build_card(folder))
    return folder


def card_of(folder: Path) -> PrivacyCard:
    return PrivacyCard.model_validate_json((folder / "report/privacy_card.json").read_text())


def test_the_headline_is_what_the_released_weights_carry(chain: dict[str, Path]) -> None:
    second = card_of(chain["second"])
    both = spent(chain, "first", "second", delta=1e-6)
    assert second.composition is not None and second.delta == 1e-6, (
        "the smaller delta protects the examples of both"
    )
    assert second.epsilon == second.composition.epsilon == pytest.approx(both, abs=1e-6)
    assert second.accounting.epsilon == pytest.approx(spent(chain, "second", delta=1e-5), abs=1e-6)
    assert second.epsilon > second.accounting.epsilon, "the run's own epsilon alone is no headline"
    assert [(entry.name, entry.attempts_charged) for entry in second.composition.runs] == [
        ("this run", 3),
        ("first", 2),
    ]
    page = (chain["second"] / "report/privacy_card.md").read_text()
    head = page.partition("## 1.")[0]
    assert (
        f"epsilon = {math.ceil(second.epsilon * 1000) / 1000:.3f}" in head
        and "behind the initial weights" in head
    )


def test_canaries_are_judged_by_what_the_released_weights_carry(
    chain: dict[str, Path], tmp_path: Path
) -> None:
    """A canary may have been in both runs, so its losses may tell as much as both spent."""
    write_canaries(tmp_path / "canaries", 20, 32)
    report = run_audit(chain["second"], tmp_path / "canaries", None, ROOT)
    both = spent(chain, "first", "second", delta=1e-6)
    assert (
        report.facts["claimed"] == pytest.approx(both, abs=1e-6) and report.facts["delta"] == 1e-6
    )
    copy = shutil.copytree(chain["second"], tmp_path / "second")
    (copy / "behind/ledger-1.jsonl").unlink()
    with pytest.raises(PrivacyStateRefused, match=r"ledger-1\.jsonl"):
        run_audit(copy, tmp_path / "canaries", None, ROOT)


def test_contract_10_of_runs_declared_disjoint_the_one_that_spent_most_is_claimed(
    chain: dict[str, Path],
) -> None:
    less, more = (read_ledger(chain[name] / "ledger.jsonl") for name in ("first", "second"))
    for newest, behind in ((less, more), (more, less)):
        newest.opened |= {"disjoint_from_start": True}
        assert composed_epsilon([newest, behind], 1e-6) == composed_epsilon([more], 1e-6)
    assert composed_epsilon([less], 1e-6) < composed_epsilon([more], 1e-6)


@pytest.mark.full
def test_declared_disjoint_the_larger_side_counts_and_the_declaration_is_named(
    chain: dict[str, Path], third: Path, tmp_path: Path, capsys: Any
) -> None:
    folder, card, second = third, card_of(third), card_of(chain["second"])
    assert card.composition is not None and card.composition.disjoint_by_declaration
    assert card.epsilon == pytest.approx(second.epsilon, abs=1e-9) and card.delta == 1e-6
    assert card.accounting.epsilon is not None and card.epsilon > card.accounting.epsilon
    assert [entry.disjoint_from_those_before for entry in card.composition.runs] == [
        True,
        False,
        False,
    ]
    page = (folder / "report/privacy_card.md").read_text()
    assert "declared disjoint" in page and "Declared, not attested" in page
    found = verified(folder, tmp_path, capsys, with_card=True)
    assert found["epsilon"] == pytest.approx(card.epsilon, abs=1e-6)


def verified(run_dir: Path, tmp_path: Path, capsys: Any, *, with_card: bool) -> dict[str, Any]:
    folder = tmp_path / "published"
    publish(run_dir, folder, card_of(run_dir).ledger)
    if not with_card:
        shutil.rmtree(folder / "report")
    code = verify.main([str(folder), "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert code == 0, found["checks"]
    assert (folder / "verify.py").read_bytes() == (ROOT / "privacy/verify.py").read_bytes()
    return found


def test_the_console_says_the_composed_number_first_and_none_below_what_it_is_of(
    chain: dict[str, Path],
) -> None:
    said = " ".join(chain["console.txt"].read_text().split())  # lines are folded
    stated = [float(number) for number in re.findall(r"epsilon (?:planned )?([0-9.]+[0-9])", said)]
    both = spent(chain, "first", "second", delta=1e-6)
    assert len(stated) >= 3 and both <= stated[0] < both + 0.01, said
    first = re.search(
        r"steps? 2 of run 'first', trained on private data with epsilon ([0-9]+\.[0-9]{3}) at", said
    )
    alone = spent(chain, "first", delta=1e-6)
    assert first is not None and alone <= float(first[1]) < alone + 0.01, said


def test_the_verifier_misses_what_is_left_out(
    chain: dict[str, Path], tmp_path: Path, capsys: Any
) -> None:
    folder = tmp_path / "published"
    shutil.copytree(chain["second"], folder, ignore=shutil.ignore_patterns("private"))
    copy = folder / "behind/ledger-1.jsonl"
    content = copy.read_bytes()
    copy.write_bytes(b"\n".join(content.split(b"\n")[:-3]) + b"\n")
    assert (
        verify.main([str(folder)]) == 5
        and "is not the one that the ledger names" in capsys.readouterr().out
    )
    copy.unlink()
    assert (
        verify.main([str(folder)]) == 6
        and "behind/ledger-1.jsonl is missing" in capsys.readouterr().out
    )
    with pytest.raises(PrivacyStateRefused, match="behind the initial weights cannot be read"):
        build_card(folder)


def test_metrics_and_evaluation_state_the_composed_number_first(chain: dict[str, Path]) -> None:
    card = card_of(chain["second"])
    assert card.epsilon is not None and card.accounting.epsilon is not None
    lines = read_metrics(chain["second"])
    said = [line["privacy/epsilon"] for line in lines if "privacy/epsilon" in line]
    assert len(said) == 3 and said == sorted(said)
    assert -1e-8 < said[-1] - card.epsilon < 1e-5, "two upper bounds, each on a grid of its own"
    assert said[0] > card.accounting.epsilon
    opened = open_model(chain["second"])
    facts = ModelFacts.of(opened.path, opened.manifest)
    assert (facts.epsilon, facts.delta) == (pytest.approx(card.epsilon, abs=1e-9), card.delta)
    assert rounded_up(card.epsilon) in facts.statement()


def test_a_private_head_composes_with_its_private_encoder(
    chain: dict[str, Path], tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, opened = np.random.default_rng(0), open_model(chain["second"])
    behind = ledgers_of(opened.path, opened.manifest)
    assert [one.run for one in behind] == ["second", "first"]
    rows = Rows(rng.normal(size=(60, 4)), rng.integers(0, 3, 60))
    head = train_head(
        rows,
        3,
        "dp-ls",
        epsilon=1.0,
        delta=1e-3,
        output=tmp_path / "heads/one",
        parent_ledgers=behind,
    )
    encoder = card_of(chain["second"])
    assert head.epsilon is not None and encoder.epsilon is not None
    assert head.delta == 1e-6 and encoder.epsilon < head.epsilon
    without_surroundings(monkeypatch)
    card = build_card(tmp_path / "heads/one")
    assert (card.epsilon, card.delta) == (head.epsilon, head.delta) and card.composition is not None
    assert [run.name for run in card.composition.runs] == ["this run", "second", "first"]
    together = joint_cost_of(tmp_path / "heads")
    assert together.num_releases == 1 and together.delta == 1e-3 and together.epsilon > 1
    code = verify.main([str(tmp_path / "heads/one"), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert code == 0 and found["epsilon"] == pytest.approx(head.epsilon, abs=1e-6), found["checks"]
    stated = json.loads((tmp_path / "heads/one/head.json").read_text())
    (tmp_path / "heads/one/head.json").write_text(
        json.dumps(stated | {"epsilon": card.accounting.epsilon})
    )
    assert (
        verify.main([str(tmp_path / "heads/one")]) == 5
        and "head.json's epsilon" in capsys.readouterr().out
    )


def test_a_false_declaration_is_refused_by_the_shards_or_their_examples(
    chain: dict[str, Path], tmp_path: Path
) -> None:
    """The same shard, and the same examples, packed anew, among others."""

    def require_refused(name: str, shards: str, words: str) -> None:
        with pytest.raises(ConfigError, match=words):
            run(
                tmp_path / name,
                f"init.checkpoint={chain['first']}",
                "init.disjoint_data=true",
                shards=shards,
            )
        assert not (tmp_path / name / "ledger.jsonl").exists()

    require_refused("run", SAME, "is also one of the run behind")
    for number, shards in enumerate(([SAME], [OTHER, SAME])):
        twin = tmp_path / f"twin{number}"
        twin.mkdir()
        table = build_index([ROOT / shard for shard in shards], tmp_path / f"index{number}")
        extents = list(table.storage().read_all(table.requests(range(len(table)))))
        for half in (0, 1):
            (twin / f"{half}.tar").write_bytes(b"".join(extents[half::2]) + bytes(1024))
        words = "1,000 examples or more are also, byte for byte, in the run behind"
        require_refused(f"run{number}", f"{twin}/*.tar", words)


def test_weights_whose_ledgers_are_elsewhere_are_refused(
    chain: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(chain["second"], tmp_path / "start")
    shutil.rmtree(tmp_path / "start/behind")
    with pytest.raises(PrivacyStateRefused, match="cannot be read"):
        run(tmp_path / "run", f"init.checkpoint={tmp_path / 'start'}")
    assert not (tmp_path / "run/ledger.jsonl").exists()


@pytest.mark.full
def test_a_start_that_spent_more_since_the_ledger_was_opened_is_refused(
    chain: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash before the first checkpoint: the run starts again from the same weights, or from newer ones."""
    monkeypatch.setattr(fcntl, "flock", lambda *arguments: None)
    shutil.copytree(chain["first"], tmp_path / "start")
    assert (
        run(tmp_path / "run", f"init.checkpoint={tmp_path / 'start'}", "train.max_minutes=1e-9")
        == 7
    )
    shutil.rmtree(tmp_path / "run/checkpoints")
    ledger = tmp_path / "run/ledger.jsonl"
    lines = ledger.read_bytes().splitlines(keepends=True)
    ledger.write_bytes(b"".join(lines[:2]))  # as after a crash before the checkpoint
    for record in (tmp_path / "run/private").glob("members.jsonl"):
        record.write_bytes(b"")
    assert (
        run(tmp_path / "run", f"init.checkpoint={tmp_path / 'start'}", "train.max_minutes=1e-9")
        == 7
    )
    assert len(read_copies(tmp_path / "run", read_ledger(ledger).opened)) == 1
    shutil.rmtree(tmp_path / "run/checkpoints")
    ledger.write_bytes(b"".join(lines[:2]))
    with pytest.raises(PrivacyConfigError, match="made its latest charges"):
        run(tmp_path / "run", f"init.checkpoint={chain['second']}", "train.max_minutes=1e-9")


@pytest.mark.full
def test_no_hash_of_a_private_shard_decides_or_enters_what_is_public(
    chain: dict[str, Path], third: Path
) -> None:
    """Whether two private data sets have a shard in common depends on single examples, so only declarations are published."""
    opened = read_ledger(third / "ledger.jsonl").opened
    assert (
        set(opened["behind"][0]) == {"file", "run", "lines", "hash"}
        and opened["disjoint_from_start"] is True
    )
    assert "disjoint_from_start" not in read_ledger(chain["second"] / "ledger.jsonl").opened
    hashes = {
        entry["sha256"]
        for entry in json.loads((chain["first"] / "private/index/manifest.json").read_text())[
            "shards"
        ]
    }
    public = b"".join(
        path.read_bytes() for path in third.rglob("*.json*") if "private" not in path.parts
    )
    assert hashes and not [digest for digest in hashes if digest.encode() in public]


@pytest.mark.full
def test_exports_carry_the_composed_number(chain: dict[str, Path], tmp_path: Path) -> None:
    attested = export(open_model(chain["second"]), "safetensors", tmp_path / "out")[0]
    assert attested is not None and attested.epsilon == card_of(chain["second"]).epsilon
    about = json.loads((tmp_path / "out/config.json").read_text())["about"]
    assert (about["epsilon"], about["delta"]) == (attested.epsilon, 1e-6)
    assert "composed with what the private runs behind" in (tmp_path / "out/README.md").read_text()
