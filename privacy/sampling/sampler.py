"""Builds the sampler of a plan."""

from ..plan.numbers import PrivacyPlan
from .poisson import PoissonSampler, Sampler
from .shuffle import ShuffleSampler


def sampler_of(plan: PrivacyPlan) -> Sampler:
    """Returns the sampler whose rate and cap the plan is accounted with."""
    if plan.sampling == "shuffle":
        return ShuffleSampler(plan.num_examples, plan.expected_batch_size)
    return PoissonSampler(plan.num_examples, plan.sampling_threshold, plan.cap)
