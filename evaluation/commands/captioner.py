"""Options of commands that ask a captioner, the opened captioner, and images with captions."""

from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from pydantic import Field

from evaluation.commands.common import CheckpointOptions, ImageOptions, cache_of, open_checkpoint
from trainer.config.options import Options, Shown
from trainer.errors import ConfigError

if TYPE_CHECKING:
    from data.examples.tokenizer import CaptionTokenizer
    from evaluation.results import ModelFacts
    from evaluation.sources.records import CaptionedImages
    from models.captioner import Captioner

SYNTHETIC_SEED = 1 << 40
"""Default of the test pictures, far from seeds that people train with."""
Count = Annotated[int | None, Shown("N"), Field(ge=1, le=10**12)]


class TooLongOptions(Options):
    """What happens to captions of more tokens than the model takes."""

    too_long: Literal["refuse", "skip"] = "refuse"
    """captions of more tokens than the model takes"""


class CaptionedOptions(CheckpointOptions, ImageOptions):
    """Images with captions, and how they are read."""

    data: Annotated[str, Shown("SOURCE")]
    """images:FILE,..., folder:DIR, shards:PATTERN or hf:DIR"""
    max_examples: Count = None
    """the first N only"""
    caption_field: Annotated[str | None, Shown("NAME")] = None
    """of shards: the captions' field of .json"""
    caption_column: Annotated[str, Shown("NAME")] = "caption"
    """of Hugging Face data sets"""


class OpenedCaptioner(NamedTuple):
    """A captioner, its tokenizer, and what is proven of its training."""

    model: "Captioner"
    tokenizer: "CaptionTokenizer"
    facts: "ModelFacts"


def open_captioner(options: CheckpointOptions) -> OpenedCaptioner:
    """
    Raises:
        ConfigError: the checkpoint holds another kind of model.
    """
    from evaluation.results import ModelFacts
    from models.captioner import Captioner

    opened = open_checkpoint(options)
    if not isinstance(opened.model, Captioner):
        raise ConfigError(f"{options.checkpoint} holds a {type(opened.model).__name__}; captions need a captioner")
    tokenizer = opened.task.make_example(train=False).tokenizer  # type: ignore[attr-defined]
    return OpenedCaptioner(opened.model, tokenizer, ModelFacts.of(opened.path, opened.manifest))


def open_captioned(options: CaptionedOptions) -> "CaptionedImages":
    """
    Raises:
        DataError: the data name no images.
    """
    from evaluation.sources.captioned import open_images

    return open_images(
        options.data, cache=cache_of(options), caption_field=options.caption_field, image_column=options.image_column,
        caption_column=options.caption_column,
    )  # fmt: skip
