"""What a sandbox run leaves for the audit of the mechanism: plain arrays, in one fixed order of coordinates.

Shapes: T noisy steps, S silent steps (the same code with a noise source that returns zeros), D coordinates of all trainable
parameters, N examples, every one of them a canary.
"""

import itertools
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
NO_CANARY = -1


@dataclass(frozen=True)
class SandboxPlan:
    """What the audited run states about its mechanism, and the sandbox's own sampling.

    Attributes:
        canary_norm: what one of the many single-coordinate canaries contributes after clipping: C with flat clipping.
        smallest_norm: the least that any honest canary contributes.
        draw_spacing: distance of neighbouring values of noise in standard deviations: of integers, in certified arithmetic; 0
            for doubles.
        coefficients: c of correlated noise; 1 alone where the noise of steps is independent.
    """

    noise_multiplier: float
    max_grad_norm: float
    sensitivity_slack: float
    target_delta: float
    num_examples: int
    expected_batch_size: int
    sample_rate: float
    cap: int | None
    rows_per_rank: int
    canary_norm: float
    smallest_norm: float
    draw_spacing: float = 0.0
    coefficients: tuple[float, ...] = (1.0,)

    @property
    def bands(self) -> int:
        """b, the number of groups of examples that take turns, and of steps that share noise."""
        return len(self.coefficients)

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noised sum, per coordinate."""
        return self.noise_multiplier * self.max_grad_norm


@dataclass(frozen=True)
class SandboxCounts:
    """The second release of adaptive clipping, attempt by attempt (S + T).

    Attributes:
        std: sigma_b, as the audited run states it.
        released: the noised centred counts.
        draws: what the source drew for them; NaN where it was not asked exactly once.
    """

    std: float
    released: Floats
    draws: Floats


@dataclass(frozen=True)
class SandboxEvents:
    """What the sandbox's processes were seen to do, on the machine's monotonic clock.

    Attributes:
        ledger, secret: the bytes of the sandbox's own ledger and sampling key at the end.
        steps: (S + T) the step of each attempt, in the order in which they were made.
        first_release: (S + T) when noise was first drawn, or a sum first left a process, on any rank.
        ledger_durable: (F, 2) when an fsync of the ledger had returned, and the size that it made durable.
        folder_durable: when an fsync of the ledger's folder had returned.
        least_entropy: (S + T) the fewest bytes that any draw of noise took from the system's entropy.
    """

    ledger: bytes
    secret: bytes
    steps: tuple[int, ...]
    first_release: NDArray[np.int64]
    ledger_durable: NDArray[np.int64]
    folder_durable: NDArray[np.int64]
    least_entropy: NDArray[np.int64]


@dataclass(frozen=True)
class SandboxRecord:
    """See the module docstring.

    Attributes:
        parameters: (name, first coordinate, coordinate after the last).
        canary_D: the example whose clipped gradient may touch a coordinate, else NO_CANARY.
        owner_D: the rank that owns it.
        weights: (S + T + 1, D) master weights before the first and after each step; the step rule is w -= released.
        draws: (S + T, D) what the noise source drew for each coordinate (in silent steps too), NaN where it was not asked.
        num_draws: (S + T,) how many numbers it was asked for, over all ranks.
        handed: (S + T, D) fp64, what the optimizer got: noised sums over the public batch size.
        seen: per attempt and rank, the examples that reached the model, in order; those that are not in the data too.
        keys: the same of the secret keys that came with them.
        neighbours: L2 distance of the sums of two neighbouring batches that round as differently as possible.
        present_N: secret coins: whether an example is in the data at all.
        hostile_N: examples with NaN, Inf or enormous gradients, which may contribute anything up to C.
        replica_digests: per step, each rank's digest of its whole replica; None where no rank holds one.
        silent_steps: S.
        retried: (first, second) indices of two attempts at the same step.
        session_starts: index of the first attempt of each session.
        counts: under adaptive clipping.
    """

    plan: SandboxPlan
    world_size: int
    parameters: tuple[tuple[str, int, int], ...]
    canary_D: NDArray[np.int64]
    owner_D: NDArray[np.int64]
    weights: Floats
    draws: Floats
    num_draws: NDArray[np.int64]
    handed: Floats
    seen: tuple[tuple[NDArray[np.int64], ...], ...]
    keys: tuple[tuple[NDArray[np.uint64], ...], ...]
    neighbours: float
    events: SandboxEvents
    present_N: NDArray[np.bool_]
    hostile_N: NDArray[np.bool_]
    silent_steps: int
    retried: tuple[int, int]
    session_starts: tuple[int, ...]
    replica_digests: tuple[tuple[str, ...], ...] | None = None
    facts: dict[str, str | int | float] = field(default_factory=dict)
    counts: SandboxCounts | None = None

    @cached_property
    def members(self) -> tuple[NDArray[np.int64], ...]:
        """Per attempt, the examples that reached the model on any rank, in rising order; one that came twice is there twice."""
        return tuple(np.sort(np.concatenate(ranks)) for ranks in self.seen)

    @cached_property
    def released(self) -> Floats:
        """(S + T, D): the released sums as the weights show them, times the public batch size."""
        return -np.diff(self.weights, axis=0) * self.plan.expected_batch_size

    @property
    def silent(self) -> Floats:
        return self.released[: self.silent_steps]

    @property
    def noisy(self) -> Floats:
        return self.released[self.silent_steps :]

    @cached_property
    def quiet(self) -> NDArray[np.bool_]:
        """Coordinates that no gradient touches: there a noisy step shows noise alone."""
        quiet: NDArray[np.bool_] = self.canary_D == NO_CANARY
        return quiet

    @property
    def segments(self) -> list[slice]:
        """The noisy rows of each session that has some; before them all noise was silent or of another session."""
        starts = [max(start - self.silent_steps, 0) for start in self.session_starts[1:]]
        return [slice(start, stop) for start, stop in itertools.pairwise([*starts, len(self.noisy)])]

    @cached_property
    def noise(self) -> Floats:
        """(T, quiet coordinates) fresh noise, standardised by what the run states: N(0, 1) if it is true."""
        return self.fresh(self.noisy[:, self.quiet]) / self.plan.noise_std

    def fresh(self, rows_TD: Floats) -> Floats:
        """C times noisy rows, segment by segment: row t is sum_k c_k row_{t-k}, the fresh noise where rows are noise alone."""
        total = np.zeros_like(rows_TD)
        for segment in self.segments:
            rows = rows_TD[segment]
            for k, c in enumerate(self.plan.coefficients[: len(rows)]):
                total[segment][k:] += c * rows[: len(rows) - k]
        return total

    def turns(self, columns: NDArray[np.int64], examples: NDArray[np.int64]) -> Floats:
        """(turns, len(columns)): each example's noised contribution in its own turns, in a coordinate that it alone has.

        An example's contribution to row t is in rows t, ..., t + b - 1 of C Y as c_0, ..., c_{b-1} times it, with fresh noise in
        each; the best estimate weighs them by c, and its noise has the standard deviation of fresh noise over the norm of c.
        Turns that a segment's end cuts off are left out, and so are those that not every group has.
        """
        c, b = np.array(self.plan.coefficients), self.plan.bands
        rows, found = self.fresh(self.noisy[:, columns]), [np.zeros((0, len(columns)))]
        for segment in self.segments:
            number = max(0, segment.stop - segment.start - b + 1) // b
            # The first row of an example's group in the segment.
            first = segment.start + (examples - self.silent_steps - segment.start) % b
            at = first + b * np.arange(number)[:, None]
            found.append(sum((c[k] * rows[at + k, np.arange(len(columns))] for k in range(b)), np.float64(0)) / (c @ c))
        return np.concatenate(found)

    @cached_property
    def realised(self) -> Floats:
        """Realised batch sizes, examples that are in the data, per step."""
        return np.array([int(self.present_N[ids].sum()) for ids in self.members], dtype=float)

    @cached_property
    def inclusion(self) -> NDArray[np.bool_]:
        """(S + T, N): chosen by the sampler and in the data."""
        chosen = np.zeros((len(self.members), self.plan.num_examples), dtype=bool)
        for step, ids in enumerate(self.members):
            chosen[step, ids] = True
        return chosen & self.present_N

    def contributions(self) -> Floats:
        """(S, N) L2 norm of what each example added to the silent sums; canaries own disjoint coordinates."""
        owned = ~self.quiet
        norms = np.zeros((self.silent_steps, self.plan.num_examples))
        for step in range(self.silent_steps):
            squares = np.bincount(self.canary_D[owned], self.silent[step, owned] ** 2, minlength=self.plan.num_examples)
            norms[step] = np.sqrt(squares)
        return norms

    @property
    def resolution(self) -> float:
        """Largest error of `released` that storing weights in fp32 can cause."""
        return self._resolution(self.weights)

    @property
    def silent_resolution(self) -> float:
        """The same of `silent`: what a later step does to the weights does not blind the earlier ones."""
        return self._resolution(self.weights[: self.silent_steps + 1])

    def _resolution(self, weights: Floats) -> float:
        return float(np.abs(weights).max()) * 2.0**-23 * self.plan.expected_batch_size
