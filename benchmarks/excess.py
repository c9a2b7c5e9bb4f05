"""Where the time of a clipped step goes beyond that of a non-private one, in per cent of the non-private step.

One thread and the processor time of this process, so that other processes disturb little. The parts that clipping adds are
timed function by function, each without what it calls; two reference steps give what they are compared with:

* non-private: forward, backward, weight gradients by autograd;
* bare: forward and backward through the taps with nothing kept or computed; non-private - bare is what autograd spends on
  weight gradients (less the cost of empty taps).

    excess = Gram matrices + small layers + clip factors + taps
             + (written-out gradients + weighted sums - autograd's weight gradients) + rest

`rest` is what the same forward and backward cost more than in the bare step because tensors are kept: page faults of memory
that is not used again at once, colder caches.
"""

import contextlib
import resource
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from privacy.clipping import clipped_sum, contributions
from privacy.clipping.accumulators import LocalSums
from privacy.clipping.contributions import Dense, OuterProducts, Rows
from privacy.clipping.coverage import claims
from privacy.clipping.norms import NormTally
from privacy.clipping.recorder import Call, Recorder, Task

Step = Callable[[], None]

PARTS: dict[str, list[tuple[Any, str]]] = {
    "gram_matrices": [(OuterProducts, "norm"), (contributions, "inner")],
    "written_out_gradients": [(OuterProducts, "instantiate")],
    "weighted_sums": [
        (OuterProducts, "add_weighted"),
        (Dense, "add_weighted"),
        (Rows, "add_weighted"),
        (LocalSums, "start"),
        (clipped_sum.ClippedSum, "_short_sums"),
    ],
    "small_layers": [
        (Call, "contributions"),
        (Dense, "norm"),
        (Rows, "norm"),
        (NormTally, "add"),
        (NormTally, "safe_norm"),
    ],
    "clip_factors": [(clipped_sum.ClippedSum, "_factors"), (clipped_sum.ClippedSum, "_accumulate")],
    "taps": [(Recorder, "report"), (Recorder, "_tap")],
}
"""The functions of each part."""


class Stopwatch:
    """Processor time by part, each without the parts that it calls."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._running = ["model"]
        self._since = time.process_time()

    def switch(self) -> None:
        now = time.process_time()
        self.seconds[self._running[-1]] += now - self._since
        self._since = now

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        self.switch()
        self._running.append(name)
        try:
            yield
        finally:
            self.switch()
            self._running.pop()


@contextlib.contextmanager
def timed_parts() -> Iterator[Stopwatch]:
    """Puts a stopwatch around the functions of `PARTS`."""
    watch = Stopwatch()
    originals = [
        (home, name, getattr(home, name), part) for part, functions in PARTS.items() for home, name in functions
    ]

    def timed(function: Callable[..., Any], part: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with watch.part(part):
                result = function(*args, **kwargs)
                return list(result) if isinstance(result, Iterator) else result  # a generator's work is inside, too

        return call

    for home, name, function, part in originals:
        setattr(home, name, timed(function, part))
    try:
        yield watch
        watch.switch()
    finally:
        for home, name, function, _ in originals:
            setattr(home, name, function)


def bare_step(model: nn.Module, inputs: Mapping[str, Tensor], task: Task | None = None) -> Step:
    """Forward and activation backward of the task (the model itself by default) with empty taps."""
    shapes = {name: p.shape for name, p in model.named_parameters()}
    taps = Recorder(claims(model, shapes))
    batch_size = len(next(iter(inputs.values())))

    def step() -> None:
        with taps.forward(task or model, inputs, batch_size) as passed:
            passed.backward(lambda call: None)

    return step


def explain(non_private: Step, bare: Step, clipped: Step, rounds: int) -> dict[str, Any]:
    """Medians over interleaved rounds, in per cent of the non-private step; call it with one thread."""
    columns: dict[str, list[float]] = {}
    for round_number in range(rounds + 1):
        row = round_of(non_private, bare, clipped)
        if round_number > 0:
            for name, value in row.items():
                columns.setdefault(name, []).append(value)
    return {name: round(statistics.median(values), 2) for name, values in columns.items()}


def round_of(non_private: Step, bare: Step, clipped: Step) -> dict[str, float]:
    """One row of `explain`."""
    whole, of_bare = _processor_time(non_private)[0], _processor_time(bare)[0]
    with timed_parts() as watch:
        total, system = _processor_time(clipped)
    part = watch.seconds
    gradients = part["written_out_gradients"] + part["weighted_sums"]
    by_autograd = whole - of_bare
    shares = {
        "excess": total - whole,
        **{name: part[name] for name in ("gram_matrices", "small_layers", "clip_factors", "taps")},
        "gradients_minus_autograd": gradients - by_autograd,
        "rest": part["model"] - of_bare,
        "of_which_kernel_time": system,
    }
    return {"non_private_seconds": whole, **{name: 100 * value / whole for name, value in shares.items()}}


def _processor_time(step: Step) -> tuple[float, float]:
    """Seconds of this process, and those of them in the operating system's kernel (page faults)."""
    started, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_stime
    step()
    return time.process_time() - started, resource.getrusage(resource.RUSAGE_SELF).ru_stime - before
