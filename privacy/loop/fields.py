"""What one item of a data set is: public shapes, kinds and values; an item that is anything else counts as zero (contract 2).

They are said and not taken from the data: one private item must not decide what all others have to look like.
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
        kind: what is wrong, without the numbers of one item, so that items can be counted by it.
        labels: of the item, by the name of their field, as far as they can be read.
    """

    def __init__(self, message: str, kind: str = "") -> None:
        super().__init__(message)
        self.kind, self.labels = kind or message, dict[str, int]()


@dataclass(frozen=True)
class Field:
    """One tensor of an item.

    Attributes:
        shape: without the batch dimension.
        below: integers are 0 to below - 1; None for floating-point numbers.
        also: further integers that are allowed, such as -100 of labels that count for nothing.
        is_mask: made-up values are ones and then zeros.
        fixed: integers that must stay, and how often each stands in every item.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    below: int | None = None
    also: tuple[int, ...] = ()
    is_mask: bool = False
    fixed: tuple[tuple[int, int], ...] = ()

    def padding(self) -> Tensor:
        """What stands in a row without an item."""
        return self._with_fixed(torch.zeros(1, *self.shape, dtype=self.dtype))[0]

    def _with_fixed(self, values: Tensor) -> Tensor:
        """The integers that must stay take the first places of each item."""
        first = torch.tensor(
            [one for one, count in self.fixed for _ in range(count)], dtype=self.dtype
        )
        values.view(len(values), -1)[:, : len(first)] = first
        return values

    def made_up(self, count: int, generator: torch.Generator) -> Tensor:
        """(count, *shape): random values that the field allows, the lowest and the highest among them, never private ones."""
        if self.below is None:
            return torch.randn(count, *self.shape, generator=generator, dtype=self.dtype)
        if self.is_mask:
            kept = torch.randint(
                1, 1 + self.shape[-1], (count, *(1 for _ in self.shape)), generator=generator
            )
            return (torch.arange(self.shape[-1]).expand(count, *self.shape) < kept).to(self.dtype)
        values = torch.randint(
            self.below - len(self.fixed),
            (count, *self.shape),
            generator=generator,
            dtype=self.dtype,
        )
        for one, _ in sorted(self.fixed):  # they stand nowhere else
            values += values >= one
        ends = min((0, *self.also)), max((self.below - 1, *self.also))
        for item, end in zip(
            values.view(count, -1)[-2:], ends, strict=False
        ):  # some condition may be on them
            if end not in dict(self.fixed):
                item[-1] = end
        return self._with_fixed(values)

    def read(self, value: object) -> Tensor:
        """The value as a tensor of this field.

        Raises:
            Unusable: it has another shape or kind, or an integer that is not allowed.
        """
        try:
            tensor = (
                value.detach().cpu()
                if isinstance(value, Tensor)
                else torch.from_numpy(np.array(value))
            )
        except (TypeError, ValueError) as error:
            raise Unusable(f"is no tensor: {error}", "is no tensor") from error
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
        if tensor.dtype == torch.uint64 and bool((tensor.view(torch.int64) < 0).any()):
            raise Unusable("holds integers that are not allowed")
        tensor = _plain(tensor, torch.int64)
        if not bool(self.allows(tensor[None])):
            fixed = "".join(f", or not {one} {count} times" for one, count in self.fixed)
            raise Unusable(f"holds integers other than 0 to {self.below - 1}{fixed}")
        return tensor

    def allows(self, items: Tensor) -> Tensor:
        """(N,): whether each of N items holds integers that the field takes; any floating-point number is one."""
        if self.below is None:
            return torch.ones(len(items), dtype=torch.bool)
        is_allowed = (items >= 0) & (items < self.below)
        for one in self.also:
            is_allowed |= items == one
        is_usable_N = is_allowed.view(len(items), -1).all(1)
        for one, count in self.fixed:
            is_usable_N &= (items == one).view(len(items), -1).sum(1) == count
        return is_usable_N


def _plain(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy that is a dense tensor and nothing else, whatever class or layout the item has.

    Raises:
        Unusable: it holds no numbers that could be copied.
    """
    try:
        return torch.empty(tensor.shape, dtype=dtype, device="cpu").copy_(
            tensor.as_subclass(Tensor)
        )
    except (RuntimeError, TypeError) as error:
        raise Unusable(f"is no dense tensor: {error}", "is no dense tensor") from error


def floats(*shape: int, dtype: torch.dtype = torch.float32) -> Field:
    """Declares a field of floating-point numbers, (*shape) for one item."""
    if not dtype.is_floating_point:
        raise PrivacyConfigError(
            f"floats: {dtype} holds no floating-point numbers; integers(...) is for integers"
        )
    return Field(_checked(shape), dtype)


def integers(
    below: int, *shape: int, also: Sequence[int] = (), fixed: Mapping[int, int] | None = None
) -> Field:
    """Declares a field of int64 from 0 to below - 1, and those in `also`: class labels, tokens, masks (below = 2).

    Args:
        fixed: integers that must stay, with how often each stands in every item, such as the placeholders that a picture's
            patches replace: `fixed={image_token_id: 256}`. Made-up items have them too, and other items are unusable.
    """
    if below < 1:
        raise PrivacyConfigError(f"integers: below must be 1 or more, not {below}")
    stays = tuple((fixed or {}).items())
    if not all(0 <= one < below and count >= 1 for one, count in stays) or (
        stays
        and (len(stays) >= below or sum(count for _, count in stays) > math.prod(_checked(shape)))
    ):
        raise PrivacyConfigError(
            f"integers: fixed must map integers from 0 to {below - 1} to how often they stand in an item of {shape}, not {fixed}"
        )
    return Field(_checked(shape), torch.int64, below, tuple(also), fixed=stays)


def mask(*shape: int) -> Field:
    """Declares a field of 1 for what counts and 0 for what does not, such as the attention mask of tokens."""
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
    """The fields of an item: named ones for items that are mappings, in order for items that are tuples."""

    def __init__(self, fields: Mapping[str, Field] | Sequence[Field] | Field) -> None:
        self.is_named = isinstance(fields, Mapping)
        listed = (
            [fields]
            if isinstance(fields, Field)
            else fields
            if isinstance(fields, Mapping | Sequence)
            else []
        )
        self.fields: dict[str, Field] = (
            dict(listed)
            if isinstance(listed, Mapping)
            else {f"item_{i}": field for i, field in enumerate(listed)}
        )
        if not self.fields or not all(isinstance(field, Field) for field in self.fields.values()):
            raise PrivacyConfigError(
                "example says what one item is: example=(floats(3, 32, 32), integers(10)) for items that are (image, label), or "
                "a mapping of names to fields for items that are mappings"
            )

    def padding(self) -> dict[str, Tensor]:
        """What stands in a row without an item."""
        return {name: field.padding() for name, field in self.fields.items()}

    def allowed_ids(self) -> dict[str, Tensor]:
        """Returns the values of each field of integers, as far as they can be listed."""
        return {
            name: torch.cat(
                [torch.arange(field.below), torch.tensor(field.also, dtype=torch.int64)]
            )
            for name, field in self.fields.items()
            if field.below is not None and field.below <= LISTED
        }

    def made_up(self, count: int) -> dict[str, Tensor]:
        """Random items, the same in every process."""
        generator = torch.Generator().manual_seed(count)
        return {name: field.made_up(count, generator) for name, field in self.fields.items()}

    def read(self, item: Any) -> dict[str, Tensor]:
        """The tensors of an item; what a mapping holds besides the named fields is not looked at.

        Raises:
            Unusable: the item has not these fields.
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
                named = f" with {', '.join(map(str, item))}" if isinstance(item, Mapping) else ""
                raise Unusable(
                    f"is {type(item).__name__}{named}, and not a tuple of {len(self.fields)}"
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
        """Returns the labels of an item, allowed or not: fields of one integer that can be read as one."""
        labels = {}
        for name, field in self.fields.items():
            if math.prod(field.shape) == 1 and field.below is not None:
                with suppress(Exception):  # whatever a foreign object raises
                    labels[name] = operator.index(np.array(values[name]).item())
        return labels

    def named(self, made_up: Mapping[str, Tensor] | Sequence[Tensor]) -> dict[str, Tensor]:
        """A made-up micro-batch that somebody gives, under the names of the fields.

        Raises:
            PrivacyConfigError: it has other fields.
        """
        given = (
            dict(made_up)
            if isinstance(made_up, Mapping)
            else dict(zip(self.fields, made_up, strict=False))
        )
        are_tensors = all(isinstance(x, Tensor) and x.dim() > 0 for x in given.values())
        if (
            given.keys() != self.fields.keys()
            or len(made_up) != len(self.fields)
            or not are_tensors
        ):
            raise PrivacyConfigError(
                f"made_up has to hold one tensor for each field of example: {', '.join(self.fields)}; items come first in it"
            )
        return given

    def arguments(self, inputs: Mapping[str, Tensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
        """How a loss is called: with names for named fields, in order for the others."""
        return ([], dict(inputs)) if self.is_named else ([inputs[name] for name in self.fields], {})
