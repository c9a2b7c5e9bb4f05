"""Learning rate as a pure function of the step; step 1 already moves."""

import math

from trainer.config.optimizer import ScheduleSection


def learning_rate(step: int, num_steps: int, peak_lr: float, schedule: ScheduleSection) -> float:
    """Rate of step 1, 2, ..., num_steps: linear warm-up that reaches the peak at `warmup_steps`, then cosine or constant.

    `cosine_from_start` is ViP's released schedule: the lesser of warm-up and a cosine that began with step 1.
    """
    if schedule.decay == "cosine_from_start":
        warmed = min(step / schedule.warmup_steps, 1.0) if schedule.warmup_steps else 1.0
        progress = min((step - 1) / (schedule.decay_steps or num_steps), 1.0)
        return peak_lr * min(warmed, fallen(progress, schedule.final_fraction))
    if step <= schedule.warmup_steps:
        return peak_lr * step / schedule.warmup_steps
    if schedule.decay == "constant":
        return peak_lr
    end = schedule.decay_steps or num_steps
    # One past the end, so that the last step still moves.
    progress = min((step - schedule.warmup_steps) / (end + 1 - schedule.warmup_steps), 1.0)
    return peak_lr * fallen(progress, schedule.final_fraction)


def fallen(progress: float, final: float) -> float:
    """What a cosine leaves of the peak after this share of its way from 1 to `final`."""
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress))
