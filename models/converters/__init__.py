"""Weights of other projects as weights of ours, and back.

    >>> config, parameters = read_foreign("vip", Path("ckpt-vip-syn-base.pth"))

`FOREIGN` lists the formats; a new one is a module here and a line in `read_foreign`.
"""

from pathlib import Path
from typing import Literal, NamedTuple, get_args

from torch import Tensor

from models.converters.native import AnyConfig, read_folder
from models.converters.weights import WeightsError, read_weights

Foreign = Literal["vip", "dpcap", "hf", "safetensors"]
FOREIGN: tuple[Foreign, ...] = get_args(Foreign)


class Unstated(NamedTuple):
    """What no weight of an official checkpoint tells; None takes what its project published."""

    num_heads: int | None = None
    decoder_heads: int | None = None
    normalise_pixels: bool = False


def read_foreign(kind: Foreign, path: Path, unstated: Unstated = Unstated()) -> tuple[AnyConfig, dict[str, Tensor]]:  # noqa: B008  (immutable)
    """Configuration, and parameters by our names in fp32.

    Args:
        path: the official torch file (or .safetensors) of ViP or DP-Cap; a folder that transformers saved; or one that
            `export.py --format safetensors` wrote.
        unstated: for official files only.

    Raises:
        WeightsError: not such a file or folder, or not of the expected structure.
        ModelConfigError: sizes that do not fit together.
    """
    if kind == "hf":
        from models.converters.huggingface import from_huggingface

        return from_huggingface(path)
    if kind == "safetensors":
        _, config, parameters = read_folder(path)
        return config, parameters
    state = read_weights(path)
    if kind == "dpcap":
        from models.converters.dpcap import from_dpcap

        if unstated.normalise_pixels:
            raise WeightsError("a captioner predicts no pixels: normalised ones are for vip")
        return from_dpcap(state, str(path), encoder_heads=unstated.num_heads, decoder_heads=unstated.decoder_heads)
    from models.converters.vip import PUBLISHED_DECODER_HEADS, from_vip

    return from_vip(
        state,
        str(path),
        num_heads=unstated.num_heads,
        decoder_heads=unstated.decoder_heads or PUBLISHED_DECODER_HEADS,
        normalise_pixels=unstated.normalise_pixels,
    )
