"""Weights of other projects as weights of ours, and back.

    >>> config, parameters = read_foreign("vip", Path("ckpt-vip-syn-base.pth"), "vip_base")  # doctest: +SKIP

`models.config.Foreign` lists the formats; a new one is a module here and a line in `read_foreign`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from models.config import Foreign
from models.converters.native import AnyConfig, read_folder
from models.converters.weights import WeightsError, read_weights


def read_foreign(
    kind: Foreign, path: Path, size: str | None = None, overrides: Mapping[str, Any] | None = None
) -> tuple[AnyConfig, dict[str, Tensor]]:
    """Configuration, and parameters by our names in fp32.

    Args:
        path: the official torch file (or .safetensors) of ViP or DP-Cap; a folder that transformers saved; or one that
            `export.py --format safetensors` wrote.
        size, overrides: of an official file; folders state their model in their config.json.

    Raises:
        WeightsError: not such a file or folder, not of the expected structure, or no size where one is needed.
        ModelConfigError: an unknown size or field, or sizes that do not fit together.
    """
    if kind in ("hf", "safetensors"):
        if size is not None or overrides:
            raise WeightsError(
                f"{path} states its model in its config.json: leave --size and --override out"
            )
        if kind == "hf":
            from models.converters.huggingface import from_huggingface

            return from_huggingface(path)
        return read_folder(path)
    if size is None:
        raise WeightsError(
            f"{path}: give --size, which states what no tensor tells, as {kind}_base (docs/models.md)"
        )
    from models.converters.official import from_dpcap, from_vip

    read = from_dpcap if kind == "dpcap" else from_vip
    return read(read_weights(path), str(path), size, overrides or {})
