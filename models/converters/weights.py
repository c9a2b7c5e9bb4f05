"""Reads and writes other projects' weight files, and renames their tensors.

A file comes from elsewhere: torch files are read with `weights_only`, so that no code in them runs,
and every name and shape must be the expected one. Nothing is guessed; tensors that are dropped are
named by the caller.
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
from models.converters.names import Names, names_in_project

_MOST_NAMES = 16
POSITION_TOLERANCE = 1e-6
"""Largest difference from the sin-cos table: other programs compute it in another order."""


class WeightsError(ValueError):
    """A weight file of another kind or structure; the message names the file and the way out."""

    exit_code = 2


_WRAPPERS = ("module.", "_module.", "_orig_mod.")
"""Prefixes that data-parallel training, per-example gradients and compilation put before names."""


def read_weights(path: Path, key: str = "model") -> dict[str, Tensor]:
    """Returns the tensors of a `.safetensors` file, a torch file, or a folder of either.

    A torch file has them in its entry `key`, or at its top if it lacks that entry. A folder has
    `model.safetensors` or `pytorch_model.bin`, in one file or in parts with an index, as
    transformers and DeepSpeed's `zero_to_fp32.py` write them. A wrapper's prefix that every name
    has is removed.

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
                    raise WeightsError(
                        f"{index} is not an index of weight files: {error}"
                    ) from error
                tensors: dict[str, Tensor] = {}
                for part in parts:
                    tensors.update(read_weights(part))
                return tensors
            if (path / name).is_file():
                return read_weights(path / name, key)
        raise WeightsError(
            f"{path} contains neither model.safetensors nor pytorch_model.bin; for a folder of "
            "torch.distributed.checkpoint run python -m torch.distributed.checkpoint.format_utils "
            f"dcp_to_torch {path} FILE"
        )
    if not path.is_file():
        raise WeightsError(f"there is no weight file {path}")
    if path.suffix == ".safetensors":
        try:
            state: Any = load_file(path)
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{path} is not a safetensors file: {error}") from error
    else:
        content = _read_torch(path)
        state = content.get(key, content) if isinstance(content, Mapping) else content
        if not isinstance(state, Mapping) or not state:
            raise WeightsError(
                f"{path} has no dictionary of tensors, neither at its top nor under {key!r}"
            )
    for name, tensor in state.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise WeightsError(
                f"{path}: entry {name!r} is a {type(tensor).__name__}, but tensors were expected"
            )
    # Wrappers may lie around each other, in any order.
    while state:
        common = [prefix for prefix in _WRAPPERS if all(name.startswith(prefix) for name in state)]
        if not common:
            break
        state = {name.removeprefix(common[0]): tensor for name, tensor in state.items()}
    return dict(state)


def _read_torch(path: Path) -> object:
    try:
        # Training scripts store their command line with the weights; a Namespace is a plain bag of
        # attributes.
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        lines = [line.strip() for line in str(error).splitlines() if "nsupported" in line]
        reason = lines[0] if lines else "it is damaged"
        raise WeightsError(
            f"{path} is not a torch file of plain tensors ({reason[:200]}), so it is not loaded: "
            "it could run code. If you trust it, save its tensors as .safetensors"
        ) from error
    except MemoryError:
        raise
    # torch's reader may raise any exception on bytes of another format.
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise WeightsError(f"{path} is not a torch file of weights: {reason[:200]}") from error


def rename(
    state: Mapping[str, Tensor],
    shapes: Mapping[str, torch.Size],
    names: Names,
    source: str,
    *,
    unused: Iterable[str] = (),
) -> dict[str, Tensor]:
    """Returns our tensors, in fp32, from those of another project.

    Args:
        shapes: of each of our tensors.
        names: their names by ours; empty where these are the same.
        source: the file, for errors.
        unused: their names that may exist and are not needed.

    Raises:
        WeightsError: missing or unknown names (listed), another shape, or numbers that are not
            floating point.
    """
    sources = {ours: names_in_project(ours, names) for ours in shapes}
    expected: set[str] = set()
    for their_names in sources.values():
        expected.update(their_names)
    missing = sorted(expected - state.keys())
    unknown = sorted(state.keys() - expected - set(unused))
    problems = []
    for problem, problem_names in (("lacks", missing), ("has unknown", unknown)):
        if problem_names:
            listing = ", ".join(problem_names[:_MOST_NAMES])
            if len(problem_names) > _MOST_NAMES:
                listing += f" and {len(problem_names) - _MOST_NAMES} more"
            problems.append(f"{problem} {listing}")
    if problems:
        raise WeightsError(
            f"{source} {' and '.join(problems)}: it is not of the expected structure"
        )
    renamed = {}
    for ours, their_names in sources.items():
        rows = shapes[ours][0] // len(their_names)
        shape = (rows, *shapes[ours][1:])
        parts = []
        for name in their_names:
            part = state[name]
            if not part.is_floating_point():
                raise WeightsError(
                    f"{source}: {name} holds {part.dtype}, but weights are floating point"
                )
            if part.shape != shape:
                raise WeightsError(
                    f"{source}: {name} has shape {tuple(part.shape)}, but {shape} was expected"
                )
            parts.append(part.to(torch.float32))
            if not bool(parts[-1].isfinite().all()):
                raise WeightsError(
                    f"{source}: {name} holds NaN or infinity (or values beyond fp32): its training "
                    "had failed"
                )
        # `cat` copies a single part too, so that the file's tensors stay unchanged.
        renamed[ours] = torch.cat(parts).contiguous()
    return renamed


def rename_back(parameters: Mapping[str, Tensor], names: Names) -> dict[str, Tensor]:
    """Returns the other project's tensors from ours; the inverse of `rename`."""
    state = {}
    for ours, tensor in parameters.items():
        their_names = names_in_project(ours, names)
        parts = tensor.detach().chunk(len(their_names))
        for name, part in zip(their_names, parts, strict=True):
            state[name] = part.clone().contiguous()
    return state


def write_weights(path: Path, state: Mapping[str, Tensor]) -> None:
    """Writes a `.safetensors` file that transformers loads too."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    # transformers refuses a file without this entry.
    save_file(tensors, path, {"format": "pt"})


def position_kind(
    state: Mapping[str, Tensor],
    name: str,
    fixed: Callable[[int, int], Tensor],
    size: int,
    width: int,
    source: str,
) -> PositionKind:
    """Returns "sincos" if the table is `fixed(size, width)`, else "learned".

    A table of a wrong shape is "learned" too; `rename` reports its shape.

    Raises:
        WeightsError: no such table.
    """
    if name not in state:
        raise WeightsError(f"{source} lacks {name}: it is not of the expected structure")
    if width % 4:
        return "learned"
    table = fixed(size, width)[None]
    if state[name].shape != table.shape:
        return "learned"
    difference = (state[name].double() - table).abs().max()
    return "sincos" if bool(difference <= POSITION_TOLERANCE) else "learned"


def mlp_ratio(hidden_width: int, width: int) -> float:
    """Returns a ratio of which int(width * ratio) is the hidden width again."""
    ratio = hidden_width / width
    return ratio if int(width * ratio) == hidden_width else (hidden_width + 0.5) / width
