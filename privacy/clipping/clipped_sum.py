"""The sum of clipped per-example gradients of a logical batch, accumulated micro-batch by micro-batch.

    sum_i  c_i g_i,     c_i = min(1, C / |g_i|),     |g_i| over all trainable parameters together (flat clipping)

Where tokens of an example cancel, c_i is smaller: at most 32 C / S_i, S_i being the norm that its gradient would have if no two
tokens cancelled (norms.py). Such an example contributes less than min(|g_i|, C), and `MicroBatchStats.num_cancelled` counts it.
Parameters of few numbers are written out for every example, which costs memory and no accuracy: their tokens do not count in S_i.

after Abadi et al. 2016 (arXiv 1607.00133), without any weight gradient that is thrown away. Two modes give the same sum:

* `bookkeeping` (Bu et al. 2022, arXiv 2210.00038): one forward, one backward for activation gradients, then norms and
  weighted sums from the inputs and output gradients that all layers kept.
* `two_pass`: a backward for the norms, a second one for the weighted sums; each layer's tensors are used and freed as soon
  as its gradient is known, so activation checkpointing keeps its memory benefit. Both go through the graph of one forward,
  except where weights are sharded (gathered for one backward only) or compiled: there each has a forward of its own. The
  second must repeat the first to the last bit, or the norm that divides is not that of what is summed: see
  `check_repeatable`.

The sums gather in an accumulator: by default in this process, without communication (privacy/sums/).
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, suppress
from typing import Literal

import torch
from torch import Tensor, nn

from ..arithmetic.precision import exact, require_exact_products, wide, wide_dtype
from ..errors import PrivacyConfigError
from ..gradients.compiled import compiled_weights
from ..gradients.coverage import claims
from ..gradients.fallback import Uncovered, plan_of
from ..gradients.module_state import writes_to
from ..gradients.per_example_gradients import (
    ChunkedOuterProducts,
    Contribution,
    in_full,
    is_short,
    may_cancel,
    without,
)
from ..gradients.recorder import Call, Forward, Recorder, Task
from ..guards.unchanged import require_passed, trained
from ..noise.rounded_normal import deviation_in_units
from ..plan.limits import MOST_DEVIATION, SMALLEST_BOUND
from ..plan.releases import Release, release_of_step
from ..sums.grid import EXAMPLES_PER_PART, Grid
from ..sums.local import LocalSums, MakeAccumulator
from ..sums.totals import Slot, Total, add_together, blocks
from .clip_factors import ClippingFunction, flat
from .norms import Factors, MicroBatchStats, NormTally

NEVER_CLIPS = 1e20
"""A C above this clips nothing that does not overflow."""
WRITTEN_ENTRIES = 1 << 14
"""Numbers of each example's gradient that are written out, those of the smallest parameters: 4 MiB for 64 examples in fp32,
which takes no time that can be measured on a model of 132,756 parameters; four times as many take 6 % of a micro-batch."""

Mode = Literal["bookkeeping", "two_pass", "certified"]
Parts = list[Contribution]
Writes = list[tuple[str, Tensor, int]]
"""(name, tensor, how often it had been written to)."""

NOT_REPEATED = (
    "clipping that computes gradients twice (two_pass, a vocabulary by chunks) is refused: the same backward gave different "
    "gradients the second time; call torch.use_deterministic_algorithms(True) first (warn_only leaves attention as it is), write "
    "to no tensor in place in a backward, or take bookkeeping with a larger max_logits"
)


class ClippedSum:
    """Accumulates the clipped sum for the trainable parameters of a model.

    Guarantee: zeroing one example out (making it padding) changes the sum, as an L2 norm over all parameters, by at most
    `sensitivity * (1 + SENSITIVITY_SLACK)`, whatever it and the others are, how all additions round included: NaN, infinity
    and gradients whose norm overflows contribute zero. `sums/grid.py` and `norms.py` derive that, from one assumption
    about the order of additions inside one matrix product. An example contributes min(|g|, C), or less where its own tokens
    cancel (module docstring).

    Amplification by sampling also compares with a batch in which the example was not drawn. This guarantee covers that where
    the others then stand in the same rows. Training deals rows at random among a public number, at least the cap, which is as
    good: the two placings have one distribution (privacy/sampling/rows.py has the proof, `deal` does it). Whoever samples
    without `deal` and closes rows up has the guarantee for x zeroed in its place only.

    Args:
        model: every trainable parameter must be covered by a clipping rule.
        max_grad_norm: C, the L2 bound of one example's contribution; `inf` switches clipping off (tests, non-private runs).
        shapes: full parameter shapes by name, where the model holds them in shards.
        mode: see the module docstring; may be set between micro-batches.
        function: how a norm becomes a factor, and over which parameters; flat clipping with constant C by default.
        accumulator: made from (shapes, grid, device); takes the sums.
        cap: the most examples of a logical batch on all ranks, and `rows`, padding included, on this one: sums then take 6 bytes
            a coordinate where that many fit, else 8. Without them there is room for a million.
        noise_multiplier: sigma. 0 is without noise: sums are then fp64, and keep gradients far below C. They are whole multiples
            of a step otherwise, which is coarser where sigma is in the thousands.
        device: where the model computes, if its parameters wait elsewhere.
        self_check: a micro-batch is refused until `selfcheck.check_against_autograd` has passed on this model, its task and
            inputs of these kinds, and is as it was then; sizes and shapes are tried when they come (neighbours.py). False where a
            copy has passed, as in the trainer.

    Raises:
        PrivacyConfigError: a parameter or layer cannot be clipped, and the message names it; or C
            outside SMALLEST_BOUND to NEVER_CLIPS; or matrix products are not exact on this device.
    """

    def __init__(
        self,
        model: nn.Module,
        max_grad_norm: float,
        *,
        shapes: Mapping[str, torch.Size] | None = None,
        mode: Mode = "bookkeeping",
        function: Callable[[list[str], float], ClippingFunction] = flat,
        accumulator: MakeAccumulator = LocalSums,
        cap: int | None = None,
        rows: int | None = None,
        noise_multiplier: float = 1.0,
        device: torch.device | None = None,
        self_check: bool = True,
    ):
        self._shapes = shapes = shapes or {name: p.shape for name, p in model.named_parameters()}
        self.mode = mode
        self._to_be_checked, self._made_for = (model if self_check else None), trained(model)
        self._model, self._at_rest = model, compiled_weights(model)
        self._recorder: Recorder | None = None
        self._recorded_by: object = None
        try:
            self._record()
        except Uncovered:  # the fallback may do for what has no rule; the self-check finds out
            if not self_check:
                raise
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        first = next(iter(parameters.values()))
        wide = {wide_dtype(p.dtype): name for name, p in parameters.items()}
        if len(wide) > 1:  # a product of fp64 layers may overflow a sum in fp32
            raise PrivacyConfigError(
                f"{' and '.join(sorted(wide.values()))} are of dtypes whose sums have different precision: train a model in "
                "float64 as a whole, or none of it"
            )
        self._differs = torch.empty(0, dtype=torch.bool)
        """() or (1,): whether a second pass of this logical batch differed from its first."""
        self._keeps_graph = not self._at_rest and all(
            type(p) is nn.Parameter
            and (p.shape == shapes[name] if p.requires_grad else p.numel() > 0)
            for name, p in model.named_parameters()
        )
        self._numel = {name: shapes[name].numel() for name in parameters}
        # The smallest, as many as fit: shapes alone decide, never an example or how many there are.
        by_size = sorted(self._numel, key=lambda name: (self._numel[name], name))
        ends = itertools.accumulate(self._numel[name] for name in by_size)
        self._small = {
            name for name, end in zip(by_size, ends, strict=True) if end <= WRITTEN_ENTRIES
        }
        self._names, self._dtype, self._device = (
            list(parameters),
            wide_dtype(first.dtype),
            device or first.device,
        )
        require_exact_products(self._device, self._dtype, (shapes[name] for name in parameters))
        has_noise = noise_multiplier > 0 and max_grad_norm < math.inf
        self.grid = self._grid(cap, rows, noise_multiplier) if has_noise else Grid()
        self.accumulator = accumulator(
            {name: shapes[name] for name in parameters}, self.grid, self._device
        )
        self._make_function = function
        self._set_bound(max_grad_norm)
        self.zero_()

    def _record(self) -> Recorder:
        """The recorder, made anew where the self-check has given parameters to the fallback since."""
        plan = plan_of(self._model)
        made_for = dict(plan.covers), dict(plan.layouts)
        if self._recorder is None or made_for != self._recorded_by:
            self.detach()
            self._recorder, self._recorded_by = (
                Recorder(claims(self._model, self._shapes), self._at_rest),
                made_for,
            )
        return self._recorder

    def _grid(self, cap: int | None, rows: int | None, noise_multiplier: float) -> Grid:
        return Grid.of(
            sum(self._numel.values()), self._dtype, cap, rows, noise_multiplier=noise_multiplier
        )

    @property
    def exponent(self) -> int | None:
        """f of this logical batch, whose sums are whole multiples of 2^-f; None where they are fp64, for want of noise."""
        unit = self.accumulator.unit
        return None if unit is None else unit.exponent

    @property
    def max_grad_norm(self) -> float:
        """C."""
        return self._max_grad_norm

    def _set_bound(self, value: float) -> None:
        if not (SMALLEST_BOUND <= value <= NEVER_CLIPS or value == math.inf):
            raise PrivacyConfigError(
                f"max_grad_norm must be between {SMALLEST_BOUND:g}, below which products in fp32 may underflow, and "
                f"{NEVER_CLIPS:g}, above which norms overflow, or inf for no clipping; not {value}"
            )
        self._max_grad_norm = value
        self._function = self._make_function(self._names, value)

    @property
    def sensitivity(self) -> float:
        """L2 change of the sum when one example is added or removed, before the slack for rounding."""
        return self._function.sensitivity

    @property
    def leaves_process(self) -> bool:
        """Whether sums are communicated before the logical batch is complete: then its intent comes first (contract 9)."""
        return self.accumulator.leaves_process

    def release(self, noise_multiplier: float) -> Release:
        """Returns what a step with this sum releases: the sum, with its noise.

        Raises:
            PrivacyConfigError: noise for a sum that is not clipped, or was made for none.
        """
        if noise_multiplier > 0 and self.sensitivity == math.inf:
            raise PrivacyConfigError(
                "no noise hides an example whose gradient is not clipped: give a finite max_grad_norm"
            )
        exponent = self.exponent
        release = release_of_step(noise_multiplier, self.sensitivity)
        if (exponent is None) != (noise_multiplier == 0):
            raise PrivacyConfigError(
                "sums are whole multiples of a step exactly where they get noise, which hides what rounding moves: give "
                f"ClippedSum noise_multiplier={noise_multiplier:g}"
            )
        if exponent is not None and deviation_in_units(release["std"], exponent) > MOST_DEVIATION:
            raise PrivacyConfigError(
                f"noise of {noise_multiplier:g} C passes what is drawn exactly in steps of this sum: give ClippedSum "
                f"noise_multiplier={noise_multiplier:g}, which takes a coarser step"
            )
        return release

    def sums(self) -> Iterator[tuple[str, Tensor]]:
        """(parameter name, this process's part of the clipped sum), of an accumulator that holds it whole."""
        assert isinstance(self.accumulator, LocalSums)
        self.require_repeated()
        yield from self.accumulator.sums()

    def zero_(self) -> None:
        """Starts a new logical batch."""
        self._differs = torch.empty(0, dtype=torch.bool)
        self.accumulator.zero_(self.grid.unit(self.sensitivity))

    def require_repeated(self) -> None:
        """Call it before anything of this logical batch is released; `sums` does.

        Raises:
            PrivacyConfigError: a second pass met other gradients than the first, so that something is clipped by a norm that
                is not its own.
        """
        if len(self._differs) and bool(self._differs):
            raise PrivacyConfigError(NOT_REPEATED)

    def detach(self) -> None:
        """Removes the hooks from the model."""
        if self._recorder is not None:
            self._recorder.remove()

    def add_micro_batch(
        self, task: Task, inputs: Mapping[str, Tensor], is_padding_B: Tensor
    ) -> MicroBatchStats:
        """Adds the clipped gradients of one micro-batch.

        Args:
            task: `task(**inputs)` returns loss_B, where loss i depends on example i alone.
            inputs: tensors with B rows; without any, nothing is added and the model is not called.
            is_padding_B: bool; True rows contribute exactly zero.

        Raises:
            PrivacyConfigError: the model has not passed the self-check; or a layer's call cannot be split by example.
        """
        if len(is_padding_B) == 0:
            dtype = torch.float64 if self.mode == "certified" else self._dtype
            nothing = torch.zeros(0, dtype=dtype, device=self._device)
            factors = self._weighed(
                [nothing for _ in self._function.bounds], nothing, nothing.bool()
            )
            return factors.stats(nothing, nothing.bool())
        stats = []
        for rows in blocks(len(is_padding_B), self.rows_at_once(len(is_padding_B))):
            part = {name: x[rows] for name, x in inputs.items()}
            if self._to_be_checked is not None:
                with suppress(
                    Uncovered
                ):  # hooks first, since checks of a new shape put back all that they find
                    self._record()
                require_passed(
                    self._to_be_checked, task, part, self._made_for, self.require_replays
                )
            with torch.no_grad():
                self.accumulator.start(rows.stop - rows.start)
                in_passes = self._in_two_passes if self.mode == "two_pass" else self._in_one_pass
                stats.append(in_passes(task, part, is_padding_B[rows]))
                self.accumulator.finish()
        return MicroBatchStats(*(torch.stack(column).sum() for column in zip(*stats, strict=True)))

    def rows_at_once(self, num_rows: int) -> int:
        """Examples of a part: larger micro-batches are gone through in parts, which bounds their memory."""
        return EXAMPLES_PER_PART

    def require_replays(self, task: Task, inputs: Mapping[str, Tensor]) -> None:
        """What the fallback replays at this size are the outputs that the forward gave, chunks and their edges included.

        Args:
            inputs: made up, never private data.

        Raises:
            PrivacyConfigError: they are not.
        """
        recorder = self._record()
        if plan_of(self._model).covers:
            recorder.compares = True
            try:
                with (
                    torch.no_grad(),
                    recorder.forward(task, inputs, len(next(iter(inputs.values())))) as passed,
                ):
                    passed.backward(lambda call: None)
            finally:
                recorder.compares = False

    def check_repeatable(self, task: Task, inputs: Mapping[str, Tensor]) -> None:
        """What is computed twice must agree to the last bit (contract 6); call it before training.

        In `two_pass` that is the model's forward and backward. In bookkeeping these run once, and only gradients that are too
        large to keep, of a vocabulary by chunks, are computed again from what was kept.

        Raises:
            PrivacyConfigError: they differ: nondeterministic kernels, or dropout.
        """
        batch_size = len(next(iter(inputs.values())))
        if self.mode == "two_pass":
            with torch.no_grad(), closing(self._twice(task, inputs, batch_size)) as passes:
                norms = [
                    [tally.totals.squared_B for tally in self._tallies(passed)[0]]
                    for passed in passes
                ]
            pairs: Iterator[tuple[Tensor, ...]] = zip(*norms, strict=True)
        else:
            kept: dict[str, Parts] = {}
            with torch.no_grad(), self._record().forward(task, inputs, batch_size) as passed:
                self._tallies(passed, kept)
            chunked = [
                x for parts in kept.values() for x in parts if isinstance(x, ChunkedOuterProducts)
            ]
            pairs = (
                (a, b)
                for x in chunked
                for (_, a), (_, b) in zip(x.gradients(), x.gradients(), strict=True)
            )
        with torch.no_grad(), exact(self._device):
            if not all(torch.equal(first, again) for first, again in pairs):
                raise PrivacyConfigError(NOT_REPEATED)

    def _in_one_pass(
        self, task: Task, inputs: Mapping[str, Tensor], is_padding_B: Tensor
    ) -> MicroBatchStats:
        kept: dict[str, Parts] = {}
        with self._record().forward(task, inputs, len(is_padding_B)) as passed:
            tallies, writes = self._tallies(passed, kept)
        require_unwritten(writes, "a backward of the model")
        del writes  # it holds all that is kept, which is freed one by one
        with exact(passed.loss_B.device):
            factors = self._factors(tallies, passed.loss_B, is_padding_B)
            # (n,) fp64 of each short gradient, by one product for all that have one factor.
            short: dict[str, Tensor] = {}
            for group, (tally, weight_B) in enumerate(zip(tallies, factors.weights, strict=True)):
                names = [
                    n
                    for n, parts in kept.items()
                    if self._function.group_of[n] == group and is_short(parts)
                ]
                if names:
                    total = torch.zeros(
                        tally.joined.grad_B.shape[1], dtype=torch.float64, device=self._device
                    )
                    without(tally.joined, factors.blank_B).add_weighted(
                        weight_B, Slot(Total(total))
                    )
                    short |= zip(
                        names, total.split([x.grad_B[0].numel() for x in tally.short]), strict=True
                    )
            if not self.leaves_process:  # else buckets are filled in their order
                self._add_together(short, len(is_padding_B))
                kept = {name: parts for name, parts in kept.items() if name not in short}
            for name in list(
                kept
            ):  # the last layer first, as two_pass does; what has been summed makes room
                if name in short:
                    self._add_together({name: short.pop(name)}, len(is_padding_B))
                else:
                    self._accumulate(name, kept.pop(name), factors)
            return factors.stats(passed.loss_B, is_padding_B)

    def _in_two_passes(
        self, task: Task, inputs: Mapping[str, Tensor], is_padding_B: Tensor
    ) -> MicroBatchStats:
        with closing(self._twice(task, inputs, len(is_padding_B))) as passes:
            first = next(passes)
            marks: list[Tensor] = []
            tallies, writes = self._tallies(first, marks=marks)
            require_unwritten(writes, "a backward of the model")
            with exact(first.loss_B.device):
                factors = self._factors(tallies, first.loss_B, is_padding_B)
            second = next(passes)
            again: list[Tensor] = []
            self._by_parameter(
                second, lambda name, parts: self._accumulate(name, parts, factors), again
            )
        if len(marks) != len(again):
            raise PrivacyConfigError(NOT_REPEATED)
        # Of an excluded example nothing is summed; on CUDA its rows are zeroed where they stand, which the second backward reads.
        is_summed_B = factors.is_finite_B
        differ = [
            ((before != after) & is_summed_B).any()
            for before, after in zip(marks, again, strict=True)
        ]
        # It stays on the device, so that no micro-batch waits for it.
        self._differs = torch.stack([*differ, *self._differs[:1]]).any().reshape(1)
        return factors.stats(first.loss_B, is_padding_B)

    def _twice(
        self, task: Task, inputs: Mapping[str, Tensor], batch_size: int
    ) -> Generator[Forward, None, None]:
        """Yields two forwards to differentiate: the same one, whose graph is kept, or two where it cannot be kept."""
        writes = [(name, tensor, writes_to(tensor)) for name, tensor in inputs.items()]
        with self._record().forward(
            task, inputs, batch_size, num_backwards=2 if self._keeps_graph else 1
        ) as passed:
            yield passed
            if self._keeps_graph:
                yield passed
                return
        require_unwritten(writes, "the forward of the model")
        with self._record().forward(task, inputs, batch_size) as passed:
            yield passed

    def _tallies(
        self,
        passed: Forward,
        kept: dict[str, Parts] | None = None,
        marks: list[Tensor] | None = None,
    ) -> tuple[list[NormTally], Writes]:
        """The norms of each group of parameters, by a backward, and how often what is kept had been written to by then.

        Args:
            kept: takes the contributions, if given.
            marks: see `_by_parameter`.
        """
        tallies = [
            NormTally(len(passed.loss_B), self._device, self._dtype) for _ in self._function.bounds
        ]
        writes: Writes = []

        def add(name: str, parts: Parts) -> None:
            if kept is not None:
                kept[name] = parts
            if kept is not None or is_short(parts):  # the tally keeps those
                tensors = [
                    value
                    for part in parts
                    for value in vars(part).values()
                    if isinstance(value, Tensor)
                ]
                writes.extend((name, tensor, writes_to(tensor)) for tensor in tensors)
            tallies[self._function.group_of[name]].add(parts)

        self._by_parameter(passed, add, marks)
        return tallies, writes

    def _by_parameter(
        self, passed: Forward, use: Callable[[str, Parts], None], marks: list[Tensor] | None = None
    ) -> None:
        """Hands over the contributions of a backward, parameter by parameter, as soon as the last call of its layers is there.

        That is usually the only one, and its tensors are still in the processor's caches. Gradients of small parameters are
        written out.

        Args:
            marks: takes the norm of every gradient that a layer reports, by which two backwards are compared; NaN reads as -1.

        Raises:
            PrivacyConfigError: a layer reports more gradients than it had calls: something differentiates through it twice.
        """
        waiting: dict[str, Parts] = {}
        reported: Counter[str] = Counter()

        def hand_over(name: str) -> None:
            parts = waiting.pop(name)
            use(
                name,
                [in_full(parts, self._shapes[name])]
                if name in self._small and may_cancel(parts)
                else parts,
            )

        def take(call: Call) -> None:
            if marks is not None:
                rows = call.output_gradient.reshape(len(call.output_gradient), -1)
                marks.append(torch.linalg.vector_norm(wide(rows), dim=1).nan_to_num(nan=-1.0))
            for name, part in call.contributions():
                reported[name] += 1
                if reported[name] > passed.num_calls[name]:
                    raise PrivacyConfigError(
                        f"{name} has more gradients in one backward than it had calls: a hook or an autograd function "
                        "differentiates through its layer (torch.autograd.grad), which clipping cannot follow"
                    )
                waiting.setdefault(name, []).append(part)
                if len(waiting[name]) == passed.num_calls[name]:
                    hand_over(name)

        passed.backward(take)
        with exact(passed.loss_B.device):
            for name in list(
                waiting
            ):  # of which not every call has a gradient, because the loss does not depend on it
                hand_over(name)

    def _factors(self, tallies: list[NormTally], loss_B: Tensor, is_padding_B: Tensor) -> Factors:
        factors = self._weighed([tally.safe_norm() for tally in tallies], loss_B, is_padding_B)
        is_longer_B = torch.stack(
            [t.is_lengthened(norm_B) for t, norm_B in zip(tallies, factors.norms, strict=True)]
        )
        return factors._replace(
            blank_B=~factors.is_finite_B if needs_blanking(factors.is_finite_B) else None,
            is_cancelled_B=(is_longer_B & (torch.stack(factors.weights) < 1)).any(0),
        )

    def _weighed(self, norms: list[Tensor], loss_B: Tensor, is_padding_B: Tensor) -> Factors:
        """From the norms of each group of parameters: zero for padding, and where a loss or norm is not finite."""
        is_finite_B = torch.stack(norms).isfinite().all(0) & loss_B.isfinite()
        excluded_B = is_padding_B | ~is_finite_B
        weights = [
            self._function.weight(norm_B, bound).masked_fill(excluded_B, 0)
            for norm_B, bound in zip(norms, self._function.bounds, strict=True)
        ]
        return Factors(norms, weights, is_finite_B, None, torch.zeros_like(excluded_B))

    def _add_together(self, sums: Mapping[str, Tensor], num_examples: int) -> None:
        if sums:
            totals = [self.accumulator.slot(name).total for name in sums]
            add_together(totals, list(sums.values()), num_examples)
        for name in sums:
            self.accumulator.filled(name)

    def _accumulate(self, name: str, parts: Parts, factors: Factors) -> None:
        slot = self.accumulator.slot(name)
        # Calls share examples, so what they contribute is added up before it is rounded (sums/grid.py).
        into = slot if len(parts) == 1 else slot.of_uses()
        weight_B = factors.weights[self._function.group_of[name]]
        for part in parts:
            without(part, factors.blank_B).add_weighted(weight_B, into)
        if into is not slot:
            slot.total.add([into.total.low], len(weight_B))
        self.accumulator.filled(name)


def require_unwritten(writes: Writes, who: str) -> None:
    """
    Raises:
        PrivacyConfigError: a tensor was written to since: the norm would not be that of what is summed.
    """
    for name, tensor, before in writes:
        if writes_to(tensor) != before:
            raise PrivacyConfigError(
                f"{who} writes in place to what clipping still needs of {name} (a gradient, an output, an input): write to a copy"
            )


def needs_blanking(is_finite_B: Tensor) -> bool:
    """Whether the rows have to be gone through. Waits for the device on CPU only; on CUDA the answer is always yes."""
    return is_finite_B.is_cuda or (not is_finite_B.is_meta and not bool(is_finite_B.all()))
