"""The clipped sum of a logical batch in whole numbers: `privacy.arithmetic = "certified"`.

Each example's gradient is written out in fp32, its norm, in fp64, gives the clip factor, and
privacy/certified/integers.py rounds it to integers whose norm is checked exactly and which are
added up in int64. docs/certified.md has the theorem and its hypothesis about rows, for which
privacy/guards/certified_rows.py looks for counterexamples before training.
"""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from ..clipping.clip_factors import ClippingFunction, Factors, factors_of, flat
from ..clipping.clipped_sum import ClippedSum, Parts
from ..gradients.per_example_gradients import write_out
from ..gradients.recorder import Task
from ..numerics.precision import exact
from ..plan.lattice import Lattice
from ..sums.grid import EXAMPLES_PER_PART, Grid
from ..sums.local import LocalSums, MakeAccumulator
from ..sums.totals import blocks
from .integers import SquaredNorms, add_contributions, round_to_even

WRITTEN_BYTES = 1 << 32
"""Written-out gradients of one part of a micro-batch, which has at least one example."""


class CertifiedSum(ClippedSum):
    """`ClippedSum` in whole numbers: `sums()` are int64 multiples of 2^-lattice.exponent.

    Guarantee: zeroing one example out changes the sum, as an L2 norm over all parameters, by at
    most `sensitivity` = C, exactly: a theorem about integers, under the hypothesis that the vectors
    of the other examples stay as they were (docs/certified.md). With that hypothesis leaving the
    example out and closing the rows up does the same.

    A micro-batch is worked off in parts of equal size, as many examples as WRITTEN_BYTES hold, each
    part with a forward and a backward of its own: shapes are then the same for every example of the
    run.

    Args:
        lattice: its bound is C.
        function: any; it is aimed at a little less than C, so that scaled gradients are within C
            after rounding.

    The other arguments are those of `ClippedSum`.

    Raises:
        PrivacyConfigError: as `ClippedSum` does; or the lattice is too coarse for this number of
            parameters.
    """

    mode = "certified"

    def __init__(
        self,
        model: nn.Module,
        lattice: Lattice,
        *,
        shapes: Mapping[str, torch.Size] | None = None,
        function: Callable[[list[str], float], ClippingFunction] = flat,
        accumulator: MakeAccumulator = LocalSums,
        device: torch.device | None = None,
    ):
        self.lattice = lattice
        super().__init__(
            model,
            lattice.bound,
            shapes=shapes,
            function=function,
            accumulator=accumulator,
            device=device,
        )

    def _grid(self, cap: int | None, rows: int | None, noise_multiplier: float) -> Grid:
        """Returns a grid without a step: the lattice makes numbers whole, and room for them."""
        return Grid(layout="int64")

    def _target_norm(self) -> float:
        """Returns a little less than C, so that rounding stays within C."""
        return self.lattice.target(self._num_coordinates)

    @property
    def _num_coordinates(self) -> int:
        return sum(self._numel.values())

    @property
    def _dtype_of_norms(self) -> torch.dtype:
        return torch.float64

    @property
    def exponent(self) -> int:
        """Returns f: sums are whole multiples of 2^-f."""
        return self.lattice.exponent

    @property
    def sensitivity(self) -> float:
        """Returns C, the L2 change of the sum when one example is added or removed."""
        return self.max_grad_norm

    def parts(self, num_rows: int) -> Iterator[slice]:
        """Yields the rows of each part; all parts have the size `size_of_part`."""
        return blocks(num_rows, self.size_of_part(num_rows))

    def size_of_part(self, num_rows: int) -> int:
        """Returns the largest divisor of `num_rows` whose written-out gradients fit."""
        num_fitting = max(1, WRITTEN_BYTES // (4 * self._num_coordinates))
        largest = min(EXAMPLES_PER_PART, num_fitting, num_rows)
        return max(size for size in range(1, largest + 1) if num_rows % size == 0)

    def _add_part(
        self, task: Task, inputs: Mapping[str, Tensor], is_padding_B: Tensor
    ) -> tuple[Tensor, Factors]:
        vectors, multiplier_B, loss_B, factors = self.vectors(task, inputs, is_padding_B)
        # In the order of the backward; a vector that has been added makes room, and so does a slot,
        # which no variable keeps.
        for name in list(vectors):
            add_contributions(
                self.accumulator.slot(name).total.low, vectors.pop(name), multiplier_B
            )
            self.accumulator.complete(name)
        return loss_B, factors

    def most_rounding_of_halves(self, num_rows: int) -> float:
        """Returns 0: whole numbers of an example are the same beside any others."""
        return 0.0

    @torch.no_grad()
    def vectors(
        self, task: Task, inputs: Mapping[str, Tensor], is_padding_B: Tensor
    ) -> tuple[dict[str, Tensor], Tensor, Tensor, Factors]:
        """Returns the integers of some examples, by one forward and one backward.

        Returns:
            Parameter name -> k, (B, n) int32, without parameters that have no gradient;
            multipliers, (B,) int64: the contribution is multiplier times k, in units of the
            lattice; losses, (B,); and clip factors.
        """
        num_rows = len(is_padding_B)
        gradients: dict[str, Tensor] = {}

        def write(name: str, parts: Parts) -> None:
            # Gradients of fp64 models are rounded.
            gradients[name] = write_out(parts, self._shapes[name]).grad_B.float()

        with self.recorder.forward(task, inputs, num_rows) as forward:
            self._by_parameter(forward, write)
        with exact(forward.loss_B.device):
            # Norms are in fp64, where no finite fp32 gradient over- or underflows.
            squared_norms = [
                torch.zeros(num_rows, dtype=torch.float64, device=self.device)
                for _ in self._function.bounds
            ]
            for name, gradient_Bn in gradients.items():
                norm_B = torch.linalg.vector_norm(gradient_Bn, dim=1, dtype=torch.float64)
                squared_norms[self._function.group_of[name]] += norm_B.square_()
            norms = [squared_B.sqrt_() for squared_B in squared_norms]
            factors = factors_of(self._function, norms, forward.loss_B, is_padding_B)
            excluded_B = is_padding_B | ~factors.is_finite_B
            exact_norms = SquaredNorms(num_rows, self.device)
            vectors = {}
            units_per_half = 2.0 ** (self.lattice.exponent - 1)
            for name in list(gradients):
                scale_B = factors.weights[self._function.group_of[name]] * units_per_half
                vectors[name] = round_to_even(gradients.pop(name), scale_B, excluded_B)
                exact_norms.add(vectors[name])
            multiplier_B = exact_norms.multipliers(self.lattice.limit)
        return vectors, multiplier_B, forward.loss_B, factors
