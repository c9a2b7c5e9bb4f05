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
* In further batches, some rows hold what no data set should: NaN, infinity and numbers ten thousand times too large. Any
  arithmetic that reads another row carries them over, at any strength, and the examples around them must stay what they were.
  The same is tried in the precision of the run, with its dtypes and under its autocast. Where a model refuses such numbers
  itself, the neighbours are other examples.
* Every example alone, and the first hostile batch, meets the model as it was before its first call, so that statistics of a first
  call are those of one example and differ; the last batches meet it as a hostile one has left it.
* In a last batch many rows hold one example and another example is cut to half of its tokens, for limits that count examples
  and for work that is fitted to the longest.

What a run has besides, its number of rows above all, is tried by apart.py, before the first micro-batch of that kind.

The check must not pass for lack of a gradient. Examples must differ, weights near zero (new heads, adapters, layer scales)
are replaced by random ones meanwhile, and a parameter without any gradient is refused by name.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..errors import PrivacyConfigError
from .apart import NotTaken, must_take, shortened
from .checked import changes, note_passed, structure
from .recorder import plain_words
from .sharded import put_away, whole
from .together import KINDS, Together, together, with_neighbours
from .untouched import as_it_was, held, no_chance, nothing_is_small, on_copies

Inputs = dict[str, Tensor]

TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-10}
"""Relative difference of a parameter's gradient, by the narrowest dtype that the forward computes in."""
NEIGHBOURS_TOLERANCE = 1e-12
"""The same where only padding differs between two batches of one size: then kernels give equal bits, in float32 too."""
ATOMICS_TOLERANCE = 1e-5
"""The same in float32 on accelerators, some of whose kernels add up in no fixed order."""
FLOOR = 0.01
"""Differences below FLOOR * tolerance of the largest gradient count as rounding, whatever the parameter's own gradient is."""
MOST_EXAMPLES = 16
"""Further examples are not looked at; and how many rows the crowd of one example has."""
TRIED = (("none", True), ("not finite", True), ("large", False))
"""The neighbours of the made-up examples in each batch, and whether the model is as before its first call or as it was left."""


def check_against_autograd(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    task: Callable[..., Tensor] | None = None,
    *,
    unreached: Collection[str] = (),
) -> None:
    """Compares, on made-up inputs, per-example gradients with torch's own; `ClippedSum` asks for it.

    A model that `fully_shard` has sharded is gathered for it, and every rank checks the same; other shards are refused.

    What the made-up inputs do not reach is not checked, such as a branch that depends on values. `ClippedSum` tries every size
    and shape of micro-batches when it meets it, on the same made-up examples. For the time of the check parameters and buffers
    are copies, in float64 where the model can compute in it: 8 bytes more for each.

    Args:
        model: in the mode and with the parameters frozen as in training; its `.grad` fields are left empty.
        inputs: two or more examples that differ, made up, never private data. Names as in training, tensors with B rows.
        task: `task(**inputs)` returns loss_B, where loss i depends on example i alone; the model itself by default.
        unreached: parameters that are trained although the loss never reaches them; all others must get a gradient.

    Raises:
        PrivacyConfigError: naming the parameter whose gradient differs most, or that no example reaches; or the loss of an
            example depends on the others or on chance; or the forward changes a buffer, keeps what it computes in another way
            that reaches later calls, or calls its layers as often as some example asks; or the inputs or dtypes do not do.
    """
    task = task or model
    count = _require_different(inputs)
    put_away(model)
    before = structure(model, task)
    with whole(model), nothing_is_small(model):
        for dtype in (torch.float64, None):
            made_up = {name: _in(dtype, x[:count]) for name, x in inputs.items()}
            with as_it_was(model, task) as restore:
                inside = structure(model, task)
                with on_copies(model, dtype):
                    precision = _precision(model, task, made_up, dtype)
                    if precision is not None:
                        _check(model, task, made_up, precision, unreached, restore)
                moved = changes(inside, structure(model, task))
            if precision is not None:
                break
        if dtype is not None and any(p.requires_grad and p.dtype != dtype for p in model.parameters()):
            with as_it_was(model, task) as restore, on_copies(model, None):
                _check_own_precision(model, task, {name: x[:count] for name, x in inputs.items()}, restore)
    note_passed(model, task, {name: x[:count] for name, x in inputs.items()}, before, moved)


def _check(
    model: nn.Module,
    task: Callable[..., Tensor],
    inputs: Inputs,
    precision: torch.dtype,
    unreached: Collection[str],
    restore: Callable[[], None],
) -> None:
    rows = range(len(next(iter(inputs.values()))))
    share_of = [1 / (1 + row) for row in rows]  # what example i's gradient counts for, in all batches
    loss_N, expected = _truth(model, task, inputs, share_of, restore)
    _require_nothing_gathered(model, task, inputs)
    seen: list[Together] = []
    for neighbours, is_fresh in TRIED:
        if is_fresh:
            restore()
        if neighbours == "none":
            # In another order, and one more row: the first example's share is split between two copies.
            order = [*reversed(rows), 0]
            shares = [*share_of[:0:-1], 0.7 * share_of[0], 0.3 * share_of[0]]
            found = together(model, task, {name: x[order] for name, x in inputs.items()}, shares)
            _compare_losses(loss_N[order], found.loss_N, TOLERANCE[precision])
        else:
            found = with_neighbours(model, task, inputs, share_of, neighbours)
            _compare_losses(loss_N, found.loss_N, TOLERANCE[precision])
        seen.append(found)
        _require_gradients([name for name in found.sums if name not in unreached], expected)
        _compare(expected, found.sums, TOLERANCE[precision])
    _require_as_many_calls(seen)
    _compare_neighbours(*seen[1:], is_wide=precision == torch.float64)
    _check_crowd(task, inputs, loss_N, TOLERANCE[precision])


def _check_own_precision(
    model: nn.Module, task: Callable[..., Tensor], inputs: Inputs, restore: Callable[[], None]
) -> None:
    """Among different neighbours, losses and gradients are equal in the precision of the run too, however rough that is."""
    shares = [1.0] * len(next(iter(inputs.values())))
    seen: list[Together] = []
    for neighbours in KINDS:
        restore()
        seen.append(with_neighbours(model, task, inputs, shares, neighbours))
    on_cpu = seen[0].loss_N.device.type == "cpu"
    _compare_losses(seen[0].loss_N, seen[1].loss_N, NEIGHBOURS_TOLERANCE if on_cpu else ATOMICS_TOLERANCE)
    _compare_neighbours(*seen, is_wide=False)


def _in(dtype: torch.dtype | None, x: Tensor) -> Tensor:
    return x.to(dtype) if dtype is not None and x.is_floating_point() else x.clone()


class _Narrowing(TorchFunctionMode):
    """Notes whether a function of torch makes narrower numbers of float64."""

    seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        y = func(*args, **(kwargs or {}))
        if isinstance(y, Tensor) and y.is_floating_point() and y.dtype != torch.float64:
            self.seen |= any(isinstance(x, Tensor) and x.dtype == torch.float64 for x in args)
        return y


def _precision(
    model: nn.Module, task: Callable[..., Tensor], inputs: Inputs, dtype: torch.dtype | None
) -> torch.dtype | None:
    """The narrowest dtype that the forward computes in; None if it cannot run in `dtype`."""
    if dtype is None:
        _require_wide(model)
        return min((p.dtype for p in model.parameters() if p.requires_grad), key=lambda d: torch.finfo(d).bits)
    watch = _Narrowing()
    try:
        with torch.enable_grad(), watch:
            task(**{name: x[:1].clone() for name, x in inputs.items()})
    except Exception:  # kernels without float64, dtypes that the model wrote down: anything may be raised
        return None
    return torch.float32 if watch.seen else torch.float64


def _require_nothing_gathered(model: nn.Module, task: Callable[..., Tensor], inputs: Inputs) -> None:
    """What a forward keeps may be replaced by the next one, but not grow: a bank may be used only when it is full."""
    sizes = []
    for _ in range(3):
        task(**{name: x[:1].clone() for name, x in inputs.items()})
        holders, tensors = held(model, task)
        sizes.append(len(tensors) + sum(map(len, holders)))
    if sizes[2] > sizes[1]:
        raise PrivacyConfigError(
            "the forward keeps more with every call, in a list or another container of the model or its task: what it keeps of "
            "one micro-batch would reach others; keep no state in the forward"
        )


def _require_wide(model: nn.Module) -> None:
    for name, p in model.named_parameters():
        if p.requires_grad and p.dtype not in TOLERANCE:
            raise PrivacyConfigError(
                f"the self-check compares gradients in float32 or float64, {name} is {p.dtype}, and the model cannot run in "
                "float64: check a copy of the model before it is cast, and give ClippedSum self_check=False"
            )


def _require_different(inputs: Mapping[str, Tensor]) -> int:
    """The number of examples to look at."""
    sizes = {name: len(x) for name, x in inputs.items()}
    if len(set(sizes.values())) != 1 or min(sizes.values()) < 2:
        raise PrivacyConfigError(
            f"the self-check needs two or more made-up examples, the same number in each input: {sizes}"
        )
    count = min(MOST_EXAMPLES, *sizes.values())
    for i in range(count):
        for j in range(i):
            if all(torch.equal(x[i], x[j]) for x in inputs.values()):
                raise PrivacyConfigError(
                    f"the made-up examples {j} and {i} are equal, so the self-check could not tell one's gradient from the "
                    "other's: make up examples that differ"
                )
    return count


def _truth(
    model: nn.Module,
    task: Callable[..., Tensor],
    inputs: Mapping[str, Tensor],
    share_of: Sequence[float],
    restore: Callable[[], None],
) -> tuple[Tensor, dict[str, Tensor]]:
    """(N,) losses of examples that are alone, and sum_i share_i grad_i by torch's backward, where there is a gradient."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    losses: list[Tensor] = []
    total: dict[str, Tensor] = {}
    for i, share in enumerate(share_of):
        restore()
        with torch.enable_grad(), no_chance(), must_take("one alone"), plain_words():
            loss_B = task(**{name: x[i : i + 1].clone() for name, x in inputs.items()})
        if loss_B.shape != (1,) or not bool(loss_B.isfinite()):
            raise PrivacyConfigError(
                f"the task must return one finite loss per example: for one made-up example alone it returned {loss_B.tolist()}"
            )
        losses.append(loss_B.detach())
        if not loss_B.requires_grad:
            continue
        with must_take("one alone"), plain_words():
            gradients = torch.autograd.grad(loss_B.sum(), list(parameters.values()), allow_unused=True)
        for name, g in zip(parameters, gradients, strict=True):
            if g is not None:
                total[name] = total[name].add_(g, alpha=share) if name in total else share * g
    return torch.cat(losses), total


def _check_crowd(task: Callable[..., Tensor], inputs: Mapping[str, Tensor], loss_N: Tensor, tolerance: float) -> None:
    """The losses among many rows of one example, and of another cut to half: they are all that of the example alone."""
    crowd = {name: x[:1].expand(MOST_EXAMPLES, *x.shape[1:]) for name, x in inputs.items()}
    short = {name: shortened(x[-1:]) for name, x in inputs.items()}
    with torch.no_grad(), no_chance():
        try:
            with must_take("cut to half"):
                short_1 = task(**{name: x.clone() for name, x in short.items()})
                together_B = task(**{name: torch.cat([crowd[name], x, short[name]]) for name, x in inputs.items()})
        except NotTaken:  # as for hostile rows
            short_1 = loss_N[:0]
            with must_take(f"{MOST_EXAMPLES + len(loss_N)} examples together"):
                together_B = task(**{name: torch.cat([crowd[name], x]) for name, x in inputs.items()})
    alone_B = torch.cat([loss_N[:1].expand(MOST_EXAMPLES), loss_N, short_1])
    known_B = alone_B.isfinite()
    _compare_losses(alone_B[known_B], together_B[known_B], tolerance)


def _compare_losses(alone_B: Tensor, together_B: Tensor, tolerance: float) -> None:
    largest = float(alone_B.nan_to_num(0, 0, 0).abs().max()) if len(alone_B) else 0.0
    if not torch.allclose(alone_B, together_B, rtol=tolerance, atol=tolerance * largest, equal_nan=True):
        raise PrivacyConfigError(
            "the loss of an example changes with the other examples of its micro-batch: every example's loss must depend on "
            "that example alone (no mean over the batch, no contrast between examples, no state that the forward keeps, no "
            "limit that examples share, no length that is fitted to the longest)"
        )


def _require_gradients(names: Iterable[str], gradients: Mapping[str, Tensor]) -> None:
    idle = [name for name in names if name not in gradients or not gradients[name].any()]
    if idle:
        listed = ", ".join(idle[:5]) + (f" and {len(idle) - 5} more" if len(idle) > 5 else "")
        raise PrivacyConfigError(
            f"no made-up example gives {listed} a gradient, so the self-check would say nothing about it: make up examples "
            "that reach it, or freeze it (requires_grad_(False)) if the loss never does"
        )


def _compare_neighbours(first: Together, second: Together, *, is_wide: bool) -> None:
    """Two batches of one size that differ in the neighbours alone: kernels give equal bits for the others."""
    in_any_order = not is_wide and any(x.device.type != "cpu" for x in first.sums.values())
    _compare(first.sums, second.sums, ATOMICS_TOLERANCE if in_any_order else NEIGHBOURS_TOLERANCE)


def _require_as_many_calls(batches: Sequence[Together]) -> None:
    """Contributions are as many in every batch: their number moves how the gradient of every example is rounded."""
    first, *others = (batch.num_calls for batch in batches)
    differing = {name for calls in others for name in {**first, **calls} if first.get(name) != calls.get(name)}
    if differing:
        raise PrivacyConfigError(
            f"the layer of {min(differing)} is called more or less often among other examples, which moves how the gradient "
            "of every example is rounded: call it as often in every micro-batch, and mask what is not needed"
        )


def _compare(expected: Mapping[str, Tensor], sums: Mapping[str, Tensor], tolerance: float) -> None:
    truth = {name: expected.get(name, torch.zeros_like(total)) for name, total in sums.items()}
    scale = max(float(g.norm()) for g in truth.values())
    if not 0 < scale < math.inf:  # neither a part that is missed nor one of a neighbour would be seen
        raise PrivacyConfigError(
            f"the gradients of the made-up examples together have norm {scale:g} in the precision of the self-check or of the "
            "run, where they underflow or overflow, so nothing can be compared: scale the loss, or make up other examples"
        )
    differences = {name: float((sums[name] - g).norm()) for name, g in truth.items()}
    allowed = {name: tolerance * (float(g.norm()) + FLOOR * scale) for name, g in truth.items()}
    # A difference that is not finite is the worst.
    name = max(truth, key=lambda n: differences[n] / allowed[n] if differences[n] < float("inf") else float("inf"))
    if not differences[name] <= allowed[name]:
        raise PrivacyConfigError(
            f"the clipping rules do not see the gradient of {name} as torch does (difference {differences[name]:.1e} of "
            f"{float(truth[name].norm()):.1e}): is the parameter used without calling the layer that owns it, is the first "
            "dimension of every layer's input the examples, and does every loss depend on its own example alone?"
        )
