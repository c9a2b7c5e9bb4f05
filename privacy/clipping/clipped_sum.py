"""The sum of clipped per-example gradients of a logical batch, micro-batch by micro-batch.

    sum_i  c_i g_i,     c_i = min(1, C / |g_i|),     |g_i| over all trainable parameters (flat)

after Abadi et al. 2016 (arXiv 1607.00133), by book-keeping (Bu et al. 2022, arXiv 2210.00038): one
forward, one backward for activation gradients, then norms and weighted sums from the inputs and
output gradients that all layers kept. docs/sums.md has the bound on one example's contribution.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from ..errors import PrivacyConfigError
from ..gradients.compiled import compiled_weights
from ..gradients.coverage import claims
from ..gradients.module_state import writes_to
from ..gradients.per_example_gradients import (
    ChunkedOuterProducts,
    Contribution,
    blank_excluded,
    is_short,
    may_cancel,
    write_out,
)
from ..gradients.recorder import Call, Forward, Recorder, Task
from ..noise.rounded_normal import deviation_in_units
from ..numerics.precision import exact, require_exact_products, wide_dtype
from ..plan.limits import MOST_DEVIATION, SMALLEST_BOUND
from ..plan.releases import Release, release_of_step
from ..sums.grid import EXAMPLES_PER_PART, EXAMPLES_PER_SUM, Grid
from ..sums.local import LocalSums, MakeAccumulator
from ..sums.totals import ParameterSum, SumTarget, blocks
from .clip_factors import ClippingFunction, Factors, MicroBatchStats, factors_of, flat
from .norms import NormTally

NEVER_CLIPS = 1e20
"""A C above this clips nothing that does not overflow."""
WRITTEN_ENTRIES = 1 << 14
"""Numbers of each example's gradient that are written out, those of the smallest parameters.

For 64 examples in fp32 they take 4 MiB, and no time that can be measured on a model of 132,756
parameters; four times as many take 6 % of a micro-batch."""

Mode = Literal["bookkeeping", "two_pass", "certified"]
Parts = list[Contribution]
Use = Callable[[str, Parts], None]
"""Takes a parameter's name and its contributions."""
Observe = Callable[[Call], None]
"""Looks at a call of a layer as soon as its gradient is known."""
LossesAndNorms = tuple[Tensor, Tensor]
"""(B,) losses and (groups, B) unclipped norms of a micro-batch, without noise."""
Writes = list[tuple[str, Tensor, int]]
"""(name, tensor, how often the tensor had been written to)."""

ROUNDING_OF_HALVES = 6e-4
"""In units of C, for EXAMPLES_PER_SUM examples: 3.7e-4 of the products of a micro-batch and of its
two halves, and 1.8e-4 of the three times that they become whole numbers (docs/sums.md)."""

NOT_REPEATED = (
    "clipping that computes gradients twice (two_pass, a vocabulary by chunks) is refused: the "
    "same backward gave different gradients the second time; call "
    "torch.use_deterministic_algorithms(True) first (warn_only leaves attention as it is), write "
    "to no tensor in place in a backward, or take bookkeeping with a larger max_logits"
)


class ClippedSum:
    """Accumulates the clipped sum for the trainable parameters of a model.

    Guarantee: zeroing one example out (making it padding) changes the sum, as an L2 norm over all
    parameters, by at most `sensitivity * (1 + SENSITIVITY_SLACK)`, whatever this example and the
    others are, all rounding of additions included: NaN, infinity and gradients whose norm overflows
    contribute zero. The proof (docs/sums.md) has one assumption, about the order of additions
    inside one matrix product.

    An example whose tokens cancel contributes less than min(|g|, C), and
    `MicroBatchStats.num_cancelled` counts it. Gradients of small parameters are written out for
    every example, which costs memory and no accuracy: there the safe norm is the norm itself.

    The guarantee assumes that the loss of an example depends on that example alone, and that rules
    and fallback see its whole gradient. `privacy/guards/` looks for models that break this; this
    class does not.

    Amplification by sampling also compares with a batch in which the example was not drawn. The
    guarantee covers that comparison where the others then stand in the same rows. Training deals
    rows at random among a public number, at least the cap, which is as good: the two placings have
    one distribution (docs/rows.md has the proof). A caller that samples without `deal`
    and closes rows up has the guarantee for an example zeroed in its place only.

    Args:
        model: every trainable parameter must be covered by a clipping rule, or by the fallback that
            the self-check has chosen.
        max_grad_norm: C, the L2 bound of one example's contribution; `inf` switches clipping off
            (tests, non-private runs).
        shapes: full parameter shapes by name, where the model holds them in shards.
        function: how a norm becomes a factor, and over which parameters; flat clipping by default.
        accumulator: made from (shapes, grid, device); takes the sums.
        cap: the most examples of a logical batch on all ranks.
        rows: the most rows of a logical batch on this rank, padding included. Sums take 6 bytes a
            coordinate where `cap` and `rows` fit, else 8. Without both there is room for a million.
        noise_multiplier: sigma. Without noise (0) sums are fp64, and keep gradients far below C.
            With noise they are whole multiples of a step, which is coarser where sigma is in the
            thousands.
        device: where the model computes, if its parameters wait elsewhere.

    Raises:
        PrivacyConfigError: a parameter or layer cannot be clipped, and the message names it; or C
            outside SMALLEST_BOUND to NEVER_CLIPS; or matrix products are not exact on this device.

    Attributes:
        mode: the recipe's word for this class.
        max_grad_norm: C.
        device: where the model computes.
        recorder: holds the hooks on the model.
        grid: the step of the sums.
        rows: losses and norms of the last micro-batch, for guards to read.
    """

    mode: Mode = "bookkeeping"

    def __init__(
        self,
        model: nn.Module,
        max_grad_norm: float,
        *,
        shapes: Mapping[str, torch.Size] | None = None,
        function: Callable[[list[str], float], ClippingFunction] = flat,
        accumulator: MakeAccumulator = LocalSums,
        cap: int | None = None,
        rows: int | None = None,
        noise_multiplier: float = 1.0,
        device: torch.device | None = None,
    ):
        require_bound(max_grad_norm)
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.model = model
        self.max_grad_norm = max_grad_norm
        self._shapes = shapes or {name: p.shape for name, p in model.named_parameters()}
        self._numel = {name: self._shapes[name].numel() for name in parameters}
        self.device = device or next(iter(parameters.values())).device
        weights_at_rest = compiled_weights(model)
        self.recorder = Recorder(claims(model, self._shapes), weights_at_rest)
        self._dtype = dtype_of_sums(parameters)
        trained_shapes = {name: self._shapes[name] for name in parameters}
        require_exact_products(self.device, self._dtype, trained_shapes.values())
        self._small = smallest_parameters(self._numel, WRITTEN_ENTRIES)
        has_noise = noise_multiplier > 0 and max_grad_norm < math.inf
        self.grid = self._grid(cap, rows, noise_multiplier) if has_noise else Grid()
        self.accumulator = accumulator(trained_shapes, self.grid, self.device)
        self._function = function(list(parameters), self._target_norm())
        self.zero_()

    def _grid(self, cap: int | None, rows: int | None, noise_multiplier: float) -> Grid:
        num_coordinates = sum(self._numel.values())
        return Grid.of(num_coordinates, self._dtype, cap, rows, noise_multiplier=noise_multiplier)

    def _target_norm(self) -> float:
        """Returns the norm to which gradients are scaled."""
        return self.max_grad_norm

    @property
    def _dtype_of_norms(self) -> torch.dtype:
        return self._dtype

    @property
    def exponent(self) -> int | None:
        """Returns f of this logical batch, whose sums are whole multiples of 2^-f.

        Without noise sums are fp64, and this is None.
        """
        unit = self.accumulator.unit
        return None if unit is None else unit.exponent

    @property
    def sensitivity(self) -> float:
        """Returns the L2 change of the sum when one example is added or removed.

        The slack for rounding comes on top.
        """
        return self._function.sensitivity

    @property
    def leaves_process(self) -> bool:
        """Returns whether sums are communicated before the logical batch is complete.

        Then its intent comes first (contract 9).
        """
        return self.accumulator.leaves_process

    def release(self, noise_multiplier: float) -> Release:
        """Returns what a step with this sum releases: the sum, with its noise.

        Raises:
            PrivacyConfigError: noise for a sum that is not clipped, or was made without noise.
        """
        if noise_multiplier > 0 and self.sensitivity == math.inf:
            raise PrivacyConfigError(
                "no noise hides an example whose gradient is not clipped: "
                "give a finite max_grad_norm"
            )
        exponent = self.exponent
        release = release_of_step(noise_multiplier, self.sensitivity)
        if (exponent is None) != (noise_multiplier == 0):
            raise PrivacyConfigError(
                "sums are whole multiples of a step exactly where they get noise, which hides what "
                f"rounding moves: give ClippedSum noise_multiplier={noise_multiplier:g}"
            )
        if exponent is not None and deviation_in_units(release["std"], exponent) > MOST_DEVIATION:
            raise PrivacyConfigError(
                f"noise of {noise_multiplier:g} C passes what is drawn exactly in steps of this "
                f"sum: give ClippedSum noise_multiplier={noise_multiplier:g}, which takes a "
                "coarser step"
            )
        return release

    def zero_(self) -> None:
        """Starts a new logical batch."""
        self.accumulator.zero_(self.grid.unit(self.sensitivity))

    def add_micro_batch(
        self, task: Task, inputs: Mapping[str, Tensor], is_padding_B: Tensor
    ) -> MicroBatchStats:
        """Adds the clipped gradients of one micro-batch.

        Args:
            task: `task(**inputs)` returns loss_B, where loss i depends on example i alone.
            inputs: tensors with B rows; without any, nothing is added and the model is not called.
            is_padding_B: bool; True rows contribute exactly zero.

        Raises:
            PrivacyConfigError: a layer's call cannot be split by example.
        """
        if len(is_padding_B) == 0:
            return self._stats_of_nothing()
        stats = []
        losses = []
        norms = []
        with torch.no_grad():
            for rows in self.parts(len(is_padding_B)):
                part = {name: x[rows] for name, x in inputs.items()}
                self.accumulator.start(rows.stop - rows.start)
                loss_B, factors = self._add_part(task, part, is_padding_B[rows])
                self.accumulator.finish()
                stats.append(factors.stats(loss_B, is_padding_B[rows]))
                losses.append(loss_B)
                norms.append(torch.stack(factors.norms))
            self.rows = torch.cat(losses), torch.cat(norms, dim=1)
        columns = zip(*stats, strict=True)
        return MicroBatchStats(*(torch.stack(column).sum() for column in columns))

    def parts(self, num_rows: int) -> Iterator[slice]:
        """Yields the rows of each part of a micro-batch.

        Parts bound the memory of a larger micro-batch.
        """
        return blocks(num_rows, EXAMPLES_PER_PART)

    def most_rounding_of_halves(self, num_rows: int) -> float:
        """Returns how far a micro-batch and its two halves may differ by rounding, in L2 norm.

        In one half padding stands in the place of some rows, and in the other in that of the rest.

        Args:
            num_rows: of the micro-batch.
        """
        return ROUNDING_OF_HALVES * math.ceil(num_rows / EXAMPLES_PER_SUM) * self.sensitivity

    def sums(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (parameter name, this process's part of the clipped sum).

        The accumulator must hold all of it in this process.
        """
        assert isinstance(self.accumulator, LocalSums)
        self.require_repeated()
        yield from self.accumulator.sums()

    def require_repeated(self) -> None:
        """Refuses a batch whose second pass differed from its first.

        Call it before anything of this batch is released. This class computes nothing twice.

        Raises:
            PrivacyConfigError: a second pass met other gradients than the first, so that a gradient
                is clipped by a norm that is not its own.
        """

    def check_repeatable(self, task: Task, inputs: Mapping[str, Tensor]) -> None:
        """Refuses a model whose gradients, computed twice, differ in a bit (contract 6).

        Call it before training. This class computes only the gradient of a vocabulary by chunks
        twice, which is too large to keep.

        Raises:
            PrivacyConfigError: the gradients differ: nondeterministic kernels.
        """
        contributions: dict[str, Parts] = {}
        with torch.no_grad(), self.recorder.forward(task, inputs, num_rows(inputs)) as forward:
            self._tallies(forward, contributions)
        with torch.no_grad(), exact(self.device):
            for part in itertools.chain.from_iterable(contributions.values()):
                if isinstance(part, ChunkedOuterProducts):
                    first_gradients = (gradient for _, gradient in part.gradients())
                    second_gradients = (gradient for _, gradient in part.gradients())
                    require_equal(first_gradients, second_gradients)

    def detach(self) -> None:
        """Removes the hooks from the model."""
        self.recorder.remove()

    def _add_part(
        self, task: Task, inputs: Mapping[str, Tensor], is_padding_B: Tensor
    ) -> tuple[Tensor, Factors]:
        """Adds some rows of a micro-batch; returns their losses, (B,), and clip factors."""
        contributions: dict[str, Parts] = {}
        with self.recorder.forward(task, inputs, len(is_padding_B)) as forward:
            tallies, writes = self._tallies(forward, contributions)
        require_unwritten(writes, "a backward of the model")
        # It holds all contributions, which are freed one by one below.
        del writes
        with exact(forward.loss_B.device):
            factors = self._factors(tallies, forward.loss_B, is_padding_B)
            short_sums = self._short_sums(contributions, tallies, factors)
            waiting_sums = self.accumulator.add_short(short_sums, len(is_padding_B))
            # The last layer first, as in two passes; a sum that has been added makes room.
            for name in list(contributions):
                parts = contributions.pop(name)
                if name in waiting_sums:
                    addends = [waiting_sums.pop(name)]
                    self.accumulator.slot(name).total.add(addends, len(is_padding_B))
                elif name not in short_sums:
                    self._add_parameter(name, parts, factors)
                self.accumulator.complete(name)
        return forward.loss_B, factors

    def _stats_of_nothing(self) -> MicroBatchStats:
        empty_B = torch.zeros(0, dtype=self._dtype_of_norms, device=self.device)
        is_padding_B = empty_B.bool()
        norms = [empty_B for _ in self._function.bounds]
        factors = factors_of(self._function, norms, empty_B, is_padding_B)
        return factors.stats(empty_B, is_padding_B)

    def _tallies(
        self,
        forward: Forward,
        contributions: dict[str, Parts] | None = None,
        observe: Observe | None = None,
    ) -> tuple[list[NormTally], Writes]:
        """Runs a backward and returns (norms of each group of parameters, write counts).

        The counts say how often each tensor that is kept had been written to.

        Args:
            contributions: takes the contributions by parameter, if given.
            observe: see `_by_parameter`.
        """
        batch_size = len(forward.loss_B)
        tallies = [NormTally(batch_size, self.device, self._dtype) for _ in self._function.bounds]
        writes: Writes = []

        def add(name: str, parts: Parts) -> None:
            if contributions is not None:
                contributions[name] = parts
            # The tally keeps short contributions even where the caller keeps none.
            if contributions is not None or is_short(parts):
                for part in parts:
                    writes.extend((name, x, writes_to(x)) for x in tensors_in(part))
            tallies[self._function.group_of[name]].add(parts)

        self._by_parameter(forward, add, observe)
        return tallies, writes

    def _by_parameter(self, forward: Forward, use: Use, observe: Observe | None = None) -> None:
        """Hands over the contributions of a backward, parameter by parameter.

        A parameter's turn comes with the last call of its layers, which is usually the only call,
        and whose tensors are still in the processor's caches. Gradients of small parameters are
        written out.

        Raises:
            PrivacyConfigError: a layer reports more gradients than it had calls: something
                differentiates through it twice.
        """
        waiting_parts: dict[str, Parts] = {}
        num_reported: Counter[str] = Counter()

        def hand_over(name: str) -> None:
            parts = waiting_parts.pop(name)
            if name in self._small and may_cancel(parts):
                parts = [write_out(parts, self._shapes[name])]
            use(name, parts)

        def take(call: Call) -> None:
            if observe is not None:
                observe(call)
            for name, part in call.contributions():
                num_reported[name] += 1
                if num_reported[name] > forward.num_calls[name]:
                    raise PrivacyConfigError(
                        f"{name} has more gradients in one backward than it had calls: a hook or "
                        "an autograd function differentiates through its layer "
                        "(torch.autograd.grad), which clipping cannot follow"
                    )
                waiting_parts.setdefault(name, []).append(part)
                if len(waiting_parts[name]) == forward.num_calls[name]:
                    hand_over(name)

        forward.backward(take)
        with exact(forward.loss_B.device):
            # Not every call of these has a gradient, because the loss does not depend on it.
            for name in list(waiting_parts):
                hand_over(name)

    def _factors(self, tallies: list[NormTally], loss_B: Tensor, is_padding_B: Tensor) -> Factors:
        norms = [tally.safe_norm() for tally in tallies]
        factors = factors_of(self._function, norms, loss_B, is_padding_B)
        pairs = zip(tallies, norms, strict=True)
        is_longer_GB = torch.stack([tally.is_lengthened(norm_B) for tally, norm_B in pairs])
        is_clipped_GB = torch.stack(factors.weights) < 1
        return factors._replace(
            blank_B=~factors.is_finite_B if needs_blanking(factors.is_finite_B) else None,
            is_cancelled_B=(is_longer_GB & is_clipped_GB).any(0),
        )

    def _short_sums(
        self, contributions: Mapping[str, Parts], tallies: list[NormTally], factors: Factors
    ) -> dict[str, Tensor]:
        """Returns the weighted sum, (n,) fp64, of each parameter of few numbers.

        All parameters that have one factor take one product.
        """
        sums: dict[str, Tensor] = {}
        for group, (tally, weight_B) in enumerate(zip(tallies, factors.weights, strict=True)):
            names = []
            for name, parts in contributions.items():
                if self._function.group_of[name] == group and is_short(parts):
                    names.append(name)
            if not names:
                continue
            width = tally.joined.grad_B.shape[1]
            total = torch.zeros(width, dtype=torch.float64, device=self.device)
            blank_excluded(tally.joined, factors.blank_B).add_weighted(
                weight_B, SumTarget(ParameterSum(total))
            )
            sizes = [gradient.grad_B[0].numel() for gradient in tally.short]
            sums |= zip(names, total.split(sizes), strict=True)
        return sums

    def _add_parameter(self, name: str, parts: Parts, factors: Factors) -> None:
        """Adds the weighted sum of a parameter's gradients to its total."""
        slot = self.accumulator.slot(name)
        # Calls share examples, so their contributions are added up before rounding (docs/sums.md).
        slot_of_calls = slot if len(parts) == 1 else slot.of_uses()
        weight_B = factors.weights[self._function.group_of[name]]
        for part in parts:
            blank_excluded(part, factors.blank_B).add_weighted(weight_B, slot_of_calls)
        if slot_of_calls is not slot:
            slot.total.add([slot_of_calls.total.low], len(weight_B))


def require_bound(max_grad_norm: float) -> None:
    """Refuses a C outside SMALLEST_BOUND to NEVER_CLIPS; infinity passes.

    Raises:
        PrivacyConfigError: C is out of bounds.
    """
    if not (SMALLEST_BOUND <= max_grad_norm <= NEVER_CLIPS or max_grad_norm == math.inf):
        raise PrivacyConfigError(
            f"max_grad_norm must be between {SMALLEST_BOUND:g}, below which products in fp32 may "
            f"underflow, and {NEVER_CLIPS:g}, above which norms overflow, or inf for no clipping; "
            f"not {max_grad_norm}"
        )


def dtype_of_sums(parameters: Mapping[str, nn.Parameter]) -> torch.dtype:
    """Returns the dtype of norms and products: fp64 for a model of fp64, else fp32.

    Raises:
        PrivacyConfigError: parameters ask for both: a product of fp64 layers may overflow an fp32
            sum.
    """
    name_by_dtype = {wide_dtype(p.dtype): name for name, p in parameters.items()}
    if len(name_by_dtype) > 1:
        raise PrivacyConfigError(
            f"{' and '.join(sorted(name_by_dtype.values()))} are of dtypes whose sums have "
            "different precision: train a model in float64 as a whole, or none of it"
        )
    return next(iter(name_by_dtype))


def smallest_parameters(numel: Mapping[str, int], room: int) -> set[str]:
    """Returns the names of the smallest parameters, as many as fit into `room` numbers.

    Shapes alone decide, never an example.
    """
    names = sorted(numel, key=lambda name: (numel[name], name))
    ends = itertools.accumulate(numel[name] for name in names)
    return {name for name, end in zip(names, ends, strict=True) if end <= room}


def num_rows(inputs: Mapping[str, Tensor]) -> int:
    """Counts the rows of a micro-batch."""
    return len(next(iter(inputs.values())))


def tensors_in(part: Contribution) -> list[Tensor]:
    """Lists the tensors of a contribution."""
    return [x for x in vars(part).values() if isinstance(x, Tensor)]


def require_unwritten(writes: Writes, writer: str) -> None:
    """Refuses tensors that were written to since `writes` was taken.

    Raises:
        PrivacyConfigError: one was, so the norm would not be that of the summed gradient; `writer`
            begins the message.
    """
    for name, tensor, count in writes:
        if writes_to(tensor) != count:
            raise PrivacyConfigError(
                f"{writer} writes in place to what clipping still needs of {name} (a gradient, an "
                "output, an input): write to a copy"
            )


def require_equal(first: Iterable[Tensor], second: Iterable[Tensor]) -> None:
    """Refuses tensors that were computed twice and differ in a bit.

    Raises:
        PrivacyConfigError: they differ.
    """
    if not all(torch.equal(x, y) for x, y in zip(first, second, strict=True)):
        raise PrivacyConfigError(NOT_REPEATED)


def needs_blanking(is_finite_B: Tensor) -> bool:
    """Returns whether the rows have to be gone through.

    Waits for the device on CPU only; on CUDA the answer is always yes.
    """
    return is_finite_B.is_cuda or (not is_finite_B.is_meta and not bool(is_finite_B.all()))
