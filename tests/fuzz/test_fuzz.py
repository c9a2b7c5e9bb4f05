"""No command line, recipe, ds_config or environment ends in a traceback, and none hangs."""

import json
import os
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.distributed.ranks import ROOT, quiet_environment
from tests.fuzz.__main__ import ENVIRONMENT, sandbox
from tests.fuzz.cases import CONDITIONS, leaves, make_case
from tests.fuzz.commands import SCRIPTS, options, parser_of
from tests.fuzz.forks import BEGUN, MOST_LINES, SECONDS
from trainer.config.recipe import RunConfig

SEED = 1


@pytest.mark.parametrize(
    ("count", "whole"), [(40, 2), pytest.param(2000, 2000, marks=[pytest.mark.full, pytest.mark.timeout(14_400)])]
)
def test_cases(count: int, whole: int) -> None:
    """In forks of one process, the known ones first; `python -m tests.fuzz` shows what a case was and how it ended."""
    with tempfile.TemporaryDirectory() as name:  # not in /dev/shm, which the sandbox covers
        if subprocess.run(sandbox(Path(name), "true"), capture_output=True, check=False).returncode:
            pytest.skip("this machine gives no namespace in which a command that writes anywhere could be tried")
        command = sandbox(Path(name), sys.executable, "-m", "tests.fuzz", str(SEED), str(count), name, "0", str(whole))
        environment = quiet_environment(**ENVIRONMENT)
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout)
    assert said["problems"] == [], json.dumps(said["problems"], indent=1)[:10_000]
    good = said["codes"]["0"] + said["codes"].get(str(BEGUN), 0)
    assert said["codes"]["2"] > count // 4 and good > count // 20, said["codes"]


def test_the_generator_reaches_every_key_option_and_condition() -> None:
    """Else a key that is new, or one that moved, would be left out without a word."""
    cases = [make_case(SEED, number) for number in range(14_000)]
    words = {word for case in cases for word in case.arguments}
    texts = b"\n".join(case.recipe for case in cases)
    said = {word.partition("=")[0] for word in words if "=" in word}
    for path, _ in leaves(RunConfig):
        assert ".".join(path) in said or path[-1].encode() in texts, path
    for script in SCRIPTS:
        for path, action in options(parser_of(script)):
            if path[:1] not in (("demo",), ("mechanism",)):
                assert any(option in words for option in action.option_strings), (script, path, action.dest)
    assert {re.sub(r"\d+", "#", condition) for case in cases for condition in case.conditions} == set(CONDITIONS)
    assert {case.script for case in cases} == set(SCRIPTS)


TRAIN = "--engine local --ds_config ds_configs/zero1.json --recipe recipes/tiny.toml train.num_steps=1"
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
        )),
    ],
)  # fmt: skip
def test_in_a_process_of_its_own(
    script: str, line: str, before: Callable[[], None], environment: dict[str, str], tmp_path: Path
) -> None:
    """What a fork cannot show: the start of the interpreter and all imports under these conditions."""
    command = [sys.executable, f"launch_scripts/{script}.py", *line.format(folder=tmp_path).split()]
    with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
        done = subprocess.run(
            command, cwd=ROOT, env=quiet_environment(**environment), stdin=subprocess.DEVNULL, stdout=out, stderr=err,
            preexec_fn=before, timeout=4 * SECONDS, check=False,
        )  # fmt: skip
    said = (tmp_path / "err").read_text()
    assert "Traceback" not in said, said
    assert done.returncode in (0, 1, 2), said
    assert len(said.splitlines()) <= MOST_LINES, said
    assert done.returncode == 0 or "error" in said.splitlines()[-1]
