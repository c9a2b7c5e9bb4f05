"""What a recipe claims at a size has run at that size, or the recipe says that it has not."""

import re
from pathlib import Path

import pytest

from tests.rehearsal.record import JSON_RECORD, page_of, ran_sizes
from trainer.config.recipe import RunConfig, load_config
from trainer.tasks import make_task

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.toml"))


def sizes_of(config: RunConfig) -> dict[str, int]:
    """The sizes of a recipe, by the names that parts of the rehearsal note."""
    return {
        "num_examples": config.data.num_examples or 0,
        "expected_batch_size": config.privacy.expected_batch_size,
        "num_steps": config.train.num_steps,
        "parameters": sum(
            weight.numel() for weight in make_task(config, ROOT).skeleton().parameters()
        ),
    }


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_every_size_of_a_recipe_has_run_or_is_marked(path: Path) -> None:
    """A mark reads "# not rehearsed: num_steps: the reason"; one that is not needed is as wrong as one that is missing.

    Dimensions of parts that the record lacks are not compared: its page names those parts.
    """
    ran, sizes = ran_sizes(), sizes_of(load_config(path))
    larger = {name for name in ran.keys() & sizes.keys() if sizes[name] > ran[name]}
    marks = re.findall(r"^# not rehearsed: ([a-z_, ]+): \w.+", path.read_text(), re.M)
    assert {name for mark in marks for name in mark.split(", ")} & ran.keys() == larger


def test_the_page_of_the_record_is_made_from_its_numbers() -> None:
    assert JSON_RECORD.with_suffix(".md").read_text() == page_of()
