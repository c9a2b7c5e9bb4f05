"""Reading and writing other projects' weight files, and renaming their tensors, with everything checked.

A file is data from elsewhere: torch files are read with `weights_only`, so that no code in them runs, and every name and
shape must be the one expected. Nothing is guessed and nothing dropped without being named here.
"""

import argparse
import json
import pickle
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.config import PositionKind
from models.converters.names import Names, theirs

_MOST_NAMES = 16
POSITION_TOLERANCE = 1e-6
"""A table this close to the sin-cos one is it: other programs compute it in other orders."""


class WeightsError(ValueError):
    """A weight file is not what it should be; the message says which file, what and how to mend it."""

    exit_code = 2


_WRAPPERS = ("module.", "_module.", "_orig_mod.")
"""What data-parallel training, per-example gradients and compilation put before every name."""


def read_weights(path: Path, key: str = "model") -> dict[str, Tensor]:
    """The tensors of a `.safetensors` file, or of a torch file: its entry `key`, or the whole where there is no such entry.

    A folder has `model.safetensors` or `pytorch_model.bin`, whole or in parts with an index, as transformers and DeepSpeed's
    `zero_to_fp32.py` write them. Names are those of the model itself: a prefix of a wrapper goes where every name has it.

    Raises:
        WeightsError: no such file, not readable as plain tensors, or no dictionary of tensors.
    """
    if path.is_dir():
        for name in ("model.safetensors", "pytorch_model.bin"):
            index = path / f"{name}.index.json"
            if index.is_file():
                try:
                    names = set(json.loads(index.read_text())["weight_map"].values())
                    parts = [path / str(name) for name in sorted(names)]
                except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                    raise WeightsError(f"{index} is no index of weight files: {error}") from error
                return {name: value for part in parts for name, value in read_weights(part).items()}
            if (path / name).is_file():
                return read_weights(path / name, key)
        raise WeightsError(
            f"{path} holds no model.safetensors or pytorch_model.bin; a file of a folder of torch.distributed.checkpoint makes "
            f"python -m torch.distributed.checkpoint.format_utils dcp_to_torch {path} FILE"
        )
    if not path.is_file():
        raise WeightsError(f"there is no weight file {path}")
    if path.suffix == ".safetensors":
        try:
            state: Any = load_file(path)
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{path} is no safetensors file: {error}") from error
    else:
        content = _read_torch(path)
        state = content.get(key, content) if isinstance(content, Mapping) else content
        if not isinstance(state, Mapping) or not state:
            raise WeightsError(
                f"{path} holds no dictionary of tensors, neither at its top nor under {key!r}"
            )
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise WeightsError(
                f"{path}: entry {name!r} is a {type(value).__name__}, but tensors were expected"
            )
    while state and (
        prefix := next((p for p in _WRAPPERS if all(name.startswith(p) for name in state)), None)
    ):
        state = {name.removeprefix(prefix): value for name, value in state.items()}
    return dict(state)


def _read_torch(path: Path) -> object:
    try:
        # Training scripts store their command line with the weights; a Namespace is a plain bag of attributes.
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = next(
            (line.strip() for line in str(error).splitlines() if "nsupported" in line),
            "it is damaged",
        )
        raise WeightsError(
            f"{path} is not a torch file of plain tensors ({reason[:200]}), so it is not loaded: it could run code. If you "
            "trust it, save its tensors as .safetensors"
        ) from error
    except MemoryError:
        raise
    except Exception as error:  # whatever torch's reader runs into in bytes that are something else
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise WeightsError(f"{path} is not a torch file of weights: {reason[:200]}") from error


def rename(
    state: Mapping[str, Tensor],
    shapes: Mapping[str, torch.Size],
    names: Names,
    what: str,
    *,
    unused: Iterable[str] = (),
) -> dict[str, Tensor]:
    """Our tensors, in fp32, from those of another project.

    Args:
        shapes: of each of our tensors.
        names: their names by ours; empty where these are the same.
        what: the file, for errors.
        unused: their names that may be there and are not needed.

    Raises:
        WeightsError: missing or unknown names (listed), another shape, or numbers that are no floating point.
    """
    sources = {ours: theirs(ours, names) for ours in shapes}
    expected = {name for parts in sources.values() for name in parts}
    problems = []
    for problem, listed in (
        ("lacks", sorted(expected - state.keys())),
        ("has unknown", sorted(state.keys() - expected - set(unused))),
    ):
        rest = f" and {len(listed) - _MOST_NAMES} more" if len(listed) > _MOST_NAMES else ""
        problems += [f"{problem} {', '.join(listed[:_MOST_NAMES])}{rest}"] if listed else []
    if problems:
        raise WeightsError(f"{what} {' and '.join(problems)}: it is not of the expected structure")
    renamed = {}
    for ours, sought in sources.items():
        parts = []
        for name in sought:
            part, rows = state[name], shapes[ours][0] // len(sought)
            if not part.is_floating_point():
                raise WeightsError(
                    f"{what}: {name} holds {part.dtype}, but weights are floating point"
                )
            if part.shape != (rows, *shapes[ours][1:]):
                expects = (rows, *shapes[ours][1:])
                raise WeightsError(
                    f"{what}: {name} has shape {tuple(part.shape)}, but {expects} was expected"
                )
            parts.append(part.to(torch.float32))
            if not bool(parts[-1].isfinite().all()):
                raise WeightsError(
                    f"{what}: {name} holds NaN or infinity (or values beyond fp32): its training had failed"
                )
        renamed[ours] = torch.cat(parts).contiguous()  # a copy, of one part too
    return renamed


def rename_back(parameters: Mapping[str, Tensor], names: Names) -> dict[str, Tensor]:
    """The other direction: their tensors from ours."""
    state = {}
    for ours, value in parameters.items():
        sought = theirs(ours, names)
        for name, part in zip(sought, value.detach().chunk(len(sought)), strict=True):
            state[name] = part.clone().contiguous()
    return state


def write_weights(path: Path, state: Mapping[str, Tensor]) -> None:
    """A `.safetensors` file that transformers loads too."""
    save_file(
        {name: value.detach().cpu().contiguous() for name, value in state.items()},
        path,
        {"format": "pt"},
    )


def position_kind(
    state: Mapping[str, Tensor],
    name: str,
    fixed: Callable[[int, int], Tensor],
    size: int,
    width: int,
    what: str,
) -> PositionKind:
    """ "sincos" if the table is `fixed(size, width)`, else "learned", of a wrong shape too, which `rename` reports.

    Raises:
        WeightsError: no such table.
    """
    if name not in state:
        raise WeightsError(f"{what} lacks {name}: it is not of the expected structure")
    table = fixed(size, width)[None] if width % 4 == 0 else None
    if table is None or state[name].shape != table.shape:
        return "learned"
    return (
        "sincos"
        if bool((state[name].double() - table).abs().max() <= POSITION_TOLERANCE)
        else "learned"
    )


def mlp_ratio(hidden_width: int, width: int) -> float:
    """A ratio of which int(width * ratio) is the hidden width again."""
    ratio = hidden_width / width
    return ratio if int(width * ratio) == hidden_width else (hidden_width + 0.5) / width
