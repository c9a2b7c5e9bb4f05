from collections.abc import Callable
from typing import Any

import pytest
import torch

from models.captioner import Captioner
from models.config import (
    SIZES,
    CaptionerConfig,
    ModelConfigError,
    captioner_config,
    classifier_config,
    masked_autoencoder_config,
)

# Millions: encoder, projection and decoder blocks, token embedding, output head with its norm, all that DP-Cap's clipping could
# train: not the class token and the two type embeddings. "Nano" is in its code only.
TABLE = {
    "dpcap_nano": (5.48, 3.58, 5.86, 5.89, 20.81),
    "dpcap_tiny": (21.58, 14.32, 11.72, 11.75, 59.37),
    "dpcap_small": (48.29, 32.20, 17.58, 17.61, 115.69),
    "dpcap_base": (85.62, 57.24, 23.44, 23.47, 189.77),
    "dpcap_large": (303.03, 57.44, 23.44, 23.47, 407.38),
}


def count(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


def on_meta(config: CaptionerConfig) -> Captioner:
    with torch.device("meta"):
        return Captioner(config)


@pytest.mark.parametrize("size", TABLE)
def test_dpcap_sizes_have_the_published_parameter_counts(size: str) -> None:
    config = SIZES[size]
    model = on_meta(config)
    assert (config.vocab_size, config.encoder.num_image_tokens) == (30522, 197)
    width, decoder = config.decoder.width, model.decoder
    found = (
        count(model.encoder) - config.encoder.width,
        count(model.memory.projection) + count(decoder.blocks),
        count(decoder.token_embedding),
        count(decoder.head_norm) + count(decoder.head),
        count(model) - config.encoder.width - 2 * width,
    )
    assert [number / 1e6 for number in found] == pytest.approx(TABLE[size], abs=0.0051)
    variant = {"tied_head": True, "parallel_share": 1.0, "decoder_bias": True}
    biases = (
        13 * config.decoder.depth * width
    )  # of a block: 4 + 4 of the attentions, 4 + 1 of the MLP
    assert count(on_meta(captioner_config(size, **variant))) == count(model) + biases + width * (
        1 - config.vocab_size
    )
    assert sum(count(block) for block in model.decoder.blocks) == config.decoder.depth * (
        16 * width**2 + 6 * width
    )


REFUSED: dict[Callable[..., Any], list[tuple[str, dict[str, object], str]]] = {
    captioner_config: [
        ("huge", {}, "model size 'huge' .*is unknown.*pico, nano, dpcap_nano"),
        ("pico", {"width": 8}, "unknown model field 'width'.*decoder_width.*encoder_width"),
        ("pico", {"vocab_size": "4000"}, "vocab_size must be a int, got '4000'"),
        ("pico", {"decoder_bias": 1}, "bias must be a bool"),
        ("pico", {"patch_size": 7}, "image_size 64 is not a multiple of patch_size 7"),
        ("pico", {"encoder_num_heads": 5}, "width 64 is not a multiple of its num_heads 5"),
        ("pico", {"decoder_width": 66, "decoder_num_heads": 3}, "multiple of 4 for sin-cos"),
        ("pico", {"decoder_depth": 0}, "depth must be positive"),
        ("pico", {"decoder_mlp_ratio": float("nan")}, "mlp_ratio must be positive"),
        (
            "pico",
            {"encoder_mlp_ratio": 1e-12},
            "encoder mlp_ratio 1e-12 gives width 64 an MLP without units",
        ),
        ("pico", {"decoder_norm_position": "middle"}, "one of pre, post"),
        ("pico", {"decoder_activation": "swish"}, "one of gelu, relu"),
        ("pico", {"encoder_position": "rotary"}, "one of sincos, learned"),
        ("pico", {"num_tokens": 1}, "num_tokens must be at least 2"),
        ("pico", {"vocab_size": 2}, "eos_id 2 is outside the vocabulary of 2 tokens"),
        ("pico", {"bos_id": 2}, "must differ"),
        ("pico", {"parallel_share": 1.5}, "parallel_share must be between 0 and 1"),
        ("pico", {"parallel_share": "often"}, "parallel_share must be a float"),
    ],
    masked_autoencoder_config: [
        ("pico", {"mask_ratio": 0.0}, "leaves 64 of 64 patches visible"),
        ("pico", {"mask_ratio": 0.99}, "leaves 0 of 64 patches visible"),
        ("pico", {"decoder_num_heads": 3}, "decoder width 64 is not a multiple"),
    ],
    classifier_config: [
        ("pico", {}, "num_classes is missing"),
        *(
            ("pico", {"num_classes": 5} | overrides, words)
            for overrides, words in (
                ({"num_classes": 1}, "num_classes must be at least 2"),
                ({"features": "mean"}, "features must be one of class_token, pooled"),
                ({"trainable": "head"}, "trainable must be one of all, last_layer, adapters"),
                ({"adapter_layers": "mlp"}, "adapter_layers must be one of"),
                ({"adapter_rank": 0}, "adapter_rank must be positive"),
                ({"adapter_rank": 65}, "more than the encoder's width"),
                ({"label_smoothing": 1.0}, "label_smoothing must be"),
                ({"decoder_width": 8}, "unknown model field 'decoder_width'"),
            )
        ),
    ],
}


@pytest.mark.parametrize(
    ("make", "case"), [(make, case) for make, cases in REFUSED.items() for case in cases]
)
def test_bad_values_are_refused_in_one_line(
    make: Callable[..., Any], case: tuple[str, dict[str, Any], str]
) -> None:
    size, overrides, words = case
    with pytest.raises(ModelConfigError, match=words) as caught:
        make(size, **overrides)
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value)
