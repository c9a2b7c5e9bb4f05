"""Every command of the guides is one that its program takes, and every fragment of a file one that its loader takes."""

import ast
import importlib
import importlib.util
import json
import re
import tomllib
from pathlib import Path

import pytest

from tests.docs.commands import check, check_study
from tests.docs.pages import GUIDES, ROOT, Block, blocks, commands, shell_commands, spans

BLOCKS = [block for page in GUIDES for block in blocks(page)]
PROGRAMS = re.compile(r"^(python|deepspeed|make|sbatch|mpirun|pip|\S+\.sh)\s", re.M)


def of(language: str) -> list[Block]:
    return [block for block in BLOCKS if block.language == language]


@pytest.mark.parametrize("page", [page for page in GUIDES if shell_commands(page)])
def test_every_command_is_accepted(page: str) -> None:
    for command in shell_commands(page):
        check(command)


def test_the_doors_of_the_first_page_are_commands() -> None:
    found = [span for span in spans("README.md") if span.startswith("python launch_scripts/")]
    assert len(found) == 2
    for span in found:
        (command,) = commands(Block("README.md", 1, "bash", span))
        check(command)


def test_the_first_screen_has_the_commands_that_set_everything_up_and_the_main_one() -> None:
    first = next(block for block in blocks("README.md") if block.language == "bash")
    words = [" ".join(command.words) for command in commands(first)]
    assert words == [
        "make quickstart",
        "make test",
        ". .venv/bin/activate",
        "deepspeed launch_scripts/train.py --ds_config ds_configs/zero3.json",
    ]
    assert first.line <= 15, "before the picture"


@pytest.mark.parametrize("page", GUIDES)
def test_every_block_says_what_it_is(page: str) -> None:
    """So that no command hides in a block that nobody checks. tests/tools/test_delivery.py checks the entries for BibTeX."""
    for block in blocks(page):
        assert block.language in ("bash", "python", "toml", "json", "bibtex", "text"), block
        assert block.language != "text" or not PROGRAMS.search(block.text), (
            f"{block}: commands go into a bash block"
        )


def commented(path: Path) -> Block:
    """Commands in the comments of a recipe or a job script."""
    lines = re.sub(r"\\\n#\s*", "", path.read_text()).splitlines()
    found = [
        line.lstrip("# ")
        for line in lines
        if re.match(r"# *(deepspeed|python|sbatch) .*launch_scripts/", line)
    ]
    return Block(path.relative_to(ROOT).as_posix(), 1, "bash", "\n".join(found))


COMMENTED = [
    *ROOT.glob("recipes/*.toml"),
    *ROOT.glob("studies/recipes/*.toml"),
    ROOT / "launch_scripts/cluster/slurm.sbatch",
]


@pytest.mark.parametrize("path", sorted(COMMENTED), ids=lambda path: path.name)
def test_every_recipe_begins_with_its_command(path: Path) -> None:
    first, *others = commands(commented(path))
    assert (
        path.suffix == ".sbatch"
        or path.relative_to(ROOT).as_posix() in first.words
        or path.stem == "quickstart"
    )
    for command in (first, *others):
        check(command)


def test_recipe_fragments_are_accepted() -> None:
    """As overrides of a shipped recipe."""
    from trainer.config.recipe import load_config
    from trainer.studies.grid import dotted_keys

    fragments = [block for block in of("toml") if block.page != "docs/studies.md"]
    assert fragments
    for block in fragments:
        keys = dotted_keys(tomllib.loads(block.text), str(block))
        load_config(
            ROOT / "recipes/dpcap_base.toml",
            [f"{key}={json.dumps(value)}" for key, value in keys.items()],
        )


def test_the_study_of_the_guide_is_accepted(tmp_path: Path) -> None:
    """docs/studies.md: the first block is a whole file; the others are what a file may have besides."""
    from trainer.studies.grid import load_study

    whole, *sections = [block.text for block in of("toml") if block.page == "docs/studies.md"]
    path = tmp_path / "study.toml"
    path.write_text(whole)
    assert check_study(path) == 18
    tan, private = sections
    path.write_text(whole + tan)
    assert load_study(path).tan is not None
    path.write_text(whole.replace('data.provenance = "public"', private))
    assert check_study(path) == 18


def test_json_blocks_are_json() -> None:
    for block in of("json"):
        json.loads(block.text)


@pytest.mark.parametrize("block", of("python"), ids=str)
def test_python_blocks_import_what_there_is(block: Block) -> None:
    """Names are looked up in our modules; other packages only have to be there."""
    for node in ast.walk(ast.parse(block.text, str(block))):
        if isinstance(node, ast.Import):
            missing = [
                alias.name for alias in node.names if importlib.util.find_spec(alias.name) is None
            ]
            assert not missing, f"{block}: {missing[0]}"
        elif isinstance(node, ast.ImportFrom):
            name = re.sub(
                r"^auditable_dp\b", "privacy", node.module or ""
            )  # as it is called once it is installed
            assert importlib.util.find_spec(name) is not None, f"{block}: {name}"
            for alias in node.names if (ROOT / name.split(".")[0]).is_dir() else []:
                known = hasattr(importlib.import_module(name), alias.name)
                assert known or importlib.util.find_spec(f"{name}.{alias.name}"), (
                    f"{block}: {name}.{alias.name}"
                )
