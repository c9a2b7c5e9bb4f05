"""Every command of the README and docs/, run in its page's order in a copy of the project, as far as one machine goes.

What a command takes for granted has a stand-in (stand_ins.py); what would take hours is made short by further arguments, which
stand behind those of the page.
"""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.distributed.ranks import free_port, quiet_environment
from tests.docs import stand_ins
from tests.docs.pages import GUIDES, Block, Command, blocks, commands, copy_project

WITHIN = 400
SHORT_RUN = "train.num_steps=2 heldout.num_examples=8 heldout.num_captions=1"
SHORTER = {
    r"train\.py --ds_config ds_configs/zero3\.json$": SHORT_RUN,
    r"synthetic_tiny_dpcap\.toml": "train.num_steps=2 train.micro_batch_size=16 privacy.expected_batch_size=16"
    " schedule.warmup_steps=1",
}
"""What is added to a command that matches."""
NOT_RUN = {
    r"^make quickstart": "tests/e2e/test_quickstart.py",
    r"^make test": "this suite",
    r"--hostfile": "a cluster; tests/distributed/test_launchers.py has each of these launchers between two hosts",
    r"^launch_scripts/cluster/|^HEAD=|mpirun -n 16|^sbatch": "the same",
    r"^tensorboard": "serves until it is stopped; its pages are read in tests/e2e/test_launches.py",
    r"audit\.py run": "a run that trained on the canaries; tests/trainer/test_audit_canaries.py has one",
    r"^pip install numpy|^sha256sum|^python -I verify\.py": "in a published folder; tests/privacy/verify",
    r"shared_ledger\.py create /shared/": "a folder that all hosts see; docs/sign.md creates one in runs/",
    r"^(\.|export|printf|exit)( |$)": "of the shell",
}
"""Commands that match are not run here, and why."""
PYTHON_NOT_RUN = {
    r"^README.md": "tests/docs/test_library_example.py",
    r"^docs/extending.md": "tests/privacy/clipping/test_rules.py runs the rule; the reader completes the last block",
}
_NAMES = ("allocation", "guarantee", "planning", "run_folder", "running", "sign", "studies")
PAGES = ["README.md", *(f"docs/{name}.md" for name in _NAMES)]
"""Commands of other pages have tests of their own in tests/launch_scripts and tests/evaluation."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stand_ins.trained(tmp_path_factory.mktemp("trained"))


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", PAGES)
def test_commands_of_a_page(page: str, trained: Path, tmp_path: Path) -> None:
    project = tmp_path / "project"
    copy_project(project)
    stand_ins.put(page, project, trained)
    for block in blocks(page):
        if block.language == "python" and not any(
            re.search(p, f"{page}\n{block.text}") for p in PYTHON_NOT_RUN
        ):
            run(["python", "-c", block.text], project, str(block))
        elif block.language == "bash":
            for command in commands(block):
                if not reason_not_to_run(command):
                    run(as_run_here(command), project, str(command))


def reason_not_to_run(command: Command) -> str:
    text = " ".join(command.words)
    return next((reason for pattern, reason in NOT_RUN.items() if re.search(pattern, text)), "")


def as_run_here(command: Command) -> list[str]:
    """On two ranks of a CPU, and in short."""
    words = list(command.words)
    text = " ".join(words)
    for pattern, more in SHORTER.items():
        if re.search(pattern, text):
            words += more.split()
    if words[0] == "deepspeed":
        words[1:1] = ["--num_gpus", "2", "--master_port", str(free_port())]
    return words


def run(words: list[str], project: Path, what: str) -> None:
    environment = quiet_environment(PATH=f"{project / '.venv/bin'}:{os.environ['PATH']}")
    environment.pop("VIRTUAL_ENV", None)
    done = subprocess.run(
        words,
        cwd=project,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=WITHIN,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == 0, (
        f"{what}\nas {shlex.join(words)}: exit code {done.returncode}\n{done.stdout[-4000:]}"
    )


def test_the_tables_name_what_there_is() -> None:
    """No entry outlives its command, and no page with commands is forgotten."""
    lines = {
        page: [c for b in blocks(page) if b.language == "bash" for c in commands(b)]
        for page in PAGES
    }
    texts = [" ".join(c.words) for found in lines.values() for c in found]
    for pattern in (*SHORTER, *NOT_RUN):
        assert any(re.search(pattern, text) for text in texts), f"no command matches {pattern}"

    def has_programs(block: Block) -> bool:
        return block.language in ("bash", "python")

    with_commands = {
        p for p in GUIDES if p.startswith("docs/") and any(has_programs(b) for b in blocks(p))
    }
    names = ("data", "evaluation", "extending", "importing", "models", "own_loop", "own_pictures")
    elsewhere = {f"docs/{name}.md" for name in names}
    assert with_commands - set(PAGES) == elsewhere
