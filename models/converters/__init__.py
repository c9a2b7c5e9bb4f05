"""Weights of other projects as weights of ours, and back.

    >>> config, parameters = read_foreign("vip", Path("ckpt-vip-syn-base.pth"))  # doctest: +SKIP

`models.config.Foreign` lists the formats; a new one is a module here and a line in `read_foreign`.
"""

from pathlib import Path

from torch import Tensor

from models.config import Foreign
from models.converters.native import AnyConfig, read_folder
from models.converters.weights import Unstated, read_weights


def read_foreign(kind: Foreign, path: Path, unstated: Unstated = Unstated()) -> tuple[AnyConfig, dict[str, Tensor]]:  # noqa: B008  (immutable)
    """Configuration, and parameters by our names in fp32.

    Args:
        path: the official torch file (or .safetensors) of ViP or DP-Cap; a folder that transformers saved; or one that
            `export.py --format safetensors` wrote.
        unstated: what no tensor of an official file tells; folders state it in their config.json.

    Raises:
        WeightsError: not such a file or folder, not of the expected structure, or something that no tensor tells is not stated.
        ModelConfigError: sizes that do not fit together.
    """
    if kind in ("hf", "safetensors"):
        unstated.decided((), None, f"{path}, whose config.json states its model")
    if kind == "hf":
        from models.converters.huggingface import from_huggingface

        return from_huggingface(path)
    if kind == "safetensors":
        _, config, parameters = read_folder(path)
        return config, parameters
    state = read_weights(path)
    if kind == "dpcap":
        from models.converters.official import from_dpcap

        return from_dpcap(state, str(path), unstated)
    from models.converters.official import from_vip

    return from_vip(state, str(path), unstated)
