"""Every command of the guides is one that its program takes, and every fragment of a file one that its loader takes."""

import ast
import importlib
import importlib.util
import json
import re
import tomllib
from pathlib import Path

import pytest

from tests.docs.commands import Refused, check, check_study
from tests.docs.pages import GUIDES, ROOT, Block, Command, anchors, blocks, commands, shell_commands

BLOCKS = [block for page in GUIDES for block in blocks(page)]
PROGRAMS = re.compile(r"^(python|deepspeed|make|sbatch|mpirun|pip|\S+\.sh)\s", re.M)


def of(language: str) -> list[Block]:
    return [block for block in BLOCKS if block.language == language]


@pytest.mark.parametrize("page", [page for page in GUIDES if shell_commands(page)])
def test_every_command_is_accepted(page: str) -> None:
    for command in shell_commands(page):
        check(command)


@pytest.mark.parametrize("page", GUIDES)
def test_every_block_says_what_it_is(page: str) -> None:
    """So that no command hides in a block that nobody checks."""
    for block in blocks(page):
        assert block.language in ("bash", "python", "toml", "json", "text"), block
        assert block.language != "text" or not PROGRAMS.search(block.text), f"{block}: commands go into a bash block"


def commented(path: Path) -> Block:
    """Commands in the comments of a recipe or a job script."""
    lines = re.sub(r"\\\n#\s*", "", path.read_text()).splitlines()
    found = [line.lstrip("# ") for line in lines if re.match(r"# *(deepspeed|python|sbatch) .*launch_scripts/", line)]
    return Block(path.relative_to(ROOT).as_posix(), 1, "bash", "\n".join(found))


COMMENTED = [
    *ROOT.glob("recipes/*.toml"),
    *ROOT.glob("studies/recipes/*.toml"),
    ROOT / "launch_scripts/cluster/slurm.sbatch",
]


@pytest.mark.parametrize("path", sorted(COMMENTED), ids=lambda path: path.name)
def test_every_recipe_begins_with_its_command(path: Path) -> None:
    first, *others = commands(commented(path))
    assert path.suffix == ".sbatch" or path.relative_to(ROOT).as_posix() in first.words or path.stem == "quickstart"
    for command in (first, *others):
        check(command)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("python launch_scripts/plan.py --num_exampels 3", "--num_exampels"),
        ("python launch_scripts/evaluate.py captions", "--checkpoint"),
        ("python launch_scripts/nothing.py", "nothing.py"),
        ("python launch_scripts/export.py --checkpoint runs/x --format hf", "OUT"),
        ("deepspeed launch_scripts/train.py", "--ds_config"),
        ("deepspeed --nodes 3 launch_scripts/train.py --ds_config ds_configs/zero3.json", "--nodes"),
        ("deepspeed launch_scripts/train.py --ds_config ds_configs/zero4.json", "zero4"),
        ("deepspeed launch_scripts/train.py --ds_config ds_configs/zero3.json --recipe recipes/none.toml", "none.toml"),
        ("deepspeed launch_scripts/train.py --ds_config ds_configs/zero3.json train.steps=3", "train.steps"),
        ("deepspeed launch_scripts/train.py --engine local --ds_config ds_configs/zero3_init_bf16.json", "zero_init"),
        ("python launch_scripts/study.py run studies/none.toml", "none.toml"),
        ("NODES=2 launch_scripts/cluster/torchrun.sh ARGUMENTS", "NODES"),
        ("launch_scripts/cluster/openmpi.sh", "before those of train.py"),
        ("sbatch launch_scripts/cluster/slurm.sbatch --recipe recipes/quickstart.toml", "--ds_config"),
        ("sbatch -N2 launch_scripts/cluster/slurm.sbatch ARGUMENTS", "-N2"),
        ("make quick-start", "quick-start"),
        ("python benchmarks/step.py --jsn", "--jsn"),
        ("python -m tests.nothing", "tests.nothing"),
        ("pip install '.[none]'", "none"),
        ("dpspeed launch_scripts/train.py --ds_config ds_configs/zero3.json", "dpspeed"),
        ("trainer --help", "trainer"),
    ],
)
def test_a_wrong_command_is_seen(line: str, reason: str) -> None:
    (command,) = commands(Block("page", 1, "bash", line + "\n"))
    with pytest.raises(Refused, match=re.escape(reason)):
        check(command)


def test_a_shell_block_is_taken_apart() -> None:
    block = Block("page", 1, "bash", "a 'b  c' \\\n    d > file    # why\nX=1 e f=~/g && h | i\n# nothing\n")
    assert [c.words for c in commands(block)] == [("a", "b  c", "d"), ("X=1", "e", "f=~/g"), ("h",), ("i",)]
    assert commands(block)[0] == Command(block, ("a", "b  c", "d"), "a 'b c' d > file")


def test_recipe_fragments_are_accepted() -> None:
    """As overrides of a shipped recipe."""
    from trainer.config.recipe import load_config
    from trainer.studies.grid import flat

    fragments = [block for block in of("toml") if block.page != "docs/planning.md"]
    assert fragments
    for block in fragments:
        keys = flat(tomllib.loads(block.text), str(block))
        load_config(ROOT / "recipes/dpcap_base.toml", [f"{key}={json.dumps(value)}" for key, value in keys.items()])


def test_the_study_of_the_guide_is_accepted(tmp_path: Path) -> None:
    """docs/planning.md: the first block is a whole file; the others are sections that a file may have besides."""
    from trainer.studies.grid import load_study

    whole, *sections = [block.text for block in of("toml") if block.page == "docs/planning.md"]
    path = tmp_path / "study.toml"
    path.write_text(whole)
    assert check_study(path) == 18
    tan, budget = sections
    path.write_text(whole + tan)
    assert load_study(path).tan is not None
    path.write_text(whole.replace('"public"', '"private"', 1) + budget)
    assert check_study(path) == 18


def test_json_blocks_are_json() -> None:
    for block in of("json"):
        json.loads(block.text)


@pytest.mark.parametrize("block", of("python"), ids=str)
def test_python_blocks_import_what_there_is(block: Block) -> None:
    """Names are looked up in our modules; other packages only have to be there."""
    for node in ast.walk(ast.parse(block.text, str(block))):
        if isinstance(node, ast.Import):
            missing = [alias.name for alias in node.names if importlib.util.find_spec(alias.name) is None]
            assert not missing, f"{block}: {missing[0]}"
        elif isinstance(node, ast.ImportFrom):
            name = re.sub(r"^auditable_dp\b", "privacy", node.module or "")  # as it is called once it is installed
            assert importlib.util.find_spec(name) is not None, f"{block}: {name}"
            for alias in node.names if (ROOT / name.split(".")[0]).is_dir() else []:
                known = hasattr(importlib.import_module(name), alias.name)
                assert known or importlib.util.find_spec(f"{name}.{alias.name}"), f"{block}: {name}.{alias.name}"


def test_headings_become_anchors() -> None:
    assert {"two-commands", "as-a-library"} <= anchors("README.md")
    assert "tan-constant-sigma--b" in anchors("docs/planning.md")
