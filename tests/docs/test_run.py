"""Every command of the README and docs/, run in its page's order in a copy of the project, as far as one machine goes.

What a command takes for granted has a stand-in (stand_ins.py); what would take hours is made short by further arguments, which
stand behind those of the page.
"""

import os
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.distributed.ranks import free_port, quiet_environment
from tests.docs import stand_ins
from tests.docs.copies import copy_project
from tests.docs.pages import GUIDES, Block, Command, blocks, commands
from tests.docs.test_two_hosts import two_hosts_block

WITHIN = 400
SHORT_RUN = "train.num_steps=2 heldout.num_examples=8 heldout.num_captions=1"
PICO = "model.size=pico " + " ".join(
    f"model.overrides.encoder_{key}" for key in ("width=16", "depth=12", "num_heads=2", "qkv_bias=true")
)
SHORTER = {
    r"train\.py --ds_config ds_configs/zero3\.json$": SHORT_RUN,
    r"finetune_vit_base": f"{PICO} model.overrides.num_classes=3 data.image_size=32 data.num_examples=512 data.num_workers=1"
    " privacy.expected_batch_size=16 train.num_steps=2 train.micro_batch_size=8",
    r"synthetic_tiny_dpcap\.toml": "train.num_steps=2 train.micro_batch_size=16 privacy.expected_batch_size=16"
    " schedule.warmup_steps=1",
    r"prepare\.py synthetic .*--num_examples": "--num_examples 30 --image_size 32 --workers 1",
    r"synthetic_shapes 1000": "--synthetic_shapes 6",
    r"synthetic_tests 500": "--synthetic_tests 3",
    r"synthetic:1:400": "--train synthetic:1:8 --test synthetic:2:4",
    r"few-shot": "--shots 1 2 --num_splits 2",
    r"image_size 512": "--image_size 32",
    r"num_workers 8": "--num_workers 1",
    r"--import vip": "--num_heads 2 --decoder_heads 2 --norm_eps 1e-6 --no-normalise_pixels --activation gelu",
}
"""What is added to a command that matches."""
NOT_RUN = {
    r"^make quickstart": "tests/e2e/test_quickstart.py",
    r"^make test": "this very command",
    r"--hostfile": "a cluster; tests/distributed/test_launchers.py has each of these launchers between two hosts",
    r"^launch_scripts/cluster/|^HEAD=|mpirun -n 16|^sbatch": "the same",
    r"^tensorboard": "serves until it is stopped; what it shows is read in tests/e2e/test_launches.py",
    r"https://host/": "a made-up host; tests/data/test_remote.py and test_index_build.py have servers and ranks",
    r"audit\.py run": "a run that trained on the canaries; tests/trainer/test_audit_run.py has one",
    r"--metrics": "an extra that needs Java; tests/evaluation/test_caption_commands.py",
    r"^pip install numpy|^python -I verify\.py": "in a published folder; tests/privacy/verify",
    r"^(\.|export|printf|exit)( |$)": "of the shell",
}
"""Commands that match are not run here, and why."""
PYTHON_NOT_RUN = {
    r"^docs/extending.md": "tests/privacy/clipping/test_rules.py runs the rule; the reader completes the last block",
    r"AutoModel\b": "tests/launch_scripts/test_export.py loads an exported captioner without the project",
}
PAGES = ["README.md", *(f"docs/{n}.md" for n in (
    "correlated_noise", "data", "guarantee", "models", "planning", "running",
))]  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stand_ins.trained(tmp_path_factory.mktemp("trained"))


def needed(page: str, trained: Path) -> list[Callable[[Path], None]]:
    """Stand-ins of a page."""
    runs = stand_ins.runs(trained)
    return {
        "README.md": [stand_ins.latest(trained)],
        "docs/data.md": [stand_ins.shards, stand_ins.coco],
        "docs/guarantee.md": [runs],
        "docs/models.md": [
            *(stand_ins.shards, stand_ins.pictures, stand_ins.benchmarks_of_others, stand_ins.official_vip),
            runs,
        ],
        "docs/planning.md": [stand_ins.small_study],
    }.get(page, [])


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", PAGES)
def test_commands_of_a_page(page: str, trained: Path, tmp_path: Path) -> None:
    project = tmp_path / "project"
    copy_project(project)
    for put in needed(page, trained):
        put(project)
    for block in blocks(page):
        if block.language == "python" and not any(re.search(p, f"{page}\n{block.text}") for p in PYTHON_NOT_RUN):
            run(["python", "-c", block.text], project, str(block))
        elif block.language == "bash" and block != two_hosts_block():
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
        words, cwd=project, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=WITHIN,
        stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{what}\nas {shlex.join(words)}: exit code {done.returncode}\n{done.stdout[-4000:]}"


def test_the_tables_name_what_there_is() -> None:
    """No entry outlives its command, and no page with commands is forgotten."""
    lines = {page: [c for b in blocks(page) if b.language == "bash" for c in commands(b)] for page in PAGES}
    texts = [" ".join(c.words) for found in lines.values() for c in found]
    for pattern in (*SHORTER, *NOT_RUN):
        assert any(re.search(pattern, text) for text in texts), f"no command matches {pattern}"

    def has_programs(block: Block) -> bool:
        return block.language in ("bash", "python")

    with_commands = {p for p in GUIDES if p.startswith("docs/") and any(has_programs(b) for b in blocks(p))}
    assert with_commands - set(PAGES) == {"docs/extending.md", "docs/own_loop.md", "docs/own_pictures.md"}, (
        "the latter two have tests of their own"
    )
