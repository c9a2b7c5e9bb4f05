"""Overrides may stand before, between and after the options of every command that takes them."""

import argparse
import itertools
from collections.abc import Callable

import pytest

from launch_scripts import plan, quickstart, train

OPTIONS = ["--ds_config", "machine.json"]
OVERRIDES = ["train.num_steps=1", "name=x"]
COMMANDS: dict[str, Callable[[list[str]], argparse.Namespace]] = {
    "train": train.parse_args,
    "plan": plan.parse_args,
    "quickstart": quickstart.parse_args,
}


@pytest.mark.parametrize("command", COMMANDS)
def test_overrides_stand_anywhere(command: str) -> None:
    for places in itertools.product(range(3), repeat=len(OVERRIDES)):
        at = {place: [o for o, p in zip(OVERRIDES, places, strict=True) if p == place] for place in range(3)}
        more = ["--recipe", "r.toml"] if command != "quickstart" else ["--run_dir", "r"]
        arguments = [*at[0], *OPTIONS, *at[1], *more, *at[2]]
        found = COMMANDS[command](arguments)
        assert sorted(found.overrides) == sorted(OVERRIDES), arguments
        assert str(found.ds_config) == "machine.json"


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unknown_option_between_overrides_is_one_line(command: str) -> None:
    from trainer.errors import ConfigError

    with pytest.raises(ConfigError, match=r"unrecognized arguments: --nosuch"):
        COMMANDS[command]([OVERRIDES[0], *OPTIONS, "--nosuch", OVERRIDES[1]])
