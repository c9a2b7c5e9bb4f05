"""Computes features of a frozen encoder and keeps them, for the other commands or for anything else.

    deepspeed launch_scripts/evaluate.py features --checkpoint runs/x --data shards:imagenet/train-{0000..1023}.tar \\
        --features blocks --num_blocks 12 --num_workers 8

Under a launcher the ranks share the images.
"""

import argparse
from typing import TYPE_CHECKING

from evaluation.commands.inputs import add_inputs, cache_of, load_inputs
from trainer.errors import ConfigError

if TYPE_CHECKING:
    from evaluation.results import Results

NAME = "features"
HELP = "features of a frozen encoder, computed once"
RANKS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See `evaluation.commands`."""
    add_inputs(parser, ["data"])


def run(args: argparse.Namespace) -> "Results | None":
    """See `evaluation.commands`."""
    from evaluation.results import Results

    if cache_of(args) is None:
        raise ConfigError("the checkpoint lies in no run folder: give --cache, a folder for the features")
    inputs = load_inputs(args, ["data"])
    if inputs is None:
        return None
    found = inputs.features["data"]
    scalars = {
        "num_examples": len(found.labels_N),
        "num_unusable": found.num_unusable,
        "width": found.values_ND.shape[1],
        "num_classes": found.num_classes,
    }
    return Results(NAME, scalars, inputs.uses(), inputs.model, notes=[f"kept in {cache_of(args)}"])
