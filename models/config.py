"""Frozen configurations of the models, and named sizes.

`SIZES` holds the encoder and decoder shapes of DP-Cap (Sander et al. 2024,
https://arxiv.org/abs/2403.02506, section 4 and the released model definitions): its "Small" is 576
wide and its "Large" has a 768 wide decoder. `MAE_SIZES` holds the shapes of ViP (Yu et al. 2023,
https://arxiv.org/abs/2306.08842, from the released model definitions): its names are not timm's,
its "Tiny" is 384 wide, and all its sizes share one decoder, 512 wide with four blocks. `pico` and
`nano` are for tests and the quickstart. Classifiers take the encoders of all sizes.

    >>> config = captioner_config("pico", vocab_size=4000, decoder_depth=3)
    >>> config.encoder.num_patches, config.decoder.depth
    (64, 3)
    >>> config = classifier_config(
    ...     "vip_base", num_classes=1000, trainable="adapters", adapter_rank=8
    ... )
    >>> config.encoder.width, config.adapter_rank
    (768, 8)
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal, TypeVar, get_args

Config = TypeVar("Config", bound=Any)


class ModelConfigError(ValueError):
    """A model that cannot be built: an unknown size or field, or values that contradict each other.

    The message is one line and says how to mend the configuration.
    """

    exit_code = 2


PositionKind = Literal["sincos", "learned"]
NormPosition = Literal["pre", "post"]
Activation = Literal["gelu", "relu"]
Features = Literal["class_token", "pooled"]
Trainable = Literal["all", "last_layer", "adapters"]
AdapterLayers = Literal["attention", "all"]
Foreign = Literal["vip", "dpcap", "hf", "safetensors"]
"""Formats of other projects' weights that `models.converters` reads."""


MAX_IMAGE_SIZE = 8192
MAX_TOKENS = 2**16
MAX_CLASSES = 2**24
LIMITS: Mapping[str, float] = {
    "image_size": MAX_IMAGE_SIZE,
    "patch_size": MAX_IMAGE_SIZE,
    "num_channels": 1024,
    "vocab_size": 2**24,
    "width": 2**17,
    "depth": 1024,
    "num_heads": 2**17,
    "mlp_ratio": 1024,
    "norm_eps": 1,
    "embedding_std": 1e6,
    "max_logits": 2**40,
    "adapter_rank": 2**17,
    "adapter_alpha": 1e6,
}
"""The most that each field may be: more than any machine holds, so a larger number is a typo."""


def check_fields(config: Any) -> None:
    """Refuses a value of a wrong type, outside of its field's choices, or beyond `LIMITS`.

    Raises:
        ModelConfigError: one line that names the field, what it takes and what it got.
    """
    for field in fields(config):
        name = field.name
        value = getattr(config, name)
        choices = get_args(field.type)
        if field.type in (int, float, bool):
            accepted = int | float if field.type is float else field.type
            # Python counts a bool as an int.
            is_stray_bool = isinstance(value, bool) and field.type is not bool
            if is_stray_bool or not isinstance(value, accepted):
                raise ModelConfigError(f"{name} must be a {field.type.__name__}, got {value!r}")
        elif choices and value not in choices:
            raise ModelConfigError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
        if name in LIMITS and not 0 < value <= LIMITS[name]:
            raise ModelConfigError(
                f"{name} must be positive and at most {LIMITS[name]:,}, got {value}"
            )


def check_transformer(config: Any, part: str) -> None:
    """Refuses what `check_fields` refuses, and a shape that contradicts the width.

    Heads, MLPs and sin-cos positions each need a width that fits them.

    Args:
        part: names the transformer in errors, "encoder" or "decoder".
    """
    check_fields(config)
    if config.width % config.num_heads:
        raise ModelConfigError(
            f"{part} width {config.width} is not a multiple of its num_heads {config.num_heads}"
        )
    if config.width * config.mlp_ratio < 1:
        raise ModelConfigError(
            f"{part} mlp_ratio {config.mlp_ratio:g} gives width {config.width} an MLP without "
            "units; 4 is usual"
        )
    if config.position == "sincos" and config.width % 4:
        raise ModelConfigError(
            f"{part} width {config.width} must be a multiple of 4 for sin-cos positions"
        )


@dataclass(frozen=True, kw_only=True)
class VitConfig:
    """A pre-norm vision transformer with a class token.

    Source: Dosovitskiy et al. 2021, https://arxiv.org/abs/2010.11929.

    Attributes:
        image_size, patch_size: pixels; the image is square and a whole number of patches.
        width, depth, num_heads, mlp_ratio: the transformer's shape.
        position: "sincos" is a fixed buffer (the class token's row is zero), "learned" a parameter.
        qkv_bias: whether query, key and value have a bias. Output projection and MLP always have
            one.
    """

    image_size: int = 224
    patch_size: int = 16
    num_channels: int = 3
    width: int = 384
    depth: int = 12
    num_heads: int = 6
    mlp_ratio: float = 4.0
    position: PositionKind = "sincos"
    qkv_bias: bool = False
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        check_transformer(self, "encoder")
        if self.image_size % self.patch_size:
            raise ModelConfigError(
                f"image_size {self.image_size} is not a multiple of patch_size {self.patch_size}"
            )

    @property
    def grid_size(self) -> int:
        """Returns the number of patches along one side."""
        return self.image_size // self.patch_size

    @property
    def num_patches(self) -> int:
        return self.grid_size**2

    @property
    def num_image_tokens(self) -> int:
        """Returns T, the number of patches and the class token."""
        return self.num_patches + 1


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A causal text decoder with cross-attention to the image.

    Attributes:
        width, depth, num_heads, mlp_ratio: the transformer's shape; the width may differ from the
            encoder's.
        norm_position: "post" normalises after each residual sum (Vaswani et al. 2017, and DP-Cap),
            "pre" before each branch. The head has a LayerNorm of its own in both.
        position: kind of the text positions and of the image positions that the decoder adds to its
            memory.
        bias: whether the blocks' Linear layers have biases (DP-Cap: no). The memory projection and
            the head always do.
        activation: between the two Linear layers of the blocks' MLP; "gelu" is the exact one.
        embedding_std: standard deviation of the token embedding's initial values. DP-Cap: 1.
    """

    width: int = 384
    depth: int = 6
    num_heads: int = 6
    mlp_ratio: float = 4.0
    norm_position: NormPosition = "post"
    position: PositionKind = "sincos"
    bias: bool = False
    activation: Activation = "gelu"
    embedding_std: float = 0.02
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        check_transformer(self, "decoder")


@dataclass(frozen=True, kw_only=True)
class CaptionerConfig:
    """An image captioner; the token defaults are those of BERT's vocabulary, which DP-Cap uses.

    Attributes:
        encoder, decoder: the two transformers.
        vocab_size: V.
        num_tokens: longest caption, counted with its first (`bos_id`) and last (`eos_id`) token.
        pad_id, bos_id, eos_id: the tokenizer's special tokens.
        max_logits: most scores (B * L * V) that the loss holds at once; above it the head works by
            chunks of the vocabulary and computes each score again when it is needed
            (`models.vocabulary_head`). Speed and memory only.
        parallel_share: probability, by a coin of the example's own, that a training example is
            predicted in parallel, from mask embeddings alone and without a causal mask (CapPa,
            Tschannen et al. 2023; its best: 0.75). 0 is Cap and has no mask embedding.
        tied_head: the output projection shares the token embedding's weight (its bias is its own).
            Both then start from `DecoderConfig.embedding_std`.
    """

    encoder: VitConfig
    decoder: DecoderConfig
    vocab_size: int = 30522
    num_tokens: int = 40
    pad_id: int = 0
    bos_id: int = 101
    eos_id: int = 102
    max_logits: int = 2**27
    parallel_share: float = 0.0
    tied_head: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if not 2 <= self.num_tokens <= MAX_TOKENS:
            raise ModelConfigError(
                f"num_tokens must be at least 2 (first and last token) and at most {MAX_TOKENS:,}, "
                f"got {self.num_tokens}"
            )
        if not 0 <= self.parallel_share <= 1:
            raise ModelConfigError(
                f"parallel_share must be between 0 and 1, got {self.parallel_share}"
            )
        special = {"pad_id": self.pad_id, "bos_id": self.bos_id, "eos_id": self.eos_id}
        for name, token in special.items():
            if not 0 <= token < self.vocab_size:
                raise ModelConfigError(
                    f"{name} {token} is outside the vocabulary of {self.vocab_size} tokens"
                )
        if len(set(special.values())) < len(special):
            raise ModelConfigError(f"pad_id, bos_id and eos_id must differ, got {special}")


@dataclass(frozen=True, kw_only=True)
class PixelDecoderConfig:
    """The light transformer that predicts pixels: pre-norm blocks as in the encoder."""

    width: int = 512
    depth: int = 4
    num_heads: int = 16
    mlp_ratio: float = 4.0
    norm_eps: float = 1e-6
    position: PositionKind = "sincos"

    def __post_init__(self) -> None:
        check_transformer(self, "decoder")


@dataclass(frozen=True, kw_only=True)
class MaskedAutoencoderConfig:
    """A masked autoencoder: an encoder of visible patches and a decoder of all pixels.

    Attributes:
        encoder, decoder: the two transformers.
        mask_ratio: share of the patches that the encoder does not see.
        normalise_pixels: predict each patch's pixels after subtracting their mean and dividing by
            their deviation.
    """

    encoder: VitConfig
    decoder: PixelDecoderConfig = PixelDecoderConfig()
    mask_ratio: float = 0.75
    normalise_pixels: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 < self.num_visible < self.encoder.num_patches:
            raise ModelConfigError(
                f"mask_ratio {self.mask_ratio} leaves {self.num_visible} of "
                f"{self.encoder.num_patches} patches visible; at least one must be visible and one "
                "masked"
            )

    @property
    def num_visible(self) -> int:
        """Returns the number of patches that the encoder sees, the same for every image."""
        return int(self.encoder.num_patches * (1 - self.mask_ratio))


@dataclass(frozen=True, kw_only=True)
class ClassifierConfig:
    """A classifier: an encoder, with or without adapters, and a linear head.

    Attributes:
        encoder: as in the captioner or masked autoencoder that it comes from.
        num_classes: labels are 0 to num_classes - 1. Public.
        features: input of the head: the class token, or the mean over the patch tokens.
        trainable: all parameters; the head alone; or low-rank adapters in the encoder and the head.
        adapter_rank, adapter_alpha: r and alpha of LoRA (Hu et al. 2022,
            https://arxiv.org/abs/2106.09685).
        adapter_layers: adapters for the attention's two layers of each block, or for the MLP's two
            as well.
        feature_norm: LayerNorm without parameters between features and head, so that all images
            weigh alike.
        label_smoothing: share of the target that is spread over all classes.
    """

    encoder: VitConfig
    num_classes: int
    features: Features = "class_token"
    trainable: Trainable = "all"
    adapter_rank: int = 8
    adapter_alpha: float = 16.0
    adapter_layers: AdapterLayers = "attention"
    feature_norm: bool = True
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self)
        if not 2 <= self.num_classes <= MAX_CLASSES:
            raise ModelConfigError(
                f"num_classes must be at least 2 and at most {MAX_CLASSES:,}, got "
                f"{self.num_classes}"
            )
        if self.adapter_rank > self.encoder.width:
            raise ModelConfigError(
                f"adapter_rank {self.adapter_rank} is more than the encoder's width "
                f"{self.encoder.width}: train everything"
            )
        if not 0 <= self.label_smoothing < 1:
            raise ModelConfigError(
                f"label_smoothing must be at least 0 and below 1, got {self.label_smoothing}"
            )


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """An encoder alone, for features."""

    encoder: VitConfig


def _dpcap(
    width: int, depth: int, heads: int, *, decoder_width: int, decoder_heads: int
) -> CaptionerConfig:
    """Returns a DP-Cap captioner: 224 pixels, patches of 16, six post-norm blocks without bias."""
    return CaptionerConfig(
        encoder=VitConfig(width=width, depth=depth, num_heads=heads),
        decoder=DecoderConfig(width=decoder_width, num_heads=decoder_heads),
    )


def _small_encoder(width: int, depth: int, *, qkv_bias: bool = False) -> VitConfig:
    """Returns an encoder for images of 64 pixels."""
    return VitConfig(
        image_size=64, patch_size=8, width=width, depth=depth, num_heads=4, qkv_bias=qkv_bias
    )


def _small(width: int, depth: int, decoder_depth: int) -> CaptionerConfig:
    """Returns a captioner for small images and a vocabulary of about 4,000 tokens."""
    return CaptionerConfig(
        encoder=_small_encoder(width, depth),
        decoder=DecoderConfig(width=width, depth=decoder_depth, num_heads=4),
        vocab_size=4000,
        num_tokens=32,
        bos_id=1,
        eos_id=2,
    )


SIZES: Mapping[str, CaptionerConfig] = {
    "pico": _small(64, 4, 2),
    "nano": _small(128, 6, 3),
    "dpcap_nano": _dpcap(192, 12, 6, decoder_width=192, decoder_heads=6),
    "dpcap_tiny": _dpcap(384, 12, 6, decoder_width=384, decoder_heads=6),
    "dpcap_small": _dpcap(576, 12, 12, decoder_width=576, decoder_heads=12),
    "dpcap_base": _dpcap(768, 12, 12, decoder_width=768, decoder_heads=12),
    "dpcap_large": _dpcap(1024, 24, 16, decoder_width=768, decoder_heads=12),
}


def _vip(width: int, depth: int = 12, num_heads: int = 12) -> MaskedAutoencoderConfig:
    return MaskedAutoencoderConfig(
        encoder=VitConfig(width=width, depth=depth, num_heads=num_heads, qkv_bias=True)
    )


MAE_SIZES: Mapping[str, MaskedAutoencoderConfig] = {
    **{
        name: MaskedAutoencoderConfig(
            encoder=_small_encoder(width, depth, qkv_bias=True),
            decoder=PixelDecoderConfig(width=width, depth=2, num_heads=4),
        )
        for name, width, depth in (("pico", 64, 4), ("nano", 128, 6))
    },
    "vip_nano": _vip(192),
    "vip_tiny": _vip(384),
    "vip_small": _vip(576),
    "vip_base": _vip(768),
    "vip_large": _vip(1024, depth=24, num_heads=16),
}
ENCODERS: Mapping[str, VitConfig] = {
    **{name: config.encoder for name, config in MAE_SIZES.items() if name.startswith("vip_")},
    **{name: config.encoder for name, config in SIZES.items()},
}
"""The encoders of the other models, by the name of their size; `pico` and `nano` are the
captioners'."""
_SHORT_NAMES = ("image_size", "patch_size")
"""Fields of the encoder without its prefix; every other field of a part carries the part's name."""


def with_overrides(base: Config, overrides: Mapping[str, Any]) -> Config:
    """Returns a configuration with some fields replaced.

    The fields of a part are named `encoder_width`, `decoder_depth`, ...

    Raises:
        ModelConfigError: unknown field (the line lists the choices), or values that do not fit
            together.
    """
    parts: dict[str, type] = {}
    # The name of an override -> (part, field); part "" is the configuration itself.
    targets: dict[str, tuple[str, str]] = {}
    for field in fields(base):
        default = getattr(base, field.name)
        if is_dataclass(default):
            parts[field.name] = type(default)
        else:
            targets[field.name] = ("", field.name)
    for part, config_class in parts.items():
        for field in fields(config_class):
            is_short = part == "encoder" and field.name in _SHORT_NAMES
            override = field.name if is_short else f"{part}_{field.name}"
            targets[override] = (part, field.name)
    changes: dict[str, dict[str, Any]] = {"": {}, **{part: {} for part in parts}}
    for name, value in overrides.items():
        if name not in targets:
            raise ModelConfigError(
                f"unknown model field {name!r}; choose among {', '.join(sorted(targets))}"
            )
        part, field_name = targets[name]
        changes[part][field_name] = value
    top_changes = changes.pop("")
    new_parts = {part: replace(getattr(base, part), **changes[part]) for part in parts}
    return replace(base, **top_changes, **new_parts)


def captioner_config(size: str, **overrides: Any) -> CaptionerConfig:
    """Returns the captioner of a named size with some fields replaced.

    Args:
        size: a key of `SIZES`.
        overrides: fields of `CaptionerConfig` (`vocab_size`, `num_tokens`, `parallel_share`,
            `tied_head`, ...), `image_size` and `patch_size`, and the other fields of the parts as
            `encoder_width`, `decoder_norm_position`, ...

    Raises:
        ModelConfigError: unknown size or field (the line lists the choices), or values that do not
            fit together.
    """
    return with_overrides(named_size(SIZES, size), overrides)


def masked_autoencoder_config(size: str, **overrides: Any) -> MaskedAutoencoderConfig:
    """Returns the masked autoencoder of a named size with some fields replaced.

    Args:
        size: a key of `MAE_SIZES`.
        overrides: `mask_ratio`, `normalise_pixels`, `image_size`, `patch_size`, `encoder_width`,
            ...

    Raises:
        ModelConfigError: unknown size or field (the line lists the choices), or values that do not
            fit together.
    """
    return with_overrides(named_size(MAE_SIZES, size), overrides)


def classifier_config(size: str, **overrides: Any) -> ClassifierConfig:
    """Returns a classifier over the encoder of a named size.

    Args:
        size: a key of `ENCODERS`.
        overrides: `num_classes` (required), `trainable`, `image_size`, `encoder_width`, ...

    Raises:
        ModelConfigError: unknown size or field (the line lists the choices), no `num_classes`, or
            values that contradict each other.
    """
    encoder = named_size(ENCODERS, size)
    if "num_classes" not in overrides:
        raise ModelConfigError(
            "num_classes is missing: a classifier's recipe says how many there are in "
            "model.overrides"
        )
    return with_overrides(
        ClassifierConfig(encoder=encoder, num_classes=overrides["num_classes"]), overrides
    )


def named_size(sizes: Mapping[str, Config], size: str) -> Config:
    """Returns the configuration of a named size.

    Raises:
        ModelConfigError: unknown size; the line lists the choices.
    """
    if size not in sizes:
        raise ModelConfigError(
            f"model size {size!r} (model.size) is unknown; choose one of {', '.join(sizes)}"
        )
    return sizes[size]
