"""Sigma, cap and epsilon of every distinct private plan in recipes/ and studies/, by PLD, PRV, RDP, an RDP filter and verify.py.

Each PLD claim is composed a second time, with 64 bits in place of 53, and what comments say of a plan is computed again.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from dp_accounting.pld.pld_pmf import DensePLDPmf

from privacy import verify
from privacy.accounting.accountants import (
    FINE_INTERVAL,
    ReleaseGroup,
    epsilon_rdp,
    filter_order,
    filtered_epsilon,
    one_step_distribution,
)
from privacy.plan.numbers import make_plan
from privacy.plan.request import PlanRequest
from tests.rehearsal.part import ROOT, Part, lap, say
from trainer.config.recipe import load_config
from trainer.planner.privacy import summarise
from trainer.studies.grid import load_study, plan_points

NUM_EXAMPLES = {"quickstart": 10_000, "own_pictures": 10_000, "tiny": 3000}
"""Of recipes that leave it to their shards: those of data/fashion, as many as the recipe is for, and those of data/demo."""
ROUNDING = 2.0**-53
"""What a composition by FFT can be wrong by in delta, for each release: it raises numbers near 1 to the number of releases."""
MOST_ROUNDINGS = 16
"""Of each release; 2 are seen."""
COMMENT = re.compile(r"epsilon is (\d+\.\d+), without a crash (\d+\.\d+)")


def rehearse(part: Part, plans: Mapping[PlanRequest, Sequence[str]] | None = None) -> None:
    """Accounts for all plans, and then for what comments say of others.

    Raises:
        AssertionError: two accountants contradict each other, verify.py finds another epsilon, or a comment is wrong.
    """
    asked = distinct_plans() if plans is None else plans
    for request, names in asked.items():
        part.stage(
            title(request, names), lambda request=request, names=names: account(request, names)
        )
    for statement in statements() if plans is None else ():
        part.stage(
            f"{statement.file}: {statement.about}", lambda statement=statement: check(statement)
        )
    part.ran(plans=len(asked))


def distinct_plans() -> dict[PlanRequest, list[str]]:
    """Every private plan, whatever its clipping bound, with the recipes and the points of studies that have it."""
    recipes = [*sorted(ROOT.glob("recipes/*.toml")), *sorted(ROOT.glob("studies/recipes/*.toml"))]
    configs = {path.relative_to(ROOT).as_posix(): load_config(path) for path in recipes}
    for path in sorted(ROOT.glob("studies/*.toml")):
        name = path.relative_to(ROOT).as_posix()
        configs |= {
            f"{name} {point.name}": point.config
            for point in plan_points(load_study(path), name, ROOT)
        }
    plans: dict[PlanRequest, list[str]] = {}
    for name, config in configs.items():
        if config.privacy.enabled and not config.privacy.simulation:
            count = config.data.num_examples or NUM_EXAMPLES[config.name]
            request = config.privacy.request(config.train.num_steps, count)
            plans.setdefault(replace(request, max_grad_norm=1.0), []).append(name)
    return plans


def title(request: PlanRequest, names: Sequence[str]) -> str:
    """The name of a plan's stage: the first that has it, and its numbers."""
    noise = (
        f"epsilon {request.target_epsilon}"
        if request.target_epsilon
        else f"sigma {request.noise_multiplier}"
    )
    sizes = f"n {request.num_examples:,}, B {request.expected_batch_size:,}, T {request.num_steps:,}, {noise}"
    return f"{names[0]}{f' and {len(names) - 1} more' if names[1:] else ''}: {sizes}"


def account(request: PlanRequest, names: Sequence[str]) -> dict[str, Any]:
    """All numbers of a plan, after a look that they agree as point 10 of the guarantee says."""
    measured = dict[str, Any]()
    with lap(measured, "plan"):
        plan = make_plan(request)
    with lap(measured, "library"):
        library = summarise(plan, say, extras=False)
    planned, most, rdp = (library[f"epsilon_{name}"] for name in ("pld", "with_reserve", "rdp"))
    lower, estimate, upper = (library[f"epsilon_prv{end}"] for end in ("_lower", "", "_upper"))
    if (
        lower is not None
    ):  # the quadrature of that accountant fails for some plans, which the planner says
        assert lower <= estimate <= upper and lower <= planned <= 1.01 * upper, (
            lower,
            estimate,
            upper,
            planned,
        )
    assert planned < most and planned <= rdp * (1 + 1e-3) + 1e-3, (planned, most, rdp)
    assert plan.formal_guarantee and plan.cap is not None
    if plan.target_epsilon is not None:
        assert plan.target_epsilon - 1e-3 <= most <= plan.target_epsilon, (
            plan.target_epsilon,
            most,
        )

    with lap(measured, "verify"):
        read = verify.read_plan(json.loads(json.dumps(plan.frozen_fields())), head=False)
        left = read["target_delta"] - read.noise_tail()
        verified = [
            verify.epsilon([read.releases(count)], left)
            for count in (plan.num_steps, plan.max_intents)
        ]
    assert all(
        math.isclose(a, b, rel_tol=verify.ROUNDING)
        for a, b in zip(verified, (planned, most), strict=True)
    ), verified
    assert math.isclose(read.noise_tail(), plan.noise_tail_delta, rel_tol=verify.ROUNDING)
    assert plan.expected_batch_size <= plan.cap <= read["usual_cap"]

    releases, delta = plan.release_group(plan.max_intents), plan.accounted_delta
    with lap(measured, "filter"):  # of a shared ledger that holds this run alone
        filtered = filtered_epsilon([releases], delta, filter_order(releases, most, delta), most)
    assert most <= filtered * (1 + 1e-3) + 1e-3, (most, filtered)
    with lap(measured, "table"):
        table, half = plan.epsilon_table(), plan.num_steps // 2
        assert table is not None
        known = [table.epsilon(count) for count in (half, plan.num_steps, plan.max_intents)]
        exact = plan.epsilon_after(half)
    assert exact is not None and exact <= known[0] <= planned and known[1:] == [planned, most], (
        exact,
        known,
    )
    with lap(measured, "second_composition"):
        composed, reached = compose_again(releases, most, delta)
    roundings = (reached - delta) / (plan.max_intents * ROUNDING)
    assert roundings <= MOST_ROUNDINGS, f"delta is {reached:.6g} at the claim for {delta:.6g}"

    comments = [
        COMMENT.findall((ROOT / name).read_text().replace("\n# ", " "))
        for name in names
        if " " not in name
    ]
    for reserve_said, planned_said in (pair for pairs in comments for pair in pairs):
        assert is_as_said(reserve_said, most, releases, delta) and is_as_said(
            planned_said, planned, releases, delta
        )
    bracket = "fails here" if lower is None else f"{lower:.4f} to {upper:.4f}"
    seconds = {name: value for name, value in measured.items() if "processor" in name}
    return {
        "sigma": plan.noise_multiplier,
        "cap": plan.cap,
        "reserve": plan.reserved_attempts,
        "delta": plan.target_delta,
        "planned": planned,
        "with_reserve": most,
        "rdp": rdp,
        "prv": bracket,
        "filter": filtered
        if math.isfinite(filtered)
        else "none: batches above the cap cost more than delta",
        "composed_again": composed,
        "claim_less_that": most - composed,
        "roundings": roundings,
        "comments": sum(map(len, comments)),
    } | seconds


def compose_again(releases: ReleaseGroup, claim: float, delta: float) -> tuple[float, float]:
    """Composes the same distribution of one release in long doubles, whose rounding is 2,048 times finer.

    Returns:
        Epsilon at `delta`, and delta at the claimed epsilon.
    """
    assert np.finfo(np.longdouble).nmant >= 63, "long doubles of this machine are doubles"
    one = one_step_distribution(releases.times(1), FINE_INTERVAL)
    results = []
    for pmf in (one._pmf_remove, one._pmf_add):
        dense = pmf.to_dense_pmf()
        probabilities = dense._probs.astype(np.longdouble)
        fine = DensePLDPmf(
            dense._discretization, dense._lower_loss, probabilities, dense._infinity_mass, True
        )
        whole = fine.self_compose(releases.count)
        results.append(
            (float(whole.get_epsilon_for_delta(delta)), float(whole.get_delta_for_epsilon(claim)))
        )
    epsilons, deltas = zip(*results, strict=True)
    return max(epsilons), max(deltas)


def is_as_said(text: str, value: float | None, releases: ReleaseGroup, delta: float) -> bool:
    """Whether a number is the value rounded up to as many digits, where rounding in the composition leaves it so many."""
    assert value is not None
    digit = 10.0 ** -len(text.partition(".")[2])
    return abs(float(text) - value) <= digit + releases.count * ROUNDING / delta


@dataclass(frozen=True)
class Statement:
    """What a page or a comment says of a plan that no recipe has.

    Attributes:
        about: names the stage.
        words: stand in the file, its lines joined.
        request: the plan that is meant.
        numbers: quantity ("sigma", "planned", "with_reserve", "rdp" without slack) -> the number that the words state.
    """

    file: Path
    about: str
    words: str
    request: PlanRequest
    numbers: Mapping[str, str]


def statements() -> list[Statement]:
    """What comments and recipes/README.md say besides the recipes' own plans."""
    base, vip = (load_config(ROOT / f"recipes/{name}_base.toml") for name in ("dpcap", "vip"))
    captions, pictures = (
        config.privacy.request(config.train.num_steps, config.data.num_examples or 0)
        for config in (base, vip)
    )
    to_eight = replace(captions, noise_multiplier=None, target_epsilon=8.0)
    return [
        Statement(
            Path("recipes/dpcap_base.toml"),
            "the published sigma",
            "0.728 was calibrated by RDP (8.05); by PLD it is 7.3586, with the reserve 7.3887",
            replace(captions, noise_multiplier=0.728),
            {"rdp": "8.05", "planned": "7.3586", "with_reserve": "7.3887"},
        ),
        Statement(
            Path("recipes/dpcap_base.toml"),
            "sigma at delta 1/(2n)",
            "1/(2n), needs noise_multiplier = 0.715244",
            replace(to_eight, target_delta=None),
            {"sigma": "0.715244"},
        ),
        Statement(
            Path("recipes/README.md"),
            "sigma without the reserve",
            "reserve 58 attempts; without the reserve sigma is 0.7078",
            replace(to_eight, reserved_attempts=0),
            {"sigma": "0.7078"},
        ),
        Statement(
            Path("recipes/dpcap_base_eps2.toml"),
            "the release's run at epsilon 2",
            "1.993 by RDP, its calibration; by PLD 1.777, or 1.786 with the cap and a reserve of 29",
            replace(captions, noise_multiplier=1.18, num_steps=2854, sensitivity_slack=0.0),
            {"rdp": "1.993", "planned": "1.777", "with_reserve": "1.786"},
        ),
        Statement(
            Path("recipes/vip_base.toml"),
            "steps of the published sigma",
            "epsilon 8 by RDP is reached after 6,026",
            replace(pictures, noise_multiplier=0.48, num_steps=6026),
            {"rdp": "8.0000"},
        ),
    ]


def check(statement: Statement) -> dict[str, Any]:
    """Computes the numbers of a statement, whose words still stand there."""
    text = (ROOT / statement.file).read_text()
    assert statement.words in text.replace("\n# ", " ").replace("\n", " "), statement.words
    plan = make_plan(statement.request)
    releases, delta = plan.release_group(plan.num_steps), plan.accounted_delta
    values: dict[str, Callable[[], float | None]] = {
        "sigma": lambda: plan.noise_multiplier,
        "planned": lambda: plan.epsilon_planned,
        "with_reserve": lambda: plan.epsilon_with_reserve,
        "rdp": lambda: epsilon_rdp(
            [replace(releases, noise_multiplier=plan.noise_multiplier)], delta
        ),
    }
    measured = {name: values[name]() for name in statement.numbers}
    for name, number in statement.numbers.items():
        assert is_as_said(number, measured[name], releases, delta), (name, number, measured[name])
    return measured
