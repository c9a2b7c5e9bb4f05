"""The clipped sum of a logical batch in whole numbers: `privacy.arithmetic = "certified"`.

Each example's gradient is written out in fp32, whatever the layers' rules prefer otherwise; its norm, in fp64, gives the clip
factor; and privacy/certified/integers.py makes integers of it whose norm is checked exactly and which are added up in int64. The
whole gradient of an example is kept as integers until its norm is known, so what is checked is what is summed.

A micro-batch is worked off in parts of equal size, as many examples as WRITTEN_BYTES hold, each part with a forward and a
backward of its own: shapes are then the same for every example of the run. What remains to be assumed is that at these shapes
the integers of an example follow from weights, example and key alone, and not from its row, its micro-batch or its neighbours.
Sums then do not depend on who else is there either; without it, clipping would still hold for each vector, but leaving out an
example could change those of others. `CertifiedSum.check_rows` looks for counterexamples on made-up inputs before training."""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from ..arithmetic.precision import exact
from ..clipping.clip_factors import ClippingFunction, flat
from ..clipping.clipped_sum import ClippedSum, Parts
from ..clipping.norms import MicroBatchStats
from ..errors import PrivacyConfigError
from ..gradients.per_example_gradients import in_full
from ..gradients.recorder import Task
from ..guards.neighbours import NotTaken, must_take
from ..plan.lattice import Lattice
from ..sums.grid import EXAMPLES_PER_PART, Grid
from ..sums.local import LocalSums, MakeAccumulator
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

    The other arguments are those of `ClippedSum`. There are no modes.

    Raises:
        PrivacyConfigError: as `ClippedSum` does; or the lattice is too coarse for this number of parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        lattice: Lattice,
        *,
        shapes: Mapping[str, torch.Size] | None = None,
        function: Callable[[list[str], float], ClippingFunction] = flat,
        accumulator: MakeAccumulator = LocalSums,
        device: torch.device | None = None,
        self_check: bool = True,
    ):
        self.lattice = lattice
        super().__init__(
            model,
            lattice.bound,
            shapes=shapes,
            mode="certified",
            function=function,
            accumulator=accumulator,
            device=device,
            self_check=self_check,
        )

    def _grid(self, cap: int | None, rows: int | None, noise_multiplier: float) -> Grid:
        """Whole numbers come as such, with room for them by the choice of the lattice."""
        return Grid(layout="int64")

    def _set_bound(self, value: float) -> None:
        super()._set_bound(value)
        self._num_coordinates = sum(self._numel.values())
        self._function = self._make_function(
            self._names, self.lattice.target(self._num_coordinates)
        )

    @property
    def exponent(self) -> int:
        return self.lattice.exponent

    @property
    def sensitivity(self) -> float:
        return self.max_grad_norm

    def rows_at_once(self, num_rows: int) -> int:
        """Examples of a part: the largest divisor of `num_rows` whose written-out gradients fit."""
        most = min(EXAMPLES_PER_PART, max(1, WRITTEN_BYTES // (4 * self._num_coordinates)))
        return max(size for size in range(1, min(most, num_rows) + 1) if num_rows % size == 0)

    def _in_one_pass(
        self, task: Task, inputs: Mapping[str, Tensor], is_padding_B: Tensor
    ) -> MicroBatchStats:
        k, multiplier_B, stats = self.vectors(task, inputs, is_padding_B)
        for name in list(k):  # as the backward found them
            add_contributions(self.accumulator.slot(name).total.low, k.pop(name), multiplier_B)
            self.accumulator.filled(name)
        return stats

    @torch.no_grad()
    def vectors(
        self, task: Task, inputs: Mapping[str, Tensor], is_padding_B: Tensor
    ) -> tuple[dict[str, Tensor], Tensor, MicroBatchStats]:
        """The integers of some examples, of which one forward and one backward are made.

        Returns:
            Parameter name -> k, (B, n) int32, without parameters that have no gradient; multipliers, (B,) int64: the contribution
            is that times k, in units of the lattice; and statistics.
        """
        num_rows = len(is_padding_B)
        written: dict[str, Tensor] = {}

        def write(name: str, parts: Parts) -> None:
            written[name] = in_full(
                parts, self._shapes[name]
            ).grad_B.float()  # fp64 models' are rounded

        with self._record().forward(task, inputs, num_rows) as passed:
            self._by_parameter(passed, write)
        with exact(passed.loss_B.device):
            # Norms are in fp64, where no finite fp32 gradient over- or underflows.
            squared = [
                torch.zeros(num_rows, dtype=torch.float64, device=self._device)
                for _ in self._function.bounds
            ]
            for name, gradient_Bn in written.items():
                norm_B = torch.linalg.vector_norm(gradient_Bn, dim=1, dtype=torch.float64)
                squared[self._function.group_of[name]] += norm_B.square_()
            factors = self._weighed(
                [squared_B.sqrt_() for squared_B in squared], passed.loss_B, is_padding_B
            )
            excluded_B = is_padding_B | ~factors.is_finite_B
            norms = SquaredNorms(num_rows, self._device)
            k = {}
            for name in list(written):
                scale_B = factors.weights[self._function.group_of[name]] * 2.0 ** (
                    self.lattice.exponent - 1
                )
                k[name] = round_to_even(written.pop(name), scale_B, excluded_B)
                norms.add(k[name])
            stats = factors.stats(passed.loss_B, is_padding_B)
        return k, norms.multipliers(self.lattice.limit), stats

    def check_rows(self, task: Task, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Looks for an example whose integers depend on its row, its micro-batch or its neighbours; collective where `task` is.

        The first example stands in every row, among itself and among others, some of which are padding and some not finite. All
        micro-batches are gone through before an error is raised, so that no rank of a sharded model waits for another.

        Args:
            inputs: one micro-batch of made-up examples, of the size that training has; never private data.

        Returns:
            The example's integers by parameter, (n,), which other ranks must find too.

        Raises:
            PrivacyConfigError: there is one; the parameter is named.
        """
        num_rows = len(next(iter(inputs.values())))
        size = self.rows_at_once(num_rows)
        part = {name: x[:size] for name, x in inputs.items()}
        expected: dict[str, Tensor] = {}
        differing: tuple[str, int] | None = None
        for micro_batch, is_here_B, is_padding_B in _neighbourhoods(part, size):
            try:
                with must_take(f"{size} examples together"):
                    k, multiplier_B, _ = self.vectors(
                        task, micro_batch, is_padding_B.to(self._device)
                    )
            except NotTaken:  # the model refuses what is not finite itself
                if all(x.isfinite().all() for x in micro_batch.values()):
                    raise
                continue
            here_B = is_here_B.to(self._device)
            z = {name: (k_Bn * multiplier_B[:, None])[here_B] for name, k_Bn in k.items()}
            expected = expected or {name: z_Rn[0].clone() for name, z_Rn in z.items()}
            for name, z_Rn in z.items():
                differs_R = (z_Rn != expected[name]).any(1)
                if differing is None and differs_R.any():
                    differing = name, int(is_here_B.nonzero()[differs_R.nonzero()[0].cpu()])
        if differing is not None:
            raise PrivacyConfigError(
                f"privacy.arithmetic = 'certified' is refused: in micro-batches of {size} examples, the gradient of "
                f"{differing[0]} of one and the same example is another in row {differing[1]} or among other examples, so here "
                "leaving an example out would change others; take train.micro_batch_size = 1, a ds_config with fp32, or "
                "privacy.arithmetic = 'floating'"
            )
        return expected


def _neighbourhoods(
    inputs: Mapping[str, Tensor], size: int
) -> Iterator[tuple[dict[str, Tensor], Tensor, Tensor]]:
    """(micro-batch, rows in which the first example is, rows that are padding)."""
    every, nobody = torch.ones(size, dtype=torch.bool), torch.zeros(size, dtype=torch.bool)
    alone_B = torch.arange(size) == 0
    yield dict(inputs), alone_B, nobody
    yield {name: x[:1].expand_as(x).contiguous() for name, x in inputs.items()}, every, nobody
    for shift in range(2):
        here_B = torch.arange(size) % 2 == shift
        if not here_B.any():
            continue
        for kind in ("others", "padding", "not finite"):
            mixed = {}
            for name, x in inputs.items():
                others = x.roll(1, 0)
                if kind == "not finite" and x.is_floating_point():
                    others = torch.full_like(x, float("nan"))
                here = here_B.to(x.device).view(-1, *[1] * (x.dim() - 1))
                mixed[name] = torch.where(here, x[:1], others)
            yield mixed, here_B, (~here_B if kind == "padding" else nobody)
