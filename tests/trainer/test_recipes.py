"""The shipped recipes: published hyper-parameters, shapes that fit, and a sigma that gives what the comment says."""

import functools
import json
import math
import re
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from data.errors import DataError
from data.index.shard import ROW
from data.index.tar_index import ExampleTable
from privacy.accounting.accountants import epsilon_rdp
from privacy.plan.numbers import PrivacyPlan, make_plan, usual_cap
from privacy.sampling.keys import SamplingKey
from privacy.sampling.poisson import Decisions, PoissonSampler
from privacy.step.batches import LogicalBatches
from tests.docs import stand_ins
from tests.e2e.launch import alone, train_arguments
from tests.processes import run_python
from tests.rehearsal.data import made_entry
from trainer.config.machine import load_machine_settings
from trainer.config.recipe import RunConfig, load_config
from trainer.planner.resources import padding, padding_note
from trainer.ranks.discovery import Ranks
from trainer.run import start as training
from trainer.run.dry_run import dry_run

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.toml"))
DPCAP = [ROOT / "recipes" / f"dpcap_{size}.toml" for size in ("base", "large", "small", "tiny")]
ALL_DPCAP = sorted((ROOT / "recipes").glob("dpcap_*.toml"))
CALIBRATED = [path for path in RECIPES if path.stem.startswith(("dpcap_", "vip_", "finetune_"))]
STAGE_ONE = [path for path in RECIPES if path.stem.startswith(("synthetic_dpcap", "synthetic_vip"))]
STAGE_TWO = [path for path in RECIPES if path.stem.startswith(("dpcap_", "vip_"))]
README = (ROOT / "recipes" / "README.md").read_text()


def plan_of(config: RunConfig, num_examples: int) -> PrivacyPlan:
    """The plan that training would make on this number of examples."""
    return make_plan(config.privacy.request(config.train.num_steps, num_examples))


def rounded_up(epsilon: float) -> str:
    return f"{math.ceil(epsilon * 1e4) / 1e4:.4f}"


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_name_and_first_comment(path: Path) -> None:
    """The first line is a command that names an existing ds_config and this very recipe."""
    lines = path.read_text().splitlines()
    assert load_config(path).name == path.stem
    assert lines[0].startswith("# deepspeed ") and "launch_scripts/train.py" in lines[0]
    ds_config = re.search(r"--ds_config (\S+)", lines[0])
    assert ds_config is not None and (ROOT / ds_config[1]).is_file()
    assert f"--recipe recipes/{path.name}" in lines[0] or path.stem == "quickstart"
    assert lines[1].startswith("# ") and path.stem in README


@pytest.mark.parametrize("path", CALIBRATED, ids=lambda p: p.stem)
def test_sigma_of_every_recipe_by_rdp_and_by_an_epsilon_without_the_cap(path: Path) -> None:
    """Cheap bounds on both sides; `test_every_calibrated_recipe` is exact."""
    config = load_config(path)
    assert config.data.num_examples is not None
    plan = plan_of(config, config.data.num_examples)
    target = {"dpcap_base_eps1": 1.0, "dpcap_base_eps2": 2.0}.get(path.stem, 8.0)
    assert plan.formal_guarantee and plan.warnings == ()
    assert (
        target
        < epsilon_rdp([plan.release_group(plan.max_intents).without_cap()], plan.target_delta)
        < 1.25 * target
    )


@pytest.mark.full
@pytest.mark.parametrize("path", CALIBRATED, ids=lambda p: p.stem)
def test_every_calibrated_recipe(path: Path) -> None:
    """`plan.py --recipe` says what the comment says, rounded up, and it is the target."""
    said = json.loads(
        run_python(
            ["launch_scripts/plan.py", "--recipe", path, "--no_extras", "--json"], timeout=600
        ).stdout
    )
    target = {"dpcap_base_eps1": 1.0, "dpcap_base_eps2": 2.0}.get(path.stem, 8.0)
    # Over 72,720 attempts one step of sigma's last digit moves the discretised epsilon by 5e-3.
    assert (
        target - (6e-3 if path.stem == "vip_base_batch8192" else 1e-3)
        <= said["epsilon_with_reserve"]
        <= target
    )
    planned, reserve = rounded_up(said["epsilon_pld"]), rounded_up(said["epsilon_with_reserve"])
    assert f"epsilon is {reserve}, without a crash {planned}" in path.read_text().replace(
        "\n# ", " "
    )


TINY = [
    "model.overrides.encoder_width=16",
    "model.overrides.encoder_depth=1",
    "model.overrides.encoder_num_heads=2",
    "model.overrides.decoder_width=16",
    "model.overrides.decoder_depth=1",
    "model.overrides.decoder_num_heads=2",
    "data.shards=data/demo/train-00000.tar",
    "data.image_size=32",
    "data.num_tokens=12",
    "data.tokenizer=data/tokenizer/tokenizer.json",
    "data.num_workers=0",
    "privacy.expected_batch_size=16",
    "schedule.warmup_steps=1",
    "train.num_steps=2",
    "train.micro_batch_size=8",
]
RANDOM_START = "init.parts=none"
REDUCED = ("vip_base", "synthetic_vip_base")
ELSEWHERE = ("quickstart", "finetune_")
"""Quickstart has a test of its own; fine-tuning needs labels (tests/trainer/test_classification.py)."""


@pytest.mark.parametrize(
    "path",
    [
        p if p.stem in REDUCED else pytest.param(p, marks=pytest.mark.full)
        for p in RECIPES
        if not p.stem.startswith(ELSEWHERE)
    ],
    ids=lambda p: p.stem,
)
def test_two_small_steps_of_every_recipe(path: Path, tmp_path: Path) -> None:
    """The recipe's own optimizer, schedule and kind of model on the demo, shrunk."""
    shrunk = (
        TINY
        if load_config(path).model.kind == "captioner"
        else [x for x in TINY if "num_tokens" not in x]
    )
    changes = [*shrunk, "data.num_examples=1000", "train.checkpoint_every=1"]
    # More noise takes less time to account for.
    changes += [RANDOM_START, "privacy.noise_multiplier=2"] if path in CALIBRATED else []
    changes += ["schedule.decay_steps=4"] if path.stem.startswith("dpcap_") else []
    arguments = train_arguments(tmp_path / "run", "--engine", "local", *changes, recipe=str(path))
    result = alone(arguments)
    assert result.returncode == 0, result.stdout[-3000:]
    claim = "no formal guarantee" if path.stem.startswith("synthetic") else "epsilon"
    assert f"done: 2 steps, {claim}" in result.stdout


def table_without_shards(num_examples: int) -> ExampleTable:
    """As many examples of 50 kB in shards of 10,000 that are not there; their rows take no memory."""
    row = np.zeros(1, ROW)
    row["low"] = 100  # blocks of 512 bytes
    counts = [min(10_000, num_examples - first) for first in range(0, num_examples, 10_000)]
    entries = [made_entry(number, count, 51_200 * count) for number, count in enumerate(counts)]
    return ExampleTable(Path("made"), "made", entries, np.broadcast_to(row, (num_examples,)))


@functools.cache
def decided(num_examples: int, batch: int) -> tuple[PoissonSampler, Decisions]:
    """The coins of one step, which recipes of one size share."""
    sampler = PoissonSampler.with_expected_batch(num_examples, batch, usual_cap(batch))
    return sampler, sampler.decide(bytes(32), 1)


@functools.cache
def dealt_rows(num_examples: int, batch: int, micro_batch_size: int) -> tuple[int, np.ndarray]:
    """(rows of a rank, the rows of all members) of a step on one rank, by the code of a run."""
    sampler, coins = decided(num_examples, batch)
    batches = LogicalBatches(sampler, SamplingKey(bytes(32)), bytes(16), {}, micro_batch_size)
    with mock.patch.object(PoissonSampler, "decide", return_value=coins):
        dealt = batches.plan(1)
    assert dealt.rows is not None
    return dealt.num_micro_batches * micro_batch_size, dealt.rows


@pytest.mark.parametrize("path", ALL_DPCAP, ids=lambda p: p.stem)
def test_a_logical_batch_of_a_million_is_dealt(path: Path) -> None:
    """1,310,720 of 233,804,767 examples, each in a row of its own; more rows than one chunk of coins."""
    config = load_config(path)
    assert config.data.num_examples is not None
    batch = config.privacy.expected_batch_size
    num_rows, rows = dealt_rows(config.data.num_examples, batch, config.train.micro_batch_size)
    assert abs(len(rows) - batch) < 8 * batch**0.5
    assert len(np.unique(rows)) == len(rows)
    assert rows.min() >= 0 and rows.max() < num_rows


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A masked autoencoder of one step, whose encoder the fine-tuning recipes start from."""
    return stand_ins.trained(tmp_path_factory.mktemp("trained"))


DEALT = re.compile(
    r"one step is dealt: ([\d,]+) examples in ([\d,]+) rows, .* ([\d,]+) micro-batches of ([\d,]+) a rank"
)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_the_dry_run_of_every_recipe_deals_a_step(
    path: Path,
    tmp_path: Path,
    trained: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its own numbers of examples, rows and steps, its own plan; networks are narrow, and there are no shards."""
    own = load_config(path)
    shrunk = [change for change in TINY if change.startswith(("model.", "data."))]
    if not path.stem.startswith(("dpcap_", "vip_", "finetune_", "synthetic_")):  # small as they are
        shrunk = [change for change in shrunk if change.startswith("data.shards")]
    if own.heldout is not None:
        shrunk.append("heldout.shards=data/demo/heldout-*.tar")
    if own.model.kind != "captioner":
        shrunk = [
            change
            for change in shrunk
            if "decoder" not in change or own.model.kind == "masked_autoencoder"
        ]
        shrunk = [change for change in shrunk if "num_tokens" not in change]
    if path.stem.startswith("finetune_"):
        shrunk = [change for change in shrunk if "encoder_depth" not in change]
        start = [f"init.checkpoint={trained / 'vip_base'}", "model.overrides.encoder_depth=12"]
        shrunk += [*start, "model.overrides.patch_size=8"]
    elif own.init is not None:
        shrunk.append(RANDOM_START)
    config = load_config(path, shrunk)
    count = own.data.num_examples or 1_000_000
    monkeypatch.setattr(
        "trainer.run.dry_run.training_table", lambda *given: table_without_shards(count)
    )
    monkeypatch.setattr(training.TrainerStart, "look_at_examples", lambda self: None)
    machine = load_machine_settings(ROOT / "ds_configs/zero1.json")
    before = sorted(tmp_path.rglob("*"))
    assert (
        dry_run(config, machine, "local", tmp_path / "run", ROOT, Ranks(), torch.device("cpu")) == 0
    )
    assert sorted(tmp_path.rglob("*")) == before
    said = " ".join(capsys.readouterr().out.split())
    if config.data.streaming:
        assert "one step is dealt" not in said
        return
    match = DEALT.search(said)
    assert match, said
    examples, rows, micro_batches, size = (
        int(number.replace(",", "")) for number in match.groups()
    )
    batch = own.privacy.expected_batch_size
    assert abs(examples - batch) < 8 * batch**0.5 and rows == micro_batches * size >= examples
    assert "sums take" in said and "the step reads" in said


MISSING = "missing or empty shards: {} is missing; mend the path or fetch it again"


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_every_recipe_starts_up_to_its_missing_shards(path: Path, tmp_path: Path) -> None:
    """All else that a start reads lies in the repository; weights to start from are looked for once there are data."""
    config = load_config(path, [f"data.shards={tmp_path}/none.tar"])
    machine = load_machine_settings(ROOT / "ds_configs/zero3.json")
    with pytest.raises(DataError) as refused:
        training.train(
            config, machine, "local", tmp_path / "run", ROOT, Ranks(), torch.device("cpu")
        )
    assert str(refused.value) == MISSING.format(tmp_path / "none.tar")


def initialised(path: Path) -> str:
    """The run that a recipe starts from."""
    config = load_config(path)
    assert config.init is not None and config.init.parts == "all"
    return config.init.checkpoint


@pytest.mark.parametrize("path", STAGE_TWO, ids=lambda p: p.stem)
def test_stage_two_starts_from_the_model_of_a_stage_one(path: Path) -> None:
    """All weights fit: both recipes make one model. And stage one costs no privacy."""
    stage_one = ROOT / "recipes" / f"{Path(initialised(path)).name}.toml"
    assert stage_one in STAGE_ONE and f"first recipes/{stage_one.name}" in path.read_text().replace(
        "\n# ", " "
    )
    one, two = load_config(stage_one), load_config(path)
    assert initialised(path) == f"runs/{one.name}" and one.model == two.model
    shared = ("image_size", "num_tokens", "tokenizer")
    assert [getattr(one.data, name) for name in shared] == [
        getattr(two.data, name) for name in shared
    ]
    assert not one.privacy.enabled and one.data.provenance == "synthetic" and two.privacy.enabled
    assert load_config(path, [RANDOM_START]).init is None


def test_every_stage_one_has_a_stage_two() -> None:
    assert {f"runs/{path.stem}" for path in STAGE_ONE} == {initialised(path) for path in STAGE_TWO}


RANKS = (8, 16, 32, 64, 128)
MOST_RANKS = {
    **dict.fromkeys(("finetune_vit_base", "finetune_vit_base_lora"), 64),
    **dict.fromkeys((path.stem for path in STAGE_ONE), 16),
}


@pytest.mark.parametrize(
    "path", [p for p in RECIPES if p in CALIBRATED or p.stem in MOST_RANKS], ids=lambda p: p.stem
)
def test_little_of_a_logical_batch_is_padding(path: Path) -> None:
    config = load_config(path)
    expected, size = config.privacy.expected_batch_size, config.train.micro_batch_size
    count = usual_cap(expected) if config.privacy.enabled else expected
    most = MOST_RANKS.get(path.stem, 128)
    assert f"Little padding on 8 to {most} ranks" in path.read_text() or path.stem.startswith(
        "dpcap_"
    )
    for ranks in (ranks for ranks in RANKS if ranks <= most):
        assert padding(count, ranks, size) <= 0.05 and padding_note(count, ranks, size) is None


def test_recipes_of_captioners_differ_in_size_only_and_cappa_in_its_share() -> None:
    def rest(stem: str, *others: str) -> tuple[dict[str, object], dict[str, Any]]:
        """All but name, start and what else is said, and the model's overrides."""
        tree = load_config(ROOT / f"recipes/{stem}.toml").model_dump()
        overrides = tree["model"].pop("overrides")
        for key in ("name", "init", *others):
            *sections, last = key.split(".")
            del (tree[sections[0]] if sections else tree)[last]
        return tree, overrides

    sizes = ("model.size", "train.micro_batch_size")
    assert all(rest(path.stem, *sizes) == rest("dpcap_base", *sizes) for path in DPCAP)
    (cappa, own), (base, overrides) = rest("dpcap_cappa_base"), rest("dpcap_base")
    assert cappa == base and own == {**overrides, "parallel_share": 0.75}
