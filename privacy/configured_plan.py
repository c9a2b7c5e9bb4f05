"""Does the plan that a ledger states fit the configuration in the same folder? A ledger written anew could state another one."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from .accounting.accountants import epsilon
from .accounting.calibration import MIN_NOISE_MULTIPLIER
from .plan import PrivacyPlan


def contradiction(recipe: Mapping[str, Any], plan: PrivacyPlan) -> str | None:
    """Why config.toml asks for another plan than `plan`, a ledger's; None where nothing speaks against it.

    Args:
        recipe: the content of config.toml, empty where there is none. What it does not state is not compared, nor is the
            number of examples, which it does not know.
    """
    privacy = dict(recipe.get("privacy", {}))
    if privacy.get("enabled", plan.enabled) != plan.enabled:
        return f"config.toml has privacy.enabled = {privacy['enabled']}, and the ledger states {plan.enabled}"
    if not plan.enabled:  # its noise and its target are not those that the recipe may name
        return None
    if privacy.get("simulation") and plan.formal_guarantee:
        return "config.toml has privacy.simulation = true, and the ledger states a guarantee"
    adaptive = plan.adaptive_clipping
    stated = asdict(plan)
    if adaptive is not None:
        stated |= asdict(adaptive) | {"clipping_function": "adaptive"}
    asked = {f"privacy.{name}": value for name, value in privacy.items() if name in stated}
    asked |= {f"train.{name}": value for name, value in recipe.get("train", {}).items() if name == "num_steps"}
    for name, value in asked.items():
        recorded = stated[name.split(".")[1]]
        if recorded != value:
            return f"config.toml has {name} = {value}, and the ledger states {recorded}"
    sigma, target = plan.noise_multiplier, plan.target_epsilon
    if "target_epsilon" not in privacy or target is None or not plan.formal_guarantee or sigma <= MIN_NOISE_MULTIPLIER:
        return None
    # Calibrated noise against its target, with a margin of 5 % for other versions of the accountant. Without the cap it takes
    # a tenth of the time, and the cap changes the last digits.
    most = plan.release_group(plan.max_intents).without_cap()
    less = replace(most, noise_multiplier=0.95 * most.noise_multiplier)
    if epsilon([less], plan.accounted_delta) > target:
        return None
    return f"config.toml asks for epsilon {target:g}, and the ledger states noise of {sigma:g}, more than that takes"
