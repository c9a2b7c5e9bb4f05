"""Mechanism and sampling of the privacy card: what was done to the data, told from the ledger alone.

Two mechanisms write ledgers: DP-SGD, and the private heads of `evaluation/private_head/`, whose `open` record has a `head`.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from privacy.ledger.records import noise_multiplier_of
from privacy.plan import PrivacyPlan

if TYPE_CHECKING:
    from privacy.card.report import LedgerSnapshot


def mechanism(snapshot: LedgerSnapshot, plan: PrivacyPlan) -> dict[str, Any]:
    head = snapshot.state.opened.get("head")
    return {
        "name": _DP_SGD if head is None else f"{head['method']}: a linear head from noised statistics of features",
        "head": head,
        "max_grad_norm": plan.max_grad_norm if head is None else None,
        "adaptive_clipping": _adaptive(snapshot, plan),
        "sensitivity_slack": plan.sensitivity_slack,
        "noise_multiplier": plan.noise_multiplier,
        "noise_multiplier_accounted": plan.effective_noise_multiplier,
        "noise_source": plan.noise_source,
        "expected_batch_size": plan.expected_batch_size,
        "releases": _releases(snapshot),
        "statement": _mechanism_statement(plan) if head is None else _HEAD,
    }


_DP_SGD = "DP-SGD: per-example clipping, Gaussian noise (Abadi et al. 2016); any optimizer is post-processing"
_HEAD = (
    "Features, or the gradients of a linear head on them, are clipped; each statistic listed below is a sum over all examples, "
    "noised once with independent Gaussian noise on every entry. Together the statistics are one Gaussian mechanism with "
    "1 / sigma^2 = the sum of (sensitivity / standard deviation)^2 (Dong, Roth and Su 2019, corollary 3.3); the weights follow "
    "from the noised statistics alone. Rounding is charged as r."
)


def _mechanism_statement(plan: PrivacyPlan) -> str:
    if not plan.enabled:
        return "Privacy was disabled: no clipping and no noise."
    return _MECHANISM if plan.adaptive_clipping is None else f"{_MECHANISM} {_ADAPTIVE}"


def _adaptive(snapshot: LedgerSnapshot, plan: PrivacyPlan) -> dict[str, Any] | None:
    """Constants of adaptive clipping and how far C has moved; None where it is constant."""
    if plan.adaptive_clipping is None:
        return None
    bounds = [intent["releases"][0]["sensitivity"] for intent in snapshot.of_type("intent")]
    return {
        **asdict(plan.adaptive_clipping),
        "gradient_noise_multiplier": plan.adaptive_clipping.gradient_noise_multiplier(plan.noise_multiplier),
        "smallest_bound": min(bounds, default=None),
        "largest_bound": max(bounds, default=None),
        "last_bound": bounds[-1] if bounds else None,
    }


_MECHANISM = (
    "Each example's gradient over all trainable parameters is clipped to the L2 norm C (flat clipping); the clipped "
    "gradients of the batch are summed, Gaussian noise of standard deviation sigma times the sensitivity is added "
    "once, and the sum is divided by the public expected batch size. Rounding may let one example contribute up to "
    "C (1 + r), so the accountant is charged with sigma / (1 + r)."
)
_ADAPTIVE = (
    "C follows a quantile of the gradient norms (Andrew et al. 2021, arXiv 1905.03871): each step also releases, with noise, "
    "how many of its examples were left unclipped. Sum and count together are one Gaussian mechanism of noise multiplier "
    "sigma, so the sum alone has a little more noise. C itself follows from noised counts and may be published."
)


def _releases(snapshot: LedgerSnapshot) -> list[dict[str, Any]]:
    """What the intents say they release, by name: how often, and the least noise of all times."""
    found: dict[str, dict[str, Any]] = {}
    for intent in snapshot.of_type("intent"):
        for release in intent["releases"]:
            sigma = noise_multiplier_of([release])
            entry = {"name": release["name"], "count": 0, "smallest_noise_multiplier": sigma, "largest_sensitivity": 0}
            entry = found.setdefault(release["name"], entry)
            entry["count"] += 1
            entry["smallest_noise_multiplier"] = min(entry["smallest_noise_multiplier"], sigma)
            entry["largest_sensitivity"] = max(entry["largest_sensitivity"], release["sensitivity"])
    return list(found.values())


def sampling(snapshot: LedgerSnapshot, plan: PrivacyPlan) -> dict[str, Any]:
    opened = snapshot.state.opened
    is_head = "head" in opened
    return {
        "scheme": "full batch" if is_head else plan.sampling,
        "sample_rate": plan.sample_rate,
        "expected_batch_size": plan.expected_batch_size,
        "cap": plan.cap,
        "matches_accounting": plan.formal_guarantee,
        "key_commitment_sha256": opened["key_commitment"],
        "data_hmac_sha256": opened.get("data_hmac"),
        "statement": _FULL_BATCH if is_head else _sampling_statement(plan),
    }


_FULL_BATCH = "Every example takes part, in one release: nothing is sampled, and nothing is claimed from sampling."


def _sampling_statement(plan: PrivacyPlan) -> str:
    if plan.sampling == "poisson":
        return _SAMPLING if plan.formal_guarantee else f"As planned, unless a reason above says otherwise. {_SAMPLING}"
    if plan.shuffle_as_gaussian:
        return (
            "Shuffled epochs: every example takes part in one step of each epoch. The claim uses no amplification by "
            "sampling at all. A retry repeats its batch and is charged as one more release."
        )
    return f"The scheme is {plan.sampling!r}, not Poisson."


_SAMPLING = (
    "True Poisson sampling: in every attempt each example takes part independently with probability q, decided by "
    "AES-256-CTR coins under a secret key, a fresh nonce per start of the program and the attempt's number, so that no "
    "retry repeats a sample. This is the scheme that the accountant assumes: nothing is shuffled. Batches above the "
    "cap, where there is one, are cut down uniformly, and the claim is charged for it. The ledger committed to the "
    "key before its first use."
)
