"""Reading and writing other projects' weight files, and renaming their tensors, with everything checked.

A file is data from elsewhere: torch files are read with `weights_only`, so that no code in them runs, and every name and
shape must be the one expected. Nothing is guessed and nothing dropped without being named here.
"""

import argparse
import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.config import Activation, ForeignActivation

_MOST_NAMES = 16


class WeightsError(ValueError):
    """A weight file is not what it should be; the message says which file, what and how to mend it."""

    exit_code = 2


class Unstated(NamedTuple):
    """What no tensor tells, under the name of the option that states it; None is not stated."""

    num_heads: int | None = None
    decoder_heads: int | None = None
    decoder_activation: Activation | None = None
    norm_eps: float | None = None
    normalise_pixels: bool | None = None
    activation: ForeignActivation | None = None

    def decided(self, asked: Iterable[str], published: "Unstated | None", what: str) -> dict[str, Any]:
        """The values of `asked`: as stated, or else as in the published model that has exactly these shapes and biases.

        Args:
            published: None where there is no such model.
            what: the file, for errors.

        Raises:
            WeightsError: one of them is neither stated nor published, or another is stated, which nothing would use; or the
                activation is none that our vision transformers have.
        """
        asked, stated = list(asked), {name: value for name, value in self._asdict().items() if value is not None}
        idle = sorted(stated.keys() - set(asked))
        if idle:
            raise WeightsError(f"{what}: --{idle[0]} decides nothing here: leave it out")
        values = {**(published._asdict() if published is not None else {}), **stated}
        missing = [f"--{name}" for name in asked if values.get(name) is None]
        if missing:
            raise WeightsError(
                f"{what}: no tensor tells {', '.join(missing)}, and its shapes and biases are those of no published model: "
                "state them as in the code that trained it (docs/models.md)"
            )
        if "activation" in asked and values["activation"] != "gelu":
            raise WeightsError(
                f"{what}: a vision transformer with --activation {values['activation']} cannot be imported: ours have the exact "
                "gelu, which computes other features from these weights"
            )
        return {name: values[name] for name in asked}


class Renaming(NamedTuple):
    """One of our tensors is the concatenation, along its first dimension, of `theirs` (usually one)."""

    ours: str
    theirs: tuple[str, ...]


class PartNames(NamedTuple):
    """How another project names the parameters of a vision transformer, by our names within it.

    Attributes:
        raw: parameters by themselves.
        layers: layers with weight and bias.
        blocks: what stands before the number of a block.
        block: the layers of a block; ours may be the concatenation of several of theirs.
    """

    raw: Mapping[str, str]
    layers: Mapping[str, str]
    blocks: str
    block: Mapping[str, tuple[str, ...]]

    def renamings(self, part: str, depth: int, *, qkv_bias: bool = True) -> list[Renaming]:
        """Renamings of our `part`, which has `depth` blocks."""
        layers: dict[str, tuple[str, ...]] = {ours: (theirs,) for ours, theirs in self.layers.items()}
        for i in range(depth):
            for ours, names in self.block.items():
                layers[f"blocks.{i}.{ours}"] = tuple(f"{self.blocks}{i}.{name}" for name in names)
        renamings = [Renaming(f"{part}.{ours}", (theirs,)) for ours, theirs in self.raw.items()]
        for ours, names in layers.items():
            kinds = ("weight", "bias") if qkv_bias or not ours.endswith("attention.qkv") else ("weight",)
            renamings += [
                Renaming(f"{part}.{ours}.{kind}", tuple(f"{name}.{kind}" for name in names)) for kind in kinds
            ]
        return renamings


_WRAPPERS = ("module.", "_module.", "_orig_mod.")
"""What data-parallel training, per-example gradients and compilation put before every name."""


def read_weights(path: Path, key: str = "model") -> dict[str, Tensor]:
    """The tensors of a `.safetensors` file, or of a torch file: its entry `key`, or the whole where there is no such entry.

    Raises:
        WeightsError: no such file, not readable as plain tensors, or no dictionary of tensors.
    """
    if not path.is_file():
        raise WeightsError(f"there is no weight file {path}")
    if path.suffix == ".safetensors":
        try:
            return without_wrappers(load_file(path))
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{path} is no safetensors file: {error}") from error
    content = _read_torch(path)
    state = content.get(key, content) if isinstance(content, Mapping) else content
    if not isinstance(state, Mapping) or not state:
        raise WeightsError(f"{path} holds no dictionary of tensors, neither at its top nor under {key!r}")
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise WeightsError(f"{path}: entry {name!r} is a {type(value).__name__}, but tensors were expected")
    return without_wrappers(state)


def without_wrappers(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same under the names of the model itself: a prefix of a wrapper goes where every name has it, again and again."""
    state = dict(state)
    while state and (prefix := next((p for p in _WRAPPERS if all(name.startswith(p) for name in state)), None)):
        state = {name.removeprefix(prefix): value for name, value in state.items()}
    return state


def _read_torch(path: Path) -> object:
    try:
        # Training scripts store their command line with the weights; a Namespace is a plain bag of attributes.
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = next((line.strip() for line in str(error).splitlines() if "nsupported" in line), "it is damaged")
        raise WeightsError(
            f"{path} holds more than plain tensors, or is no torch file ({reason[:200]}); it is not loaded, since such a "
            "file could run code. Save its tensors alone as .safetensors where you trust it"
        ) from error
    except MemoryError:
        raise
    except Exception as error:  # whatever torch's reader runs into in bytes that are something else
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise WeightsError(f"{path} is no torch file of weights: {reason[:200]}") from error


def rename(
    state: Mapping[str, Tensor],
    renamings: Iterable[Renaming],
    shapes: Mapping[str, torch.Size],
    what: str,
    *,
    unused: Iterable[str] = (),
) -> dict[str, Tensor]:
    """Our tensors, in fp32, from those of another project.

    Args:
        renamings: one for each tensor of ours.
        shapes: of each of our tensors.
        what: the file, for errors.
        unused: their names that may be there and are not needed.

    Raises:
        WeightsError: missing or unknown names (listed), another shape, or numbers that are no floating point.
    """
    renamings = list(renamings)
    expected = [name for renaming in renamings for name in renaming.theirs]
    missing, unknown = sorted(set(expected) - state.keys()), sorted(state.keys() - set(expected) - set(unused))
    if missing or unknown:
        problems = []
        for problem, names in (("lacks", missing), ("has unknown", unknown)):
            rest = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
            problems += [f"{problem} {', '.join(names[:_MOST_NAMES])}{rest}"] if names else []
        raise WeightsError(f"{what} {' and '.join(problems)}: it is not of the expected structure")
    renamed = {}
    for ours, theirs in renamings:
        for name in theirs:
            if not state[name].is_floating_point():
                raise WeightsError(f"{what}: {name} holds {state[name].dtype}, but weights are floating point")
            if state[name].dim() == 0:
                raise WeightsError(f"{what}: {name} is a single number, but {ours} has shape {tuple(shapes[ours])}")
        parts = [state[name].to(torch.float32) for name in theirs]
        broken = [name for name, part in zip(theirs, parts, strict=True) if not bool(part.isfinite().all())]
        if broken:
            raise WeightsError(
                f"{what}: {broken[0]} holds NaN or infinity (or values beyond fp32): its training had failed"
            )
        if len({part.shape[1:] for part in parts}) == 1 and len({part.shape[0] for part in parts}) == 1:
            value = torch.cat(parts) if len(parts) > 1 else parts[0].clone()
        else:
            value = parts[0]  # its shape is wrong in any case
        if value.shape != shapes[ours]:
            raise WeightsError(
                f"{what}: {' + '.join(theirs)} has shape {tuple(value.shape)}, but {tuple(shapes[ours])} was expected"
            )
        renamed[ours] = value.contiguous()
    return renamed


def rename_back(parameters: Mapping[str, Tensor], renamings: Iterable[Renaming]) -> dict[str, Tensor]:
    """The other direction: their tensors from ours."""
    state = {}
    for ours, theirs in renamings:
        for name, part in zip(theirs, parameters[ours].detach().chunk(len(theirs)), strict=True):
            state[name] = part.clone().contiguous()
    return state


def write_weights(path: Path, state: Mapping[str, Tensor]) -> None:
    """A `.safetensors` file that transformers loads too."""
    save_file({name: value.detach().cpu().contiguous() for name, value in state.items()}, path, {"format": "pt"})


def count_blocks(state: Mapping[str, Tensor], prefix: str, what: str) -> int:
    """How many blocks `prefix`0., `prefix`1., ... there are.

    Raises:
        WeightsError: none, or numbers that do not count from 0.
    """
    blocks = {name.removeprefix(prefix).partition(".")[0] for name in state if name.startswith(prefix)}
    numbers = sorted(int(number) for number in blocks if number.isdecimal())
    if not numbers or numbers != list(range(len(numbers))) or len(numbers) != len(blocks):
        raise WeightsError(f"{what} lacks {prefix}0, {prefix}1, ...: its blocks {sorted(blocks)} do not count from 0")
    return len(numbers)


def shape_of(state: Mapping[str, Tensor], name: str, num_dims: int, what: str) -> tuple[int, ...]:
    """
    Raises:
        WeightsError: no such tensor, or another number of dimensions.
    """
    if name not in state:
        raise WeightsError(f"{what} lacks {name}: it is not of the expected structure")
    shape = tuple(state[name].shape)
    if len(shape) != num_dims:
        raise WeightsError(f"{what}: {name} has shape {shape}, but {num_dims} dimensions were expected")
    return shape


def mlp_ratio(hidden_width: int, width: int) -> float:
    """A ratio of which int(width * ratio) is the hidden width again."""
    ratio = hidden_width / width
    return ratio if int(width * ratio) == hidden_width else (hidden_width + 0.5) / width
