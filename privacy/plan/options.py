"""The options of a plan: each is one class that says everything about itself, and all others iterate over `OPTIONS`.

A plan has one option of each kind. The recipe takes the names that stand here, recipe and plan refuse in the words of this file
what does not go together, the ledger freezes the fields that an option adds, and card and planner show its rows and sentences.
Two things are elsewhere: the code that acts on tensors (privacy/clipping), which a plan picks by
the option's name, and privacy/verify.py, which shares nothing with this file and refuses an option that its own table lacks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

from ..errors import PrivacyConfigError
from .lattice import Lattice
from .releases import SENSITIVITY_SLACK


class ChosenNumbers(Protocol):
    """The numbers of a plan that an option follows from, or adds a row about."""

    @property
    def lattice(self) -> Lattice | None: ...

    @property
    def max_batch_size(self) -> int: ...

    @property
    def max_grad_norm(self) -> float: ...

    @property
    def noise_multiplier(self) -> float: ...

    @property
    def had_doubles(self) -> bool: ...


class Option:
    """One choice of one kind; the defaults are those of an option that adds nothing.

    Attributes:
        kind: what it is a choice of: a key of `OPTIONS`.
        name: what recipes and ledgers call it.
        instead: the way out where it does not go with another setting.
        excludes: setting that it does not go with -> why.
        reason: why a run with it has no formal guarantee.
        statement: a sentence of the card's section on the mechanism.
        sampling_statement: one of its section on sampling.
    """

    kind: ClassVar[str]
    name: ClassVar[str]
    instead: ClassVar[str] = ""
    excludes: ClassVar[Mapping[str, str]] = {}
    reason: ClassVar[str | None] = None
    statement: ClassVar[str] = ""
    sampling_statement: ClassVar[str] = ""

    @property
    def setting(self) -> str:
        """How a recipe writes it."""
        return f'{self.kind} = "{self.name}"'

    def frozen(self, plan: ChosenNumbers) -> dict[str, Any]:
        """What it adds to the plan in a ledger's `open` record."""
        return {}

    def rows(self, plan: ChosenNumbers) -> list[tuple[str, str]]:
        """(what, value): what card and planner say of it in their tables."""
        return []


# ---------------------------------------------------------------- Clipping functions


class Clipping(Option):
    """How an example's norm becomes a factor. privacy/clipping/clip_factors.py has its formula, which states its sensitivity.

    Attributes:
        clipped: what the card says is done to an example's gradient.
        normalises: every gradient gets a length of about C; otherwise longer ones are cut to it.
    """

    kind = "clipping_function"
    instead = 'take clipping_function = "flat"'
    clipped: ClassVar[str]
    normalises: ClassVar[bool] = False

    def group_of(self, parameter: str) -> str:
        """The group of parameters that shares a norm with this one: all together unless an option says otherwise."""
        return ""

    def rows(self, plan: ChosenNumbers) -> list[tuple[str, str]]:
        return [("clipping function", self.name)]


class Flat(Clipping):
    name = "flat"
    clipped = "is clipped to the L2 norm C (flat clipping)"


class Automatic(Clipping):
    name = "automatic"
    clipped = (
        "is normalised to an L2 norm below C (automatic clipping, Bu et al. 2023, arXiv 2206.07136)"
    )
    normalises = True


class PerLayer(Clipping):
    name = "per_layer"
    clipped = "is clipped layer by layer, so that the L2 norm of the whole is at most C"

    def group_of(self, parameter: str) -> str:
        return parameter.rpartition(".")[0]


class Grouped(Clipping):
    name = "grouped"
    clipped = "is clipped by groups of parameters, so that the L2 norm of the whole is at most C"

    def group_of(self, parameter: str) -> str:
        return parameter.partition(".")[0]


# ---------------------------------------------------------------- Arithmetic


class Arithmetic(Option):
    """How contributions are added up.

    Attributes:
        slack: r; one example contributes at most C (1 + r), and the accountant gets sigma / (1 + r).
    """

    kind = "arithmetic"
    slack: ClassVar[float]

    def lattice(self, plan: ChosenNumbers) -> Lattice | None:
        """Where contributions, sums and noise lie; None in floating point."""
        return None

    def frozen(self, plan: ChosenNumbers) -> dict[str, Any]:
        return {"lattice_exponent": None if plan.lattice is None else plan.lattice.exponent}

    def rows(self, plan: ChosenNumbers) -> list[tuple[str, str]]:
        lies = (
            ""
            if plan.lattice is None
            else f", multiples of 2^{-plan.lattice.exponent}; no slack for rounding"
        )
        rows = [("arithmetic", f"{self.name}{lies}")]
        if plan.noise_multiplier > 0:
            kind = (
                "made of doubles, as version 0.1 drew it"
                if plan.had_doubles
                else "rounded to whole steps of the sums"
            )
            rows.append(("noise", f"Gaussian, {kind}"))
        return rows


class Floating(Arithmetic):
    name = "floating"
    slack = SENSITIVITY_SLACK
    statement = (
        "Rounding may let one example contribute up to C (1 + r), so the accountant is charged with sigma / (1 + r). That "
        "bound is proved for norms and for everything that is added up in double precision, or term by term in short "
        "sums; for other matrix products over tokens it assumes that the roundings of a kernel do not add up in one "
        "direction, which an adversarial search supports, on CPU kernels and on emulated ones of CUDA. It also assumes "
        "that an example's gradient does not depend on its row. An example that is not drawn leaves all others in rows "
        "of the same distribution."
    )


class Certified(Arithmetic):
    name = "certified"
    slack = 0.0
    instead = 'take arithmetic = "floating"'
    excludes: ClassVar[Mapping[str, str]] = {
        "enabled = false": "it is for runs with noise",
        "noise_multiplier = 0": "it is for runs with noise",
        "clipping_mode": "its sums have no modes, because they write every gradient out: remove clipping_mode",
        "sensitivity_slack above 0": "it rounds nothing up, so that its sensitivity_slack is 0",
        "train.compile = true": "a compiler picks kernels by itself, and it needs the same ones for every example",
    }
    statement = (
        "Arithmetic is certified: each clipped gradient is a vector of whole multiples of a power of two whose norm is "
        "checked exactly, sums are whole numbers, and the noise is a Gaussian rounded to the same multiples, drawn "
        "exactly. That one example's contribution is at most C, with no slack for rounding, and that the accountant's "
        "continuous Gaussian covers what is released, are theorems (docs/certified.md). Assumed is that, at the fixed "
        "shapes of the run, the whole numbers of an example do not depend on its row, its micro-batch or the other "
        "examples; every start searched for counterexamples on made-up inputs before its first step."
    )

    def lattice(self, plan: ChosenNumbers) -> Lattice | None:
        return Lattice.of(plan.max_grad_norm, plan.max_batch_size, plan.noise_multiplier)


# ---------------------------------------------------------------- Sampling


class Sampling(Option):
    """Who is in a step."""

    kind = "sampling"


class Poisson(Sampling):
    name = "poisson"
    sampling_statement = (
        "The sampling is true Poisson sampling: in every attempt each example takes part independently with probability q, "
        "decided by AES-256-CTR coins under a secret key, a fresh nonce per start of the program and the attempt's "
        "number, so that no retry repeats a sample. This is the scheme that the accountant assumes: nothing is shuffled. "
        "Batches above the cap, where there is one, are cut down uniformly, and the claim is charged for it. The ledger "
        "committed to the key before its first use."
    )


class Shuffle(Sampling):
    name = "shuffle"
    instead = "give noise_multiplier"
    excludes: ClassVar[Mapping[str, str]] = {
        "target_epsilon": "shuffled data meet no target_epsilon, because they claim none"
    }
    reason = "sampling is 'shuffle', not Poisson"
    sampling_statement = "The scheme is shuffle, not Poisson."


# ---------------------------------------------------------------- All of them

OPTIONS: dict[str, dict[str, Option]] = {}
"""Kind -> name -> option. An option is one more entry here, and its name in the table of privacy/verify.py."""
for _option in (
    *(Flat(), Automatic(), PerLayer(), Grouped()),
    *(Floating(), Certified()),
    *(Poisson(), Shuffle()),
):
    OPTIONS.setdefault(_option.kind, {})[_option.name] = _option

OTHER_EXCLUSIONS = (
    (
        "noise_multiplier = 0",
        "target_epsilon",
        "noise_multiplier = 0 gives no guarantee",
        "remove one of them",
    ),
    ("simulation = true", "target_epsilon", "a simulation has no epsilon", "give noise_multiplier"),
    (
        "simulation = true",
        "enabled = false",
        "a simulation has the noise of a private run",
        "remove simulation",
    ),
)
"""(setting, setting, why, way out) of what is no option."""


def option(kind: str, name: object) -> Option:
    """The option of that name; PrivacyConfigError names those that there are."""
    known = OPTIONS[kind]
    if name not in known:
        raise PrivacyConfigError(f"{kind} must be one of {', '.join(known)}, not {name!r}")
    return known[str(name)]


def options_of(choices: Any) -> dict[str, Option]:
    """Kind -> the option that a recipe's section, a request or a plan has chosen."""
    return {kind: option(kind, getattr(choices, kind, None)) for kind in OPTIONS}


def require_compatible(choices: Any, also: Mapping[str, bool] | None = None) -> None:
    """PrivacyConfigError for two settings that do not go together: the one place that says so.

    Args:
        choices: a recipe's section, a request or a plan; what it does not have is not set.
        also: settings of other sections, and whether they are.
    """
    chosen = options_of(choices)
    sigma = getattr(choices, "noise_multiplier", None)
    is_set = {
        "enabled = false": not choices.enabled,
        "noise_multiplier = 0": choices.enabled and sigma == 0,
        "target_epsilon": choices.enabled and choices.target_epsilon is not None,
        "simulation = true": getattr(choices, "simulation", False),
        "clipping_mode": getattr(choices, "clipping_mode", "auto") != "auto",
        "sensitivity_slack above 0": getattr(choices, "sensitivity_slack", 0) != 0,
        **{one.setting: True for one in chosen.values()},
        **(also or {}),
    }
    every = (one for named in OPTIONS.values() for one in named.values())
    exclusions = [
        (one.setting, other, why, one.instead)
        for one in every
        for other, why in one.excludes.items()
    ]
    for one, other, why, way_out in (*exclusions, *OTHER_EXCLUSIONS):
        if is_set.get(one) and is_set.get(other):
            raise PrivacyConfigError(f"{one} and {other} exclude each other: {why}; {way_out}")
