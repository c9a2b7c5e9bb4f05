"""The commands of `launch_scripts/evaluate.py`, one module each.

A module has `NAME`, `HELP`, `add_arguments(parser)` and `run(args)`, which returns what `evaluation.results` writes and
prints; what every command takes (--output, --json, --data_is_public) is added for all. `RANKS = True` says that it shares
its work under a launcher; its ranks but the first then return None. Modules import what is heavy inside of functions.
"""

import argparse
from typing import TYPE_CHECKING, Protocol

from evaluation.commands import (
    aro,
    captions,
    dense,
    features,
    few_shot,
    linear_probe,
    private_head,
    retrieval,
    zero_shot,
)

if TYPE_CHECKING:
    from evaluation.results import Results


class Command(Protocol):
    """What a module here looks like."""

    NAME: str
    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> "Results | None": ...


COMMANDS: tuple[Command, ...] = (
    features,
    linear_probe,
    few_shot,
    private_head,
    dense,
    zero_shot,
    aro,
    captions,
    retrieval,
)
"""In the order of the help."""
