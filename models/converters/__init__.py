"""Weights of other projects as weights of ours, and back.

    >>> path = Path("ckpt-vip-syn-base.pth")
    >>> config, parameters = read_foreign("vip", path, "vip_base")  # doctest: +SKIP

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
    """Returns the configuration, and the parameters by our names in fp32.

    Args:
        path: the official torch file (or .safetensors) of ViP or DP-Cap; a folder that transformers
            saved; or one that `export.py --format safetensors` wrote.
        size, overrides: of an official file; folders state their model in their config.json.

    Raises:
        WeightsError: another kind of file or folder, an unexpected structure, or a missing size.
        ModelConfigError: an unknown size or field, or sizes that contradict each other.
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
            f"{path}: give --size, e.g. {kind}_base, because tensors do not state all of a model "
            "(docs/models.md)"
        )
    from models.converters.official import from_dpcap, from_vip

    read = from_dpcap if kind == "dpcap" else from_vip
    return read(read_weights(path), str(path), size, overrides or {})
