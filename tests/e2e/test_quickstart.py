"""`make quickstart` as a newcomer runs it, and every command of the README."""

import json
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.distributed.ranks import ROOT, quiet_environment
from tests.e2e.launch import launch

KEYS = {"run_dir", "steps", "epsilon", "delta", "heldout_loss_before", "heldout_loss_after", "formal_guarantee"}


def quickstart(run_dir: Path, *overrides: str) -> tuple[dict, str]:
    command = [sys.executable, "launch_scripts/quickstart.py", "--run_dir", str(run_dir), *overrides]
    result = subprocess.run(command, cwd=ROOT, env=quiet_environment(), capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return json.loads(result.stdout.strip().splitlines()[-1]), result.stdout


def test_quickstart_in_short(tmp_path: Path) -> None:
    card, said = quickstart(tmp_path / "run", "train.num_steps=5", "heldout.num_examples=32", "heldout.num_captions=1")
    assert set(card) == KEYS
    assert card["steps"] == 5 and card["formal_guarantee"] is True
    assert 0 < card["epsilon"] <= 8 and card["delta"] == 1e-5
    assert card["heldout_loss_after"] < card["heldout_loss_before"]
    assert "privacy_card.md" in said and (tmp_path / "run" / "report" / "privacy_card.md").is_file()


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_quickstart_whole(tmp_path: Path) -> None:
    started = time.monotonic()
    card, _ = quickstart(tmp_path / "run")
    assert time.monotonic() - started <= 360
    assert card["heldout_loss_after"] <= 0.9 * card["heldout_loss_before"]
    assert card["epsilon"] <= 8


def readme_commands() -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    joined = "\n".join(blocks).replace("\\\n", " ")
    return [line.split("  #")[0].strip() for line in joined.splitlines() if line.strip()]


TESTED_ELSEWHERE = {
    "make quickstart": "test_quickstart_in_short and test_quickstart_whole run what the target runs",
    "make test": "this very command",
    ". .venv/bin/activate": "the tests run in that environment",
}


@pytest.mark.full
@pytest.mark.timeout(900)
def test_readme_python_commands_run(tmp_path: Path) -> None:
    """Each as it stands, only with the run folder of this test and few steps."""
    run_dir = tmp_path / "runs" / "quickstart"
    more = ["train.num_steps=2", "heldout.num_examples=8", "heldout.num_captions=1"]
    seen = set()
    for command in readme_commands():
        words = shlex.split(command.replace("runs/", f"{tmp_path}/runs/"))
        if command in TESTED_ELSEWHERE:
            continue
        if words[0] == "deepspeed" and "--hostfile" not in words:
            result = launch([*words[2:], "--run_dir", str(run_dir), *more], script=words[1])
        elif words[0] == "python":
            result = subprocess.run(
                [sys.executable, *words[1:]],
                cwd=ROOT,
                env=quiet_environment(),
                capture_output=True,
                text=True,
                check=False,
            )
        elif words[0] == "deepspeed":
            check_cluster_command(words)
            continue
        else:
            assert words[0] == "tensorboard", f"no test runs this command of the README: {command}"
            assert (run_dir / "tensorboard").is_dir()  # its pages are read in test_launches.py
            continue
        assert result.returncode == 0, command + result.stdout[-2000:] + result.stderr[-2000:]
        seen.add(words[1])
    assert len(seen) == 7


def check_cluster_command(words: list[str]) -> None:
    """Two hosts are not here; everything that the command names must exist and be accepted."""
    from trainer.config import load_config
    from trainer.ds_config import load_machine_settings, resolve

    options = dict(zip(words[4::2], words[5::2], strict=False))
    overrides = [word.replace("'", "") for word in words if re.match(r"^[a-z]+\.[a-z_]+=", word)]
    config = load_config(ROOT / options["--recipe"], overrides)
    machine = load_machine_settings(ROOT / options["--ds_config"])
    assert config.data.shards.startswith("/shared/") and config.data.index is not None
    assert resolve(machine, micro_batch_size=config.train.micro_batch_size, world_size=128)["gradient_clipping"] == 0.0
