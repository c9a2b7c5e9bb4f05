"""Computes features of a frozen encoder and keeps them, for the other commands or for anything else.

    deepspeed launch_scripts/evaluate.py features --checkpoint runs/x --data shards:imagenet/train-{0000..1023}.tar \\
        --features blocks --num_blocks 12 --num_workers 8

Under a launcher the ranks share the images.
"""

from typing import TYPE_CHECKING

from evaluation.commands.common import cache_of
from evaluation.commands.inputs import FeatureInputOptions, Source, load_inputs
from trainer.errors import ConfigError

if TYPE_CHECKING:
    from evaluation.results import Results


class FeaturesOptions(FeatureInputOptions):
    """Options of `features`."""

    data: Source
    """shards:PATTERN, folder:DIR, hf:DIR, arrays:FILE.npz, or features:FILE_OR_DIR"""


def features(options: FeaturesOptions) -> "Results | None":
    """Computes and keeps features; None on other ranks than 0."""
    from evaluation.results import Results

    cache = cache_of(options)
    if cache is None:
        raise ConfigError("the checkpoint lies in no run folder: give --cache, a folder for the features")
    inputs = load_inputs(options, data=options.data)
    if inputs is None:
        return None
    computed = inputs.features["data"]
    scalars = {
        "num_examples": len(computed.labels_N),
        "num_unusable": computed.num_unusable,
        "width": computed.values_ND.shape[1],
        "num_classes": computed.num_classes,
    }
    return Results("features", scalars, inputs.uses(), inputs.model, notes=[f"kept in {cache}"])
