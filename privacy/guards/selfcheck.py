"""Compares clipping with torch's own gradients on made-up examples before training starts.

Coverage (contract 3) knows the owner of a parameter, not the use of the parameter in the forward.
`_check_gradients` finds a gradient that is missed or booked to a wrong example, and
`_sum_among_neighbours` an example that reaches others. docs/guarantee.md lists the tests and
their limits.
"""

import inspect
import itertools
import math
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..clipping import SUMS, ClippedSum
from ..clipping.clip_factors import ClippingFunction
from ..clipping.clipped_sum import Mode
from ..errors import PrivacyConfigError
from ..gradients.compiled import compiled_weights
from ..gradients.coverage import rule_of
from ..gradients.fallback import Fallback, Places, Uncovered, places_of, plan_of
from ..gradients.raw_parameters import layouts
from ..gradients.recorder import Task, plain_words
from ..numerics.precision import exact
from ..ranks.fsdp import gathered, put_away
from ..sums.grid import EXAMPLES_PER_PART, EXAMPLES_PER_SUM
from .conditions import NO_IDS, require_padding, require_unconditional, returning, tables_of
from .holders import require_nothing_gathered, untouched
from .neighbours import (
    Inputs,
    NotTaken,
    among_neighbours,
    compare_losses,
    in_rows,
    must_take,
    nothing_is_small,
    shortened,
)
from .unchanged import PASSED, SelfCheckRecord, changes, structure

TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-10}
"""Relative difference of a parameter's gradient, by the narrowest dtype of the forward.

Rounding in float64 is 1e-16, so a part of 1e-10 shows that one example reaches another. That
matters however small the part is: real examples may be a thousand times as large.
"""
NEIGHBOURS_TOLERANCE = 1e-12
"""The tolerance between batches of one size that differ in padding alone.

Kernels give equal bits for equal shapes, in float32 too.
"""
ATOMICS_TOLERANCE = 1e-5
"""The same in float32 on accelerators, some of whose kernels add up in no fixed order."""
WIDE = (torch.float64, torch.complex128)
"""The dtypes of a float64 check, unless the forward narrows values itself."""
FLOOR = 0.01
"""Differences below FLOOR * tolerance of the largest gradient count as rounding."""
MOST_EXAMPLES = 16
"""Further examples are left out."""
TOGETHER = 1 << 26
"""Trained numbers whose gradients are compared together."""
_SHARES = [1 / (1 + row) for row in range(MOST_EXAMPLES)]
"""The weight of each example in all sums.

All weights differ, so a gradient that is missed, counted twice or booked to another example
changes the sum.
"""
AT_SIZE_TOLERANCE = 1e-2
"""Relative difference of norms and sums at the run's own size.

A single example takes other kernels there than many examples together.
"""
IN_HALF_PRECISION = 0.1
"""The same where the forward computes in bf16 or fp16."""
TINY_BOUND = 1e-6
"""C at the run's own size: clipping shortens every longer gradient."""
ALONE = 5
"""Examples that fill the rows at that size, each compared with itself alone."""
# Neighbours are on both sides, so that work that is sorted by length, up or down, puts one of
# them between the examples.
FIRST = 5
"""Neighbours before the examples."""
BEFORE_THE_LAST = 3
"""Neighbours before the last example."""


LossesAndSums = tuple[Tensor, dict[str, Tensor]]
"""(N,) losses of the examples that count, and by parameter sum_i share_i grad_i."""


def check_against_autograd(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    task: Task | None = None,
    *,
    unreached: Collection[str] = (),
    fallback: Fallback = True,
    padding: Mapping[str, Tensor] | None = None,
    allowed_ids: Mapping[str, Tensor] = NO_IDS,
) -> None:
    """Compares per-example gradients of made-up inputs with torch's own; `SelfChecked` needs it.

    A model that `fully_shard` has sharded is gathered, and every rank runs the same check. Other
    shards are refused.

    The check covers the code that the made-up inputs reach: a branch that depends on values may
    stay out. `SelfChecked` tries each new size and shape of micro-batches on the same made-up
    examples. Parameters and buffers are copies during the check, in float64 where the model can
    compute in it: 8 bytes more for each number. Gradients take 40 bytes for each of at most
    TOGETHER trained numbers; parameters of larger models are checked group after group.

    Args:
        model: in the mode and with the parameters frozen as in training; its `.grad` fields are
            left empty.
        inputs: two or more made-up examples that differ, never private data. Names as in
            training, tensors with B rows.
        task: `task(**inputs)` returns loss_B, where loss i depends on example i alone; the model
            itself by default.
        unreached: trained parameters that the loss never reaches; all others must get a gradient.
        fallback: whether parameters that no rule follows may be differentiated through the module
            around them, per example and as a whole (fallback.py); or the paths of modules that
            may be. `plan_of(model).sentences(model)` names these modules.
        padding: the contents of a row without an example, (1, ...) in each input; by default such
            rows are not tried.
        allowed_ids: the ids that an input of integers may have; by default those from 0 to the
            highest made-up one, and negative ones that are made up.

    Raises:
        PrivacyConfigError: naming the parameter whose gradient differs most, or that no example
            reaches; or the loss of an example depends on the others or on chance; or the forward
            changes a buffer, or calls its layers as often as some example asks; or the inputs or
            dtypes do not fit.
    """
    task = task or model
    sizes = {name: len(x) for name, x in inputs.items()}
    if len(set(sizes.values())) != 1 or min(sizes.values()) < 2:
        raise PrivacyConfigError(
            "the self-check needs two or more made-up examples, the same number in each input: "
            f"{sizes}"
        )
    made_up = {name: x[:MOST_EXAMPLES] for name, x in inputs.items()}
    num_examples = len(next(iter(made_up.values())))
    for j, i in itertools.combinations(range(num_examples), 2):
        if all(torch.equal(x[i], x[j]) for x in made_up.values()):
            raise PrivacyConfigError(
                f"the made-up examples {j} and {i} are equal, so the self-check could not tell "
                "one's gradient from the other's: make up examples that differ"
            )
    plan_of(model).start(fallback)
    put_away(model)
    recorded_structure = structure(model, task)
    # Weights near zero (new heads, adapters, layer scales) would hide missing gradients.
    with gathered(model), nothing_is_small(model):
        for dtype in (torch.float64, None):
            with untouched(model, task, dtype) as restore:
                structure_of_copy = structure(model, task)
                examples = {}
                for name, x in made_up.items():
                    is_cast = dtype is not None and x.is_floating_point()
                    examples[name] = x.to(dtype) if is_cast else x.clone()
                precision = _precision_of(model, task, examples, dtype)
                if precision is not None:
                    check = partial(
                        _check_gradients, model, task, examples, precision, unreached, restore
                    )
                    _by_groups(model, check)
                moved = changes(structure_of_copy, structure(model, task))
                if precision is not None:
                    require_nothing_gathered(model, task, examples, restore)
                    restore()
                    is_wide = precision == torch.float64
                    tolerance = NEIGHBOURS_TOLERANCE if is_wide else ATOMICS_TOLERANCE
                    require_unconditional(model, task, examples, tolerance, allowed_ids)
                    if padding is not None:
                        require_padding(task, examples, dict(padding), tolerance)
            if precision is not None:
                break
        trained_dtypes = {p.dtype for p in model.parameters() if p.requires_grad}
        # The neighbours are tried in the precision of the run, too.
        if dtype is not None and trained_dtypes - {dtype}:
            with untouched(model, task) as restore:
                check_neighbours = partial(
                    _sum_among_neighbours, model, task, made_up, restore, is_wide=False
                )
                _by_groups(model, check_neighbours)
    reference = weakref.WeakMethod(task) if inspect.ismethod(task) else weakref.ref(task)
    made_up = {name: x.detach().clone() for name, x in made_up.items()}
    passed = SelfCheckRecord(recorded_structure, moved, reference, made_up, set())
    PASSED.setdefault(model, []).append(passed)


def check_at_size(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    size: int,
    task: Task | None = None,
    *,
    mode: Mode = "bookkeeping",
) -> None:
    """Compares clipped sums, as a run makes them, with examples one at a time.

    A micro-batch of `size` rows is added, and then a second one in which the last rows alone
    count: those beyond one fp32 sum where there are so many. The norm of each row and both sums
    must agree with torch's own gradients. The check costs less than three micro-batches of a run,
    and 30 bytes for each of at most TOGETHER trained numbers. A model that `fully_shard` has
    sharded is gathered, as in `check_against_autograd`.

    Args:
        model: on its device, in its dtype, compiled or not as in training.
        inputs: made-up examples that differ, as there; the first ALONE of them count.
        size: rows of the run's micro-batches.
        task: as there.
        mode: of the run.

    Raises:
        PrivacyConfigError: naming the parameter whose sum differs most, or the row whose norm
            does.
    """
    task = task or model
    made_up = {name: x[:ALONE] for name, x in inputs.items()}
    size = min(size, EXAMPLES_PER_PART)  # clipping goes through larger micro-batches in parts
    prefix = f"in micro-batches of {size} examples, in the precision of the run, "
    num_examples = len(next(iter(made_up.values())))
    row_B = torch.arange(size) % num_examples
    is_first_B = torch.ones(size, dtype=torch.bool)
    is_second_B = torch.arange(size) >= min(EXAMPLES_PER_SUM, size // 2)
    batch = {name: x[row_B.to(x.device)] for name, x in made_up.items()}
    device = next(iter(batch.values())).device
    # Scales make norms differ, so that the clip factor of another row changes the sum.
    scale_B = 2.0 ** (torch.arange(size) % 5)

    def scaled(**inputs: Tensor) -> Tensor:
        loss_B = task(**inputs)
        return loss_B * scale_B[: len(loss_B)].to(loss_B)

    def compare(restore: Callable[[], None], tolerance: float) -> None:
        running_sums: list[dict[str, Tensor]] = []
        expected: tuple[dict[str, Tensor], ...] = ({}, {})
        num_cancelled = 0
        with _clipped_sum(model, TINY_BOUND, mode=mode, device=device) as (clipped, norms):
            for counts_B in (is_first_B, is_second_B):
                is_padding_B = ~counts_B.to(device)
                with must_take(f"{size} examples together"):
                    stats = clipped.add_micro_batch(scaled, batch, is_padding_B)
                    num_cancelled += int(stats.num_cancelled)
                sums = {n: total.to("cpu", torch.float32) for n, total in clipped.sums()}
                running_sums.append(sums)
        norm_B = torch.cat(norms)[:size].double().cpu() / scale_B
        # Clipping leaves gradients that are shorter than C.
        factor_B = torch.minimum(scale_B, TINY_BOUND / norm_B)
        for i in range(int(row_B.max()) + 1):
            example = {name: x[i : i + 1] for name, x in made_up.items()}
            _, gradient = _torch_gradients(model, task, example, restore)
            norms_of_parameters = [float(g.double().norm()) for g in gradient.values()]
            norm = math.hypot(*norms_of_parameters)
            # Where contributions of tokens cancel, clipping may overestimate a norm (norms.py).
            longest = math.inf if num_cancelled else (1 + tolerance) * norm + TINY_BOUND
            is_right_B = (norm_B >= (1 - tolerance) * norm) & (norm_B <= longest)
            is_wrong_B = (row_B == i) & ~is_right_B
            if is_wrong_B.any():
                row = int(is_wrong_B.nonzero()[0])
                row_norm = float(norm_B[row])
                raise PrivacyConfigError(
                    f"{prefix}the norm of row {row} is {row_norm:.3g}, and {norm:.3g} "
                    "for the same example alone: does a layer, or the rule of one, depend on the "
                    "number of rows or on the dtype?"
                )
            for sums, counts_B in zip(expected, (is_first_B, is_second_B), strict=True):
                share = float(factor_B[counts_B & (row_B == i)].sum())
                for name, g in gradient.items():
                    sums[name] = sums.get(name, 0) + share * g.float().cpu()
        first_sums, both_sums = running_sums
        second_sums = {name: total - first_sums[name] for name, total in both_sums.items()}
        # In bf16 a bias without effect has a gradient of rounding alone.
        floor = max(FLOOR, tolerance)
        _compare(expected[0], first_sums, tolerance, prefix, floor)
        _compare(expected[1], second_sums, tolerance, f"{prefix}of a second one, ", floor)

    put_away(model)
    with gathered(model), nothing_is_small(model), untouched(model, task) as restore:
        tolerance = IN_HALF_PRECISION if _is_narrow(model, task, made_up) else AT_SIZE_TOLERANCE
        restore()
        _by_groups(model, partial(compare, restore, tolerance))


def _by_groups(model: nn.Module, check: Callable[[], object]) -> None:
    """Runs a check for at most TOGETHER trained numbers at a time, while the others are frozen.

    Groups follow the order of the model. A compiled model is one group, since every group would
    compile it again.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    groups: list[set[nn.Parameter]] = [set()]
    for p in trained:
        group_size = sum(q.numel() for q in groups[-1])
        is_full = bool(groups[-1]) and group_size + p.numel() > TOGETHER
        if is_full and not compiled_weights(model):
            groups.append(set())
        groups[-1].add(p)
    try:
        for group in groups:
            for p in trained:
                p.requires_grad_(p in group)
            check()
    finally:
        for p in trained:
            p.requires_grad_(True)


@dataclass(frozen=True)
class _NormRecorder(ClippingFunction):
    """Records norms, and clips flatly or returns given weights whatever the norms."""

    norms: list[Tensor] = field(default_factory=list)
    weights: tuple[float, ...] = ()

    def weight(self, norm_B: Tensor, bound: float) -> Tensor:
        self.norms.append(norm_B.clone())
        return norm_B.new_tensor(self.weights) if self.weights else super().weight(norm_B, bound)


@contextmanager
def _clipped_sum(
    model: nn.Module,
    bound: float,
    weights: tuple[float, ...] = (),
    mode: Mode = "bookkeeping",
    **settings: Any,
) -> Iterator[tuple[ClippedSum, list[Tensor]]]:
    """Yields a clipped sum of this model, and the list that collects the norms of its rows."""
    norms: list[Tensor] = []

    def recorder_of(names: Any, c: float) -> ClippingFunction:
        return _NormRecorder(dict.fromkeys(names, 0), (c,), norms=norms, weights=weights)

    clipped = SUMS[mode](model, bound, **settings, function=recorder_of)
    try:
        yield clipped, norms
    finally:
        clipped.detach()


def _check_gradients(
    model: nn.Module,
    task: Task,
    inputs: Inputs,
    precision: torch.dtype,
    unreached: Collection[str],
    restore: Callable[[], None],
) -> None:
    """Compares batches of two sizes with single examples, and extends the fallback until all agree.

    Two sizes keep any other dimension (tokens, channels) from passing for the examples in both.
    Single examples and the first batch meet the model as it was before its first call, and the
    last batches as a hostile one has left it: so state of one call shows in another.

    Raises:
        PrivacyConfigError: a sum or a loss differs, and no fallback mends it.
    """
    count = len(next(iter(inputs.values())))
    tolerance = TOLERANCE[precision]
    loss_N, expected = _torch_gradients(model, task, inputs, restore)

    def require_truth(expected_B: Tensor, loss_B: Tensor, sums: dict[str, Tensor]) -> None:
        compare_losses(expected_B, loss_B, tolerance)
        reached = {name for name, gradient in expected.items() if gradient.any()}
        idle = [name for name in sums if name not in unreached and name not in reached]
        if idle:
            idle_names = ", ".join(idle[:5])
            if len(idle) > 5:
                idle_names += f" and {len(idle) - 5} more"
            raise PrivacyConfigError(
                f"no made-up example gives {idle_names} a gradient, so the self-check would say "
                "nothing about it: make up examples that reach it, or freeze it "
                "(requires_grad_(False)) if the loss never does"
            )
        _compare(expected, sums, tolerance)

    def losses(size: int) -> Tensor:
        row_B = torch.arange(size) % count
        batch = {name: x[row_B] for name, x in inputs.items()}
        with torch.enable_grad(), must_take(f"{size} examples together"):
            return task(**batch)

    @cache
    def places() -> Places:
        return places_of(model, losses, restore)

    names_with_layouts_tried: set[str] = set()

    # Another order, and one more row: the first example's share is split between two copies.
    order = [*reversed(range(count)), 0]
    shares = _SHARES[:count]
    shares_of_copies = [0.7 * shares[0], 0.3 * shares[0]]
    weight_B = torch.tensor([*shares[:0:-1], *shares_of_copies], dtype=torch.float64)
    # Each time a parameter goes at least one module further out, or a layout is found for it.
    trained_names = [name for name, p in model.named_parameters() if p.requires_grad]
    most_extensions = sum(2 + name.count(".") for name in trained_names)
    for num_extensions_left in reversed(range(most_extensions + 1)):
        restore()
        try:
            batch = {name: x[order] for name, x in inputs.items()}
            with _weighted_sums(model, weight_B) as sum_batch:
                loss_B, sums = sum_batch(task, batch)
            require_truth(loss_N[order], loss_B, sums)
            is_wide = precision == torch.float64
            loss_B, sums = _sum_among_neighbours(model, task, inputs, restore, is_wide=is_wide)
            require_truth(loss_N, loss_B, sums)
            return
        except PrivacyConfigError as error:
            # Copies of a parameter that a model reads itself are wrong for it where it raises an
            # error, where losses or gradients change (its norm, its length, rows by number). Then
            # the fallback tries; a model that mixes examples is refused all the same.
            plan = plan_of(model)
            without_rule = {path for path, m in model.named_modules() if rule_of(m) is None}
            raw = [name for name in trained_names if name.rpartition(".")[0] in without_rule]
            names = error.names if isinstance(error, Uncovered) else [*raw, *plan.shared]
            # The fallback leaves no copies of what it covers.
            if not isinstance(error, Uncovered | NotTaken):
                names = [name for name in names if name not in plan.covers]
            untried = set(raw) - names_with_layouts_tried
            candidates = [name for name in names if name in untried]
            fitting = layouts(model, candidates, losses, restore)
            names_with_layouts_tried |= {*names}
            plan.layouts |= fitting
            if num_extensions_left == 0:
                raise
            if not fitting and not (names and plan.lift(model, names, places)):
                raise


def _sum_among_neighbours(
    model: nn.Module, task: Task, inputs: Inputs, restore: Callable[[], None], *, is_wide: bool
) -> LossesAndSums:
    """Returns losses and sums of all made-up examples, equal among neighbours of all kinds.

    Neighbours hold NaN, infinity and numbers ten thousand times too large, one example again and
    again, or half of its tokens. Where a model refuses such rows, they are other examples.

    Raises:
        PrivacyConfigError: losses or sums change with the neighbours.
    """
    count = len(next(iter(inputs.values())))
    are_before = [False] * FIRST
    are_examples = [True] * (count - 1)
    are_before_the_last = [False] * BEFORE_THE_LAST
    stays_B = torch.tensor([*are_before, *are_examples, *are_before_the_last, True])
    row_B = torch.arange(len(stays_B)) % count
    row_B[stays_B] = torch.arange(count)
    weight_B = torch.zeros(len(stays_B), dtype=torch.float64)
    weight_B[stays_B] = torch.tensor(_SHARES[:count], dtype=torch.float64)
    on_cpu = next(iter(inputs.values())).device.type == "cpu"
    tolerance = NEIGHBOURS_TOLERANCE if is_wide or on_cpu else ATOMICS_TOLERANCE
    references: list[LossesAndSums] = []

    def with_nan(y_B: Tensor) -> Tensor:
        return torch.where(in_rows(stays_B, y_B), y_B, torch.nan)

    # The second kind meets the model as the first, a hostile one as a rule, has left it.
    restore()
    # One clipped sum sees all batches, and so refuses layers that are called more or less often
    # among other examples.
    with _weighted_sums(model, weight_B) as sum_batch:

        def run(batch: Inputs, has_nan: bool) -> None:
            trained = [table for table in tables_of(model) if table.weight.requires_grad]
            with returning(trained if has_nan else [], with_nan, batch):
                loss_B, sums = sum_batch(task, batch)
            if not references:
                references.append((loss_B, sums))
                return
            expected_B, expected_sums = references[0]
            compare_losses(expected_B, loss_B, tolerance)
            try:
                _compare(expected_sums, sums, tolerance)
            except Uncovered as error:
                # A neighbour reaches a gradient, so no other rule would help.
                raise PrivacyConfigError(str(error)) from None

        among_neighbours(inputs, row_B, stays_B, run)
    with suppress(NotTaken), torch.no_grad(), must_take("cut to half"):
        short = {name: shortened(x) for name, x in inputs.items()}
        among_short = {name: torch.cat([x, x]) for name, x in short.items()}
        among_long = {name: torch.cat([x, inputs[name]]) for name, x in short.items()}
        among_short_B = task(**among_short)
        among_long_B = task(**among_long)
        compare_losses(among_short_B[:count], among_long_B[:count], tolerance)
    return references[0]


@contextmanager
def _weighted_sums(
    model: nn.Module, weight_B: Tensor
) -> Iterator[Callable[[Task, Inputs], LossesAndSums]]:
    """Yields a function that returns losses and weighted sums of a batch from the clipping rules.

    Rows of weight 0 are padding.
    """
    weights = tuple(weight_B.tolist())
    # Nothing is clipped here, and no gradient is too small to be compared: fp64 sums.
    with _clipped_sum(model, 1.0, weights, noise_multiplier=0.0) as (clipped, _):
        clipped.recorder.compares = True

        def sum_batch(task: Task, batch: Inputs) -> LossesAndSums:
            losses: list[Tensor] = []

            def watched(**inputs: Tensor) -> Tensor:
                losses.append(task(**inputs))
                return losses[-1]

            counts_B = (weight_B > 0).to(next(iter(batch.values())).device)
            clipped.zero_()
            with must_take(f"{len(counts_B)} examples together"):
                clipped.add_micro_batch(watched, batch, ~counts_B)
            loss_B = losses[0].detach()[counts_B]
            return loss_B, {name: total.clone() for name, total in clipped.sums()}

        yield sum_batch


class _NarrowingWatch(TorchFunctionMode):
    """Records whether a function of torch narrows float64, and the bits of its narrowest result."""

    narrows_float64 = False
    narrowest_bits = 64

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        y = func(*args, **(kwargs or {}))
        is_inexact = isinstance(y, Tensor) and (y.is_floating_point() or y.is_complex())
        if is_inexact and y.dtype not in WIDE:
            bits = torch.finfo(y.dtype.to_real()).bits
            self.narrowest_bits = min(self.narrowest_bits, bits)
            self.narrows_float64 |= any(isinstance(x, Tensor) and x.dtype in WIDE for x in args)
        return y


def _is_narrow(model: nn.Module, task: Task, inputs: Inputs) -> bool:
    """Returns whether the forward computes in half precision somewhere.

    A compiled forward may do so where no function of torch shows it.
    """
    bits = [torch.finfo(p.dtype).bits for p in model.parameters() if p.requires_grad]
    if compiled_weights(model) or min(bits, default=32) < 32:
        return True
    example = {name: x[:1].clone() for name, x in inputs.items()}
    with torch.no_grad(), _NarrowingWatch() as watch:
        task(**example)
    return bool(watch.narrowest_bits < 32)


def _precision_of(
    model: nn.Module, task: Task, inputs: Inputs, dtype: torch.dtype | None
) -> torch.dtype | None:
    """Returns the narrowest dtype of the forward, or None if it cannot run in `dtype`."""
    if dtype is None:
        dtypes = {p.dtype: name for name, p in model.named_parameters() if p.requires_grad}
        for narrow_dtype in dtypes.keys() - TOLERANCE.keys():
            raise PrivacyConfigError(
                "the self-check compares gradients in float32 or float64, "
                f"{dtypes[narrow_dtype]} is {narrow_dtype}, and the model cannot run in float64: "
                "check a copy of the model before it is cast"
            )
        return min(dtypes, key=lambda d: torch.finfo(d).bits)
    example = {name: x[:1].clone() for name, x in inputs.items()}
    watch = _NarrowingWatch()
    try:
        with torch.enable_grad(), watch:
            task(**example)
    except Exception:
        # Kernels without float64 and models with fixed dtypes may raise any exception.
        return None
    return torch.float32 if watch.narrows_float64 else torch.float64


def _torch_gradients(
    model: nn.Module, task: Task, inputs: Inputs, restore: Callable[[], None]
) -> LossesAndSums:
    """Returns losses of single examples, and the weighted sums of torch's own gradients.

    Parameters that no example reaches are left out.

    Raises:
        PrivacyConfigError: the task does not return one finite loss for an example alone.
    """
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    losses: list[Tensor] = []
    total: dict[str, Tensor] = {}
    num_examples = len(next(iter(inputs.values())))
    for i, share in zip(range(num_examples), _SHARES, strict=False):
        restore()
        example = {name: x[i : i + 1].clone() for name, x in inputs.items()}
        with torch.enable_grad(), must_take("one alone"), plain_words():
            loss_B = task(**example)
        if not isinstance(loss_B, Tensor) or loss_B.shape != (1,) or not bool(loss_B.isfinite()):
            output = loss_B.tolist() if isinstance(loss_B, Tensor) else type(loss_B).__name__
            raise PrivacyConfigError(
                "the loss must be one finite number per example, a tensor (N,): use "
                f'reduction="none"; one made-up example alone gave {output}'
            )
        losses.append(loss_B.detach())
        if not loss_B.requires_grad:
            continue
        # Backward of cuDNN's convolutions would be in TF32, which would accuse a model that runs
        # in float32 alone.
        with (
            must_take("one alone"),
            plain_words(),
            exact(loss_B.device),
            torch.backends.cudnn.flags(enabled=False),
        ):
            gradients = torch.autograd.grad(
                loss_B.sum(), list(parameters.values()), allow_unused=True
            )
        for name, g in zip(parameters, gradients, strict=True):
            if g is not None:
                total[name] = total[name].add_(g, alpha=share) if name in total else share * g
    return torch.cat(losses), total


def _compare(
    expected: Mapping[str, Tensor],
    sums: Mapping[str, Tensor],
    tolerance: float,
    prefix: str = "",
    floor: float = FLOOR,
) -> None:
    """Requires that sums by parameter agree.

    Raises:
        PrivacyConfigError: all expected sums are zero or one is not finite.
        Uncovered: naming the parameters whose sums differ.
    """
    truth = {name: expected.get(name, torch.zeros_like(total)) for name, total in sums.items()}
    norms = {name: float(g.norm()) for name, g in truth.items()}
    scale = max(norms.values())
    # Zeros and infinities would hide a part that is missed and a part of a neighbour.
    if not 0 < scale < math.inf:
        raise PrivacyConfigError(
            f"the gradients of the made-up examples together have norm {scale:g} in the precision "
            "of the self-check or of the run, where they underflow or overflow, so nothing can be "
            "compared: scale the loss, or make up other examples"
        )
    differences = {name: float((sums[name] - g).norm()) for name, g in truth.items()}
    allowed = {name: tolerance * (norm + floor * scale) for name, norm in norms.items()}
    excess = {}
    for name, difference in differences.items():
        # A difference that is not finite is the worst.
        excess[name] = difference / allowed[name] if difference < math.inf else math.inf
    worst_name = max(excess, key=lambda name: excess[name])
    if not differences[worst_name] <= allowed[worst_name]:
        uncovered = [name for name in truth if not differences[name] <= allowed[name]]
        sizes = f"difference {differences[worst_name]:.1e} of {norms[worst_name]:.1e}"
        raise Uncovered(
            f"{prefix}the clipping rules do not see the gradient of {worst_name} as torch does "
            f"({sizes}): is the parameter used without calling the layer that owns it, is the "
            "first dimension of every layer's input the examples, and does every loss depend on "
            "its own example alone?",
            uncovered,
        )
