"""The commands of `launch_scripts/evaluate.py`: a frozen model of options and the function that takes it.

    from evaluation.commands import ZeroShotOptions, zero_shot

    results = zero_shot(ZeroShotOptions(checkpoint="runs/x", data="folder:imagenet/val"))

A function returns what `evaluation.results` writes and prints. Modules import what is heavy inside of functions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from evaluation.commands.captioner import CaptionsOptions, RetrievalOptions, captions, retrieval
from evaluation.commands.choices import AroOptions, ZeroShotOptions, aro, zero_shot
from evaluation.commands.common import CommandOptions
from evaluation.commands.private_head import PrivateHeadOptions, private_head
from evaluation.commands.probes import (
    DenseCommandOptions,
    FeaturesOptions,
    FewShotOptions,
    LinearProbeOptions,
    dense,
    features,
    few_shot,
    linear_probe,
)

if TYPE_CHECKING:
    from evaluation.results import Results

OptionsT = TypeVar("OptionsT", bound=CommandOptions)


@dataclass(frozen=True)
class Command(Generic[OptionsT]):
    """
    Attributes:
        help: one line; the docstring of the function says more.
        uses_ranks: the command shares its work under a launcher, where all ranks but the first return None.
    """

    name: str
    help: str
    options: type[OptionsT]
    run: "Callable[[OptionsT], Results | None]"
    uses_ranks: bool = False


COMMANDS: tuple[Command[Any], ...] = (
    Command("features", "features of a frozen encoder, computed once", FeaturesOptions, features, uses_ranks=True),
    Command(
        "linear-probe", "linear classifier on frozen features (LARS and L-BFGS), not private", LinearProbeOptions,
        linear_probe, uses_ranks=True,
    ),
    Command(
        "few-shot", "classifier from K examples per class (probe or fine-tuning), not private", FewShotOptions, few_shot,
        uses_ranks=True,
    ),
    Command(
        "private-head", "linear head trained with differential privacy on frozen features", PrivateHeadOptions,
        private_head, uses_ranks=True,
    ),
    Command("dense", "segmentation or detection on frozen token maps, not private", DenseCommandOptions, dense),
    Command("zero-shot", "classification by the likelihood of captions that name the class", ZeroShotOptions, zero_shot),
    Command("aro", "does it see attributes, relations and order? (ARO's files, or synthetic tests)", AroOptions, aro),
    Command("captions", "captions of images, and their BLEU, ROUGE-L and CIDEr", CaptionsOptions, captions),
    Command(
        "retrieval", "which caption belongs to which image? (recall at 1, 5 and 10)", RetrievalOptions, retrieval
    ),
)  # fmt: skip
"""All commands in the order of the help."""


def command_of(options: CommandOptions) -> Command[Any]:
    """The command that takes these options."""
    return next(command for command in COMMANDS if command.options is type(options))
