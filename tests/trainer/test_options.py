"""Commands' options: what the command line gives is what a notebook builds, and a bad value is one line that names its option."""

import argparse
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field, ValidationError

from trainer.config.cli import Parser
from trainer.config.options import Options, Shown, add_options, parse_options
from trainer.errors import ConfigError


class Shared(Options):
    output: Annotated[Path | None, Shown("DIR")] = None
    """the folder, 100 % of it"""
    as_json: bool = Field(False, alias="json")
    """one object"""


class Cooking(Shared):
    GROUP = "cooking"
    ONE_OF = ("pan", "pot")

    dish: Annotated[str, Shown("DISH", is_positional=True)]
    """what is cooked"""
    pan: int | None = None
    """size of the pan"""
    pot: int | None = None
    """size of the pot"""
    heat: Literal["low", "high"]
    """of the stove"""
    minutes: Annotated[int, Shown("M"), Field(ge=1)] = 20
    """how long"""
    salt: Annotated[float, Field(gt=0, le=2)] = 0.5
    herbs: tuple[str, ...] = ("thyme",)
    guests: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    note: Annotated[tuple[str, ...] | None, Shown("TEXT", is_repeated=True)] = None
    stir: bool = False


def parsed(*arguments: str) -> Cooking:
    parser = Parser(prog="cook")
    add_options(parser, Cooking)
    options = parse_options(parser, arguments)
    assert isinstance(options, Cooking)
    return options


NEEDED = ("soup", "--pan", "3", "--heat", "low")


def test_the_command_line_gives_what_a_notebook_builds() -> None:
    assert parsed(*NEEDED) == Cooking(dish="soup", pan=3, heat="low")
    everything = parsed(
        "stew", "--pot", "4", "--heat", "high", "--minutes", "5", "--salt", "2", "--herbs", "sage", "mint", "--guests",
        "--note", "a", "--note", "b", "--stir", "--output", "here", "--json",
    )  # fmt: skip
    assert everything == Cooking(
        dish="stew", pot=4, heat="high", minutes=5, salt=2.0, herbs=("sage", "mint"), guests=(), note=("a", "b"),
        stir=True, output=Path("here"), json=True,
    )  # fmt: skip
    with pytest.raises(ValidationError, match="frozen"):
        everything.minutes = 6  # type: ignore[misc]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--minutes", "0"], "--minutes must be at least 1, got 0"),
        (["--salt", "0"], "--salt must be above 0, got 0.0"),
        (["--salt", "3"], "--salt must be at most 2, got 3.0"),
        (["--salt", "nan"], "argument --salt: must be a number below 9.22e+18 in size, not nan"),
        (["--guests", "2", "-1"], "--guests must be at least 0, got -1"),
        (["--minutes", "soon"], "argument --minutes: invalid int value: 'soon'"),
        (["--heat", "mild"], "argument --heat: invalid choice: 'mild' (choose from 'low', 'high')"),
        (["--pot", "2"], "argument --pot: not allowed with argument --pan"),
        (["--herbs"], "argument --herbs: expected at least one argument"),
        (["--minute", "x"], "argument --minutes: invalid int value: 'x'"),
        (["--spice", "1"], "unrecognized arguments: --spice 1"),
    ],
)
def test_a_bad_option_is_one_line(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed(*NEEDED, *arguments)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["soup", "--heat", "low"], "one of the arguments --pan --pot is required"),
        (["soup", "--pan", "1"], "the following arguments are required: --heat"),
        (["--pan", "1", "--heat", "low"], "the following arguments are required: DISH"),
    ],
)
def test_what_is_missing_is_named(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed(*arguments)
    assert str(caught.value) == message


def test_a_notebook_is_refused_alike() -> None:
    for values, match in (
        ({}, "give exactly one of --pan and --pot"),
        ({"pan": 1, "pot": 1}, "give exactly one"),
        ({"pan": 1, "minutes": 0}, "greater than or equal to 1"),
        ({"pan": 1, "spice": 1}, "Extra inputs are not permitted"),
    ):
        with pytest.raises(ValidationError, match=match):
            Cooking(dish="soup", heat="low", **values)


def test_help_is_the_strings_below_the_fields() -> None:
    parser = argparse.ArgumentParser(prog="cook")
    add_options(parser, Cooking)
    text = " ".join(parser.format_help().split())
    for part in (
        "DISH what is cooked", "--minutes M how long", "--heat {low,high} of the stove", "--output DIR the folder, 100 % of it",
        "(--pan PAN | --pot POT)", "--json one object", "cooking:", "--guests [GUESTS ...]", "--herbs HERBS [HERBS ...]",
    ):  # fmt: skip
        assert part in text
    assert text.index("--json one object") < text.index("cooking:") < text.index("--minutes M how long")
