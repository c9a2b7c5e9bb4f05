"""The clipped sum by two backward passes: one for the norms, one for the weighted sums.

Each layer's tensors are used and freed as soon as its gradient is known, so activation
checkpointing keeps its memory benefit. The second pass must repeat the first to the last bit, or
the norm that divides is not that of the summed gradient: `check_repeatable` tries that before
training, and every micro-batch compares the two.
"""

from collections.abc import Generator, Mapping
from contextlib import closing
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import PrivacyConfigError
from ..gradients.compiled import compiled_weights
from ..gradients.module_state import writes_to
from ..gradients.recorder import Call, Forward, Task
from ..numerics.precision import exact, wide, wide_dtype
from ..sums.totals import blocks
from .clip_factors import Factors
from .clipped_sum import (
    NOT_REPEATED,
    ClippedSum,
    Parts,
    num_rows,
    require_equal,
    require_unwritten,
)

MARKED_ENTRIES = 1 << 22
"""Entries of a gradient that are multiplied at a time, to compare two passes: 16 MiB."""


class TwoPassSum(ClippedSum):
    """`ClippedSum` by two passes: the same sum, guarantee and arguments, more time, less memory."""

    mode = "two_pass"

    def __init__(self, model: nn.Module, max_grad_norm: float, **settings: Any) -> None:
        self._directions: dict[int, Tensor] = {}
        self._generator = torch.Generator()
        self._generator.seed()
        super().__init__(model, max_grad_norm, **settings)
        # One forward serves both passes, unless its weights are sharded (engines gather them for
        # one backward only) or compiled: then each pass has a forward of its own.
        has_whole_weights = all(
            has_whole_weight(p, self._shapes.get(name)) for name, p in model.named_parameters()
        )
        self.keeps_graph = has_whole_weights and not compiled_weights(model)

    def zero_(self) -> None:
        """Starts a new logical batch."""
        super().zero_()
        # () or (1,): whether a second pass of this batch differed from its first; on the device, so
        # that nothing waits for it.
        self._differs = torch.empty(0, dtype=torch.bool)

    def require_repeated(self) -> None:
        """Refuses a batch whose second pass differed (`ClippedSum.require_repeated`)."""
        if len(self._differs) and bool(self._differs):
            raise PrivacyConfigError(NOT_REPEATED)

    def check_repeatable(self, task: Task, inputs: Mapping[str, Tensor]) -> None:
        """Refuses a model whose forward and backward differ in a bit the second time.

        Raises:
            PrivacyConfigError: they differ: nondeterministic kernels, or dropout.
        """
        norms: list[list[Tensor]] = []
        with torch.no_grad(), closing(self._twice(task, inputs, num_rows(inputs))) as passes:
            for forward in passes:
                tallies, _ = self._tallies(forward)
                norms.append([tally.totals.squared_B for tally in tallies])
        require_equal(*norms)

    def _add_part(
        self, task: Task, inputs: Mapping[str, Tensor], is_padding_B: Tensor
    ) -> tuple[Tensor, Factors]:
        first_marks: list[Tensor] = []
        second_marks: list[Tensor] = []
        with closing(self._twice(task, inputs, len(is_padding_B))) as passes:
            first = next(passes)
            tallies, writes = self._tallies(first, observe=partial(self._add_mark, first_marks))
            require_unwritten(writes, "a backward of the model")
            with exact(first.loss_B.device):
                factors = self._factors(tallies, first.loss_B, is_padding_B)

            def add(name: str, parts: Parts) -> None:
                self._add_parameter(name, parts, factors)
                self.accumulator.complete(name)

            second = next(passes)
            self._by_parameter(second, add, partial(self._add_mark, second_marks))
        self._compare(first_marks, second_marks, factors)
        return first.loss_B, factors

    def _add_mark(self, marks: list[Tensor], call: Call) -> None:
        """Appends (B,) a number for each example's gradient, by which two passes are compared.

        It is the gradient's product with a random direction, drawn once for each number of entries:
        a norm would not see a sign. NaN reads as -1.
        """
        rows_Bn = call.output_gradient.reshape(len(call.output_gradient), -1)
        numel = rows_Bn.shape[1]
        if numel not in self._directions:
            direction_n = torch.randn(numel, generator=self._generator)
            self._directions[numel] = direction_n.to(rows_Bn.device, wide_dtype(rows_Bn.dtype))
        direction_n = self._directions[numel]
        rows_at_a_time = max(1, MARKED_ENTRIES // max(1, numel))
        products = []
        for rows in blocks(len(rows_Bn), rows_at_a_time):
            products.append((wide(rows_Bn[rows]) * direction_n).sum(1))
        marks.append(torch.cat(products).nan_to_num(nan=-1.0))

    def _compare(self, first: list[Tensor], second: list[Tensor], factors: Factors) -> None:
        """Notes whether the two passes differ in an example that is summed.

        Excluded examples are not summed, so they are not compared. On CUDA their rows are zeroed in
        place, and the second backward reads those zeros.

        Raises:
            PrivacyConfigError: the passes report different numbers of gradients.
        """
        if len(first) != len(second):
            raise PrivacyConfigError(NOT_REPEATED)
        # The loss depends on no parameter.
        if not first:
            return
        differs = [*self._differs[:1]]
        for first_B, second_B in zip(first, second, strict=True):
            differs.append(((first_B != second_B) & factors.is_finite_B).any())
        self._differs = torch.stack(differs).any().reshape(1)

    def _twice(
        self, task: Task, inputs: Mapping[str, Tensor], batch_size: int
    ) -> Generator[Forward, None, None]:
        """Yields two forwards to differentiate.

        They are one forward whose graph is kept, or two where it cannot be kept.
        """
        writes = [(name, tensor, writes_to(tensor)) for name, tensor in inputs.items()]
        num_backwards = 2 if self.keeps_graph else 1
        with self.recorder.forward(
            task, inputs, batch_size, num_backwards=num_backwards
        ) as forward:
            yield forward
            if self.keeps_graph:
                yield forward
                return
        require_unwritten(writes, "the forward of the model")
        with self.recorder.forward(task, inputs, batch_size) as forward:
            yield forward


def has_whole_weight(parameter: nn.Parameter, shape: torch.Size | None) -> bool:
    """Returns whether this process always holds all of a parameter.

    Sharded engines hold it only while its layer runs.

    Args:
        shape: the full shape of a trained parameter.
    """
    is_whole = parameter.shape == shape if parameter.requires_grad else parameter.numel() > 0
    return type(parameter) is nn.Parameter and is_whole
