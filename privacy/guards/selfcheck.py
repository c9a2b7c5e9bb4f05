"""Before training: do the clipping rules see the whole gradient of this model, and book it to the right example?

Coverage (contract 3) knows who owns a parameter, not how the forward uses it: a weight that is read without calling its layer
would silently miss that part of its gradient, and a layer called on a tensor whose first dimension is not the examples would
book it to the wrong one. So a few made-up examples go through the model, each alone, and torch's own gradient of each is the
truth. Then they go through it together, and a weighted sum of their per-example gradients must be the same weighted sum of
the truth. The weights all differ, so a gradient that is missed, counted twice or booked to another example changes the sum.
Batches of two sizes are tried, so that no other dimension (tokens, channels) can pass for the examples in both.

An example that reaches others breaks the bound on its contribution, however little it does on made-up inputs, because real ones
may be a thousand times as large. Three things find that at any size:

* Everything is computed in float64, on copies of parameters and buffers, where the model can: then rounding is 1e-16 and a part
  of 1e-10 is seen. Where a forward narrows values to float32 itself, or cannot run in float64, a part of 1e-3 is.
* In further batches, and in the precision of the run too, some rows hold what no data set should: NaN, infinity and numbers ten
  thousand times too large. The examples around them must stay what they were, to the last bit. Other rows hold one example
  again and again, or cut to half of its tokens. Where a model refuses such rows itself, the neighbours are other examples.
* Every example alone, and the first batch, meets the model as it was before its first call; the last batches meet it as a hostile
  one has left it. So what a forward keeps of one call shows in another; what it gathers for much later ones is looked for.

What clipping does besides, with many rows, with micro-batches one after the other, in the dtype and the mode of the run and
under a compiler, is compared with single examples too (`check_at_size`); unchanged.py tries losses in every new shape.

The check must not pass for lack of a gradient. Examples must differ, weights near zero (new heads, adapters, layer scales)
are replaced by random ones meanwhile, and a parameter without any gradient is refused by name.
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
from .unchanged import PASSED, Passed, changes, structure

TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-10}
"""Relative difference of a parameter's gradient, by the narrowest dtype that the forward computes in."""
NEIGHBOURS_TOLERANCE = 1e-12
"""The same where only padding differs between two batches of one size: then kernels give equal bits, in float32 too."""
ATOMICS_TOLERANCE = 1e-5
"""The same in float32 on accelerators, some of whose kernels add up in no fixed order."""
WIDE = (torch.float64, torch.complex128)
"""What a float64 check computes in, as far as the forward narrows nothing itself."""
FLOOR = 0.01
"""Differences below FLOOR * tolerance of the largest gradient count as rounding, whatever the parameter's own gradient is."""
MOST_EXAMPLES = 16
"""Further examples are not looked at."""
TOGETHER = 1 << 26
"""Trained numbers whose gradients are compared together."""
_SHARES = [1 / (1 + row) for row in range(MOST_EXAMPLES)]
"""What the gradient of each example counts for, in all batches: all differ."""
AT_SIZE_TOLERANCE = 1e-2
"""Relative difference of norms and sums at the run's own size, where an example alone takes other kernels than many together."""
IN_HALF_PRECISION = 0.1
"""The same where the forward computes in bf16 or fp16."""
TINY_BOUND = 1e-6
"""C at the run's own size: every example is clipped, as far as its gradient is not smaller."""
ALONE = 5
"""Examples that stand in many rows at that size, each compared with itself alone."""
FIRST, BEFORE_THE_LAST = 5, 3
"""Neighbours: on both sides, so that work that is sorted by length, up or down, puts one of them between the examples."""


Found = tuple[Tensor, dict[str, Tensor]]
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
    """Compares, on made-up inputs, per-example gradients with torch's own; `SelfChecked` asks for it.

    A model that `fully_shard` has sharded is gathered for it, and every rank checks the same; other shards are refused.

    What the made-up inputs do not reach is not checked, such as a branch that depends on values. `SelfChecked` tries every size
    and shape of micro-batches when it meets it, on the same made-up examples. For the time of the check parameters and buffers
    are copies, in float64 where the model can compute in it: 8 bytes more for each. Gradients take 40 bytes for each of at most
    TOGETHER trained numbers: of larger models some parameters are checked after the others.

    Args:
        model: in the mode and with the parameters frozen as in training; its `.grad` fields are left empty.
        inputs: two or more examples that differ, made up, never private data. Names as in training, tensors with B rows.
        task: `task(**inputs)` returns loss_B, where loss i depends on example i alone; the model itself by default.
        unreached: parameters that are trained although the loss never reaches them; all others must get a gradient.
        fallback: whether parameters that no rule follows may be differentiated through the module around them, per example and
            as a whole (fallback.py), which `plan_of(model).sentences(model)` names; or the paths of modules that may be.
        padding: what stands in a row without an example, (1, ...) in each input; by default that is not tried.
        allowed_ids: the values that an input of integers may have; by default those from 0 to the highest made-up one, and
            negative ones that are made up.

    Raises:
        PrivacyConfigError: naming the parameter whose gradient differs most, or that no example reaches; or the loss of an
            example depends on the others or on chance; or the forward changes a buffer, or calls its layers as often as some
            example asks; or the inputs or dtypes do not do.
    """
    task = task or model
    sizes = {name: len(x) for name, x in inputs.items()}
    if len(set(sizes.values())) != 1 or min(sizes.values()) < 2:
        raise PrivacyConfigError(
            f"the self-check needs two or more made-up examples, the same number in each input: {sizes}"
        )
    made_up = {name: x[:MOST_EXAMPLES] for name, x in inputs.items()}
    for j, i in itertools.combinations(range(len(next(iter(made_up.values())))), 2):
        if all(torch.equal(x[i], x[j]) for x in made_up.values()):
            raise PrivacyConfigError(
                f"the made-up examples {j} and {i} are equal, so the self-check could not tell one's gradient from the "
                "other's: make up examples that differ"
            )
    plan_of(model).start(fallback)
    put_away(model)
    before = structure(model, task)
    with gathered(model), nothing_is_small(model):
        for dtype in (torch.float64, None):
            with untouched(model, task, dtype) as restore:
                inside = structure(model, task)
                wide = {
                    n: x.to(dtype) if x.is_floating_point() and dtype else x.clone()
                    for n, x in made_up.items()
                }
                precision = _precision(model, task, wide, dtype)
                if precision is not None:
                    _by_groups(
                        model, partial(_check, model, task, wide, precision, unreached, restore)
                    )
                moved = changes(inside, structure(model, task))
                if precision is not None:
                    require_nothing_gathered(model, task, wide, restore)
                    restore()
                    allowed = (
                        NEIGHBOURS_TOLERANCE if precision == torch.float64 else ATOMICS_TOLERANCE
                    )
                    require_unconditional(model, task, wide, allowed, allowed_ids)
                    if padding is not None:
                        require_padding(task, wide, dict(padding), allowed)
            if precision is not None:
                break
        if dtype is not None and any(
            p.requires_grad and p.dtype != dtype for p in model.parameters()
        ):
            with untouched(model, task) as restore:
                _by_groups(
                    model, lambda: _among_neighbours(model, task, made_up, restore, is_wide=False)
                )
    reference = weakref.WeakMethod(task) if inspect.ismethod(task) else weakref.ref(task)
    made_up = {name: x.detach().clone() for name, x in made_up.items()}
    PASSED.setdefault(model, []).append(Passed(before, moved, reference, made_up, set()))


def check_at_size(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    size: int,
    task: Task | None = None,
    *,
    mode: Mode = "bookkeeping",
) -> None:
    """Compares clipped sums, as a run makes them, with examples one at a time.

    A micro-batch of `size` rows is added, and then a second one in which the last rows alone count, those beyond one fp32 sum
    where there are so many. Each row's norm and both sums must be what torch's own gradients say. It costs less than three
    micro-batches of a run, and 30 bytes, for each of at most TOGETHER trained numbers. A model that `fully_shard` has sharded is
    gathered, as in `check_against_autograd`.

    Args:
        model: on its device, in its dtype, compiled or not as in training.
        inputs: made-up examples that differ, as there; the first ALONE of them count.
        size: rows of the run's micro-batches.
        task: as there.
        mode: of the run.

    Raises:
        PrivacyConfigError: naming the parameter whose sum differs most, or the row whose norm does.
    """
    task, made_up = task or model, {name: x[:ALONE] for name, x in inputs.items()}
    size = min(size, EXAMPLES_PER_PART)  # clipping goes through larger ones in parts
    where = f"in micro-batches of {size} examples, in the precision of the run, "
    row_B = torch.arange(size) % len(next(iter(made_up.values())))
    counted = (
        torch.ones(size, dtype=torch.bool),
        torch.arange(size) >= min(EXAMPLES_PER_SUM, size // 2),
    )
    batch = {name: x[row_B.to(x.device)] for name, x in made_up.items()}
    device = next(iter(batch.values())).device
    scale_B = 2.0 ** (
        torch.arange(size) % 5
    )  # so that norms differ, and a factor of another row is seen

    def scaled(**inputs: Tensor) -> Tensor:
        loss_B = task(**inputs)
        return loss_B * scale_B[: len(loss_B)].to(loss_B)

    def compare(restore: Callable[[], None]) -> None:
        found: list[dict[str, Tensor]] = []
        expected: tuple[dict[str, Tensor], ...] = ({}, {})
        num_cancelled = 0
        with _clipped(model, TINY_BOUND, mode=mode, device=device) as (clipped, norms):
            for counts_B in counted:
                with must_take(f"{size} examples together"):
                    num_cancelled += int(
                        clipped.add_micro_batch(scaled, batch, ~counts_B.to(device)).num_cancelled
                    )
                found.append(
                    {name: total.to("cpu", torch.float32) for name, total in clipped.sums()}
                )
        norm_B = torch.cat(norms)[:size].double().cpu() / scale_B
        factor_B = torch.minimum(
            scale_B, TINY_BOUND / norm_B
        )  # what is shorter than C is not clipped
        for i in range(int(row_B.max()) + 1):
            _, gradient = _truth(
                model, task, {name: x[i : i + 1] for name, x in made_up.items()}, restore
            )
            norm = math.hypot(*(float(g.double().norm()) for g in gradient.values()))
            longest = (
                math.inf if num_cancelled else (1 + tolerance) * norm + TINY_BOUND
            )  # tokens that cancel: norms.py
            wrong_B = (row_B == i) & ~((norm_B >= (1 - tolerance) * norm) & (norm_B <= longest))
            if wrong_B.any():
                row = int(wrong_B.nonzero()[0])
                raise PrivacyConfigError(
                    f"{where}the norm of row {row} is {float(norm_B[row]):.3g}, and {norm:.3g} for the same example alone: does "
                    "a layer, or the rule of one, depend on the number of rows or on the dtype?"
                )
            for sums, counts_B in zip(expected, counted, strict=True):
                share = float(factor_B[counts_B & (row_B == i)].sum())
                for name, g in gradient.items():
                    sums[name] = sums.get(name, 0) + share * g.float().cpu()
        second = {name: total - found[0][name] for name, total in found[1].items()}
        floor = max(
            FLOOR, tolerance
        )  # in bf16 a bias without effect has a gradient of rounding alone
        _compare(expected[0], found[0], tolerance, where, floor)
        _compare(expected[1], second, tolerance, f"{where}of a second one, ", floor)

    put_away(model)
    with gathered(model), nothing_is_small(model), untouched(model, task) as restore:
        tolerance = IN_HALF_PRECISION if _is_narrow(model, task, made_up) else AT_SIZE_TOLERANCE
        restore()
        _by_groups(model, partial(compare, restore))


def _by_groups(model: nn.Module, check: Callable[[], object]) -> None:
    """Checks at most TOGETHER trained numbers at a time, in the order of the model, while the others are frozen.

    What is compiled would be compiled again for each group: it is trained as a whole.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    groups: list[set[nn.Parameter]] = [set()]
    for p in trained:
        if (
            groups[-1]
            and sum(q.numel() for q in groups[-1]) + p.numel() > TOGETHER
            and not compiled_weights(model)
        ):
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
class _Noting(ClippingFunction):
    """Flat clipping that notes the norms, or weights that are given, whatever the norms."""

    norms: list[Tensor] = field(default_factory=list)
    weights: tuple[float, ...] = ()

    def weight(self, norm_B: Tensor, bound: float) -> Tensor:
        self.norms.append(norm_B.clone())
        return norm_B.new_tensor(self.weights) if self.weights else super().weight(norm_B, bound)


@contextmanager
def _clipped(
    model: nn.Module,
    bound: float,
    weights: tuple[float, ...] = (),
    mode: Mode = "bookkeeping",
    **settings: Any,
) -> Iterator[tuple[ClippedSum, list[Tensor]]]:
    """Yields a sum of this model, and the norms of what it is given."""
    norms: list[Tensor] = []
    clipped = SUMS[mode](
        model,
        bound,
        **settings,
        function=lambda names, c: _Noting(
            dict.fromkeys(names, 0), (c,), norms=norms, weights=weights
        ),
    )
    try:
        yield clipped, norms
    finally:
        clipped.detach()


def _check(
    model: nn.Module,
    task: Task,
    inputs: Inputs,
    precision: torch.dtype,
    unreached: Collection[str],
    restore: Callable[[], None],
) -> None:
    """Compares batches of two sizes with the truth, and gives to the fallback what no rule follows until all is followed."""
    count, tolerance = len(next(iter(inputs.values()))), TOLERANCE[precision]
    loss_N, expected = _truth(model, task, inputs, restore)

    def require_truth(loss_B: Tensor, found_B: Tensor, sums: dict[str, Tensor]) -> None:
        compare_losses(loss_B, found_B, tolerance)
        idle = [
            n for n in sums if n not in unreached and (n not in expected or not expected[n].any())
        ]
        if idle:
            listed = ", ".join(idle[:5]) + (f" and {len(idle) - 5} more" if len(idle) > 5 else "")
            raise PrivacyConfigError(
                f"no made-up example gives {listed} a gradient, so the self-check would say nothing about it: make up "
                "examples that reach it, or freeze it (requires_grad_(False)) if the loss never does"
            )
        _compare(expected, sums, tolerance)

    def losses(size: int) -> Tensor:
        with torch.enable_grad(), must_take(f"{size} examples together"):
            return task(**{name: x[torch.arange(size) % count] for name, x in inputs.items()})

    @cache
    def places() -> Places:
        return places_of(model, losses, restore)

    tried: set[str] = set()

    # In another order, and one more row: the first example's share is split between two copies.
    order, shares = [*reversed(range(count)), 0], _SHARES[:count]
    weight_B = torch.tensor([*shares[:0:-1], 0.7 * shares[0], 0.3 * shares[0]], dtype=torch.float64)
    # Each time a parameter goes at least one module further out, or a layout is found for it.
    most = sum(2 + name.count(".") for name, p in model.named_parameters() if p.requires_grad)
    for left in reversed(range(most + 1)):
        restore()
        try:
            with _weighted(model, weight_B) as together:
                first = together(task, {name: x[order] for name, x in inputs.items()})
            require_truth(loss_N[order], *first)
            require_truth(
                loss_N,
                *_among_neighbours(
                    model, task, inputs, restore, is_wide=precision == torch.float64
                ),
            )
            return
        except PrivacyConfigError as error:
            # Copies of what a model reads itself are wrong for it where it raises an error, where losses or gradients change (its
            # norm, its length, rows by number). Then the fallback tries; a model that mixes examples is refused all the same.
            plan, by_themselves = (
                plan_of(model),
                {p for p, m in model.named_modules() if rule_of(m) is None},
            )
            raw = [
                n
                for n, p in model.named_parameters()
                if p.requires_grad and n.rpartition(".")[0] in by_themselves
            ]
            names = error.names if isinstance(error, Uncovered) else [*raw, *plan.shared]
            if not isinstance(
                error, Uncovered | NotTaken
            ):  # no copies are left where the fallback is
                names = [n for n in names if n not in plan.covers]
            fitting = layouts(
                model, [n for n in names if n in raw and n not in tried], losses, restore
            )
            tried |= {*names}
            plan.layouts |= fitting
            if not left or not (fitting or (names and plan.lift(model, names, places))):
                raise


def _among_neighbours(
    model: nn.Module, task: Task, inputs: Inputs, restore: Callable[[], None], *, is_wide: bool
) -> Found:
    """What the clipping rules make of all made-up examples, after a look that it is equal among neighbours of all kinds."""
    count = len(next(iter(inputs.values())))
    stays_B = torch.tensor(
        [*[False] * FIRST, *[True] * (count - 1), *[False] * BEFORE_THE_LAST, True]
    )
    row_B = torch.arange(len(stays_B)) % count
    row_B[stays_B] = torch.arange(count)
    weight_B = torch.zeros(len(stays_B), dtype=torch.float64)
    weight_B[stays_B] = torch.tensor(_SHARES[:count], dtype=torch.float64)
    on_cpu = next(iter(inputs.values())).device.type == "cpu"
    tolerance = NEIGHBOURS_TOLERANCE if is_wide or on_cpu else ATOMICS_TOLERANCE
    first: list[Found] = []

    def with_nan(y_B: Tensor) -> Tensor:
        return torch.where(in_rows(stays_B, y_B), y_B, torch.nan)

    restore()  # the second kind meets the model as the first, a hostile one as a rule, has left it
    # One sum for all, which refuses layers that are called more or less often among other examples.
    with _weighted(model, weight_B) as together:

        def run(batch: Inputs, has_nan: bool) -> None:
            trained = [table for table in tables_of(model) if table.weight.requires_grad]
            with returning(trained if has_nan else [], with_nan, batch):
                loss_B, sums = together(task, batch)
            if not first:
                first.append((loss_B, sums))
                return
            compare_losses(first[0][0], loss_B, tolerance)
            try:
                _compare(first[0][1], sums, tolerance)
            except (
                Uncovered
            ) as error:  # a neighbour reaches a gradient: no other rule is looked for
                raise PrivacyConfigError(str(error)) from None

        among_neighbours(inputs, row_B, stays_B, run)
    with suppress(NotTaken), torch.no_grad(), must_take("cut to half"):
        short = {name: shortened(x) for name, x in inputs.items()}
        alone_B, among_B = (
            task(**{name: torch.cat([x, others[name]]) for name, x in short.items()})
            for others in (short, inputs)
        )
        compare_losses(alone_B[:count], among_B[:count], tolerance)
    return first[0]


@contextmanager
def _weighted(model: nn.Module, weight_B: Tensor) -> Iterator[Callable[[Task, Inputs], Found]]:
    """What the clipping rules make of batches in which rows count for their weight; those of weight 0 are padding."""
    # Nothing is clipped here, and no gradient is too small to be compared: fp64 sums.
    with _clipped(model, 1.0, tuple(weight_B.tolist()), noise_multiplier=0.0) as (clipped, _):
        clipped.recorder.compares = True

        def together(task: Task, batch: Inputs) -> Found:
            seen: list[Tensor] = []

            def watched(**inputs: Tensor) -> Tensor:
                seen.append(task(**inputs))
                return seen[-1]

            counts_B = (weight_B > 0).to(next(iter(batch.values())).device)
            clipped.zero_()
            with must_take(f"{len(counts_B)} examples together"):
                clipped.add_micro_batch(watched, batch, ~counts_B)
            return seen[0].detach()[counts_B], {
                name: total.clone() for name, total in clipped.sums()
            }

        yield together


class _Narrowing(TorchFunctionMode):
    """Notes whether a function of torch makes narrower numbers of float64, and the bits of the narrowest ones that any makes."""

    seen, narrowest = False, 64

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        y = func(*args, **(kwargs or {}))
        if (
            isinstance(y, Tensor)
            and (y.is_floating_point() or y.is_complex())
            and y.dtype not in WIDE
        ):
            self.narrowest = min(self.narrowest, torch.finfo(y.dtype.to_real()).bits)
            self.seen |= any(isinstance(x, Tensor) and x.dtype in WIDE for x in args)
        return y


def _is_narrow(model: nn.Module, task: Task, inputs: Inputs) -> bool:
    """Whether the forward computes in half precision somewhere; a compiled one may, and nobody sees it."""
    if compiled_weights(model) or any(
        torch.finfo(p.dtype).bits < 32 for p in model.parameters() if p.requires_grad
    ):
        return True
    with torch.no_grad(), _Narrowing() as watch:
        task(**{name: x[:1].clone() for name, x in inputs.items()})
    return bool(watch.narrowest < 32)


def _precision(
    model: nn.Module, task: Task, inputs: Inputs, dtype: torch.dtype | None
) -> torch.dtype | None:
    """The narrowest dtype that the forward computes in; None if it cannot run in `dtype`."""
    if dtype is None:
        dtypes = {p.dtype: name for name, p in model.named_parameters() if p.requires_grad}
        for own in dtypes.keys() - TOLERANCE.keys():
            raise PrivacyConfigError(
                f"the self-check compares gradients in float32 or float64, {dtypes[own]} is {own}, and the model cannot run in "
                "float64: check a copy of the model before it is cast"
            )
        return min(dtypes, key=lambda d: torch.finfo(d).bits)
    watch = _Narrowing()
    try:
        with torch.enable_grad(), watch:
            task(**{name: x[:1].clone() for name, x in inputs.items()})
    except (
        Exception
    ):  # kernels without float64, dtypes that the model wrote down: anything may be raised
        return None
    return torch.float32 if watch.seen else torch.float64


def _truth(model: nn.Module, task: Task, inputs: Inputs, restore: Callable[[], None]) -> Found:
    """(N,) losses of examples that are alone, and sum_i share_i grad_i by torch's backward, where there is a gradient."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    losses: list[Tensor] = []
    total: dict[str, Tensor] = {}
    for i, share in zip(range(len(next(iter(inputs.values())))), _SHARES, strict=False):
        restore()
        with torch.enable_grad(), must_take("one alone"), plain_words():
            loss_B = task(**{name: x[i : i + 1].clone() for name, x in inputs.items()})
        if not isinstance(loss_B, Tensor) or loss_B.shape != (1,) or not bool(loss_B.isfinite()):
            found = loss_B.tolist() if isinstance(loss_B, Tensor) else type(loss_B).__name__
            raise PrivacyConfigError(
                'the loss must be one finite number per example, a tensor (N,): use reduction="none"; '
                f"one made-up example alone gave {found}"
            )
        losses.append(loss_B.detach())
        if not loss_B.requires_grad:
            continue
        # Backward of cuDNN's convolutions would be in TF32, of which a model that runs in float32 alone must not be accused.
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
    where: str = "",
    floor: float = FLOOR,
) -> None:
    truth = {name: expected.get(name, torch.zeros_like(total)) for name, total in sums.items()}
    scale = max(float(g.norm()) for g in truth.values())
    if (
        not 0 < scale < math.inf
    ):  # neither a part that is missed nor one of a neighbour would be seen
        raise PrivacyConfigError(
            f"the gradients of the made-up examples together have norm {scale:g} in the precision of the self-check or of the "
            "run, where they underflow or overflow, so nothing can be compared: scale the loss, or make up other examples"
        )
    differences = {name: float((sums[name] - g).norm()) for name, g in truth.items()}
    allowed = {name: tolerance * (float(g.norm()) + floor * scale) for name, g in truth.items()}
    # A difference that is not finite is the worst.
    name = max(
        truth,
        key=lambda n: (
            differences[n] / allowed[n] if differences[n] < float("inf") else float("inf")
        ),
    )
    if not differences[name] <= allowed[name]:
        raise Uncovered(
            f"{where}the clipping rules do not see the gradient of {name} as torch does (difference {differences[name]:.1e} of "
            f"{float(truth[name].norm()):.1e}): is the parameter used without calling the layer that owns it, is the first "
            "dimension of every layer's input the examples, and does every loss depend on its own example alone?",
            [n for n in truth if not differences[n] <= allowed[n]],
        )
