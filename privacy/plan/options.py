"""The options of a plan: each is one class with its words, and others iterate over `OPTIONS`.

A plan has one option of each kind. Recipe and plan refuse conflicts in the words of this file, the
ledger freezes the fields that an option adds, and card and planner show its rows and sentences.
Elsewhere are the code that acts on tensors (privacy/clipping), which picks an option by its name,
and privacy/verify.py, which shares nothing with this file and refuses a name that its table lacks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

from ..errors import PrivacyConfigError
from .lattice import Lattice
from .releases import SENSITIVITY_SLACK


class ChosenNumbers(Protocol):
    """The numbers of a plan that options derive their fields and rows from."""

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
    """A choice of one kind; the defaults are those of an option that adds nothing.

    Attributes:
        kind: key of `OPTIONS`.
        name: the value of the option in recipes and ledgers.
        way_out: the way out of a conflict with another setting.
        excludes: conflicting setting -> the reason.
        reason: why a run with this option has no formal guarantee.
        statement: a sentence for the card's section on the mechanism.
        sampling_statement: a sentence for the card's section on sampling.
    """

    kind: ClassVar[str]
    name: ClassVar[str]
    way_out: ClassVar[str] = ""
    excludes: ClassVar[Mapping[str, str]] = {}
    reason: ClassVar[str | None] = None
    statement: ClassVar[str] = ""
    sampling_statement: ClassVar[str] = ""

    @property
    def setting(self) -> str:
        """Returns the line of a recipe that chooses the option."""
        return f'{self.kind} = "{self.name}"'

    def frozen(self, plan: ChosenNumbers) -> dict[str, Any]:
        """Returns the fields that the option adds to the plan in a ledger's `open` record."""
        return {}

    def rows(self, plan: ChosenNumbers) -> list[tuple[str, str]]:
        """Returns (name, value) of the option's rows in tables of card and planner."""
        return []


# ---------------------------------------------------------------- Clipping functions


class Clipping(Option):
    """A clipping function, which turns an example's norm into a factor.

    privacy/clipping/clip_factors.py has its formula, which states its sensitivity.

    Attributes:
        clipped: the predicate of the card's sentence about an example's gradient.
        normalises: whether every gradient gets a length of about C; otherwise longer ones are cut
            to it.
    """

    kind = "clipping_function"
    way_out = 'take clipping_function = "flat"'
    clipped: ClassVar[str]
    normalises: ClassVar[bool] = False

    def group_of(self, parameter: str) -> str:
        """Returns the group of parameters that share a norm; by default one group of all."""
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
    """The arithmetic of the sums of contributions.

    Attributes:
        slack: r; an example contributes at most C (1 + r), and the accountant gets sigma / (1 + r).
    """

    kind = "arithmetic"
    slack: ClassVar[float]

    def lattice(self, plan: ChosenNumbers) -> Lattice | None:
        """Returns the lattice of contributions, sums and noise; None in floating point."""
        return None

    def frozen(self, plan: ChosenNumbers) -> dict[str, Any]:
        return {"lattice_exponent": None if plan.lattice is None else plan.lattice.exponent}

    def rows(self, plan: ChosenNumbers) -> list[tuple[str, str]]:
        text = self.name
        if plan.lattice is not None:
            text += f", multiples of 2^{-plan.lattice.exponent}; no slack for rounding"
        rows = [("arithmetic", text)]
        if plan.noise_multiplier > 0:
            noise = "rounded to whole steps of the sums"
            if plan.had_doubles:
                noise = "made of doubles, as version 0.1 drew it"
            rows.append(("noise", f"Gaussian, {noise}"))
        return rows


class Floating(Arithmetic):
    name = "floating"
    slack = SENSITIVITY_SLACK
    statement = (
        "Rounding may let one example contribute up to C (1 + r), so the accountant is charged "
        "with sigma / (1 + r). That bound is proved for norms and for everything that is added up "
        "in double precision, or term by term in short sums; for other matrix products over tokens "
        "it assumes that the roundings of a kernel do not add up in one direction, which an "
        "adversarial search supports, on CPU kernels and on emulated ones of CUDA. It also assumes "
        "that an example's gradient does not depend on its row. An example that is not drawn "
        "leaves all others in rows of the same distribution."
    )


class Certified(Arithmetic):
    name = "certified"
    slack = 0.0
    way_out = 'take arithmetic = "floating"'
    excludes: ClassVar[Mapping[str, str]] = {
        "enabled = false": "it is for runs with noise",
        "noise_multiplier = 0": "it is for runs with noise",
        "clipping_mode": (
            "its sums have no modes, because they write every gradient out: remove clipping_mode"
        ),
        "sensitivity_slack above 0": "it rounds nothing up, so that its sensitivity_slack is 0",
        "train.compile = true": (
            "a compiler picks kernels by itself, and it needs the same ones for every example"
        ),
    }
    statement = (
        "Arithmetic is certified: each clipped gradient is a vector of whole multiples of a power "
        "of two whose norm is checked exactly, sums are whole numbers, and the noise is a Gaussian "
        "rounded to the same multiples, drawn exactly. That one example's contribution is at most "
        "C, with no slack for rounding, and that the accountant's continuous Gaussian covers what "
        "is released, are theorems (docs/certified.md). Assumed is that, at the fixed shapes of "
        "the run, the whole numbers of an example do not depend on its row, its micro-batch or the "
        "other examples; every start searched for counterexamples on made-up inputs before its "
        "first step."
    )

    def lattice(self, plan: ChosenNumbers) -> Lattice | None:
        return Lattice.of(plan.max_grad_norm, plan.max_batch_size, plan.noise_multiplier)


# ---------------------------------------------------------------- Sampling


class Sampling(Option):
    """The scheme that decides which examples take part in a step."""

    kind = "sampling"


class Poisson(Sampling):
    name = "poisson"
    sampling_statement = (
        "The sampling is true Poisson sampling: in every attempt each example takes part "
        "independently with probability q, decided by AES-256-CTR coins under a secret key, a "
        "fresh nonce per start of the program and the attempt's number, so that no retry repeats a "
        "sample. This is the scheme that the accountant assumes: nothing is shuffled. Batches "
        "above the cap, where there is one, are cut down uniformly, and the claim is charged for "
        "it. The ledger committed to the key before its first use."
    )


class Shuffle(Sampling):
    name = "shuffle"
    way_out = "give noise_multiplier"
    excludes: ClassVar[Mapping[str, str]] = {
        "target_epsilon": "shuffled data meet no target_epsilon, because they claim none"
    }
    reason = "sampling is 'shuffle', not Poisson"
    sampling_statement = "The scheme is shuffle, not Poisson."


# ---------------------------------------------------------------- All options

OPTIONS: dict[str, dict[str, Option]] = {}
"""Kind -> name -> option. A new option needs an entry here, and its name in the table of
privacy/verify.py."""
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
"""(setting, setting, reason, way out) of conflicts between settings that are not options."""


def option(kind: str, name: object) -> Option:
    """Returns the option of that name; PrivacyConfigError lists the names of the kind."""
    options = OPTIONS[kind]
    if name not in options:
        raise PrivacyConfigError(f"{kind} must be one of {', '.join(options)}, not {name!r}")
    return options[str(name)]


def options_of(choices: Any) -> dict[str, Option]:
    """Returns kind -> the option that a recipe's section, a request or a plan has chosen."""
    return {kind: option(kind, getattr(choices, kind, None)) for kind in OPTIONS}


def require_compatible(choices: Any, also: Mapping[str, bool] | None = None) -> None:
    """Raises PrivacyConfigError if two settings conflict.

    Args:
        choices: a recipe's section, a request or a plan; a setting that it lacks is not set.
        also: settings of other sections -> whether they are set.
    """
    chosen_settings = [chosen.setting for chosen in options_of(choices).values()]
    sigma = getattr(choices, "noise_multiplier", None)
    is_set = {
        "enabled = false": not choices.enabled,
        "noise_multiplier = 0": choices.enabled and sigma == 0,
        "target_epsilon": choices.enabled and choices.target_epsilon is not None,
        "simulation = true": getattr(choices, "simulation", False),
        "clipping_mode": getattr(choices, "clipping_mode", "auto") != "auto",
        "sensitivity_slack above 0": getattr(choices, "sensitivity_slack", 0) != 0,
        **dict.fromkeys(chosen_settings, True),
        **(also or {}),
    }
    exclusions = []
    for options in OPTIONS.values():
        for candidate in options.values():
            for setting, reason in candidate.excludes.items():
                exclusions.append((candidate.setting, setting, reason, candidate.way_out))
    for first, second, reason, way_out in (*exclusions, *OTHER_EXCLUSIONS):
        if is_set.get(first) and is_set.get(second):
            raise PrivacyConfigError(
                f"{first} and {second} exclude each other: {reason}; {way_out}"
            )
