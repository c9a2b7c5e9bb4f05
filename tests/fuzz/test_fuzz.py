"""No recipe, ds_config, study, command line or environment ends in a traceback, and none hangs."""

import contextlib
import importlib
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.distributed.ranks import ROOT, quiet_environment
from tests.fuzz import strategies as made
from tests.processes import run_python
from trainer.config.machine import load_machine_settings
from trainer.config.recipe import load_config
from trainer.errors import ConfigError
from trainer.studies.grid import load_study

MOST_LINES = 8  # a ds_config with several faults has a line for each
MANY = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
TRAIN = "--engine local --ds_config ds_configs/zero1.json --recipe recipes/tiny.toml train.num_steps=1"


def ends_well(call: Callable[[], object]) -> None:
    """It returns, or refuses with a few lines; anything else is a defect."""
    with contextlib.suppress(SystemExit):  # of --help
        try:
            call()
        except ConfigError as error:
            said, code = str(error), error.exit_code
        else:
            return
        assert code == 2 and 1 <= len(said.splitlines()) <= MOST_LINES, said


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@MANY
@given(tree=made.recipes, overrides=st.lists(made.overrides, max_size=2))
def test_recipes(folder: Path, tree: dict[str, Any], overrides: list[str]) -> None:
    recipe = written(folder / "recipe.toml", made.toml_file(tree))
    ends_well(lambda: load_config(recipe, overrides))


TINY = ROOT / "recipes" / "tiny.toml"
FILES: dict[str, tuple[bytes, Callable[[Path], object]]] = {
    "recipe": (TINY.read_bytes(), load_config),
    "machine": ((ROOT / "ds_configs" / "zero3_bf16.json").read_bytes(), load_machine_settings),
    "study": (made.toml_file(made.STUDY), load_study),
}


@MANY
@given(kind=st.sampled_from(sorted(FILES)), data=st.data())
def test_damaged_files(folder: Path, kind: str, data: st.DataObject) -> None:
    content, load = FILES[kind]
    path = written(folder / kind, data.draw(made.damaged(content)))
    ends_well(lambda: load(path))


@pytest.mark.parametrize("script", made.SCRIPTS)
def test_command_lines(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What parsers make of them; none of these starts anything."""
    parse = importlib.import_module(f"launch_scripts.{script}").parse_args

    @settings(MANY, max_examples=25)
    @given(arguments=made.command_lines(script))
    def check(arguments: list[str]) -> None:
        ends_well(lambda: parse(arguments))

    check()
    capsys.readouterr()


NEW = f"{TRAIN} --run_dir {{folder}}/new"
SIZES = "--num_examples 60000 --expected_batch_size 600 --num_steps 1000"
LONG = "x" * 3000
KNOWN: dict[str, tuple[str, str]] = {
    "a deeply nested override": ("train", f"{NEW} train.seed={'[' * 30_000 + ']' * 30_000}"),
    "a model wider than any": ("train", f"{NEW} model.overrides.encoder_width=1000000000000"),
    "a model larger than this machine": (
        "train", f"{NEW} model.overrides.encoder_width=131072 model.overrides.encoder_depth=24",
    ),
    "shards by ftp": ("train", f"{NEW} data.shards=ftp://host/a.tar"),
    "a picture of a million pixels a side": ("train", f"{NEW} data.image_size=1000000"),
    "a caption field that is not UTF-8": ("train", f"{NEW} data.caption_field=\udcff"),
    "more noise than a float holds": ("train", f"{NEW} privacy.noise_multiplier=1e308"),
    "a micro-batch of a thousand million": ("train", f"{NEW} train.micro_batch_size=1000000000"),
    "a seed of 77 bits": ("train", f"{NEW} train.seed=100000000000000000000000"),
    "a seed that is no integer": ("train", f"{NEW} train.seed=1e23"),
    "a number of 5,000 digits": ("train", f"{NEW} data.memory_limit_mib={made.DIGITS}"),
    "a rendezvous for no number of seconds": ("train", f"{NEW} --rendezvous_seconds nan"),
    "a rendezvous for ever": ("train", f"{NEW} --rendezvous_seconds inf"),
    "a run folder of 3,000 characters": ("train", f"{TRAIN} --run_dir {{folder}}/{LONG}"),
    "a run folder of 2,500 folders": ("train", f"{TRAIN} --run_dir {{folder}}/{'x/' * 2500}"),
    "a report of a run folder of 3,000 characters": ("report", f"--run_dir {LONG}"),
    "an audit of a run folder of 3,000 characters": ("audit", f"ledger --run_dir {LONG}"),
    "the smallest epsilon": ("plan", f"{SIZES} --target_epsilon 1e-9"),
    "more noise than an accountant resolves": ("plan", f"{SIZES} --noise_multiplier 4e5"),
    "an epsilon that fills the memory": (
        "plan", "--num_examples 3000 --expected_batch_size 60 --num_steps 100000000 --noise_multiplier 1 --no_extras",
    ),
    "a file of other things as weights": ("export", "--import vip README.md {folder}/new"),
    "shards by a product of ranges": ("train", f"{NEW} data.shards={{0..9999999}}{{0..9999999}}{{0..9999999}}.tar"),
}  # fmt: skip
"""Command lines that once ended in a traceback. Each is refused now with one line."""
QUICK = ("a model wider than any", "a run folder of 2,500 folders", "more noise than an accountant resolves")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.full) for n in KNOWN])
def test_what_once_ended_in_a_traceback_is_refused(name: str, tmp_path: Path) -> None:
    script, line = KNOWN[name]
    arguments = [one.replace("{folder}", str(tmp_path)) for one in line.split()]
    done = run_python([f"launch_scripts/{script}.py", *arguments])
    assert done.returncode == 2, done.stderr[-2000:]
    lines = done.stderr.splitlines()
    assert len(lines) <= MOST_LINES and lines[-1].startswith("error"), done.stderr[-2000:]


INDEX = "index data/demo/heldout-00000.tar --workers 1"
NUMBERS = "--num_examples 3000 --expected_batch_size 60 --num_steps 50 --noise_multiplier 1.0 --no_extras"


def limited(kind: int, amount: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(kind, (amount, amount))


@pytest.mark.parametrize(
    ("script", "line", "before", "environment"),
    [
        ("train", f"{TRAIN} --run_dir {{folder}}/run", limited(resource.RLIMIT_NOFILE, 24), {}),
        ("plan", NUMBERS, lambda: (os.close(0), os.close(1)), {"LANG": "C", "PYTHONIOENCODING": "ascii"}),
        ("prepare", f"{INDEX} --output {{folder}}/index", limited(resource.RLIMIT_FSIZE, 1000), {}),
        ("audit", "ledger --run_dir {folder}", limited(resource.RLIMIT_NOFILE, 12), {"HOME": "/nowhere", "TERM": "dumb"}),
        *(pytest.param(*case, marks=pytest.mark.full) for case in (
            ("plan", NUMBERS, lambda: os.dup2(os.open("/dev/full", os.O_WRONLY), 1), {"PYTHONUTF8": "0", "LC_ALL": "C"}),
            ("train", f"{TRAIN} --run_dir {{folder}}/run data.num_workers=2", limited(resource.RLIMIT_NOFILE, 48), {}),
            ("train", f"{TRAIN} --run_dir {{folder}}/run", limited(resource.RLIMIT_FSIZE, 100_000), {}),
            ("train", f"{TRAIN} --run_dir {{folder}}/run", limited(resource.RLIMIT_AS, 1 << 31), {}),
            ("train", f"{TRAIN} --run_dir {{folder}}/run", lambda: None, {"RANK": "0", "WORLD_SIZE": "é", "MASTER_PORT": "-1"}),
        )),
    ],
)  # fmt: skip
def test_under_limits_and_in_odd_environments(
    script: str, line: str, before: Callable[[], None], environment: dict[str, str], tmp_path: Path
) -> None:
    """In a process of its own, since the interpreter starts and imports everything under these conditions."""
    command = [sys.executable, f"launch_scripts/{script}.py", *line.format(folder=tmp_path).split()]
    with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
        done = subprocess.run(
            command, cwd=ROOT, env=quiet_environment(**environment), stdin=subprocess.DEVNULL, stdout=out, stderr=err,
            preexec_fn=before, timeout=240, check=False,
        )  # fmt: skip
    said = (tmp_path / "err").read_text()
    assert "Traceback" not in said, said
    assert done.returncode in (0, 1, 2), said
    assert len(said.splitlines()) <= MOST_LINES, said
    assert done.returncode == 0 or "error" in said.splitlines()[-1]
