"""DP-SGD by JAX Privacy 2 as its documentation puts the parts together, in an environment of its own (benchmarks/utility.py).

Poisson sampling by `CyclicPoissonSampling`, batches padded to one shape and `clipped_grad` in micro-batches, noise by
`gaussian_privatizer`, sigma by `calibrate_noise_multiplier` with the PLD accountant, optax's SGD.
"""

import os
import secrets
import sys
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import jax_privacy
import numpy as np
import optax
from jax_privacy import accounting, batch_selection, noise_addition

sys.path.insert(0, str(Path(__file__).resolve().parent))

from job import MICRO_BATCH, Clock, Job, Outcome, peak_mib, serve


def logits(weights: dict[str, Any], x_BCHW: Any) -> Any:
    """The network of `torch_run.network`, with its names."""

    def conv(x: Any, name: str, pad: int) -> Any:
        y = jax.lax.conv_general_dilated(
            x, weights[f"{name}.weight"], (2, 2), [(pad, pad)] * 2, dimension_numbers=("NCHW", "OIHW", "NCHW")
        )
        y = jnp.tanh(y + weights[f"{name}.bias"][:, None, None])
        return jax.lax.reduce_window(y, -jnp.inf, jax.lax.max, (1, 1, 2, 2), (1, 1, 1, 1), "VALID")

    h = conv(conv(x_BCHW, "0", 3), "3", 0).reshape(len(x_BCHW), -1)
    h = jnp.tanh(h @ weights["7.weight"].T + weights["7.bias"])
    return h @ weights["9.weight"].T + weights["9.bias"]


def loss(weights: dict[str, Any], x_BCHW: Any, y_B: Any) -> Any:
    """Mean cross-entropy; `clipped_grad` calls it with one example."""
    return optax.softmax_cross_entropy_with_integer_labels(logits(weights, x_BCHW), y_B).mean()


def calibrate(job: Job) -> float:
    return accounting.calibrate.calibrate_noise_multiplier(
        target_epsilon=job.epsilon,
        accountant=accounting.analysis.DpsgdTrainingAccountant(accounting.accountants.PldAccountantConfig()),
        batch_sizes=job.expected_batch_size,
        num_updates=job.num_steps,
        num_samples=job.num_examples,
        target_delta=job.delta,
        tol=1e-3,
    )


def run(job: Job, clock: Clock) -> Outcome:
    if job.network != "small":
        raise SystemExit(f"the network {job.network} is written in torch alone")
    with np.load(job.data) as held:
        data = {name: held[name] for name in held.files}
    x, y, x_test, y_test = (data.pop(name) for name in ("x", "y", "x_test", "y_test"))
    assert job.noise_multiplier is not None
    weights = {name: jnp.asarray(value) for name, value in data.items()}
    x = np.concatenate([x, np.zeros_like(x[:1])])  # row -1 is padding
    y = np.append(y, 0)
    clipped = jax_privacy.clipped_grad(loss, l2_clip_norm=job.max_grad_norm, batch_argnums=(1, 2))
    key = jax.random.key(secrets.randbits(63))
    noise = noise_addition.gaussian_privatizer(stddev=job.noise_multiplier * clipped.sensitivity(), prng_key=key)
    optimizer = optax.sgd(job.rate, momentum=job.momentum)
    state, noise_state = optimizer.init(weights), noise.init(weights)

    @jax.jit
    def add(total: Any, weights: Any, x_BCHW: Any, y_B: Any, is_padding_B: Any) -> Any:
        return optax.tree.add(total, clipped(weights, x_BCHW, y_B, is_padding_example=is_padding_B))

    @jax.jit
    def update(total: Any, weights: Any, state: Any, noise_state: Any) -> Any:
        noised, noise_state = noise.update(total, noise_state)
        updates, state = optimizer.update(optax.tree.scale(1 / job.expected_batch_size, noised), state, weights)
        return optax.apply_updates(weights, updates), state, noise_state

    zeros = optax.tree.zeros_like(weights)
    nobody = np.full(MICRO_BATCH, -1)
    # Compiled before the clock: what comes out is thrown away.
    update(add(zeros, weights, x[nobody], y[nobody], nobody < 0), weights, state, noise_state)
    sampling = batch_selection.CyclicPoissonSampling(
        sampling_prob=job.expected_batch_size / job.num_examples, iterations=job.num_steps
    )
    clock.begin()
    for ids in sampling.batch_iterator(job.num_examples):
        total = zeros
        for rows in batch_selection.split_and_pad_global_batch(ids, MICRO_BATCH):
            total = add(total, weights, x[rows], y[rows], rows < 0)
        weights, state, noise_state = update(total, weights, state, noise_state)
    jax.block_until_ready(weights)
    seconds = clock.seconds()
    accuracy = float((np.asarray(logits(weights, x_test)).argmax(1) == y_test).mean())
    return Outcome(
        job.system, f"jax_privacy {jax_privacy.__version__}, jax {jax.__version__}", sampling.sampling_prob,
        accuracy, seconds, clock.start_seconds, clock.start_mib, peak_mib(),
    )  # fmt: skip


if __name__ == "__main__":
    serve(calibrate, run)
