"""The clipped sum by two backward passes: one for the norms, one for the weighted sums.

Each layer's tensors are used and freed as soon as its gradient is known, so activation checkpointing keeps its memory benefit.
Both passes go through the graph of one forward, except where weights are sharded (gathered for one backward only) or compiled:
there each has a forward of its own. The second pass must repeat the first to the last bit, or the norm that divides is not that
of what is summed. `check_repeatable` tries that before training, and every micro-batch compares the two.
"""

from collections.abc import Generator, Mapping
from contextlib import closing
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
    """`ClippedSum` by two passes: the same sum, guarantee and arguments, more time and less memory."""

    mode = "two_pass"

    def __init__(self, model: nn.Module, max_grad_norm: float, **settings: Any) -> None:
        self._directions: dict[int, Tensor] = {}
        self._generator = torch.Generator()
        self._generator.seed()
        super().__init__(model, max_grad_norm, **settings)
        self.keeps_graph = not compiled_weights(model) and all(
            has_whole_weight(p, self._shapes.get(name)) for name, p in model.named_parameters()
        )

    def zero_(self) -> None:
        """Starts a new logical batch."""
        super().zero_()
        # () or (1,): whether a second pass of this batch differed from its first; on the device, so that nothing waits for it.
        self._differs = torch.empty(0, dtype=torch.bool)

    def require_repeated(self) -> None:
        """See `ClippedSum.require_repeated`."""
        if len(self._differs) and bool(self._differs):
            raise PrivacyConfigError(NOT_REPEATED)

    def check_repeatable(self, task: Task, inputs: Mapping[str, Tensor]) -> None:
        """Requires that forward and backward of the model agree to the last bit the second time.

        Raises:
            PrivacyConfigError: they differ: nondeterministic kernels, or dropout.
        """
        norms: list[list[Tensor]] = []
        with torch.no_grad(), closing(self._twice(task, inputs, num_rows(inputs))) as passes:
            for passed in passes:
                tallies, _ = self._tallies(passed)
                norms.append([tally.totals.squared_B for tally in tallies])
        require_equal(*norms)

    def _add_part(
        self, task: Task, inputs: Mapping[str, Tensor], is_padding_B: Tensor
    ) -> tuple[Tensor, Factors]:
        first_marks: list[Tensor] = []
        second_marks: list[Tensor] = []
        with closing(self._twice(task, inputs, len(is_padding_B))) as passes:
            first = next(passes)
            tallies, writes = self._tallies(
                first, observe=lambda call: first_marks.append(self._mark_of(call))
            )
            require_unwritten(writes, "a backward of the model")
            with exact(first.loss_B.device):
                factors = self._factors(tallies, first.loss_B, is_padding_B)

            def add(name: str, parts: Parts) -> None:
                self._add_parameter(name, parts, factors)
                self.accumulator.filled(name)

            second = next(passes)
            self._by_parameter(second, add, lambda call: second_marks.append(self._mark_of(call)))
        self._compare(first_marks, second_marks, factors)
        return first.loss_B, factors

    def _mark_of(self, call: Call) -> Tensor:
        """Returns (B,) a number for each example's gradient that a layer reports, by which two passes are compared.

        It is the product with a random direction, drawn once for each number of entries: a norm would not see a sign. NaN reads
        as -1.
        """
        rows_Bn = call.output_gradient.reshape(len(call.output_gradient), -1)
        numel = rows_Bn.shape[1]
        if numel not in self._directions:
            direction_n = torch.randn(numel, generator=self._generator)
            self._directions[numel] = direction_n.to(rows_Bn.device, wide_dtype(rows_Bn.dtype))
        marks = [
            (wide(rows_Bn[some]) * self._directions[numel]).sum(1)
            for some in blocks(len(rows_Bn), max(1, MARKED_ENTRIES // max(1, numel)))
        ]
        return torch.cat(marks).nan_to_num(nan=-1.0)

    def _compare(self, first: list[Tensor], second: list[Tensor], factors: Factors) -> None:
        """Notes whether the two passes differ in an example that is summed.

        Of an excluded example nothing is summed. On CUDA its rows are zeroed where they stand, which the second backward reads.

        Raises:
            PrivacyConfigError: they report different numbers of gradients.
        """
        if len(first) != len(second):
            raise PrivacyConfigError(NOT_REPEATED)
        if not first:  # the loss depends on no parameter
            return
        differ = [
            ((mark_B != again_B) & factors.is_finite_B).any()
            for mark_B, again_B in zip(first, second, strict=True)
        ]
        self._differs = torch.stack([*differ, *self._differs[:1]]).any().reshape(1)

    def _twice(
        self, task: Task, inputs: Mapping[str, Tensor], batch_size: int
    ) -> Generator[Forward, None, None]:
        """Yields two forwards to differentiate: the same one, whose graph is kept, or two where it cannot be kept."""
        writes = [(name, tensor, writes_to(tensor)) for name, tensor in inputs.items()]
        num_backwards = 2 if self.keeps_graph else 1
        with self.recorder.forward(task, inputs, batch_size, num_backwards=num_backwards) as passed:
            yield passed
            if self.keeps_graph:
                yield passed
                return
        require_unwritten(writes, "the forward of the model")
        with self.recorder.forward(task, inputs, batch_size) as passed:
            yield passed


def has_whole_weight(parameter: nn.Parameter, shape: torch.Size | None) -> bool:
    """Whether this process holds a parameter as a whole, and not only while its layer runs.

    Args:
        shape: the full shape of a trained parameter.
    """
    is_whole = parameter.shape == shape if parameter.requires_grad else parameter.numel() > 0
    return type(parameter) is nn.Parameter and is_whole
