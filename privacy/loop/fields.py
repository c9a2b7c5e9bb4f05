"""The declared fields of an item: public shapes, kinds and values.

An item that does not match its fields counts as zero (contract 2). Fields are declared and not
taken from the data: no private item may set the shapes of others.
"""

import math
import operator
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import PrivacyConfigError
from ..guards.conditions import LISTED


class Unusable(Exception):
    """An item does not match its declared fields.

    Attributes:
        kind: the fault without the numbers of one item, so that items can be counted by it.
        labels: of the item, by the name of their field, as far as they can be read.
    """

    def __init__(self, message: str, kind: str = "") -> None:
        super().__init__(message)
        self.kind = kind or message
        self.labels: dict[str, int] = {}


@dataclass(frozen=True)
class Field:
    """One tensor of an item.

    Attributes:
        shape: without the batch dimension.
        below: integers are 0 to below - 1; None for floating-point numbers.
        also: further integers that are allowed, such as -100 for labels that a loss leaves out.
        is_mask: made-up values are ones and then zeros.
        fixed: pairs of an integer and the number of times that every item has it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    below: int | None = None
    also: tuple[int, ...] = ()
    is_mask: bool = False
    fixed: tuple[tuple[int, int], ...] = ()

    def padding(self) -> Tensor:
        """Returns the values of a row without an item."""
        return self._with_fixed(torch.zeros(1, *self.shape, dtype=self.dtype))[0]

    def _with_fixed(self, values: Tensor) -> Tensor:
        """Writes the fixed integers to the first places of each item; returns the values."""
        fixed_integers: list[int] = []
        for integer, count in self.fixed:
            fixed_integers += [integer] * count
        places = values.view(len(values), -1)[:, : len(fixed_integers)]
        places[:] = torch.tensor(fixed_integers, dtype=self.dtype)
        return values

    def made_up(self, count: int, generator: torch.Generator) -> Tensor:
        """Returns (count, *shape) random values that the field allows.

        Integers include the lowest and the highest, since a model may branch on them.
        """
        if self.below is None:
            return torch.randn(count, *self.shape, generator=generator, dtype=self.dtype)
        if self.is_mask:
            length = self.shape[-1]
            size = (count, *(1 for _ in self.shape))
            num_ones = torch.randint(1, 1 + length, size, generator=generator)
            return (torch.arange(length).expand(count, *self.shape) < num_ones).to(self.dtype)
        values = torch.randint(
            self.below - len(self.fixed),
            (count, *self.shape),
            generator=generator,
            dtype=self.dtype,
        )
        # Fixed integers are at their places alone, so the others skip over them.
        for integer, _ in sorted(self.fixed):
            values += values >= integer
        lowest = min((0, *self.also))
        highest = max((self.below - 1, *self.also))
        last_rows = values.view(count, -1)[-2:]
        for row, end in zip(last_rows, (lowest, highest), strict=False):
            if end not in dict(self.fixed):
                row[-1] = end
        return self._with_fixed(values)

    def read(self, value: object) -> Tensor:
        """Returns a value of an item as a tensor of this field.

        Raises:
            Unusable: it has another shape or kind, or an integer that is not allowed.
        """
        try:
            if isinstance(value, Tensor):
                tensor = value.detach().cpu()
            else:
                tensor = torch.from_numpy(np.array(value))
        except (TypeError, ValueError) as error:
            raise Unusable(f"is not a tensor: {error}", "is not a tensor") from error
        if tuple(tensor.shape) != self.shape:
            raise Unusable(
                f"has shape {tuple(tensor.shape)}, not {self.shape}", "has another shape"
            )
        if self.below is None:
            if tensor.dtype.is_complex:
                raise Unusable("is complex")
            return _plain(tensor, self.dtype)
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            raise Unusable(f"is {tensor.dtype}, and integers are expected")
        # The sign bit of an int64 is 2^63 of a uint64, which no field allows.
        if tensor.dtype == torch.uint64 and bool((tensor.view(torch.int64) < 0).any()):
            raise Unusable("holds integers that are not allowed")
        tensor = _plain(tensor, torch.int64)
        if not bool(self.allows(tensor[None])):
            fault = f"holds integers other than 0 to {self.below - 1}"
            for integer, count in self.fixed:
                fault += f", or not {integer} {count} times"
            raise Unusable(fault)
        return tensor

    def allows(self, items: Tensor) -> Tensor:
        """Returns whether each of N items holds allowed integers, (N,).

        Any floating-point number is allowed.
        """
        if self.below is None:
            return torch.ones(len(items), dtype=torch.bool)
        is_allowed = (items >= 0) & (items < self.below)
        for integer in self.also:
            is_allowed |= items == integer
        is_usable_N = is_allowed.view(len(items), -1).all(1)
        for integer, count in self.fixed:
            is_usable_N &= (items == integer).view(len(items), -1).sum(1) == count
        return is_usable_N


def _plain(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a dense copy of class `Tensor`, whatever class or layout the item has.

    Raises:
        Unusable: its numbers cannot be copied.
    """
    try:
        copy = torch.empty(tensor.shape, dtype=dtype, device="cpu")
        return copy.copy_(tensor.as_subclass(Tensor))
    except (RuntimeError, TypeError) as error:
        raise Unusable(f"is not a dense tensor: {error}", "is not a dense tensor") from error


def floats(*shape: int, dtype: torch.dtype = torch.float32) -> Field:
    """Declares a field of floating-point numbers, (*shape) for one item."""
    if not dtype.is_floating_point:
        raise PrivacyConfigError(
            f"floats: {dtype} is not a floating-point dtype; integers(...) is for integers"
        )
    return Field(_checked(shape), dtype)


def integers(
    below: int, *shape: int, also: Sequence[int] = (), fixed: Mapping[int, int] | None = None
) -> Field:
    """Declares a field of int64 from 0 to below - 1, and those in `also`.

    Such are class labels, tokens and masks (below = 2).

    Args:
        below: one more than the largest integer.
        shape: of one item.
        also: further integers that are allowed, such as -100 for labels that a loss leaves out.
        fixed: integers of every item, with the number of times that each item has them, such as the
            placeholders that a picture's patches replace: `fixed={image_token_id: 256}`. Made-up
            items have them, too, and items without them are unusable.
    """
    if below < 1:
        raise PrivacyConfigError(f"integers: below must be 1 or more, not {below}")
    fixed_counts = tuple((fixed or {}).items())
    are_allowed = all(0 <= integer < below and count >= 1 for integer, count in fixed_counts)
    if are_allowed and fixed_counts:
        num_fixed = sum(count for _, count in fixed_counts)
        are_allowed = len(fixed_counts) < below and num_fixed <= math.prod(_checked(shape))
    if not are_allowed:
        raise PrivacyConfigError(
            f"integers: fixed must map integers from 0 to {below - 1} to how often an item of "
            f"{shape} has them, not {fixed}"
        )
    return Field(_checked(shape), torch.int64, below, tuple(also), fixed=fixed_counts)


def mask(*shape: int) -> Field:
    """Declares a field of 1 for places that count and 0 for others, such as an attention mask."""
    if not shape:
        raise PrivacyConfigError("mask: give its shape")
    return Field(_checked(shape), torch.int64, 2, is_mask=True)


def _checked(shape: tuple[int, ...]) -> tuple[int, ...]:
    if any(not isinstance(size, int) or size < 1 for size in shape):
        raise PrivacyConfigError(
            f"a field's shape has sizes of 1 or more, without the batch, not {shape}"
        )
    return shape


class Example:
    """Holds the fields of an item: named for items that are mappings, in order for tuples."""

    def __init__(self, fields: Mapping[str, Field] | Sequence[Field] | Field) -> None:
        self.is_named = isinstance(fields, Mapping)
        self.fields: dict[str, Field] = {}
        if isinstance(fields, Mapping):
            self.fields = dict(fields)
        elif isinstance(fields, Field):
            self.fields = {"item_0": fields}
        elif isinstance(fields, Sequence):
            self.fields = {f"item_{number}": field for number, field in enumerate(fields)}
        if not self.fields or not all(isinstance(field, Field) for field in self.fields.values()):
            raise PrivacyConfigError(
                "example says what one item is: example=(floats(3, 32, 32), integers(10)) for "
                "items that are (image, label), or a mapping of names to fields for items that are "
                "mappings"
            )

    def padding(self) -> dict[str, Tensor]:
        """Returns the values of a row without an item, by field."""
        return {name: field.padding() for name, field in self.fields.items()}

    def allowed_ids(self) -> dict[str, Tensor]:
        """Returns the values of each field of integers, as far as they can be listed."""
        ids = {}
        for name, field in self.fields.items():
            if field.below is not None and field.below <= LISTED:
                further_ids = torch.tensor(field.also, dtype=torch.int64)
                ids[name] = torch.cat([torch.arange(field.below), further_ids])
        return ids

    def made_up(self, count: int) -> dict[str, Tensor]:
        """Returns `count` random items by field, the same in every process."""
        generator = torch.Generator().manual_seed(count)
        return {name: field.made_up(count, generator) for name, field in self.fields.items()}

    def read(self, item: Any) -> dict[str, Tensor]:
        """Returns the tensors of an item by field; other entries of a mapping are ignored.

        Raises:
            Unusable: the item does not match these fields.
        """
        if self.is_named:
            if not isinstance(item, Mapping):
                raise Unusable(
                    f"is {type(item).__name__}, and not a mapping with {', '.join(self.fields)}"
                )
            missing = [name for name in self.fields if name not in item]
            if missing:
                raise Unusable(f"lacks {missing[0]!r}")
            values = {name: item[name] for name in self.fields}
        else:
            parts = list(item) if isinstance(item, tuple | list) else [item]
            if len(parts) == 1 < len(self.fields) and not isinstance(item, tuple | list):
                keys = f" with {', '.join(map(str, item))}" if isinstance(item, Mapping) else ""
                raise Unusable(
                    f"is {type(item).__name__}{keys}, and not a tuple of {len(self.fields)}"
                )
            if len(parts) != len(self.fields):
                raise Unusable(
                    f"has {len(parts)} parts, not {len(self.fields)}", "has another number of parts"
                )
            values = dict(zip(self.fields, parts, strict=True))
        tensors = {}
        for name, field in self.fields.items():
            try:
                tensors[name] = field.read(values[name])
            except Unusable as error:
                unusable = Unusable(f"{name} {error}", f"{name} {error.kind}")
                unusable.labels = self._labels(values)
                raise unusable from error
        return tensors

    def _labels(self, values: Mapping[str, Any]) -> dict[str, int]:
        """Returns the labels of an item, allowed or not: readable values of one-integer fields."""
        labels = {}
        for name, field in self.fields.items():
            if math.prod(field.shape) == 1 and field.below is not None:
                # A foreign object may raise anything.
                with suppress(Exception):
                    labels[name] = operator.index(np.array(values[name]).item())
        return labels

    def named(self, made_up: Mapping[str, Tensor] | Sequence[Tensor]) -> dict[str, Tensor]:
        """Returns the caller's made-up micro-batch under the names of the fields.

        Raises:
            PrivacyConfigError: it has other fields.
        """
        if isinstance(made_up, Mapping):
            tensors = dict(made_up)
        else:
            tensors = dict(zip(self.fields, made_up, strict=False))
        has_all = tensors.keys() == self.fields.keys() and len(made_up) == len(self.fields)
        are_tensors = all(isinstance(x, Tensor) and x.dim() > 0 for x in tensors.values())
        if not has_all or not are_tensors:
            raise PrivacyConfigError(
                "made_up has to hold one tensor for each field of example: "
                f"{', '.join(self.fields)}; items come first in it"
            )
        return tensors

    def arguments(self, inputs: Mapping[str, Tensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Returns positional and keyword arguments of a loss: keywords for named fields."""
        if self.is_named:
            return [], dict(inputs)
        return [inputs[name] for name in self.fields], {}
