"""The commands of `launch_scripts/evaluate.py`: options of each, and the function that takes them.

    from evaluation.command_options import ZeroShotOptions
    from evaluation.zero_shot import zero_shot

    results = zero_shot(ZeroShotOptions(checkpoint="runs/x", data="folder:imagenet/val"))

A function returns the `Results` that `evaluation.results` writes and prints. This module imports
nothing heavy, so that --help is quick.
"""

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from trainer.config.options import Options, Shown

SYNTHETIC_SEED = 1 << 40
"""Default of the test pictures, far from seeds that people train with."""
GRID = 24
"""Pictures that `captions --grid` draws."""
Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]
Count = Annotated[int | None, Shown("N"), Field(ge=1, le=10**12)]
Source = Annotated[str, Shown("SOURCE")]
Epochs = Annotated[int, Field(ge=1, le=100_000)]
HeadMethod = Literal["dp-ls", "dp-newton", "dp-fc"]


class CommandOptions(Options):
    """Options of every command.

    Attributes:
        DRAWN_WITHOUT: the option without which pictures are drawn from a seed; None for a command
            that draws no pictures.
    """

    DRAWN_WITHOUT: ClassVar[str | None] = None

    checkpoint: Annotated[Path | None, Shown("DIR")] = None
    """run folder (its newest checkpoint) or checkpoint"""
    use_average: bool = False
    """the moving average of the weights (train.ema_decay)"""
    device: str = "auto"
    """cpu, cuda, cuda:1, ...; default: a GPU where there is one"""
    output: Annotated[Path | None, Shown("DIR")] = None
    """for results; default: the checkpoint's run folder"""
    data_is_public: bool = False
    """the evaluation data are public: results may leave the private part of the run folder"""
    as_json: bool = Field(False, alias="json")
    """print one JSON object on stdout"""

    @property
    def results_are_public(self) -> bool:
        """Returns whether the data are declared public, or drawn from a seed."""
        if self.DRAWN_WITHOUT is None:
            return self.data_is_public
        return self.data_is_public or getattr(self, self.DRAWN_WITHOUT) is None

    @property
    def output_folder(self) -> Path | None:
        """Returns the folder for results: the output, or the run folder of the checkpoint.

        None writes nothing.
        """
        if self.output is not None or self.checkpoint is None:
            return self.output
        from trainer.weights.open_model import run_folder_of

        is_run = (self.checkpoint / "checkpoints").is_dir()
        return self.checkpoint if is_run else run_folder_of(self.checkpoint)


class CheckpointOptions(CommandOptions):
    """Options of commands that need a checkpoint."""

    checkpoint: Annotated[Path, Shown("DIR")]
    """run folder (its newest checkpoint) or checkpoint"""


class ImageOptions(CommandOptions):
    """Options for reading images."""

    cache: Annotated[Path | None, Shown("DIR")] = None
    """for indexes of shards and features; default: private/features of the run folder"""
    batch_size: Annotated[int, Shown("B"), Field(ge=1, le=2**20)] = 64
    """images at once, per rank"""
    num_workers: Annotated[int, Shown("N"), Field(ge=0, le=1024)] = 0
    """processes that decode, per rank"""

    @property
    def cache_folder(self) -> Path | None:
        """Returns the cache, or a folder in `private/` of the run folder; None keeps nothing."""
        output = self.output_folder if self.cache is None else None
        return self.cache if output is None else output / "private" / "features"


class LabelledOptions(ImageOptions):
    """Options for reading labelled images."""

    label_field: Annotated[str, Shown("NAME")] = "cls"
    """of shards: cls, or a field of .json"""


class CaptionedOptions(ImageOptions):
    """Options for reading images with captions."""

    caption_field: Annotated[str | None, Shown("NAME")] = None
    """of shards: the captions' field of .json"""


class FeatureOptions(LabelledOptions):
    """Options of features: the vector of an image."""

    GROUP = "features"

    features: Literal["pooled", "class_token", "blocks", "memory"] = "pooled"
    """mean of the patch tokens; the class token; means over each of the last --num_blocks blocks;
    mean of the captioner's image memory (default: pooled)"""
    num_blocks: Annotated[int, Shown("K")] = 1
    """for --features blocks; ViP takes 12"""
    image_size: Annotated[int | None, Shown("PIXELS")] = None
    """default: the model's; positions are interpolated"""
    resize: Annotated[int | None, Shown("PIXELS")] = None
    """shorter side before the centre is cut out: 256 in the papers; default: the image size"""


class TrainTestOptions(FeatureOptions):
    """Options of training and test data.

    Under a launcher ranks share the images, and ranks other than 0 return None.
    """

    train: Source
    """shards:PATTERN, folder:DIR, arrays:FILE.npz, or features:FILE_OR_DIR"""
    test: Source
    """shards:PATTERN, folder:DIR, arrays:FILE.npz, or features:FILE_OR_DIR"""


class LinearProbeOptions(TrainTestOptions):
    """Linear probe of frozen features: LARS as in the papers, and cross-validated regression.

        python launch_scripts/evaluate.py linear-probe --checkpoint runs/x \\
            --train shards:train/ --test shards:val/ --features blocks --num_blocks 12

    LARS gives the test accuracy of its last epoch and, labelled, of its best (which the papers
    report). Not private.
    """

    GROUP = "probe"

    method: Literal["both", "lars", "lbfgs"] = "both"
    epochs: Epochs = 90
    """LARS; default 90, a tenth of which at most warms up"""
    probe_batch_size: Annotated[int, Shown("B"), Field(ge=1, le=10**12)] = 16384
    """LARS; capped at the data"""
    base_lr: Annotated[float, Shown("R"), Field(gt=0, le=1e4)] = 0.1
    """LARS: rate is R * batch / 256"""
    trust_coefficient: Annotated[float, Shown("R"), Field(gt=0, le=1e4)] = 1e-3
    """LARS; to be raised for small data sets"""
    augment: bool = False
    """LARS: features of random crops and flips, new in each epoch, as in the papers; needs images
    and that many passes"""
    num_folds: int = Field(5, ge=2, le=1000)
    """L-BFGS: of the cross-validation"""
    seed: Seed = 0


class FewShotOptions(TrainTestOptions):
    """Few-shot classification, not private: K examples per class, mean over random splits.

        python launch_scripts/evaluate.py few-shot --checkpoint runs/x \\
            --train shards:train/ --test shards:val/ --shots 1 2 5 10

    The mean has a 95 % interval. The probe is DP-Cap's regression on frozen features. Fine-tuning
    is training: recipes/finetune_vit_base.toml.
    """

    GROUP = "few-shot"

    shots: Annotated[tuple[Epochs, ...], Shown("K"), Field(min_length=1)] = (1, 2, 5, 10)
    """examples per class"""
    num_splits: Annotated[int, Shown("S"), Field(ge=1, le=100_000)] = 3
    """random splits for each K"""
    seed: Seed = 0
    """of the first split"""


class PrivateHeadOptions(TrainTestOptions):
    """A linear head trained with differential privacy on features of a frozen encoder.

        python launch_scripts/evaluate.py private-head --checkpoint runs/x \\
            --train shards:train/ --test shards:val/ --num_classes 100 \\
            --method dp-ls --target_epsilon 1 --output runs/x-heads

    The guarantee covers the training images. The charges of a private encoder are composed with
    those of the head, since the encoder may have seen the images too; with an encoder without a
    guarantee, or from stored features, the guarantee holds given the encoder. The test accuracy is
    computed without noise. Weights, ledger and head.json are in a folder of OUTPUT/private_heads
    (--heads). The command prints the joint epsilon of all heads in that folder: several heads need
    public data, or a budget with room for all of them. Under a launcher ranks share the images;
    rank 0 trains the head, and the others return None.
    """

    GROUP = "head"

    method: HeadMethod
    target_epsilon: Annotated[float, Shown("E")]
    """of the head's release"""
    delta: Annotated[float | None, Shown("D")] = None
    """default 1 / (2 N)"""
    num_classes: Annotated[int | None, Shown("L")] = None
    """public; default: as many as have names"""
    option: Annotated[tuple[str, ...], Shown("NAME=VALUE", is_repeated=True)] = ()
    """of the method: max_norm, ridge, ..."""
    heads: Annotated[Path | None, Shown("DIR")] = None
    """folder of heads and ledgers"""
    shared_ledger: Annotated[Path | None, Shown("FILE")] = None
    """the data owner's ledger, which must have room"""
    whiten_on: Annotated[str | None, Shown("SOURCE")] = None
    """public pictures: features get their mean 0, and equal variances"""
    compare: bool = False
    """also without privacy"""


class DenseOptions(CheckpointOptions):
    """Segmentation or detection by a small head on token maps of the frozen encoder, not private.

        python launch_scripts/evaluate.py dense --task segmentation --checkpoint runs/x \\
            --train ade20k:ADE/training --test ade20k:ADE/validation --image_size 512
        python launch_scripts/evaluate.py dense --task detection --checkpoint runs/x \\
            --train synthetic:1:400 --test synthetic:2:100

    Whole pictures are squeezed to a square of --image_size pixels. Masks are scored at their own
    resolution. Detection and coco: need the extra `evaluation`.
    """

    task: Literal["segmentation", "detection"]
    train: Source
    """synthetic:SEED:COUNT, ade20k:DIR/SPLIT or coco:FILE.json:IMAGES"""
    test: Source
    """synthetic:SEED:COUNT, ade20k:DIR/SPLIT or coco:FILE.json:IMAGES"""
    image_size: Annotated[int | None, Shown("PIXELS"), Field(ge=1, le=8192)] = None
    """default: the model's; positions are interpolated"""
    head: Literal["linear", "conv"] = "conv"
    epochs: Epochs = 30
    lr: float = Field(2e-3, gt=0, le=1e4)
    """of AdamW, in one cycle"""


class ZeroShotOptions(CheckpointOptions, LabelledOptions):
    """Zero-shot classification by caption likelihood.

        python launch_scripts/evaluate.py zero-shot --checkpoint runs/x \\
            --data folder:imagenet/val --classes names.txt
        python launch_scripts/evaluate.py zero-shot --checkpoint runs/x --synthetic_shapes 1000

    Rules: `sum`, `mean` (per token, the published one) and `prior` (minus the log of the name's
    mean probability over all images); see evaluation/zero_shot.py.
    """

    ONE_OF = ("data", "synthetic_shapes")
    DRAWN_WITHOUT = "data"

    data: Annotated[str | None, Shown("SOURCE")] = None
    """shards:PATTERN, folder:DIR or arrays:FILE.npz"""
    synthetic_shapes: Count = None
    """zero-shot on N pictures of plain shapes"""
    synthetic_seed: int = Field(SYNTHETIC_SEED, ge=0, lt=2**63)
    """of these pictures"""
    max_examples: Count = None
    """the first N only"""
    classes: Annotated[Path | None, Shown("FILE")] = None
    """class names, one per line; default: the data's own"""
    template: Annotated[tuple[str, ...] | None, Shown("TEXT", is_repeated=True)] = None
    """with {} for the name or {a} for it with a/an; may be repeated (default:
    evaluation/zero_shot.py)"""


class AroOptions(CheckpointOptions):
    """Compositional tests: the true caption against false ones, by the captioner's loss.

        python launch_scripts/evaluate.py aro --checkpoint runs/x --images vg/images \\
            --test vg-relation:visual_genome_relation.json
        python launch_scripts/evaluate.py aro --checkpoint runs/x \\
            --test order:coco_order.json --images coco
        python launch_scripts/evaluate.py aro --checkpoint runs/x \\
            --synthetic shapes --synthetic_tests 500

    evaluation/compositional.py has the file formats and the synthetic tests.
    """

    ONE_OF = ("test", "synthetic")
    DRAWN_WITHOUT = "test"

    test: Annotated[str | None, Shown("FORMAT:FILE")] = None
    """vg-relation:, vg-attribution: or order: and a JSON file"""
    synthetic: Literal["shapes"] | None = None
    """pictures of plain shapes"""
    images: Annotated[Path | None, Shown("DIR")] = None
    """that the image paths of --test are relative to"""
    synthetic_tests: Annotated[int, Shown("N"), Field(ge=1, le=100_000)] = 500
    """of each kind (default: 500)"""
    synthetic_seed: int = Field(SYNTHETIC_SEED, ge=0, lt=2**63)
    """of the pictures"""
    max_examples: Count = None
    """the first N tests only"""
    batch_size: Annotated[int, Shown("B"), Field(ge=1, le=2**20)] = 32
    """images at once"""
    too_long: Literal["refuse", "skip"] = "refuse"
    """captions of more tokens than the model takes"""


class CaptionsOptions(CheckpointOptions, CaptionedOptions):
    """Captions of images, folders or shards; with --metrics their BLEU, ROUGE-L and CIDEr.

        python launch_scripts/evaluate.py captions --checkpoint runs/x \\
            --data folder:pictures --num_beams 4
        python launch_scripts/evaluate.py captions --checkpoint runs/x \\
            --data shards:heldout/ --metrics --grid captions.png

    Metrics compare with the captions of the data, and need the extra `captions` and Java. The
    record has all captions; --grid draws the first 24.
    """

    data: Source
    """images:FILE,..., folder:DIR or shards:PATTERN"""
    max_examples: Count = None
    """the first N only"""
    max_tokens: Annotated[int | None, Shown("L"), Field(ge=1, le=2**16)] = None
    """default: as many as the model takes"""
    num_beams: Annotated[int, Shown("K"), Field(ge=1, le=1024)] = 1
    """of a beam search; 1 takes the likeliest next token"""
    length_penalty: Annotated[float, Shown("P"), Field(ge=-100, le=100)] = 1.0
    """of a beam search: 1 compares means per token, 0 likelihoods"""
    metrics: bool = False
    """BLEU, ROUGE-L and CIDEr (an extra; needs Java)"""
    grid: Annotated[Path | None, Shown("PNG")] = Field(
        None, description=f"a picture of the first {GRID} images with captions"
    )


@dataclass(frozen=True)
class Command:
    """A command of evaluate.py.

    Attributes:
        help: one line; the docstring of the options says more.
        function: "module:name" of the function that takes the options and returns results.
        uses_ranks: the command shares its work under a launcher, where all ranks but the first
            return None.
    """

    name: str
    help: str
    options: type[CommandOptions]
    function: str
    uses_ranks: bool = False

    def run(self, options: CommandOptions) -> Any:
        """Runs the command and returns its `evaluation.results.Results`.

        Imports the command's module only here, so that --help is quick.
        """
        module, _, name = self.function.partition(":")
        return getattr(importlib.import_module(module), name)(options)


COMMANDS = (
    Command(
        "linear-probe",
        "linear classifier on frozen features (LARS and L-BFGS), not private",
        LinearProbeOptions,
        "evaluation.linear_probe:linear_probe",
        uses_ranks=True,
    ),
    Command(
        "few-shot",
        "classifier from K examples per class, not private",
        FewShotOptions,
        "evaluation.few_shot:few_shot",
        uses_ranks=True,
    ),
    Command(
        "private-head",
        "linear head trained with differential privacy on frozen features",
        PrivateHeadOptions,
        "evaluation.private_head.run:private_head",
        uses_ranks=True,
    ),
    Command(
        "dense",
        "segmentation or detection on frozen token maps, not private",
        DenseOptions,
        "evaluation.dense:dense",
    ),
    Command(
        "zero-shot",
        "classification by the likelihood of captions that name the class",
        ZeroShotOptions,
        "evaluation.zero_shot:zero_shot",
    ),
    Command(
        "aro",
        "does it see attributes, relations and order? (ARO's files, or synthetic tests)",
        AroOptions,
        "evaluation.compositional:aro",
    ),
    Command(
        "captions",
        "captions of images, and their BLEU, ROUGE-L and CIDEr",
        CaptionsOptions,
        "evaluation.captions:captions",
    ),
)
"""All commands in the order of the help."""
