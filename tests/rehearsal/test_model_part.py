"""The part `model` of the rehearsal at a tiny size: the same stages, with commands that are forked instead of started."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import ROOT, quiet_environment, run_python
from tests.rehearsal import model
from tests.rehearsal.model import RUNS, Trained, steps_of, train_words, watched
from tests.rehearsal.part import GIB, Part
from trainer.config.machine import load_machine_settings
from trainer.config.recipe import RunConfig, load_config
from trainer.tasks import make_task

MIB = 2**20


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that the part has given."""
    given: list[list[str]] = []

    def command(*words: object, log: Path | None = None, code: int = 0, **environment: str) -> str:
        given.append([str(word) for word in words])
        ended = run_python(given[-1][1:], env=quiet_environment(**environment))
        assert ended.returncode == code, ended.stdout + ended.stderr
        return ended.stdout

    monkeypatch.setattr(model, "command", command)
    monkeypatch.setattr(model, "PICTURES", 6)
    monkeypatch.setattr(model, "WORKERS", 0)
    return given


def count_of(config: RunConfig) -> int:
    return sum(p.numel() for p in make_task(config, ROOT).skeleton().parameters())


@pytest.mark.full
@pytest.mark.parametrize("is_exported", [False, True])
def test_the_part_starts_resumes_exports_and_imports(
    is_exported: bool, commands: list[list[str]], tmp_path: Path
) -> None:
    part, recipe = Part("model", tmp_path / "part"), tmp_path / "tiny.toml"
    whole = (ROOT / "recipes" / "tiny.toml").read_text()
    recipe.write_text(re.sub(r"(?ms)^\[heldout\]$.*?(?=^\[)", "", whole))
    tiny = Trained("tiny", str(recipe), "zero1", is_exported=is_exported)
    model.rehearse(part, (tiny,))
    first, second, *exchanged = (stage["measured"] for stage in part.stages[1:])
    assert [measured["equal_tensors"] > 30 for measured in exchanged] == [True] * is_exported
    count = count_of(load_config(recipe))
    assert part.sizes == {"parameters": count} == {"parameters": first["parameters"]}
    assert all(
        first[f"{name} seconds"] > 0
        for name in ("build_model", "require_sums_of_autograd", "train_step")
    )
    assert 0 < first["seconds_to_imports"] < first["seconds_to_step_1"]
    assert first["checkpoint_bytes"] > 3 * 4 * count
    assert (
        first["step_seconds"] > 0 and second["step_seconds"] > 0 and second["together_peak_gib"] > 0
    )
    assert not list(tmp_path.rglob("*.safetensors"))
    given = len(commands)
    again = Part("model", tmp_path / "part")
    model.rehearse(again, (tiny,))
    assert len(commands) == given and again.sizes == part.sizes


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.label)
def test_each_run_is_the_main_command_with_all_parameters_of_its_recipe(run: Trained) -> None:
    words = [str(word) for word in train_words(run, Path("run"), Path("shards"))]
    launcher = ["--num_gpus", str(run.num_ranks)] if run.num_ranks > 1 else []
    assert words[1 : len(launcher) + 3] == [*launcher, "launch_scripts/train.py", "--ds_config"]
    load_machine_settings(Path(words[words.index("--ds_config") + 1]))
    recipe = words.index("--recipe") + 1
    config = load_config(Path(words[recipe]), words[recipe + 3 :])
    assert (
        config.init is None and config.train.num_steps == 2 and not config.train.async_checkpoints
    )
    assert count_of(config) == count_of(load_config(ROOT / run.recipe))


HOLDS = "import time; held = bytearray(64 << 20); time.sleep({})"


def test_memory_of_processes_is_counted_together() -> None:
    measured: dict[str, float] = {}
    with watched(measured, interval=0.05):
        processes = [subprocess.Popen([sys.executable, "-c", HOLDS.format(1.5)]) for _ in range(2)]
        assert [process.wait() for process in processes] == [0, 0]
    assert measured["together_peak_gib"] * GIB > 100 * MIB


def test_processes_that_hold_too_much_together_are_ended() -> None:
    with (
        pytest.raises(AssertionError, match=r"hold [0-9.]+ GiB together"),
        watched({}, 32 * MIB, 0.05),
    ):
        ended = subprocess.run([sys.executable, "-c", HOLDS.format(60)], check=False)
    assert ended.returncode == -9


def test_a_step_that_was_charged_twice_is_found(tmp_path: Path) -> None:
    records = [{"type": kind, "step": 1} for kind in ("intent", "intent", "done")]
    (tmp_path / "ledger.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    with pytest.raises(AssertionError, match="charged twice"):
        steps_of(tmp_path, 1)
