"""Looks, while a run trains, whether the loss of an example depends on that example alone.

A secret micro-batch is computed twice more at its own shape: once with the run's padding in a
secret random half of its rows, and once with the padding in the others. Where examples stay apart,
their losses and norms do not change, and the sums of the two halves add up to the sum of the whole.
docs/guarantee.md says what this finds, with which probability, and what it cannot find.
"""

import math
import random
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..clipping.clipped_sum import LossesAndNorms
from ..errors import MixedExamples, PrivacyConfigError
from ..gradients.module_state import MODULE_ATTRIBUTES
from ..ranks import collectives
from ..ranks.engine import holds_whole_weights, to_device
from ..step.step import Mechanism, MicroBatch
from ..sums.local import Accumulator
from .neighbours import IN_ANY_ORDER, in_rows, must_take
from .unchanged import SETTINGS, Part

ModuleSettings = list[tuple[dict[str, object], dict[str, object]]]
"""The attributes of each module, and those of its numbers and words that were read."""
WINDOW = 100
"""Micro-batches of which one is checked. That one is computed three times: 2 % of a run's time."""


class Agreement(NamedTuple):
    """How the halves of a micro-batch agree with the whole.

    Attributes:
        losses_keep_bits: they are the same numbers.
        norms_keep_bits: they are the same numbers.
        rows_are_close: they are within IN_ANY_ORDER.
        distance: of the sums, in units of the most that rounding explains.
    """

    losses_keep_bits: bool
    norms_keep_bits: bool
    rows_are_close: bool
    distance: float

    @property
    def keeps_bits(self) -> bool:
        """Returns whether losses and norms are the same numbers."""
        return self.losses_keep_bits and self.norms_keep_bits

    @property
    def is_close(self) -> bool:
        """Returns whether rounding explains all differences."""
        return self.rows_are_close and self.distance <= 1


class Isolation:
    """Chooses the secret micro-batches of a run, and computes them again in two halves.

    Args:
        mechanism: of the run. Without noise nothing is checked, since nothing is claimed.
        padding: by input, (1, ...): the row that stands where no example does.
        modules: whose numbers and words are put back after a check, such as counters of calls.

    Attributes:
        padding: see the argument.
        num_passed: checks that this start has passed.
        is_mixed: whether a check has failed on this rank.
    """

    def __init__(
        self,
        mechanism: Mechanism,
        padding: Mapping[str, Tensor],
        modules: Iterable[nn.Module] = (),
    ) -> None:
        self._mechanism = mechanism
        self.padding = padding
        self._modules = list(modules)
        # Whether all ranks meet in every micro-batch, in its forward or its sums.
        has_whole_weights = holds_whole_weights(mechanism.engine)
        self._is_in_lockstep = mechanism.clipped.leaves_process or not has_whole_weights
        self._kinds_that_keep_bits: set[object] = set()
        self._is_forced = False
        self.is_mixed = False
        self.num_passed = 0

    def require(self, made_up: Mapping[str, Tensor]) -> None:
        """Checks a micro-batch of made-up examples before a run is charged. Collective.

        It sees whether rows of this shape keep their bits, which later checks then demand.

        Args:
            made_up: as many rows as the run's micro-batches.

        Raises:
            PrivacyConfigError: on all ranks; the examples do not stay apart on one of them.
        """
        if not self._is_on:
            return
        clipped = self._mechanism.clipped
        is_on_cpu = clipped.device.type == "cpu"
        inputs = to_device(made_up, self._mechanism.engine)
        num_rows = len(next(iter(inputs.values())))
        part = Part(inputs, torch.zeros(num_rows, dtype=torch.bool), 0)

        def compare() -> Agreement:
            sums_before = clipped.accumulator.twin()
            settings_before = self._read_settings()
            with self._without_trace(), must_take(f"{num_rows} examples, some of them padding"):
                self._add(part)
                agreement = self._compare_halves(part, clipped.rows, sums_before, settings_before)
            clipped.zero_()
            # On a CPU, kernels give equal bits for equal shapes.
            has_mixed = is_on_cpu and not agreement.losses_keep_bits
            if has_mixed or not agreement.is_close:
                raise PrivacyConfigError(
                    "made-up examples of one micro-batch change each other's losses or gradients: "
                    "every loss must depend on its own example alone"
                )
            return agreement

        agreements = collectives.refuse_together(compare)
        if all(agreement.keeps_bits for agreement in agreements):
            self._kinds_that_keep_bits.add(kind_of(inputs))

    def begin(self, num_micro_batches: int) -> None:
        """Draws the secret places of checks. Collective.

        Args:
            num_micro_batches: which each rank goes through in this start.
        """
        self._window = max(1, min(WINDOW, num_micro_batches))
        # All ranks check the same micro-batch: forwards of sharded models are collective.
        secret = collectives.broadcast_object(secrets.token_bytes(32))
        self._places = random.Random(secret)
        self._index = 0

    @property
    def _is_on(self) -> bool:
        """Returns whether there is noise, and so a claim to check."""
        return self._mechanism.clipped.exponent is not None

    def force(self) -> None:
        """Requests a check of the next micro-batch, too."""
        self._is_forced = True

    def watched(self, micro_batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        """Yields the micro-batches of a step, and checks those that are chosen.

        It is collective where the step's forwards or sums are, and nowhere else: before the intent
        of other steps a rank may drop the step, which the others learn at the intent alone.

        Raises:
            MixedExamples, StepDropped: see `stop_if_mixed`.
        """
        for number, micro_batch in enumerate(micro_batches):
            is_forced = False
            if not self._is_in_lockstep:
                is_forced = self._is_forced
                self._is_forced = False
            elif number == 0:
                # Once a step: a rank that checked alone would wait for the others in its forward.
                [is_forced] = collectives.on_any(self._is_forced)
                self._is_forced = False
            if (self._is_chosen() or is_forced) and self._is_on:
                yield from self._checked(micro_batch)
                self.stop_if_mixed()
            else:
                yield micro_batch

    def stop_if_mixed(self) -> None:
        """Ends the step if the last check has failed.

        Raises:
            MixedExamples: on all ranks, where they are in lockstep.
            StepDropped: on this rank, and on the others before their intent; `require_apart` then
                raises MixedExamples on all.
        """
        if self._is_in_lockstep:
            self.require_apart()
        elif self.is_mixed:
            collectives.agree(ready=False)

    def require_apart(self) -> None:
        """Refuses to go on where a check has failed on any rank. Collective.

        Raises:
            MixedExamples: on all ranks.
        """
        [is_mixed] = collectives.on_any(self.is_mixed)
        if is_mixed:
            raise MixedExamples(
                "losses or gradients of examples changed when other rows of their micro-batch did, "
                "so a loss does not depend on its own example alone: no guarantee holds for this "
                "run, its earlier steps included"
            )

    def _is_chosen(self) -> bool:
        """Returns whether the next micro-batch is checked; each window has one secret place."""
        index = self._index % self._window
        if index == 0:
            self._place = self._places.randrange(self._window)
        self._index += 1
        return index == self._place

    def _checked(self, micro_batch: MicroBatch) -> Iterator[MicroBatch]:
        """Yields a micro-batch, and computes its halves when the mechanism has added it."""
        clipped = self._mechanism.clipped
        # Some kernels round by the alignment of their operands, so all three computations read
        # fresh copies.
        inputs = to_device(micro_batch.inputs, self._mechanism.engine)
        inputs = {name: x.clone() for name, x in inputs.items()}
        part = Part(inputs, micro_batch.is_padding_B, micro_batch.num_undecodable)
        sums_before = clipped.accumulator.twin()
        settings_before = self._read_settings()
        yield part
        with self._without_trace():
            agreement = self._compare_halves(part, clipped.rows, sums_before, settings_before)
        must_keep_bits = kind_of(inputs) in self._kinds_that_keep_bits
        if agreement.is_close and (agreement.keeps_bits or not must_keep_bits):
            self.num_passed += 1
        else:
            self.is_mixed = True

    def _compare_halves(
        self,
        part: Part,
        rows: LossesAndNorms,
        sums_before: Accumulator,
        settings_before: ModuleSettings,
    ) -> Agreement:
        """Adds both halves of a micro-batch to the sums before it, and compares rows and sums.

        Args:
            rows: of the whole part, which the mechanism's own sums hold.
            settings_before: those that the whole part met; each half meets the same.
        """
        clipped = self._mechanism.clipped
        num_rows = len(part.is_padding_B)
        is_in_first_B = random_half(part.is_padding_B.cpu())
        keep_bits = [True, True]  # losses, norms
        rows_are_close = True
        sums = clipped.accumulator
        clipped.accumulator = sums_before
        try:
            for is_kept_B in (is_in_first_B, ~is_in_first_B):
                half = self._half_of(part, is_kept_B)
                put_back(settings_before)
                self._add(half)
                for kind, (x, y) in enumerate(zip(rows, clipped.rows, strict=True)):
                    is_compared_B = ~half.is_padding_B.to(x.device)
                    x_kept = x[..., is_compared_B]
                    y_kept = y[..., is_compared_B]
                    keep_bits[kind] &= torch.equal(x_kept.nan_to_num(-1.0), y_kept.nan_to_num(-1.0))
                    rows_are_close &= _are_close(x_kept, y_kept)
        finally:
            clipped.accumulator = sums
        assert clipped.exponent is not None, "sums with noise are whole numbers"
        distance = math.sqrt(sums.squared_distance(sums_before)) * 2.0**-clipped.exponent
        allowed = clipped.most_rounding_of_halves(num_rows)
        if clipped.leaves_process:  # these are sums of all ranks
            allowed *= collectives.world_size()
        if distance > 0:
            distance = distance / allowed if allowed > 0 else math.inf
        losses_keep_bits, norms_keep_bits = keep_bits
        return Agreement(losses_keep_bits, norms_keep_bits, rows_are_close, distance)

    def _half_of(self, part: Part, is_kept_B: Tensor) -> Part:
        """Returns a micro-batch that keeps some rows, with padding in the place of the others."""
        inputs = {}
        for name, x in part.inputs.items():
            padding = self.padding[name].to(x)
            inputs[name] = torch.where(in_rows(is_kept_B, x), x, padding)
        is_kept_B = is_kept_B.to(part.is_padding_B.device)
        return Part(inputs, part.is_padding_B | ~is_kept_B, 0)

    def _add(self, part: Part) -> None:
        """Adds a micro-batch to the sums as a step does; its statistics go nowhere."""
        mechanism = self._mechanism
        inputs = to_device(part.inputs, mechanism.engine)
        is_padding_B = part.is_padding_B.to(mechanism.engine.device)
        mechanism.clipped.add_micro_batch(mechanism.task, inputs, is_padding_B)

    @contextmanager
    def _without_trace(self) -> Iterator[None]:
        """Puts generators of random numbers, and numbers and words of modules, back afterwards."""
        python_state = random.getstate()
        numpy_state = np.random.get_state()  # noqa: NPY002  # foreign models use it
        settings = self._read_settings()
        devices = [self._mechanism.engine.device.index or 0] if torch.cuda.is_initialized() else []
        with torch.random.fork_rng(devices):
            try:
                yield
            finally:
                random.setstate(python_state)
                np.random.set_state(numpy_state)  # noqa: NPY002
                put_back(settings)

    def _read_settings(self) -> ModuleSettings:
        """Returns the numbers and words of the modules, such as counters of calls."""
        return [(vars(module), settings_of(module)) for module in self._modules]


def put_back(settings: ModuleSettings) -> None:
    """Sets numbers and words of modules to what they were."""
    for attributes, saved_settings in settings:
        attributes.update(saved_settings)


def random_half(is_padding_B: Tensor) -> Tensor:
    """Returns which rows are in a secret random half of the examples; padding is in none.

    Each half has an example where there are two, so a mean over the micro-batch always shows.
    """
    generator = torch.Generator()
    generator.seed()  # from the operating system
    rows_N = (~is_padding_B).nonzero().flatten()
    order_N = torch.randperm(len(rows_N), generator=generator)
    is_in_half_B = torch.zeros_like(is_padding_B)
    is_in_half_B[rows_N[order_N[: len(rows_N) // 2]]] = True
    return is_in_half_B


def kind_of(inputs: Mapping[str, Tensor]) -> object:
    """Returns what decides the kernels of a micro-batch: its shapes, its dtypes, and autocast."""
    shapes = tuple((name, x.shape, x.dtype) for name, x in sorted(inputs.items()))
    autocast = tuple(
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in ("cpu", "cuda")
    )
    return shapes, autocast


def settings_of(module: nn.Module) -> dict[str, object]:
    """Returns the numbers and words among a module's own attributes."""
    return {
        name: x
        for name, x in vars(module).items()
        if name not in MODULE_ATTRIBUTES and isinstance(x, SETTINGS)
    }


def _are_close(x: Tensor, y: Tensor) -> bool:
    """Returns whether numbers agree within IN_ANY_ORDER of the largest one."""
    largest = float(x.nan_to_num(0, 0, 0).abs().max()) if x.numel() else 0.0
    return torch.allclose(x, y, rtol=IN_ANY_ORDER, atol=IN_ANY_ORDER * largest, equal_nan=True)
