"""The clipped sum of a logical batch in whole numbers: `privacy.arithmetic = "certified"`.

Each example's gradient is written out in fp32, whatever the layers' rules prefer otherwise; its norm, in fp64, gives the clip
factor; and privacy/certified/integers.py makes integers of it whose norm is checked exactly and which are added up in int64. The
whole gradient of an example is kept as integers until its norm is known, so what is checked is what is summed.

A micro-batch is worked off in parts of equal size, as many examples as WRITTEN_BYTES hold, each part with a forward and a
backward of its own: shapes are then the same for every example of the run. What remains to be assumed is that at these shapes
the integers of an example follow from weights, example and key alone, and not from its row, its micro-batch or its neighbours.
Sums then do not depend on who else is there either; without it, clipping would still hold for each vector, but leaving out an
example could change those of others. privacy/guards/certified_rows.py looks for counterexamples before training.
"""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from ..clipping.clip_factors import ClippingFunction, Factors, factors_of, flat
from ..clipping.clipped_sum import ClippedSum, Parts
from ..gradients.per_example_gradients import in_full
from ..gradients.recorder import Task
from ..numerics.precision import exact
from ..plan.lattice import Lattice
from ..sums.grid import EXAMPLES_PER_PART, Grid
from ..sums.local import LocalSums, MakeAccumulator
from ..sums.totals import blocks
from .integers import SquaredNorms, add_contributions, round_to_even

WRITTEN_BYTES = 1 << 32
"""Written-out gradients of one part of a micro-batch; one example's at least."""


class CertifiedSum(ClippedSum):
    """`ClippedSum` in whole numbers: `sums()` are int64 multiples of 2^-lattice.exponent.

    Guarantee: zeroing one example out changes the sum, as an L2 norm over all parameters, by at most `sensitivity` = C,
    exactly: a theorem about integers (privacy/certified/integers.py), where the vectors of the other examples stay what they
    were (module docstring). With that hypothesis leaving it out and closing the rows up does the same.

    Args:
        lattice: its bound is C.
        function: any; it is aimed at a little less than C, so that what it scales is within C after rounding.

    The other arguments are those of `ClippedSum`.

    Raises:
        PrivacyConfigError: as `ClippedSum` does; or the lattice is too coarse for this number of parameters.
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
        """Whole numbers come as such, with room for them by the choice of the lattice."""
        return Grid(layout="int64")

    def _clipped_to(self) -> float:
        """A little less than C, so that rounding stays within C."""
        return self.lattice.target(self._num_coordinates)

    @property
    def _num_coordinates(self) -> int:
        return sum(self._numel.values())

    @property
    def _dtype_of_norms(self) -> torch.dtype:
        return torch.float64

    @property
    def exponent(self) -> int:
        return self.lattice.exponent

    @property
    def sensitivity(self) -> float:
        return self.max_grad_norm

    def parts(self, num_rows: int) -> Iterator[slice]:
        """Yields the rows of each part, all of one size: the largest that divides `num_rows` and whose gradients fit."""
        return blocks(num_rows, self.size_of_part(num_rows))

    def size_of_part(self, num_rows: int) -> int:
        """Returns the largest divisor of `num_rows` for which the written-out gradients of as many examples fit."""
        most = min(EXAMPLES_PER_PART, max(1, WRITTEN_BYTES // (4 * self._num_coordinates)))
        return max(size for size in range(1, min(most, num_rows) + 1) if num_rows % size == 0)

    def _add_part(
        self, task: Task, inputs: Mapping[str, Tensor], is_padding_B: Tensor
    ) -> tuple[Tensor, Factors]:
        k, multiplier_B, loss_B, factors = self.vectors(task, inputs, is_padding_B)
        for name in list(k):  # as the backward found them
            add_contributions(self.accumulator.slot(name).total.low, k.pop(name), multiplier_B)
            self.accumulator.filled(name)
        return loss_B, factors

    def most_rounding_of_halves(self, num_rows: int) -> float:
        """Returns 0: whole numbers of an example are the same beside any others."""
        return 0.0

    @torch.no_grad()
    def vectors(
        self, task: Task, inputs: Mapping[str, Tensor], is_padding_B: Tensor
    ) -> tuple[dict[str, Tensor], Tensor, Tensor, Factors]:
        """The integers of some examples, of which one forward and one backward are made.

        Returns:
            Parameter name -> k, (B, n) int32, without parameters that have no gradient; multipliers, (B,) int64: the contribution
            is that times k, in units of the lattice; losses, (B,); and clip factors.
        """
        num_rows = len(is_padding_B)
        written: dict[str, Tensor] = {}

        def write(name: str, parts: Parts) -> None:
            written[name] = in_full(
                parts, self._shapes[name]
            ).grad_B.float()  # fp64 models' are rounded

        with self.recorder.forward(task, inputs, num_rows) as passed:
            self._by_parameter(passed, write)
        with exact(passed.loss_B.device):
            # Norms are in fp64, where no finite fp32 gradient over- or underflows.
            squared = [
                torch.zeros(num_rows, dtype=torch.float64, device=self.device)
                for _ in self._function.bounds
            ]
            for name, gradient_Bn in written.items():
                norm_B = torch.linalg.vector_norm(gradient_Bn, dim=1, dtype=torch.float64)
                squared[self._function.group_of[name]] += norm_B.square_()
            norms = [squared_B.sqrt_() for squared_B in squared]
            factors = factors_of(self._function, norms, passed.loss_B, is_padding_B)
            excluded_B = is_padding_B | ~factors.is_finite_B
            exact_norms = SquaredNorms(num_rows, self.device)
            k = {}
            for name in list(written):
                scale_B = factors.weights[self._function.group_of[name]] * 2.0 ** (
                    self.lattice.exponent - 1
                )
                k[name] = round_to_even(written.pop(name), scale_B, excluded_B)
                exact_norms.add(k[name])
            multiplier_B = exact_norms.multipliers(self.lattice.limit)
        return k, multiplier_B, passed.loss_B, factors
