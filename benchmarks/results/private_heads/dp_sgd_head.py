"""A linear head by DP-SGD, from the parts that the trainer is made of: what the other private heads are compared with.

The trainer's plan calibrates sigma, its sampler draws Poisson batches, its clipper sums, its source gives the noise. No ledger,
because nothing is released of public data; a head on private data is a run (docs/models.md).
"""

import secrets
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from privacy.clipping.clipped_sum import ClippedSum
from privacy.clipping.selfcheck import check_against_autograd
from privacy.noise import SystemNoise, add_noise
from privacy.plan import PrivacyPlan, make_plan
from privacy.plan_request import PlanRequest
from privacy.releases import SENSITIVITY_SLACK
from privacy.sampling.keys import KEY_BYTES, NONCE_BYTES, SamplingKey


@dataclass(frozen=True)
class SgdOptions:
    """Softmax cross-entropy from zero weights; `rate` is per mean gradient, with a momentum on the noised gradients."""

    expected_batch_size: int = 400
    num_steps: int = 60
    max_grad_norm: float = 0.5
    rate: float = 4.0
    momentum: float = 0.8


def sgd_plan(num_examples: int, options: SgdOptions, epsilon: float, delta: float) -> PrivacyPlan:
    """Calibrated by PLD, capped batches and the slack for rounding included, as a run without a reserve."""
    return make_plan(
        PlanRequest(
            num_examples=num_examples,
            expected_batch_size=options.expected_batch_size,
            num_steps=options.num_steps,
            target_epsilon=epsilon,
            target_delta=delta,
            max_grad_norm=options.max_grad_norm,
            sensitivity_slack=SENSITIVITY_SLACK,
            reserved_attempts=0,
        )
    )


def train_sgd_head(
    x_ND: np.ndarray, y_N: np.ndarray, num_classes: int, options: SgdOptions, plan: PrivacyPlan, *, noisy: bool = True
) -> np.ndarray:
    """(L, D) weights after the plan's steps; without noise they are not private."""
    model = nn.Linear(x_ND.shape[1], num_classes, bias=False)
    nn.init.zeros_(model.weight)
    features_ND, labels_N = torch.tensor(x_ND, dtype=torch.float32), torch.tensor(y_N)

    def loss(images_BD: Tensor, labels_B: Tensor) -> Tensor:
        return F.cross_entropy(model(images_BD), labels_B, reduction="none")

    made_up = {"images_BD": torch.randn(2, x_ND.shape[1]), "labels_B": torch.arange(2) % num_classes}
    check_against_autograd(model, made_up, loss)
    clipped = ClippedSum(model, plan.max_grad_norm)
    key, nonce = SamplingKey(secrets.token_bytes(KEY_BYTES)), secrets.token_bytes(NONCE_BYTES)
    velocity_LD = torch.zeros(model.weight.shape, dtype=torch.float64)
    for step in range(1, plan.num_steps + 1):
        clipped.zero_()
        ids = torch.from_numpy(plan.sampler.members(plan.sampler.coin_key(key, nonce, step), step))
        if len(ids):
            inputs = {"images_BD": features_ND[ids], "labels_B": labels_N[ids]}
            clipped.add_micro_batch(loss, inputs, torch.zeros(len(ids), dtype=torch.bool))
        ((_, sum_LD),) = clipped.sums()
        noised_LD = sum_LD.double()
        add_noise(noised_LD, plan.noise_multiplier * clipped.sensitivity if noisy else 0.0, SystemNoise())
        velocity_LD = options.momentum * velocity_LD + noised_LD / plan.expected_batch_size
        with torch.no_grad():
            model.weight -= options.rate * velocity_LD
    clipped.detach()
    return model.weight.detach().double().numpy()
