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
* In further batches, rows of padding hold what no data set should: NaN, infinity and numbers ten thousand times too large. Any
  arithmetic that reads another row carries them over, at any strength, and the examples beside them must stay what they were.
* In a last batch many rows hold one example and another example is cut to half of its tokens, for limits that count examples
  and for work that is fitted to the longest.

The check must not pass for lack of a gradient. Examples must differ, weights near zero (new heads, adapters, layer scales)
are replaced by random ones meanwhile, and a parameter without any gradient is refused by name.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from privacy.clipping.checked import note_passed, structure
from privacy.clipping.clipped_sum import ClippedSum
from privacy.clipping.functions import ClippingFunction
from privacy.clipping.recorder import plain_words
from privacy.clipping.untouched import as_it_was, no_chance, nothing_is_small, on_copies
from privacy.errors import PrivacyConfigError

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
LARGE = 1e4
"""An example's floating inputs times this are large."""


def check_against_autograd(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    task: Callable[..., Tensor] | None = None,
    *,
    unreached: Collection[str] = (),
) -> None:
    """Compares, on an unsharded model and made-up inputs, per-example gradients with torch's own; `ClippedSum` asks for it.

    What the made-up inputs do not reach is not checked, such as a branch that depends on values, or a limit that more examples
    than MOST_EXAMPLES would reach: where the model's work depends on the number or the lengths of examples, make up as many, and
    of as many lengths, as a micro-batch has. For the time of the check parameters and buffers are copies, in float64 where
    the model can compute in it: 8 bytes more for each.

    Args:
        model: in the mode and with the parameters frozen as in training; its `.grad` fields are left empty.
        inputs: two or more examples that differ, made up, never private data. Names as in training, tensors with B rows.
        task: `task(**inputs)` returns loss_B, where loss i depends on example i alone; the model itself by default.
        unreached: parameters that are trained although the loss never reaches them; all others must get a gradient.

    Raises:
        PrivacyConfigError: naming the parameter whose gradient differs most, or that no example reaches; or the loss of an
            example depends on the others or on chance; or the forward changes a buffer; or the inputs or dtypes do not do.
    """
    task = task or model
    count = _require_different(inputs)
    before = structure(model, task)
    with nothing_is_small(model):
        for dtype in (torch.float64, None):
            made_up = {name: _in(dtype, x[:count]) for name, x in inputs.items()}
            with as_it_was(model):
                with on_copies(model, dtype):
                    precision = _precision(model, task, made_up, dtype)
                    if precision is not None:
                        _check(model, task, made_up, precision, unreached)
                after = structure(model, task)
            if precision is not None:
                break
    note_passed(model, task, inputs, before, after)


def _check(
    model: nn.Module, task: Callable[..., Tensor], inputs: Inputs, precision: torch.dtype, unreached: Collection[str]
) -> None:
    rows = range(len(next(iter(inputs.values()))))
    share_of = [1 / (1 + row) for row in rows]  # what example i's gradient counts for, in all batches
    loss_N, expected = _truth(model, task, inputs, share_of)

    def compare(chosen: list[int], weights: list[float], padding: Inputs | None = None) -> dict[str, Tensor]:
        batch = {name: x[chosen] for name, x in inputs.items()}
        loss_B, sums = _clipped(model, task, batch, weights, padding)
        _compare_losses(loss_N[chosen], loss_B, TOLERANCE[precision])
        _require_gradients([name for name in sums if name not in unreached], expected)
        _compare(expected, sums, TOLERANCE[precision])
        return sums

    # In another order, and one more row: the first example's share is split between two copies.
    compare([*reversed(rows), 0], [*share_of[:0:-1], 0.7 * share_of[0], 0.3 * share_of[0]])
    seen: list[dict[str, Tensor]] = []
    for number, padding in enumerate(_hostile(inputs)):
        try:
            with _tables_give_nan(model, 2, 2 + len(rows)) if number == 0 else nullcontext():
                seen.append(compare(list(rows), share_of, padding))
        except PrivacyConfigError:
            raise
        except Exception:  # the model refuses such values itself; the check is about those that it takes
            continue
    in_any_order = precision != torch.float64 and next(model.parameters()).device.type != "cpu"
    for sums in seen[1:]:
        _compare(seen[0], sums, ATOMICS_TOLERANCE if in_any_order else NEIGHBOURS_TOLERANCE)
    _check_crowd(task, inputs, loss_N, TOLERANCE[precision])


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
            task(**{name: x[:1] for name, x in inputs.items()})
    except Exception:  # kernels without float64, dtypes that the model wrote down: anything may be raised
        return None
    return torch.float32 if watch.seen else torch.float64


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
    model: nn.Module, task: Callable[..., Tensor], inputs: Mapping[str, Tensor], share_of: Sequence[float]
) -> tuple[Tensor, dict[str, Tensor]]:
    """(N,) losses of examples that are alone, and sum_i share_i grad_i by torch's backward, where there is a gradient."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    losses: list[Tensor] = []
    total: dict[str, Tensor] = {}
    for i, share in enumerate(share_of):
        with torch.enable_grad(), no_chance(), plain_words():
            loss_B = task(**{name: x[i : i + 1].clone() for name, x in inputs.items()})
        if loss_B.shape != (1,) or not bool(loss_B.isfinite()):
            raise PrivacyConfigError(
                f"the task must return one finite loss per example: for one made-up example alone it returned {loss_B.tolist()}"
            )
        losses.append(loss_B.detach())
        if not loss_B.requires_grad:
            continue
        with plain_words():
            gradients = torch.autograd.grad(loss_B.sum(), list(parameters.values()), allow_unused=True)
        for name, g in zip(parameters, gradients, strict=True):
            if g is not None and name in total:
                total[name].add_(g, alpha=share)
            elif g is not None:
                total[name] = share * g
    return torch.cat(losses), total


@dataclass(frozen=True)
class _ByPlace(ClippingFunction):
    """Weights that are given, whatever the norms."""

    weights: tuple[float, ...] = ()

    def weight(self, norm_B: Tensor, bound: float) -> Tensor:
        return norm_B.new_tensor(self.weights)


def _clipped(
    model: nn.Module,
    task: Callable[..., Tensor],
    inputs: Mapping[str, Tensor],
    weights: Sequence[float],
    padding: Mapping[str, Tensor] | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """loss_B of examples that are together, behind rows of padding, and sum_b weight_b grad_b by the clipping rules."""
    seen: list[Tensor] = []
    padding = padding or {name: x[:0] for name, x in inputs.items()}
    inputs = {name: torch.cat([padding[name], x]) for name, x in inputs.items()}
    size = len(next(iter(inputs.values())))
    num_padding = size - len(weights)

    def watched(**inputs: Tensor) -> Tensor:
        with no_chance():
            loss_B = task(**inputs)
        seen.append(loss_B.detach())
        return loss_B

    def by_place(names: list[str], bound: float) -> ClippingFunction:
        return _ByPlace(dict.fromkeys(names, 0), (bound,), weights=(*[0.0] * num_padding, *weights))

    clipped = ClippedSum(model, 1.0, function=by_place, self_check=False)
    try:
        device = next(iter(inputs.values())).device
        clipped.add_micro_batch(watched, inputs, torch.arange(size, device=device) < num_padding)
        return seen[0][num_padding:], dict(clipped.sums())
    finally:
        clipped.detach()


def _hostile(inputs: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Twice two rows of padding that arithmetic over the batch would carry to others; what is not floating is of other rows."""
    for first, last, rows in ((torch.nan, torch.inf, [0, -1]), (-LARGE, LARGE, [-1, -1])):
        yield {
            name: torch.cat([x[:1] * first, x[-1:] * last]) if x.is_floating_point() else x[rows]
            for name, x in inputs.items()
        }


@contextmanager
def _tables_give_nan(model: nn.Module, num_rows: int, size: int) -> Iterator[None]:
    """Trained tables return NaN for the first rows of a batch: inputs that are ids cannot be made hostile themselves."""

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        if not isinstance(output, Tensor) or output.dim() == 0 or output.shape[0] != size:
            return None
        is_hostile_B = torch.arange(size, device=output.device) < num_rows
        return torch.where(is_hostile_B.view(-1, *[1] * (output.dim() - 1)), torch.nan, output)

    tables = [m for m in model.modules() if isinstance(m, nn.Embedding) and m.weight.requires_grad]
    handles = [table.register_forward_hook(hook) for table in tables]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _check_crowd(task: Callable[..., Tensor], inputs: Mapping[str, Tensor], loss_N: Tensor, tolerance: float) -> None:
    """The losses beside many rows of one example, and of another cut to half: they are all that of the example alone."""
    crowd = {name: x[:1].expand(MOST_EXAMPLES, *x.shape[1:]) for name, x in inputs.items()}
    short = {name: _shortened(x[-1:]) for name, x in inputs.items()}
    with torch.no_grad(), no_chance():
        try:
            short_1 = task(**{name: x.clone() for name, x in short.items()})
        except Exception:  # as for hostile rows
            short, short_1 = {name: x[:0] for name, x in inputs.items()}, loss_N[:0]
        together_B = task(**{name: torch.cat([crowd[name], x, short[name]]) for name, x in inputs.items()})
    alone_B = torch.cat([loss_N[:1].expand(MOST_EXAMPLES), loss_N, short_1])
    known_B = alone_B.isfinite()
    _compare_losses(alone_B[known_B], together_B[known_B], tolerance)


def _shortened(x: Tensor) -> Tensor:
    """The second half of dimension 1 (tokens, as a rule) is zero."""
    if x.dim() < 2:
        return x
    return torch.where(
        (torch.arange(x.shape[1], device=x.device) < -(-x.shape[1] // 2)).view(-1, *[1] * (x.dim() - 2)), x, 0
    )


def _compare_losses(alone_B: Tensor, together_B: Tensor, tolerance: float) -> None:
    if not torch.allclose(alone_B, together_B, rtol=tolerance, atol=tolerance * float(alone_B.abs().max())):
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


def _compare(expected: Mapping[str, Tensor], sums: Mapping[str, Tensor], tolerance: float) -> None:
    truth = {name: expected.get(name, torch.zeros_like(total)) for name, total in sums.items()}
    scale = max(float(g.norm()) for g in truth.values())
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
