"""Rechecks a published run folder with this file, numpy and dp-accounting, without the trainer.

    python -I verify.py [FOLDER] [--head H] [--json]

FOLDER is by default the folder of this file. A published folder is a run folder without
`private/`. The start of a run copies this file into the run folder. If you do not trust the
publisher, take this file from the project, since it judges the folder that it came in.

files        The folder has no other code, no link, and no ledger that ledger.jsonl does not name.
             If this check fails, no other check is made.
chain        Every line of ledger.jsonl is canonical JSON, repeats the SHA-256 of the line before,
             and has known fields only.
order        Sessions, intents, `done`, checkpoints and repairs follow each other as they must.
             Every intent states the planned noise and sensitivity, and no more attempts are
             charged than planned and reserved. With --head, the ledger has that line.
plan         The plan is consistent, and config.toml asks for it.
behind       The ledgers of the private runs whose weights the run started from are here and
             complete, and they are those that config.toml and the manifests name.
epsilon      Epsilon is recomputed from the ledgers alone, by privacy loss distributions (zero-out
             neighbours), with the cap of the batches and every charged attempt.
card         Claim, open record, plan and counts of report/privacy_card.json follow from the
             ledger; its other fields are not compared. The card may state a larger epsilon than
             this file computes, never a smaller one.
checkpoints  Every manifest is the one that the ledger recorded, and remembers the ledger's line
             at its step. The files of a checkpoint have the hashes that its manifest lists.
metrics      metrics.jsonl and held-out results have only the fields that a run publishes, no
             step, charge, norm or C that the ledger lacks, and no smaller epsilon.
noise        No norm of a noised sum is too small for the noise that its intent states. This check
             can refute the noise, and never proves it.

Claim and mechanism are printed. Believe them and not the pages of the card: this file reads no
page, as its last line says, since styles and scripts decide which number a browser shows.
docs/run_folder.md of the project documents the ledger's format, of which this file is a second
implementation.
Exit codes: 0 consistent; 5 violated: something contradicts the ledger; 6 inconclusive: nothing
does, but a check lacks something, as config.toml, a ledger in behind/, or a file of a checkpoint;
2 bad input. A stranger's folder may hold anything: a file that is too large, too deep, not plain
or of a wrong type ends in one line.
"""

import os
import sys

if __name__ == "__main__":
    # Modules beside this file are part of the folder that is judged, so Python must not import
    # them.
    _paths = (os.path.abspath(__file__), os.path.realpath(__file__))
    _folders = {os.path.realpath(os.path.dirname(path)) for path in _paths}
    sys.path[:] = [
        entry for entry in sys.path if os.path.realpath(entry or os.curdir) not in _folders
    ]

# Python would look for a file __future__.py before the lines above run, so there is no such import;
# os is loaded before any script.
import argparse
import functools
import hashlib
import io
import json
import logging
import math
import re
import stat
import tomllib
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from importlib import metadata
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

# Exit codes.
CONSISTENT = 0
BAD_INPUT = 2
VIOLATED = 5
INCONCLUSIVE = 6

# Bytes.
LARGEST_LEDGER = 1 << 30
LARGEST_LINE = 1 << 20
LARGEST_FILE = 1 << 26
LARGEST_CONFIG = 1 << 18
LARGEST_CHECKPOINT_FILE = 1 << 50

LARGEST_INTEGER = 10**12
MAX_FOLDERS = 10_000
MAX_CHECKPOINTS = 10_000
MAX_RECOMPUTED_COUNTS = 20
"""Bounds how often epsilon is recomputed for metrics.jsonl."""

TORN_MARK = b" #torn"
"""Ends a line that a crash cut off; the next start of the program adds it."""
USELESS_DELTA = "; a delta of 1/n or more protects nobody"
PAGES_UNREAD = "; no page was read: believe this line"

ROUNDING = 1e-9
"""The relative difference that two machines' rounding may make in the result of one computation."""
FP32_ROUNDING = 1e-7
"""The same where the result was rounded to fp32."""
METRIC_ROUNDING = 2.0**-23 + 6e-9
"""The relative difference between a number of the metrics and that of the ledger: half a step of
fp32 by rounding, half a step by its shortest decimal, and the ledger's nine digits."""

FALSE_ALARM = 1e-9
"""The probability that `check_noise` refutes noise that was drawn as stated."""
NORM_MARGIN = 1 + 1e-6
"""The factor on a stated norm that allows for rounding."""
EXACT_BELOW = 1000
"""The number of coordinates below which quantiles are exact."""

NORM = "optimizer/noised_grad_norm"
HELDOUT = {
    "loss",
    "accuracy",
    "shuffled_loss",
    "loss_of_average",
    "blind_loss",
    "blind_accuracy",
    "blind_unigram_loss",
    "blind_bigram_loss",
    "blind_whole_caption_loss",
}
METRICS = {
    NORM,
    "step",
    "attempt",
    "optimizer/lr",
    "privacy/epsilon",
    "privacy/charged_attempts",
    *(f"heldout/{name}" for name in HELDOUT),
}
PUBLIC_FIELDS = {
    "metrics.jsonl": METRICS,
    "evaluation/heldout.jsonl": {"step", "attempt", "captions", *HELDOUT},
}
"""The only fields that a run publishes: they follow from noised sums, the ledger, the schedule, and
held-out data that somebody declared public."""

FINE_GRID = 1e-4
"""The grid of privacy loss distributions."""
SMALLEST_DELTA = 1e-12
"""The delta below which privacy loss distributions are not precise enough."""
COARSE_ABOVE = 50.0
"""The epsilon above which the grid is coarser."""
LARGEST_EPSILON = 1000
"""The epsilon, or mu of one Gaussian, above which nothing is computed."""


class BadInput(Exception):
    """A folder that is not a run folder, or that cannot be read."""


class Violated(Exception):
    """A contradiction that a check found."""


class Undecided(Exception):
    """The reason why a check cannot decide."""


FIELD_ERRORS = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError)
"""The exceptions that a missing field, or a field of another type, raises in a check."""


class Bound(float):
    """An upper bound, as an epsilon: a card may state a larger number, never a smaller one."""


def open_plain(path: Path, largest: int) -> int:
    """Opens a plain file of at most `largest` bytes and returns its descriptor.

    Follows no link, and waits for no pipe or device.

    Raises:
        BadInput: the file cannot be read, is not a plain file, or is larger.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadInput(f"{shown(path)}: cannot be read: {reason}") from error
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and status.st_size <= largest:
        return descriptor
    os.close(descriptor)
    raise BadInput(f"{shown(path)}: must be a plain file of at most {largest:,} bytes")


def read_file(path: Path, largest: int = LARGEST_FILE) -> bytes:
    """Returns the content of a plain file of at most `largest` bytes."""
    with os.fdopen(open_plain(path, largest), "rb") as file:
        return file.read(largest)


def lines_of(path: Path) -> Iterator[bytes]:
    """Yields the lines of a file with their line ends; a line that is too long is bad input."""
    with os.fdopen(open_plain(path, LARGEST_LEDGER), "rb") as file:
        while line := file.readline(LARGEST_LINE):
            if len(line) == LARGEST_LINE:
                raise BadInput(f"{shown(path)}: a line has {LARGEST_LINE:,} bytes or more")
            yield line


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns a JSON object from its pairs; raises ValueError if a key is repeated."""
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key stands twice in an object, so readers may see different values")
    return dict(pairs)


def parsed(text: bytes) -> Any:
    """Returns the content of JSON; raises ValueError if it is not JSON or repeats a key.

    NaN and Infinity are numbers, since held-out losses may be either.
    """
    try:
        return json.loads(text.decode(), object_pairs_hook=unique_keys)
    except (RecursionError, UnicodeDecodeError) as error:
        raise ValueError("it is nested too deeply, or is not UTF-8") from error


def object_in(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file; raises Violated if the file holds anything else."""
    try:
        content = parsed(read_file(path))
    except ValueError as error:
        raise Violated(f"{path.name} is not JSON: {shown(error)}") from error
    require(isinstance(content, dict), f"{path.name} must hold a JSON object")
    return dict(content)


def shown(content: object) -> str:
    """Returns text from a file as one printable line of at most 200 characters."""
    try:
        text = printable(str(content)[:300])
    except ValueError:
        # Python refuses to print an integer of more than 4,300 digits.
        return "a number of thousands of digits"
    return text if len(text) <= 200 else f"{text[:160]}..."


def shown_list(names: list[str]) -> str:
    """Returns up to 60 names as one printable line, and the number of the others."""
    text = ", ".join(map(shown, names[:60]))
    return text if len(names) <= 60 else f"{text} and {len(names) - 60} more"


def printable(text: str) -> str:
    """Returns the text on one line, so that no name of a file can print a line of its own."""
    return "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text
    )


def rounded_up(epsilon: float) -> str:
    """Returns an epsilon as text with three decimals, never below its value."""
    if math.isinf(epsilon):
        return "inf"
    thousandths = math.ceil(Fraction(repr(float(epsilon))) * 1000)
    return f"{thousandths / 1000:.3f}"


def require(condition: bool, sentence: str) -> None:
    """Raises Violated with the sentence unless the condition holds."""
    if not condition:
        raise Violated(sentence)


def equal(first: object, second: object) -> bool:
    """Returns whether two JSON values are equal; true and 1 differ."""
    return first == second and isinstance(first, bool) == isinstance(second, bool)


def is_hex(content: object, digits: int = 64) -> bool:
    """Returns whether a JSON value is text of so many hexadecimal digits."""
    pattern = f"[0-9a-f]{{{digits}}}"
    return isinstance(content, str) and re.fullmatch(pattern, content) is not None


def is_whole(content: object, least: int = 0, largest: int = LARGEST_INTEGER) -> bool:
    """Returns whether a JSON value is an integer from `least` to `largest`."""
    return type(content) is int and least <= content <= largest


def whole(record: dict[str, Any], name: str, least: int = 0, largest: int = LARGEST_INTEGER) -> int:
    """Returns the integer in a field; raises Violated unless it is from `least` to `largest`."""
    fits = is_whole(record.get(name), least, largest)
    require(fits, f"{name} must be an integer from {least} to {largest}")
    return int(record[name])


def number(record: dict[str, Any], name: str, least: float, largest: float) -> float:
    """Returns the number in a field; raises Violated unless it is from `least` to `largest`."""
    content: Any = record.get(name)
    fits = type(content) in (int, float) and least <= content <= largest
    require(fits, f"{name} must be a number from {least:g} to {largest:g}")
    return float(content)


# ---------------------------------------------------------------- The plan, frozen in the first
# line

SLACK = {"floating": 1e-3, "certified": 0.0, "head": 1e-6}
"""r of each arithmetic: rounding may carry a contribution up to C (1 + r). `head` is that of a
private head of version 0.1, whose statistics were not rounded to steps."""
CHOICES: dict[str, dict[str, str | None]] = {
    "adjacency": {"zero_out": None},
    "sampling": {"poisson": None, "shuffle": "sampling is 'shuffle', not Poisson"},
    # Each of them keeps the contribution of an example within C.
    "clipping_function": dict.fromkeys(("flat", "automatic", "per_layer", "grouped")),
    "arithmetic": dict.fromkeys(("floating", "certified")),
}
"""The choices of a plan, and for each the reason why it excludes a guarantee, or None."""
POSITIVE = (1e-300, 1e300)
PLAN_FIELDS = {
    "num_examples",
    "expected_batch_size",
    "num_steps",
    "target_epsilon",
    "max_grad_norm",
    "clipping_function",
    "arithmetic",
    "lattice_exponent",
    "sensitivity_slack",
    "enabled",
    "sampling",
    "informal_reasons",
    "noise_multiplier",
    "target_delta",
    "reserved_attempts",
    "cap",
    "sample_rate",
    "sampling_threshold",
    "adjacency",
    "formal_guarantee",
}
ADAPTIVE = "adaptive_clipping"
"""A field of version 0.1, null where C was constant."""
NOISE_KIND = "noise_kind"
"""A further field, always "rounded": the noise is whole steps of the sums, with the distribution of
the accountant's Gaussian rounded to steps. Ledgers of version 0.1 lack the field: their noise was
made of doubles, except under certified arithmetic."""
MIXED_EXAMPLES = "mixed_examples"
"""The reason of a `close` that takes the claim of the complete run back."""
WHY_MIXED = (
    "a check while the run trained found that losses or gradients of examples depended on other "
    "examples, so no step of this run has a guarantee"
)

NOISE_EDGE = math.sqrt(128 * math.log(2))
"""The largest noise of version 0.1 in units of sigma, since Box-Muller used 63 random bits."""
EDGE_SLOPE = math.exp(-NOISE_EDGE * NOISE_EDGE / 2) / math.sqrt(2 * math.pi) * 2**18


def passes_edge(shift: float) -> float:
    """Bounds the probability that noise of version 0.1 reveals a shift of a sum.

    One coordinate that moves by a sigma passes the edge e with probability at most
    g(a) = Q(e - a) - Q(e). Over the at most 2^36 coordinates of a vector of norm a that is at most
    2^18 g'(0) a + g(a).

    Args:
        shift: the norm by which the sum moves, in units of sigma.
    """
    if NOISE_EDGE - shift <= 1:
        return 1.0
    return EDGE_SLOPE * shift + math.erfc((NOISE_EDGE - shift) / math.sqrt(2)) / 2


class Group(NamedTuple):
    """A number of `releases` of one Poisson-subsampled Gaussian.

    Batches above `cap` are cut to `cap` uniformly.
    """

    rate: float
    sigma: float
    num_examples: int
    cap: int | None
    releases: int


@dataclass(frozen=True)
class Plan:
    """The checked plan of an `open` record.

    Attributes:
        fields: those of the record, and `usual_cap` and `most_charges`, which follow from them.
        rate: q, rounded up.
        accounted: the noise multiplier that the accountant is charged with, sigma / (1 + r).
        reasons: the reasons why no guarantee is claimed; empty if one is.
    """

    fields: dict[str, Any]
    rate: float
    accounted: float
    reasons: tuple[str, ...]

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]

    def releases(self, count: int) -> Group:
        """Returns `count` charges as the accountant sees them."""
        return Group(self.rate, self.accounted, self["num_examples"], self["cap"], count)

    def noise_tail(self) -> float:
        """Returns the delta that the bounded noise of version 0.1 costs over all allowed charges.

        An example moves the sum of a step by at most 1 in units of C, if the step draws it. Rounded
        noise is exact, has no edge and costs nothing.
        """
        is_exact = self.fields.get("arithmetic") == "certified" or NOISE_KIND in self.fields
        if self.reasons or is_exact:
            return 0.0
        steps = self.releases(self["most_charges"])
        cuts = 0.0
        if steps.cap is not None:
            from scipy.stats import binom  # comes with dp-accounting

            # An example that pushes another one out of a cut batch moves the sum by up to 2.
            overflow = float(binom.sf(steps.cap - 1, steps.num_examples - 1, steps.rate))
            cuts = steps.rate * steps.releases * overflow * passes_edge(2 / self.accounted)
        draws = steps.rate * steps.releases * passes_edge(1 / self.accounted)
        return min(1.0, cuts + draws)


def read_plan(fields: dict[str, Any], head: bool) -> Plan:
    """Returns the plan after a check of every field.

    Derived fields must follow from the others: if two disagreed, each reader could choose one.

    Args:
        head: whether the ledger is that of a private head.

    Raises:
        Violated: a field is missing, unknown, out of its range or not the derived one.
    """
    require(
        fields.get(ADAPTIVE) is None,
        "C moved, as version 0.1 allowed: judge the run by the verify.py in its own folder",
    )
    odd_names = sorted(fields.keys() - {NOISE_KIND, ADAPTIVE} ^ PLAN_FIELDS)
    require(
        not odd_names,
        f"the frozen plan lacks {shown(odd_names[:1])}, or this verifier does not know it",
    )
    is_rounded = NOISE_KIND in fields
    noise_kind = fields.get(NOISE_KIND, "rounded")
    require(noise_kind == "rounded", "noise_kind must be rounded")
    n = whole(fields, "num_examples", 1)
    batch = whole(fields, "expected_batch_size", 1, n)
    steps = whole(fields, "num_steps", 1)
    reserve = whole(fields, "reserved_attempts")
    sigma = number(fields, "noise_multiplier", 0, 1e4)
    bound = number(fields, "max_grad_norm", 1e-12, 1e12)
    delta = number(fields, "target_delta", 1e-300, 1 - 1e-9)
    cap = None if fields["cap"] is None else whole(fields, "cap", 1)
    if fields["target_epsilon"] is not None:
        number(fields, "target_epsilon", 1e-12, 1e12)
    for name in ("enabled", "formal_guarantee"):
        require(type(fields[name]) is bool, f"{name} must be true or false")
    for name, choices in CHOICES.items():
        require(fields[name] in choices, f"{name} must be {' or '.join(choices)}")

    arithmetic = fields["arithmetic"]
    is_old_head = head and arithmetic == "floating" and not is_rounded
    slack = SLACK["head" if is_old_head else arithmetic]
    stated_slack = number(fields, "sensitivity_slack", 0, 1e-3)
    require(
        stated_slack == slack or not sigma,
        f"sensitivity_slack must be {slack:g}, the most that rounding may add",
    )
    exponent = None
    if arithmetic == "certified":
        # Sums and noise are multiples of 2^-f, the finest on which an entry has 32 bits, and a sum
        # 63.
        exponent = 32 - math.frexp(bound)[1]
        deviation = Fraction(sigma) * Fraction(bound)
        largest_sum = (min(n, cap or n) + 1) * Fraction(bound) + 64 * deviation
        # The sum with 64 deviations of noise stays below 2^62, and the noise in its sampler's
        # range.
        while (
            largest_sum * Fraction(2) ** exponent > 2**62
            or deviation * Fraction(2) ** exponent > 2**49
        ):
            exponent -= 1
    require(
        equal(fields["lattice_exponent"], exponent),
        f"lattice_exponent must be {exponent}, which follows from C, cap and noise",
    )
    threshold = batch * 2**64 // n
    require(
        fields["sampling_threshold"] == str(threshold),
        f"sampling_threshold must be B 2^64 / n = {threshold}",
    )
    exact_rate = Fraction(threshold, 2**64)
    rate = float(exact_rate)
    if Fraction(rate) < exact_rate:
        rate = math.nextafter(rate, 1.0)
    require(fields["sample_rate"] == rate, f"sample_rate must be B / n rounded up, {rate!r}")
    usual_cap = None
    if fields["sampling"] != "shuffle":
        usual_cap = min(n, math.ceil(batch + 8 * math.sqrt(batch)))
    require(
        head or not fields["enabled"] or cap is None or cap <= n,
        f"cap {cap} is above the number of examples",
    )
    takes_all = batch == n and cap is None and fields["sampling"] == "poisson"
    require(
        takes_all or not head,
        "a private head takes all examples in every step, but this plan does not",
    )

    informal = fields["informal_reasons"]
    are_texts = isinstance(informal, list) and all(isinstance(reason, str) for reason in informal)
    require(are_texts, "informal_reasons must be a list of texts")
    reasons = []
    if not fields["enabled"]:
        reasons.append("privacy is disabled (privacy.enabled = false)")
    elif sigma == 0:
        reasons.append("the noise multiplier is 0")
    for name, choices in CHOICES.items():
        reason = choices[fields[name]]
        if reason is not None:
            reasons.append(reason)
    reasons += informal
    require(
        fields["formal_guarantee"] == (not reasons),
        "formal_guarantee does not follow from the rest of the plan",
    )
    most_charges = steps + reserve
    derived = {"usual_cap": usual_cap, "most_charges": most_charges}
    plan = Plan(fields | derived, rate, sigma / (1 + stated_slack), tuple(reasons))
    require(
        most_charges <= LARGEST_INTEGER and plan.noise_tail() < delta,
        "delta is below the tail of the noise",
    )
    return plan


def check_sum_exponent(opened: dict[str, Any], plan: Plan) -> None:
    """Refuses a step 2^-f of sums that is too fine for their noise or too coarse for rounding.

    Args:
        opened: the `open` record.
    """
    sigma = plan["noise_multiplier"]
    bound = plan["max_grad_norm"]
    exponent = opened.get("sum_exponent")
    coordinates = opened.get("noised_coordinates")
    if NOISE_KIND not in plan.fields:
        require(exponent is None, "sum_exponent is stated for noise that was not rounded")
        return
    if "head" in opened:
        return
    if exponent is None:
        # `noise_of_ledger` is then undecided.
        return
    require(sigma > 0, "sum_exponent is stated, but the plan has no noise")
    if plan["arithmetic"] == "certified":
        require(
            equal(exponent, plan["lattice_exponent"]), "sum_exponent must equal lattice_exponent"
        )
        return
    if coordinates is not None:
        # Rounding moves what is added to the sum by at most sqrt(coordinates) steps, here squared.
        is_fine = coordinates * 4**13 <= Fraction(4) ** exponent * Fraction(bound) ** 2
    else:
        is_fine = True
    require(
        is_fine,
        f"rounding to steps of 2^-{exponent} moves {coordinates} coordinates by more than 2^-13 C",
    )
    largest_batch = min(plan["num_examples"], plan["cap"] or plan["num_examples"])
    require_room(largest_batch, bound * (1 + SLACK["floating"]), exponent)
    require_drawn(sigma * bound, exponent)


def require_room(num_examples: int, bound: float, exponent: int) -> None:
    """Refuses a step in which a sum of so many examples, each at most `bound`, passes 2^62."""
    largest_sum = num_examples * Fraction(bound) * Fraction(2) ** exponent
    require(
        largest_sum < 2**62,
        f"in steps of 2^-{exponent} a sum of {num_examples} examples passes 2^62",
    )


def require_drawn(std: float, exponent: int) -> None:
    """Refuses a step in which noise of this deviation cannot be drawn exactly."""
    deviation = math.ldexp(std, exponent)
    require(
        deviation <= 2**50 * (1 + ROUNDING),
        f"in steps of 2^-{exponent} the noise passes 2^50, so it cannot be drawn exactly",
    )


def check_sum_exponents_of_head(opened: dict[str, Any], plan: Plan, releases: list[Any]) -> None:
    """Refuses a step in which sum or noise of a private head's statistic has no room."""
    exponents = opened.get("sum_exponents")
    if exponents is None:
        # Version 0.1 has none.
        return
    are_integers = all(is_whole(exponent, -200, 200) for exponent in exponents.values())
    names = {release["name"] for release in releases}
    require(
        are_integers and exponents.keys() == names,
        "sum_exponents must state a step for each release",
    )
    for release in releases:
        exponent = exponents[release["name"]]
        require_room(plan["num_examples"], release["sensitivity"], exponent)
        require_drawn(release["std"], exponent)


def check_releases(plan: Plan, head: bool, releases: list[Any]) -> float:
    """Returns the standard deviation of the gradient's noise in an intent, or 0 for a private head.

    Raises Violated unless the intent states the planned noise for the planned sensitivity.
    """
    require(1 <= len(releases) <= 1000, "an intent lists its releases, from 1 to 1,000")
    for release in releases:
        has_fields = isinstance(release, dict) and release.keys() == {"name", "std", "sensitivity"}
        require(
            has_fields and isinstance(release["name"], str),
            "a release must have name, std and sensitivity, and no other field",
        )
    deviations = []
    sensitivities = []
    for release in releases:
        deviations.append(number(release, "std", 0, 1e300))
        sensitivities.append(number(release, "sensitivity", *POSITIVE))
    sigma = plan["noise_multiplier"]
    bound = plan["max_grad_norm"]
    if head:
        # Several Gaussian releases of one sample are one, with 1 / sigma^2 = sum of
        # (sensitivity / std)^2.
        ratios = [
            sensitivity / std if std else math.inf
            for std, sensitivity in zip(deviations, sensitivities, strict=True)
        ]
        joint_ratio = math.hypot(*ratios)
        noise_multiplier = 1 / joint_ratio if joint_ratio else math.inf
        agrees = math.isclose(noise_multiplier, sigma, rel_tol=1e-9)
        require(agrees, f"the noise is not the planned {sigma:g}")
        return 0.0
    names = [release["name"] for release in releases]
    require(names == ["gradient"], "an intent must release the gradient, and nothing else")
    std = deviations[0]
    sensitivity = sensitivities[0]
    std_planned = sigma * bound
    has_noise = math.isclose(std, std_planned, rel_tol=1e-9)
    has_sensitivity = math.isclose(sensitivity, bound, rel_tol=1e-9)
    require(
        has_noise and has_sensitivity,
        f"gradient states std, sensitivity = {std:g}, {sensitivity:g}; "
        f"the plan has {std_planned:g}, {bound:g}",
    )
    return std


# ---------------------------------------------------------------- The ledger, line by line

HEADER = ("seq", "type", "time_utc", "previous")
FieldType = type | Callable[[Any], bool]
"""The type of a field, or a function that returns whether a JSON value may stand in it."""


def is_norm(content: Any) -> bool:
    """Returns whether a JSON value is a number that can be squared."""
    return type(content) in (int, float) and abs(content) < 1e150


def is_share(content: Any) -> bool:
    """Returns whether a JSON value describes the owner whose norm is smallest beside its noise."""
    has_fields = isinstance(content, dict) and content.keys() == {"owners", "coordinates", "norm"}
    if not has_fields:
        return False
    are_counts = is_whole(content["owners"], 2) and is_whole(content["coordinates"], 1)
    return are_counts and is_norm(content["norm"])


FIELDS: dict[str, dict[str, FieldType]] = {
    "open": {
        "format": functools.partial(is_whole, least=1, largest=1),
        "plan": dict,
        "key_commitment": is_hex,
        "data_hmac?": is_hex,
        "commit?": str,
        "accountant?": str,
        "unit?": str,
        "tuning?": str,
        "deduplication?": str,
        "head?": dict,
        "behind?": list,
        "shared_ledger?": lambda content: content is None or is_hex(content),
        "disjoint_from_start?": bool,
        "max_examples_per_owner?": lambda content: content is None or is_whole(content, 1),
        "noised_coordinates?": lambda content: content is None or is_whole(content, 1),
        "sum_exponent?": lambda content: content is None or is_whole(content, -200, 200),
        "sum_exponents?": dict,
    },
    "session": {
        "nonce": functools.partial(is_hex, digits=32),
        "mirror": bool,
        "environment": dict,
        "restarted_from_step_0?": bool,
        "shared_seq?": is_whole,
        "shared_hash?": is_hex,
    },
    "intent": {"step": is_whole, "attempt": is_whole, "releases": list},
    "done": {
        "step": is_whole,
        "attempt": is_whole,
        "noised_norm?": is_norm,
        "smallest_share?": is_share,
    },
    "checkpoint": {"step": is_whole, "path": str, "digest": is_hex, "checks?": is_whole},
    "repair": {"torn_lines": is_whole, "charged": is_whole},
    "close": {
        "reason": lambda content: (
            content in ("finished", "budget_spent", "stopped", MIXED_EXAMPLES)
        ),
        "num_charged": is_whole,
    },
}
"""The fields of each type of line besides the header; a field with `?` may be missing. Another
field is refused, since readers would believe it and no check would look at it."""
CHECKED_FIELDS = {"format", "plan", "key_commitment", "behind", "nonce", "step", "attempt"}
UNCHECKED_FIELDS = {"reason"}
"""The fields of lines that nothing here can check. A norm may be larger than the true one, and the
number of coordinates smaller."""
for _type in ("open", "session", "done"):
    UNCHECKED_FIELDS |= {name.rstrip("?") for name in FIELDS[_type]} - CHECKED_FIELDS
PARENT_FIELDS: dict[str, FieldType] = {
    "file": str,
    "run": str,
    "lines": is_whole,
    "hash": is_hex,
}
"""The fields with which `behind` of `open` names the ledger of a private run that led to the
initial weights."""


def check_fields(record: dict[str, Any], fields: dict[str, FieldType], owner: str) -> None:
    """Refuses a record that lacks a field, has another one, or has one of another type.

    Args:
        owner: the name of the record in the sentence of a violation.
    """
    odd_names = sorted(record.keys() - {name.rstrip("?") for name in fields})
    require(not odd_names, f"{owner} states {shown(odd_names)}, which this verifier does not know")
    for name, field_type in fields.items():
        content = record.get(name.rstrip("?"), ...)
        if isinstance(field_type, type):
            fits = isinstance(content, field_type)
        else:
            fits = field_type(content)
        may_lack = content is ... and name.endswith("?")
        if not fits and not may_lack:
            raise Violated(f"{name} of {owner} cannot be {shown(content)}")


def record_in(line: bytes) -> dict[str, Any]:
    """Returns the record of a line; raises Violated unless the line is in canonical form.

    Other bytes of the same content would have another hash.
    """
    try:
        record = parsed(line)
        has_header = isinstance(record, dict) and list(record)[:4] == list(HEADER)
        require(has_header, "it is not a ledger record")
        header = {name: record[name] for name in record if name in HEADER}
        body = {name: record[name] for name in record if name not in HEADER}
        # This sorts the keys of nested objects, too; the header keeps its order and stays in front.
        ordered_body = json.loads(json.dumps(body, sort_keys=True))
        canonical = json.dumps(header | ordered_body, separators=(",", ":"), allow_nan=False)
        if b"\\ud" in line:
            # Half of a surrogate pair is not text: encoding it raises ValueError.
            json.dumps(record, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise Violated(f"it is not a ledger record: {shown(error)}") from error
    require(canonical.encode() == line, "it is not in canonical form")
    are_texts = all(isinstance(record[name], str) for name in HEADER[1:])
    require(
        are_texts and type(record["seq"]) is int,
        "seq must be an integer; type, time_utc and previous must be texts",
    )
    return dict(record)


@dataclass
class Ledger:
    """The content of a ledger's lines so far; a position is the number of a line, from 0.

    Attributes:
        hashes: SHA-256 of each line.
        opened: the `open` record.
        parents: the records that name the ledgers of private runs behind the initial weights,
            the newest first.
        charges: position of every charged attempt, done or not, and of torn lines that may have
            been an intent.
        attempts: step -> number of its intents.
        done_steps: (position, step) of every `done`.
        reached_steps: (position, step) of every `done`; also (position, 0) of a `session` that may
            write a checkpoint before its first step, and (position, None) of a `session` that
            resumes from a checkpoint.
        checkpoints: (position, step, digest of the manifest).
        num_torn: the number of torn lines.
        close_reason: the reason that `close` states, or None.
        unchecked_fields: the fields of lines that nothing here can check.
        is_cut: whether the last line has no line end.
        last_step: the largest step that is done.
        in_session: whether a session may write steps.
        pending_attempt: (step, attempt) of the intent whose `done` is missing so far.
        session_step: the last step that this session finished.
        checkpoint_step: the step of the newest checkpoint since the run began, or since it began
            again at step 0.
        unrepaired: for each torn line without its `repair` so far, whether it was charged.
        releases: (step, std of the gradient's noise, its `done` or nothing) of every intent.
    """

    hashes: list[str] = field(default_factory=list)
    opened: dict[str, Any] = field(default_factory=dict)
    plan: Plan = field(default_factory=lambda: Plan({}, 0.0, 0.0, ()))
    parents: list[dict[str, Any]] = field(default_factory=list)
    nonces: set[str] = field(default_factory=set)
    charges: list[int] = field(default_factory=list)
    attempts: Counter[int] = field(default_factory=Counter)
    done_steps: list[tuple[int, int]] = field(default_factory=list)
    reached_steps: list[tuple[int, int | None]] = field(default_factory=list)
    checkpoints: list[tuple[int, int, str]] = field(default_factory=list)
    num_torn: int = 0
    close_reason: str | None = None
    unchecked_fields: set[str] = field(default_factory=set)
    is_cut: bool = False
    last_step: int = 0
    in_session: bool = False
    pending_attempt: tuple[int, int] | None = None
    session_step: int | None = None
    checkpoint_step: int | None = None
    unrepaired: list[bool] = field(default_factory=list)
    releases: list[tuple[int, float, dict[str, Any]]] = field(default_factory=list)

    @property
    def reasons(self) -> list[str]:
        """Returns the reasons why no guarantee is claimed; an empty list if one is."""
        if self.close_reason == MIXED_EXAMPLES:
            return [*self.plan.reasons, WHY_MIXED]
        return list(self.plan.reasons)

    def charged(self, num_lines: int | None = None) -> int:
        """Returns the number of charges in the first `num_lines` lines, or in all."""
        if num_lines is None:
            return len(self.charges)
        return bisect_right(self.charges, num_lines - 1)

    def reached_at(self, position: int) -> tuple[int, int | None]:
        """Returns the newest entry of `reached_steps` at or before a position."""
        index = bisect_right(self.reached_steps, position, key=itemgetter(0)) - 1
        return self.reached_steps[index] if index >= 0 else (0, None)

    def may_lack_record(self, step: int, position: int) -> bool:
        """Returns whether a crash between a checkpoint and its record explains a missing record.

        Then the checkpoint is of the step that its session had reached, and the ledger has no later
        checkpoint: a session records the checkpoint that it resumes from, unless it has a record.

        Args:
            position: the line that the checkpoint remembers.
        """
        start, reached_step = self.reached_at(position)
        has_later_record = any(
            record_position > start and record_step >= step
            for record_position, record_step, _ in self.checkpoints
        )
        return step == reached_step and not has_later_record and self.close_reason is None

    def take_torn(self) -> None:
        """Adds a torn line, and charges it where an intent could stand.

        An attempt may have been under way there.
        """
        require(
            bool(self.hashes) and self.close_reason is None,
            "a torn line where no line can be written",
        )
        has_budget = not self.plan["formal_guarantee"] or self.charged() < self.plan["most_charges"]
        between_steps = self.in_session and self.pending_attempt is None and not self.unrepaired
        has_steps = (self.session_step or 0) < self.plan["num_steps"]
        may_be_intent = between_steps and has_budget and has_steps
        if may_be_intent:
            self.charges.append(len(self.hashes))
        self.unrepaired.append(may_be_intent)
        self.num_torn += 1

    def take(self, record: dict[str, Any]) -> None:
        """Adds the next record; raises Violated if it must not stand here."""
        seq = len(self.hashes)
        kind = record["type"]
        require(record["seq"] == seq, f"its number is not {seq}")
        previous = self.hashes[-1] if seq else "0" * 64
        require(
            record["previous"] == previous,
            "the chain of hashes is broken: it does not continue the line before",
        )
        require(kind in FIELDS, f"unknown record type {kind[:40]}")
        body = {name: content for name, content in record.items() if name not in HEADER}
        check_fields(body, FIELDS[kind], f"`{kind}`")
        require((kind == "open") == (seq == 0), "the first record, and no other, must be `open`")
        require(self.close_reason is None, "a record after `close`")
        require(
            (kind == "repair") == bool(self.unrepaired),
            "torn lines must be followed by a `repair`, and nothing else may be",
        )
        require(
            self.in_session or kind not in ("intent", "checkpoint"),
            f"`{kind}` outside of a session",
        )
        self.unchecked_fields |= body.keys() & UNCHECKED_FIELDS
        first_time = self.opened.get("time_utc", record["time_utc"])
        require(
            record["time_utc"] == first_time,
            "its time is not that of the first line, which all lines must repeat",
        )
        step = record.get("step", 0)
        plan = self.plan
        match kind:
            case "open":
                self.opened = record
                self.plan = read_plan(record["plan"], "head" in record)
                check_sum_exponent(record, self.plan)
                self.parents = record.get("behind", [])
                require(len(self.parents) <= 100, "`behind` lists more than 100 ledgers")
                for parent in self.parents:
                    check_fields(parent, PARENT_FIELDS, "`behind`")
                    has_place = re.fullmatch(r"behind/ledger-[0-9]{1,3}\.jsonl", parent["file"])
                    require(
                        has_place is not None and parent["lines"] > 0,
                        "`behind` must name files behind/ledger-N.jsonl of at least one line",
                    )
            case "session":
                require(
                    record["nonce"] not in self.nonces,
                    "the session nonce was used before: coins would repeat",
                )
                require(
                    ("shared_seq" in record) == ("shared_hash" in record),
                    "shared_seq and shared_hash must stand together",
                )
                if record.get("restarted_from_step_0"):
                    self.checkpoint_step = None
                self.reached_steps.append((seq, 0 if self.checkpoint_step is None else None))
                self.nonces.add(record["nonce"])
                self.in_session = True
                self.pending_attempt = None
                self.session_step = None
            case "intent":
                require(
                    1 <= step <= plan["num_steps"],
                    f"step must be an integer from 1 to {plan['num_steps']}",
                )
                if self.pending_attempt is not None:
                    pending_step = self.pending_attempt[0]
                    require(
                        step == pending_step,
                        f"step {step} begins while step {pending_step} is not done",
                    )
                elif self.session_step is not None:
                    require(
                        step == self.session_step + 1,
                        f"step {step} does not follow step {self.session_step}",
                    )
                else:
                    next_step = self.last_step + 1
                    require(step <= next_step, f"step {step} skips step {next_step}")
                attempt = record["attempt"]
                next_attempt = self.attempts[step]
                require(
                    attempt == next_attempt,
                    f"attempt {attempt} of step {step}, where {next_attempt} is next",
                )
                std = check_releases(plan, "head" in self.opened, record["releases"])
                check_sum_exponents_of_head(self.opened, plan, record["releases"])
                self.releases.append((step, std, {}))
                self.attempts[step] += 1
                self.pending_attempt = (step, attempt)
                self.charges.append(seq)
            case "done":
                require(
                    (step, record["attempt"]) == self.pending_attempt,
                    "`done` without its intent just before",
                )
                self.session_step = step
                self.pending_attempt = None
                self.last_step = max(self.last_step, step)
                self.done_steps.append((seq, step))
                self.releases[-1][-1].update(record)
                self.reached_steps.append((seq, step))
            case "checkpoint":
                require(step <= self.last_step, f"a checkpoint of step {step}, which is not done")
                path = record["path"]
                require(
                    path == f"step-{step:08d}",
                    f"a checkpoint of step {step} has the name {shown(path)}",
                )
                self.checkpoints.append((seq, step, record["digest"]))
                self.checkpoint_step = step
            case "repair":
                counts = (record["torn_lines"], record["charged"])
                require(
                    counts == (len(self.unrepaired), sum(self.unrepaired)),
                    "the repair does not match the torn lines before it",
                )
                self.unrepaired = []
                self.in_session = False
                self.pending_attempt = None
                self.session_step = None
            case "close":
                may_finish = self.last_step == plan["num_steps"] or not plan["enabled"]
                require(
                    may_finish or record["reason"] != "finished",
                    f"the run finished after step {self.last_step}",
                )
                require(
                    record["num_charged"] == self.charged(),
                    f"`close` states other charges than {self.charged()}",
                )
                self.close_reason = record["reason"]


def read_ledger(path: Path) -> Ledger:
    """Returns the ledger, read once from top to bottom.

    Raises:
        Violated: names the first line that is wrong.
    """
    ledger = Ledger()
    try:
        for raw_line in lines_of(path):
            line = raw_line.removesuffix(b"\n")
            if raw_line == line:
                # A crash cut it, or a write is under way: the next start marks the line as torn.
                ledger.take_torn()
                ledger.is_cut = True
                break
            if line.endswith(TORN_MARK) or b"\0" in line:
                ledger.take_torn()
            else:
                ledger.take(record_in(line))
            ledger.hashes.append(hashlib.sha256(line).hexdigest())
        require(bool(ledger.hashes), "it has no complete record")
    except (Violated, *FIELD_ERRORS) as error:
        raise Violated(f"{path.name}: line {len(ledger.hashes) + 1}: {shown(error)}") from error
    return ledger


# ---------------------------------------------------------------- Epsilon


def epsilon(groups: list[Group], delta: float) -> float:
    """Returns an upper bound of epsilon at `delta` of all groups together, as the project reports
    it.

    Without sampling all releases are one Gaussian, whose epsilon is exact. With sampling epsilon is
    computed by privacy loss distributions on a grid of 1e-4, or on a coarser one above 50.

    Raises:
        Undecided: epsilon is above 1000, or delta is below 1e-12.
    """
    from dp_accounting import get_epsilon_gaussian

    groups = [group for group in groups if group.releases and group.rate]
    if not groups:
        return 0.0
    if delta <= 0 or any(group.sigma == 0 for group in groups):
        return math.inf
    try:
        if all(group.rate == 1 and group.cap is None for group in groups):
            mu = math.sqrt(math.fsum(group.releases / group.sigma**2 for group in groups))
            if mu <= LARGEST_EPSILON:
                return float(get_epsilon_gaussian(1 / mu, delta))
        else:
            upper_bound = renyi(tuple(groups), delta)
            if upper_bound <= LARGEST_EPSILON and delta >= SMALLEST_DELTA:
                grid = FINE_GRID
                if upper_bound > COARSE_ABOVE:
                    grid *= 10 ** math.ceil(math.log10(upper_bound / COARSE_ABOVE))
                loss = composed(tuple(groups), grid)
                composed_epsilon = float(loss.get_epsilon_for_delta(delta))
                if grid != FINE_GRID and composed_epsilon <= COARSE_ABOVE:
                    loss = composed(tuple(groups), FINE_GRID)
                    composed_epsilon = float(loss.get_epsilon_for_delta(delta))
                return composed_epsilon
    except (MemoryError, OverflowError, ValueError, ArithmeticError) as error:
        # No sensible plan has such numbers.
        name = type(error).__name__
        raise Undecided(f"epsilon cannot be computed here: {name}: {shown(error)}") from error
    raise Undecided(
        "epsilon is so large that none is computed: it protects nobody; or delta is below 1e-12"
    )


@functools.lru_cache(maxsize=64)
def renyi(groups: tuple[Group, ...], delta: float) -> float:
    """Returns epsilon at `delta` by Renyi DP, without caps."""
    from dp_accounting import NeighboringRelation, dp_event
    from dp_accounting.rdp import RdpAccountant

    # dp-accounting warns about Renyi orders that it leaves out; the bound is sound without them.
    logging.getLogger("absl").setLevel(logging.ERROR)
    accountant = RdpAccountant(neighboring_relation=NeighboringRelation.REPLACE_SPECIAL)
    for group in groups:
        gaussian = dp_event.GaussianDpEvent(group.sigma)
        accountant.compose(dp_event.PoissonSampledDpEvent(group.rate, gaussian), group.releases)
    return float(accountant.get_epsilon(delta)) if groups else 0.0


@functools.lru_cache(maxsize=8)
def one_release(rate: float, sigma: float, num_examples: int, cap: int | None, grid: float) -> Any:
    """Returns the privacy loss distribution of one release."""
    from dp_accounting import NeighboringRelation
    from dp_accounting.pld import privacy_loss_distribution as pld

    settings = {
        "value_discretization_interval": grid,
        "neighboring_relation": NeighboringRelation.REPLACE_SPECIAL,
    }
    if cap is None:
        return pld.from_gaussian_mechanism(sigma, sampling_prob=rate, **settings)
    return pld.from_truncated_subsampled_gaussian_mechanism(
        num_examples, rate, cap, sigma, **settings
    )


@functools.lru_cache(maxsize=8)
def composed(groups: tuple[Group, ...], grid: float) -> Any:
    """Returns the privacy loss distribution of all groups together (Koskela et al. 2020)."""
    composition = None
    for group in groups:
        release = one_release(group.rate, group.sigma, group.num_examples, group.cap, grid)
        run = release.self_compose(group.releases)
        composition = run if composition is None else composition.compose(run)
    return composition


# ---------------------------------------------------------------- The checks: each returns one
# sentence


@dataclass
class Folder:
    """A published folder, with content that several checks read and the epsilon that they find.

    Attributes:
        head: the hash of a line that the ledger must have, or None.
        parents: the ledgers of private runs behind the initial weights, the newest first; None if
            one of them is missing.
        config: the content of config.toml, or None without such a file.
        epsilon: that of the whole chain of runs; None if nothing is claimed or it is unknown.
        delta: the smallest target of the chain.
    """

    path: Path
    ledger: Ledger
    head: str | None = None
    parents: list[Ledger] | None = None
    config: dict[str, Any] | None = None
    epsilon: float | None = None
    delta: float = 0.0

    def has(self, place: str) -> bool:
        """Returns whether a file or folder is at this place; `check_files` has refused links."""
        return os.path.lexists(self.path / place)


def check_files(folder: Folder) -> str:
    """Refuses code, links, and ledgers that ledger.jsonl does not name.

    Python may run code that lies beside this file, and a link leads to files of somebody else.
    """
    parent_files = {parent["file"] for parent in folder.ledger.parents}
    for count, (root, folders, files) in enumerate(os.walk(folder.path)):
        if count > MAX_FOLDERS:
            raise Undecided(f"there are more than {MAX_FOLDERS:,} folders")
        is_top = Path(root) == folder.path
        for name in sorted([*folders, *files]):
            path = Path(root) / name
            place = str(path.relative_to(folder.path))
            mode = path.lstat().st_mode
            require(
                stat.S_ISREG(mode) or stat.S_ISDIR(mode),
                f"{shown(place)} is a link or a device: no run writes any",
            )
            is_module = name.endswith((".py", ".pyc", ".pyd", ".so")) and name != "verify.py"
            is_package = os.path.lexists(path / "__init__.py")
            require(
                not (is_top and (is_module or is_package)),
                f"{shown(place)} is code: no run writes any here, and Python may run it",
            )
            is_foreign = place.startswith("behind/") and place not in parent_files
            require(not is_foreign, f"{shown(place)} is not a ledger that ledger.jsonl names")
        if is_top and "private" in folders:
            # It is not published.
            folders.remove("private")
        folders.sort()
    return "no other code, no link, and no ledger that ledger.jsonl does not name"


def check_order(folder: Folder) -> str:
    """Refuses charges above the budget, and a ledger without the line `head`."""
    ledger = folder.ledger
    most_charges = ledger.plan["most_charges"]
    charges = f"{ledger.charged()} attempts are charged where {most_charges} are allowed"
    require(bool(ledger.plan.reasons) or ledger.charged() <= most_charges, charges)
    require(
        folder.head in (None, *ledger.hashes),
        f"the ledger lacks the line {folder.head}: it was cut or replaced",
    )
    if ledger.close_reason:
        state = f"closed ({ledger.close_reason})"
    else:
        state = "open: the run may go on, or its end was cut off"
    starts = f"{len(ledger.hashes)} lines, {len(ledger.nonces)} starts"
    steps = f"{len(ledger.done_steps)} steps done, {ledger.num_torn} torn lines"
    return f"{starts}, {steps}; {charges}; {state}"


def check_plan(folder: Folder) -> str:
    """Refuses a config.toml that asks for another plan than the ledger's."""
    if "head" in folder.ledger.opened:
        require(not folder.has("config.toml"), "a private head has no config.toml, but one is here")
        return "all intents state the planned noise; a private head has no config.toml"
    if not folder.has("config.toml"):
        raise Undecided("config.toml is missing: only the ledger itself says what was asked for")
    try:
        text = read_file(folder.path / "config.toml", LARGEST_CONFIG).decode()
        for line in text.split("\n"):
            # The memory that tomllib takes grows with the square of the dots in a key. Dots in
            # strings do not count, since a list of shards may be long.
            bare_line = re.sub(r'"[^"]*"|\'[^\']*\'', "", line)
            if bare_line.count(".") > 100:
                raise ValueError("a key of more than 100 parts")
        folder.config = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"config.toml is not TOML: {shown(error)}") from error
    return compare_plan(folder.ledger, folder.config)


def compare_plan(ledger: Ledger, config: dict[str, Any]) -> str:
    """Refuses the content of a config.toml that asks for another plan than the ledger's.

    A missing key asks for its default.
    """
    plan = ledger.plan
    tables = {name: config.get(name, {}) for name in ("privacy", "train", "data", "init")}
    are_tables = all(isinstance(table, dict) for table in tables.values())
    require(are_tables, f"config.toml: {', '.join(tables)} must be tables")
    privacy = tables["privacy"]
    n = plan["num_examples"]
    batch = plan["expected_batch_size"]
    steps = plan["num_steps"]
    # A recipe of the trainer, which has a model, need not state the number of examples.
    default_n = n if "model" in config else None
    has_disjoint_data = bool(ledger.parents) and tables["init"].get("disjoint_data", False)
    requests: dict[str, Any] = {
        "enabled": privacy.get("enabled", True),
        "train.num_steps": tables["train"].get("num_steps"),
        "data.num_examples": tables["data"].get("num_examples", default_n),
        "max_examples_per_owner": privacy.get("max_examples_per_owner"),
        "shared_ledger": "shared_ledger" in privacy,
        "init.disjoint_data": has_disjoint_data,
    }
    frozen: dict[str, Any] = {
        "enabled": plan["enabled"],
        "train.num_steps": steps,
        "data.num_examples": n,
        "max_examples_per_owner": ledger.opened.get("max_examples_per_owner"),
        "shared_ledger": ledger.opened.get("shared_ledger") is not None,
        "init.disjoint_data": ledger.opened.get("disjoint_from_start", False),
    }
    if plan["enabled"]:
        requests |= {
            "reserved_attempts": max(2, -(-steps // 100)),
            "target_delta": 1 / (2 * n),
            "sampling": "poisson",
            "max_grad_norm": 1.0,
            "clipping_function": "flat",
            "arithmetic": "floating",
            "expected_batch_size": None,
            "target_epsilon": None,
        }
        requests |= {name: privacy[name] for name in privacy if name in plan.fields}
        frozen |= plan.fields
        # Whatever the cap is, epsilon includes its cost.
        cap = plan["cap"]
        usual_cap = plan["usual_cap"]
        is_lower = cap is not None and usual_cap is not None and batch <= cap < usual_cap
        is_allowed = "cap" in privacy or cap == usual_cap or is_lower
        require(
            is_allowed,
            f"config.toml asks for cap at most {shown(usual_cap)}, and the ledger has {shown(cap)}",
        )
    for name, request in requests.items():
        choice = frozen[name]
        require(
            equal(request, choice),
            f"config.toml asks for {name} = {shown(request)}, and the ledger has {shown(choice)}",
        )
    parent_runs = Counter(parent["run"] for parent in ledger.parents)
    surplus = Counter(starts_in(config) or ()) - parent_runs
    require(
        not surplus,
        f"config.toml starts from {shown_list(sorted(surplus))}, "
        "and `behind` of the ledger does not",
    )
    require(
        bool(plan.reasons) or not privacy.get("simulation"),
        "config.toml has a simulation, but the plan has a guarantee",
    )
    if not plan["enabled"]:
        return "config.toml asks for a run without privacy, as the plan has it"
    target = plan["target_epsilon"]
    sigma = plan["noise_multiplier"]
    require(
        "noise_multiplier" in privacy or target is not None,
        "config.toml states neither noise nor epsilon",
    )
    if target is not None and not plan.reasons:
        delta = plan["target_delta"] - plan.noise_tail()
        charges = plan.releases(plan["most_charges"])
        planned_epsilon = epsilon([charges], delta)
        require(
            planned_epsilon <= target * 1.001,
            f"the plan spends epsilon {planned_epsilon:.6g}, more than epsilon {target:g} "
            "of config.toml",
        )
        less_noise = charges._replace(sigma=0.95 * charges.sigma, num_examples=n, cap=None)
        needs_noise = sigma <= 0.3 or epsilon([less_noise], delta) > target
        require(
            needs_noise,
            f"the plan states more noise than epsilon {target:g} of config.toml takes: {sigma:g}",
        )
    rate = f"q = {plan.rate:.6g} ({batch} of {n})"
    bound = plan["max_grad_norm"]
    return f"{rate}, sigma = {sigma:.6g}, C = {bound:g}, as asked"


def starts_in(config: dict[str, Any]) -> list[str] | None:
    """Returns the private runs from whose weights the run started, by the config.toml of a loop.

    The list is empty for public weights, and has two entries for two runs of one name. None stands
    for a config.toml without `init.starts_from`.
    """
    start = config.get("init", {}).get("starts_from")
    runs = [start] if isinstance(start, str) else start
    is_list = isinstance(runs, list) and bool(runs)
    are_names = is_list and all(isinstance(run, str) for run in runs)
    require(
        start is None or are_names,
        'config.toml: init.starts_from is neither "public" nor names of runs',
    )
    return [] if start == "public" else runs


def check_behind(folder: Folder) -> str:
    """Reads the ledgers of private runs behind the initial weights, and refuses an incomplete one.

    Each of them must name the ledgers behind itself.
    """
    entries = folder.ledger.parents
    parents: list[Ledger] = []
    for entry in entries:
        file = entry["file"]
        if not folder.has(file):
            raise Undecided(
                f"{file} is missing: what the initial weights had spent cannot be recomputed"
            )
        parent = read_ledger(folder.path / file)
        end = (len(parent.hashes), parent.hashes[-1])
        require(
            end == (entry["lines"], entry["hash"]), f"{file} is not the one that the ledger names"
        )
        require(not parent.reasons, f"{file} is of a run without a guarantee")
        newer_runs = {newer.hashes[0] for newer in (folder.ledger, *parents)}
        require(
            parent.hashes[0] not in newer_runs, f"{file} is of a run that the chain has already"
        )
        parents.append(parent)
    # Indices of the ledgers that another ledger behind this run names.
    grandparents: set[int] = set()
    for number, parent in enumerate(parents, start=1):
        file = entries[number - 1]["file"]
        older = range(number, len(parents))
        for entry in parent.parents:
            # The older run may have gone on before this run started, so its ledger may be longer.
            line = slice(entry["lines"] - 1, entry["lines"])
            matches = {index for index in older if entry["hash"] in parents[index].hashes[line]}
            require(bool(matches), f"{file} names other ledgers behind it than there are")
            grandparents |= matches
        is_disjoint = parent.opened.get("disjoint_from_start")
        require(
            not is_disjoint or len(parent.parents) == len(older),
            f"{file} declares data disjoint from those of runs that it does not name",
        )
    runs = None if folder.config is None else starts_in(folder.config)
    for number, entry in enumerate(entries):
        is_asked = runs is None or number in grandparents or entry["run"] in runs
        require(is_asked, f"the ledger starts from {shown(entry['run'])}, and config.toml does not")
    folder.parents = parents
    return (
        f"{len(entries)} private runs led to the initial weights; "
        "their ledgers are here and complete"
    )


def epsilon_of(chain: list[Ledger], delta: float, count: int | None = None) -> float:
    """Returns the epsilon of a chain of runs, the worst of any example.

    An example may be in all runs; where data are declared disjoint from those of the runs before,
    it is either in the declaring run or in runs before.

    Args:
        chain: ledgers, the newest first.
        count: the number of charges of the newest run; all if None.
    """
    *newer, oldest = chain
    # Lists of runs that may share one example.
    alternatives = [[oldest]]
    for run in reversed(newer):
        if run.opened.get("disjoint_from_start") is True:
            alternatives = [[run], *alternatives]
        else:
            alternatives = [[run, *runs] for runs in alternatives]
    epsilons = []
    for runs in alternatives:
        groups = []
        for run in runs:
            is_newest = run is chain[0]
            charges = count if is_newest and count is not None else run.charged()
            groups.append(run.plan.releases(charges))
        noise_tails = math.fsum(run.plan.noise_tail() for run in runs)
        epsilons.append(epsilon(groups, delta - noise_tails))
    return max(epsilons)


def check_epsilon(folder: Folder) -> str:
    """Recomputes epsilon of this run, and of the chain of runs that led to its weights."""
    ledger = folder.ledger
    plan = ledger.plan
    delta = plan["target_delta"]
    folder.delta = delta
    if ledger.reasons:
        return f"nothing is claimed: {shown('; '.join(ledger.reasons))}"
    run_epsilon = epsilon_of([ledger], delta)
    sentence = (
        f"epsilon {rounded_up(run_epsilon)} at delta {delta:g} "
        f"for {ledger.charged()} charged attempts"
    )
    if folder.parents is None:
        raise Undecided(
            f"this run alone spent {sentence}; what its initial weights had spent is unknown"
        )
    if not folder.parents:
        folder.epsilon = run_epsilon
    else:
        chain = [ledger, *folder.parents]
        folder.delta = min(run.plan["target_delta"] for run in chain)
        folder.epsilon = epsilon_of(chain, folder.delta)
        total = f"epsilon {rounded_up(folder.epsilon)} at delta {folder.delta:g}"
        sentence += f"; with what the initial weights had spent, {total}"
    if folder.delta * plan["num_examples"] >= 1:
        sentence += USELESS_DELTA
    return sentence


def card_fields(folder: Folder) -> dict[str, Any]:
    """Returns the fields of a card that follow from the ledger, by their places."""
    ledger = folder.ledger
    plan = ledger.plan
    target_delta = plan["target_delta"]
    steps_done: int | None = ledger.last_step
    if not plan["enabled"]:
        # Without privacy the ledger has no steps.
        steps_done = plan["num_steps"] if ledger.close_reason == "finished" else None
    card: dict[str, Any] = {
        "formal_guarantee": not ledger.reasons,
        "reasons": ledger.reasons,
        "epsilon": None,
        "delta": folder.delta,
        "steps_done": steps_done,
        "steps_planned": plan["num_steps"],
        "attempts_charged": ledger.charged(),
        "mechanism.noise_multiplier_accounted": plan.accounted,
        "accounting.epsilon": None,
        "accounting.delta": target_delta,
        "accounting.attempts.charged": ledger.charged(),
        "accounting.attempts.allowed": plan["most_charges"],
        "ledger.lines": len(ledger.hashes) + ledger.is_cut,
    }
    for name, content in ledger.opened.items():
        if name != "plan":
            card[f"opened.{name}"] = content
    for name, content in ledger.opened["plan"].items():
        if name != "target_epsilon":
            card[f"plan.{name}"] = content
    if not ledger.reasons:
        card["epsilon"] = Bound(folder.epsilon or 0.0)
        remaining_delta = target_delta - plan.noise_tail()
        counts = {
            "": ledger.charged(),
            "_planned": plan["num_steps"],
            "_with_reserve": plan["most_charges"],
        }
        for suffix, count in counts.items():
            bound = Bound(epsilon([plan.releases(count)], remaining_delta))
            card[f"accounting.epsilon{suffix}"] = bound
        card["accounting.noise_tail_delta"] = plan.noise_tail() or None
        card["accounting.epsilon_target"] = plan["target_epsilon"]
    if ledger.reasons or not folder.parents:
        return card | {"composition": None}
    card["composition.epsilon"] = card["epsilon"]
    card["composition.delta"] = folder.delta
    entries = [{"run": "this run", "file": "ledger.jsonl"}, *ledger.parents]
    runs = [ledger, *folder.parents]
    for number, (entry, run) in enumerate(zip(entries, runs, strict=True)):
        run_delta = run.plan["target_delta"]
        fields = {
            "name": entry["run"],
            "file": entry["file"],
            "attempts_charged": run.charged(),
            "delta": run_delta,
            "epsilon": Bound(epsilon_of([run], run_delta)),
            "disjoint_from_those_before": run.opened.get("disjoint_from_start") is True,
        }
        for name, content in fields.items():
            card[f"composition.runs.{number}.{name}"] = content
    # No further run.
    card[f"composition.runs.{len(runs)}"] = ...
    return card


PLACES_OF_FORMAT_3 = {
    "adjacency": "plan.adjacency",
    "unit_of_privacy.num_examples": "plan.num_examples",
    "sampling.key_commitment_sha256": "opened.key_commitment",
    "provenance.ledger.lines": "ledger.lines",
}
"""Places in a card of version 0.1, and the places of the same facts in later cards."""


def fields_of_format_3(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of `card_fields` by their places in a card of version 0.1."""
    card = {}
    for place, content in fields.items():
        if not place.startswith(("opened.", "ledger.")):
            card[place] = content
    for old_place, place in PLACES_OF_FORMAT_3.items():
        card[old_place] = fields[place]
    return card


def value_at(tree: Any, place: str) -> Any:
    """Returns the JSON value at a dotted place of a card, or `...` if there is none."""
    for name in place.split("."):
        entries = tree
        if isinstance(tree, list):
            entries = {str(number): entry for number, entry in enumerate(tree)}
        tree = entries.get(name, ...) if isinstance(entries, dict) else ...
    return tree


def compare(document: str, content: Any, expected: Any, place: str) -> str:
    """Returns what is wrong with a field of a document, or "".

    A number may differ by rounding, and may be larger than an expected `Bound`.

    Args:
        document: the name of the file in the sentence.
        expected: the content that follows from the ledger; `...` for none.
    """
    is_bound = isinstance(expected, Bound)
    if isinstance(expected, float) and type(content) in (int, float):
        is_right = math.isclose(content, expected, rel_tol=ROUNDING)
        is_right = is_right or (is_bound and content > expected)
    else:
        # JSON has no infinity, so a card states null.
        is_infinite = is_bound and math.isinf(expected)
        is_right = equal(content, expected) or (is_infinite and content is None)
    if is_right:
        return ""
    expectation = "nothing" if expected is ... else shown(expected)
    return f"{document}'s {place} is {shown(content)}, and the ledger gives {expectation}"


def check_card(folder: Folder) -> str:
    """Compares privacy_card.json, and the statement of a private head, with the ledger."""
    ledger = folder.ledger
    num_head_fields = 0
    if not ledger.reasons and folder.epsilon is None:
        raise Undecided("epsilon, the first number of card and head, was not computed")
    if folder.has("head.json"):
        expected = {"num_examples": ledger.plan["num_examples"]}
        expected |= ledger.opened.get("head", {})
        expected["delta"] = folder.delta
        expected["epsilon"] = None if folder.epsilon is None else Bound(folder.epsilon)
        head = object_in(folder.path / "head.json")
        require(
            head.keys() == expected.keys(), "head.json has other fields than a private head states"
        )
        for name, content in expected.items():
            difference = compare("head.json", head[name], content, name)
            require(not difference, difference)
        num_head_fields = len(expected)
    if not folder.has("report/privacy_card.json"):
        return (
            f"there is no privacy card, and {num_head_fields} fields of head.json "
            "agree with the ledger"
        )
    card = object_in(folder.path / "report/privacy_card.json")
    is_format_3 = equal(value_at(card, "card_format"), 3)
    hash_place = "ledger.last_line_sha256"
    if is_format_3:
        hash_place = f"provenance.{hash_place}"
    last_hash = value_at(card, hash_place)
    require(
        last_hash in ledger.hashes,
        "the card is of a line that the ledger lacks: ledger or card were replaced",
    )
    if last_hash != ledger.hashes[-1]:
        num_lines = ledger.hashes.index(last_hash) + 1
        raise Undecided(
            f"the card is of the first {num_lines} lines of {len(ledger.hashes)}: make it again"
        )
    expected = card_fields(folder)
    if is_format_3:
        expected = fields_of_format_3(expected)
    our_accountant = f"dp-accounting {metadata.version('dp-accounting')}"
    card_accountant = value_at(card, "accounting.accountant")
    close_places = []
    for place, content in expected.items():
        card_content = value_at(card, place)
        difference = compare("the card", card_content, content, place)
        if not difference:
            continue
        # Two versions of the accountant may round differently.
        may_differ = our_accountant != card_accountant
        is_epsilon = isinstance(content, Bound) and type(card_content) is float
        is_close = may_differ and is_epsilon and math.isclose(card_content, content, rel_tol=1e-3)
        require(is_close, difference)
        close_places.append(place)
    if close_places:
        raise Undecided(
            f"{shown_list(close_places)} differ between {shown(card_accountant)}, which computed "
            f"the card, and {our_accountant} here"
        )
    num_fields = len(expected) + num_head_fields
    return f"{num_fields} fields agree with the ledger, and no other is compared"


def compare_start(folder: Folder, manifest: dict[str, Any], name: str) -> None:
    """Refuses a manifest of the trainer that names other runs behind its weights than the ledger.

    The ledgers of these runs may be longer than the manifest states, since a run may go on between
    two looks at it, but never shorter.

    Args:
        name: the folder of the checkpoint.
    """
    start = manifest.get("initialisation")
    config = folder.config or {}
    has_init = "checkpoint" in config.get("init", {})
    is_of_loop = not has_init and "model" not in config
    if start is None and is_of_loop:
        # The config.toml of a loop names the start, and `compare_plan` has compared it.
        return
    kind = start["kind"] if isinstance(start, dict) else None
    require(kind is not None, f"{name} does not say what its weights started from")
    require(
        not has_init or kind == "checkpoint",
        f"config.toml starts from init.checkpoint, and {name} says {shown(kind)}",
    )
    links: list[dict[str, Any]] = []
    while isinstance(start, dict):
        links.append(start)
        start = start.get("before_that")
    private_links = []
    gaps = []
    for link in links:
        if link.get("guarantee"):
            private_links.append(link)
        elif link.get("training_data") == "private":
            gaps.append(str(link.get("run")))
    require(not gaps, f"{name} started from private data of {shown_list(gaps)} without a guarantee")
    ledger_runs = [parent["run"] for parent in folder.ledger.parents]
    manifest_runs = [str(link.get("run")) for link in private_links]
    require(
        ledger_runs == manifest_runs,
        f"{name} says private runs {shown_list(manifest_runs) or 'none'} made its weights, "
        f"the ledger {shown_list(ledger_runs) or 'none'}",
    )
    for link, parent in zip(private_links, folder.parents or [], strict=False):
        target_delta = parent.plan["target_delta"]
        epsilon_spent = link["guarantee"]["epsilon"]
        delta = link["guarantee"]["delta"]
        may_be = equal(delta, target_delta) and (
            epsilon_spent <= epsilon_of([parent], target_delta) * (1 + 1e-3)
        )
        require(
            may_be,
            f"{name} states of {shown(link['run'])} epsilon {shown(epsilon_spent)} "
            f"at delta {shown(delta)}, and its ledger in behind/ gives less",
        )


def check_checkpoints(folder: Folder) -> str:
    """Compares manifests with the ledger, and files with manifests.

    A run may remove checkpoints, but not some of their files.
    """
    ledger = folder.ledger
    plan = ledger.plan
    entries = os.listdir(folder.path / "checkpoints") if folder.has("checkpoints") else []
    names = sorted(name for name in entries if name.startswith("step-"))
    require(
        len(names) <= MAX_CHECKPOINTS,
        f"checkpoints/ holds more than {MAX_CHECKPOINTS:,} checkpoints",
    )
    has_init = "checkpoint" in (folder.config or {}).get("init", {})
    if has_init and not names and not ledger.parents and not plan.reasons:
        raise Undecided(
            "config.toml starts from init.checkpoint, "
            "and no manifest says whether a private run made that"
        )
    records = {(step, digest) for _, step, digest in ledger.checkpoints}
    gaps = []
    num_hashed = 0
    for name in names:
        place = folder.path / "checkpoints" / name
        require(
            folder.has(f"checkpoints/{name}/manifest.json"), f"{shown(name)} has no manifest.json"
        )
        manifest_hash = hashlib.sha256(read_file(place / "manifest.json")).hexdigest()
        manifest = object_in(place / "manifest.json")
        step = whole(manifest, "step")
        position = manifest["ledger"]
        files = manifest.get("files", {})
        require(name == f"step-{step:08d}", f"{shown(name)} is of step {step}")
        line = whole(position, "seq")
        has_line = line < len(ledger.hashes) and ledger.hashes[line] == position.get("hash")
        require(
            has_line,
            f"{name} remembers another line {line + 1}: the ledger was cut or replaced",
        )
        guarantee = manifest.get("formal_guarantee")
        require(
            equal(guarantee, not plan.reasons),
            f"{name} states another formal_guarantee than the plan",
        )
        num_charges = ledger.charged(line + 1)
        stated_charges = manifest.get("charged_attempts", num_charges)
        require(
            equal(stated_charges, num_charges),
            f"{name} states {shown(stated_charges)} charges, and the ledger has {num_charges}",
        )
        if plan["enabled"] and (step, manifest_hash) not in records:
            require(
                ledger.may_lack_record(step, line),
                f"{name}: manifest.json is not the one that the ledger recorded",
            )
            gaps.append(f"{name}: the ledger has no record of it, as after a crash between the two")
        _, reached_step = ledger.reached_at(line)
        require(
            not plan["enabled"] or step == reached_step,
            f"{name} remembers line {line + 1}, which is of another step",
        )
        unlisted = sorted({*os.listdir(place)} - {"manifest.json", *files})
        require(
            not unlisted,
            f"{name} holds {shown_list(unlisted[:9])}, which its manifest does not list",
        )
        for file, listed_hash in files.items():
            is_plain_name = re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}", file) is not None
            require(is_plain_name, f"{name} lists a file with odd characters in its name")
            if not folder.has(f"checkpoints/{name}/{file}"):
                gaps.append(f"{name}: {file} is missing")
                continue
            descriptor = open_plain(place / file, LARGEST_CHECKPOINT_FILE)
            with os.fdopen(descriptor, "rb") as content:
                file_hash = hashlib.file_digest(content, "sha256").hexdigest()
            require(
                file_hash == listed_hash,
                f"{name}: {file} has another hash than its manifest says",
            )
            num_hashed += 1
        if not plan.reasons:
            compare_start(folder, manifest, name)
    if gaps:
        raise Undecided("; ".join(gaps[:3]))
    return (
        f"{len(names)} manifests are those that the ledger recorded, "
        f"and {num_hashed} files have their hashes"
    )


def check_metrics(folder: Folder) -> str:
    """Refuses metrics and held-out results with a step, charge or norm that the ledger lacks.

    Each pair of step and charges must be one that the ledger passed through, and each epsilon must
    be at least that of its charges.
    """
    ledger = folder.ledger
    plan = ledger.plan
    num_torn = 0
    num_lines = 0
    passed_states = {(step, ledger.charged(line + 1)) for line, step in ledger.done_steps}
    # charges -> the smallest epsilon that a line states for them
    claims: dict[int, float] = {}
    # step -> norms that its `done` records state
    ledger_norms: dict[int, list[float]] = {}
    for step, _, done in ledger.releases:
        ledger_norms.setdefault(step, []).append(done.get("noised_norm", math.nan))
    for file, public_fields in PUBLIC_FIELDS.items():
        lines = lines_of(folder.path / file) if folder.has(file) else ()
        # A crash before a restart may have torn one line; without privacy the ledger has no
        # restarts.
        tears_left = len(ledger.nonces) - 1 if plan["enabled"] else LARGEST_INTEGER
        for count, line in enumerate(lines, start=1):
            place = f"{file}: line {count}"
            num_lines += 1
            try:
                entry = parsed(line)
            except json.JSONDecodeError:
                # A crash cut the line off, and no reader takes a number from it.
                num_torn += 1
                tears_left -= line.endswith(b"\n")
                beginning = b'{"step": '
                is_beginning = line.startswith(beginning) or beginning.startswith(
                    line.removesuffix(b"\n")
                )
                require(is_beginning, f"{place} is neither an entry nor the beginning of one")
                require(
                    tears_left >= 0, f"{place} is torn, and no restart of the ledger explains it"
                )
                continue
            except ValueError as error:
                # Other readers might read the line, each in its own way.
                raise Violated(f"{place}: {shown(error)}") from error
            has_step = isinstance(entry, dict) and type(entry.get("step")) is int
            require(has_step, f"{place} has no step")
            foreign = sorted(entry.keys() - public_fields)
            require(not foreign, f"{place} shows {shown_list(foreign[:9])}, which no run publishes")
            step = entry["step"]
            charges = entry.get("privacy/charged_attempts")
            claim = entry.get("privacy/epsilon")
            is_done = not plan["enabled"] or 0 <= step <= ledger.last_step
            require(
                is_done,
                f"{place} shows step {shown(step)}, which the ledger never finished",
            )
            # Each start measures step 0, which is not charged.
            num_attempts = ledger.attempts[step] if step > 0 else len(ledger.nonces)
            num_attempts = max(num_attempts, 1)
            attempt = entry.get("attempt", 0)
            has_attempt = type(attempt) is int and 0 <= attempt < num_attempts
            require(
                has_attempt,
                f"{place} shows attempt {shown(attempt)} of step {step}, "
                f"where the ledger has {num_attempts}, from 0 on",
            )
            if NORM in entry and not plan.reasons:
                is_stated = False
                for norm in ledger_norms.get(step, []):
                    is_stated |= math.isclose(entry[NORM], norm, rel_tol=METRIC_ROUNDING)
                require(
                    is_stated,
                    f"{place} shows {NORM} = {shown(entry[NORM])}, "
                    "which no line of the step states",
                )
            if charges is not None or claim is not None:
                has_passed = type(charges) is int and (step, charges) in passed_states
                require(
                    has_passed,
                    f"{place} shows {shown(charges)} charges, "
                    f"as the ledger never stood after step {step}",
                )
            if charges is not None and claim is not None:
                require(not plan.reasons, f"{place} states an epsilon, and nothing is claimed")
                # NaN would hide a smaller epsilon.
                is_number = type(claim) in (int, float) and not math.isnan(claim)
                require(is_number, f"{place} states epsilon {shown(claim)}")
                claims[charges] = min(claim, claims.get(charges, claim))
    counts = sorted(claims)
    # Of very many counts some are recomputed, the last one among them.
    stride = max(1, -(-len(counts) // MAX_RECOMPUTED_COUNTS))
    recomputed = {*counts[::stride], *counts[-1:]}
    if folder.epsilon is not None:
        least_epsilon = 0.0
        for count in counts:
            if count in recomputed:
                chain = [ledger, *(folder.parents or [])]
                least_epsilon = epsilon_of(chain, folder.delta, count)
            # For other counts this is the epsilon of fewer charges, which is a lower bound.
            require(
                claims[count] >= least_epsilon * (1 - FP32_ROUNDING),
                f"epsilon {claims[count]:.8g} after {count}, "
                f"where it is {rounded_up(least_epsilon)} or more",
            )
    lines_seen = f"{num_lines} lines, {num_torn} of them torn"
    epsilons = f"epsilon is recomputed for {len(recomputed)} of {len(counts)} counts of charges"
    return f"{lines_seen}, show nothing that the ledger lacks; {epsilons}"


def too_small(squared: float, coordinates: int, level: float) -> bool:
    """Returns whether a sum of squared standard normals is improbably small.

    Args:
        squared: the sum of at least `coordinates` squares.
        level: the largest probability that counts as improbable.
    """
    from scipy.special import gammainc  # comes with dp-accounting

    if coordinates < EXACT_BELOW:
        return bool(gammainc(coordinates / 2, squared / 2) < level)
    # Laurent and Massart 2000, lemma 1.
    return squared < coordinates - 2 * math.sqrt(coordinates * math.log(1 / level))


def check_noise(folder: Folder) -> str:
    """Compares the norm of every noised sum with the noise that its intent states.

    Given the past, the sum S of a step is fixed, whatever the data are, and its noise w is fresh:
    |S + w|^2 is stochastically at least |w|^2 = std^2 chi-square(P), and so are sums over steps. In
    steps of h, |S + w| is at most sqrt(P) h / 2 longer than round(S + w), which is published. All
    comparisons in one ledger together refute honest noise with probability `FALSE_ALARM`.
    """
    ledgers = [folder.ledger, *(folder.parents or [])]
    sentences = [noise_of_ledger(ledger) for ledger in ledgers]
    sentence = f"not refuted: {sentences[0]}"
    if folder.parents:
        sentence += f"; {len(folder.parents)} ledgers behind it neither"
    return sentence


def noise_of_ledger(ledger: Ledger) -> str:
    """Returns the sentence of `check_noise` about one ledger, or raises Violated."""
    plan = ledger.plan
    batch = plan["expected_batch_size"]
    coordinates = ledger.opened.get("noised_coordinates")
    if "head" in ledger.opened or not plan["noise_multiplier"] or not ledger.done_steps:
        return "no step states noise that a norm could refute"
    if coordinates is None:
        raise Undecided(
            "the ledger does not state the number of noised coordinates, "
            "so the noise cannot be checked"
        )
    exponent = ledger.opened.get("sum_exponent")
    if exponent is None and NOISE_KIND in plan.fields:
        raise Undecided(
            "the ledger does not state the step of its noise, so the noise cannot be checked"
        )
    half_step = 0.0 if exponent is None else math.ldexp(1.0, -exponent - 1)
    # Rows of (name, squared norm in units of the noise, coordinates, number of comparisons).
    rows: list[tuple[str, float, int, int]] = []
    total = 0.0
    for step, std, done in ledger.releases:
        if not done:
            continue
        require("noised_norm" in done, f"`done` of step {step} does not state what was noised")
        total_share = {"owners": 1, "coordinates": coordinates, "norm": done["noised_norm"]}
        share = done.get("smallest_share", total_share)
        norms = []
        for part in (total_share, share):
            rounding = half_step * math.sqrt(part["coordinates"])
            norms.append((part["norm"] * batch * NORM_MARGIN + rounding) / std)
        norm, share_norm = norms
        # The share is the smallest of so many owners, so as many comparisons are made.
        rows.append((f"step {step}", share_norm**2, share["coordinates"], share["owners"]))
        total += norm**2
    steps = len(rows)
    least_ratio = min(math.sqrt(squared / size) for _, squared, size, _ in rows)
    rows.append(("all steps together", total, steps * coordinates, 1))
    level = FALSE_ALARM / sum(comparisons for *_, comparisons in rows)
    refuted = [name for name, squared, size, _ in rows if too_small(squared, size, level)]
    require(
        not refuted,
        f"less noise was drawn than stated, by the norm of {shown_list(refuted[:9])}",
    )
    return (
        f"{steps} norms over {coordinates} coordinates are at least {least_ratio:.4g} "
        "of the stated noise's"
    )


CHECKS = (
    check_files,
    check_order,
    check_plan,
    check_behind,
    check_epsilon,
    check_card,
    check_checkpoints,
    check_metrics,
    check_noise,
)


# ---------------------------------------------------------------- The verdict, and what is printed


def declarations(folder: Folder) -> dict[str, str]:
    """Returns what no check here can decide, and for each what is known about it."""
    ledger = folder.ledger
    opened = ledger.opened
    declared = {
        "that the program did what the ledger says": "see audit.py of the project",
        "time of the first start; all records repeat it, since clocks depend on the data": shown(
            opened["time_utc"]
        ),
        "commit of the code": shown(opened.get("commit") or "NOT STATED"),
        "what one example is": shown(opened.get("unit", "one example")),
        "in ledger.jsonl": shown_list(sorted(ledger.unchecked_fields)),
    }
    if ledger.parents:
        is_disjoint = "disjoint_from_start" in opened
        declared |= {
            "that the data are disjoint from those behind the initial weights": (
                "stated: one example bears one of them" if is_disjoint else "NOT STATED"
            ),
            "that no later schedule was chosen after looking at outputs of the earlier runs": (
                "the composed epsilon assumes it; a shared ledger's RDP filter does not"
            ),
        }
    return declared | {
        "metrics.jsonl, heldout.jsonl": "learning rates and held-out results",
        "config.toml": (
            "all but [privacy] as the plan holds it, numbers of steps and examples, disjoint_data "
            "and starts_from of [init]; manifests say whether init.checkpoint is of a private run"
        ),
        "manifests of checkpoints": (
            "all but step, charges, guarantee, line, hashes, and private runs that they started "
            "from"
        ),
        "verify.py": "cannot judge itself: take it from the project, not from the folder",
        "privacy_card.html, privacy_card.md": "not read, whatever they show",
        "tensorboard/, private/ and all other files": (
            "not read, and neither is an epsilon that they state"
        ),
        "privacy_card.json": (
            "all but the claim, what it is composed of, the plan, the opening record, and numbers "
            "of steps, attempts and lines; not the epsilons of groups and other neighbours, nor "
            "the rates of attacks"
        ),
    }


def verify(path: Path, head: str | None = None) -> tuple[int, dict[str, Any]]:
    """Makes all checks of a folder and returns the exit code and the object that --json prints.

    Args:
        head: the hash of a line that the ledger must have.

    Raises:
        BadInput: there is no such folder, or a file in it cannot be judged.
    """
    if not path.is_dir():
        raise BadInput(f"{shown(path)}: is not a folder")
    try:
        ledger = read_ledger(path / "ledger.jsonl")
    except Violated as error:
        sentence = printable(str(error))
        return VIOLATED, {
            "verdict": "violated",
            "exit_code": VIOLATED,
            "line": f"violated: no epsilon was found{PAGES_UNREAD}",
            "checks": [{"name": "ledger", "outcome": "violated", "sentence": sentence}],
        }
    plan = ledger.plan
    folder = Folder(path, ledger, head)
    checks = [
        ("chain", "ok", f"{len(ledger.hashes)} lines are canonical and chained by their hashes")
    ]
    for check in CHECKS:
        outcome = "violated"
        try:
            sentence = check(folder)
            outcome = "ok"
        except Violated as error:
            sentence = str(error)
        except Undecided as error:
            sentence = str(error)
            outcome = "inconclusive"
        except FIELD_ERRORS as error:
            sentence = f"a field is missing or of another type ({error!r:.200})"
        checks.append((check.__name__.removeprefix("check_"), outcome, sentence))
        if check is check_files and outcome != "ok":
            # Behind a link are files of somebody else.
            break
    outcomes = {outcome for _, outcome, _ in checks}
    if "violated" in outcomes:
        verdict = "violated"
        exit_code = VIOLATED
    elif "inconclusive" in outcomes:
        verdict = "inconclusive"
        exit_code = INCONCLUSIVE
    else:
        verdict = "consistent"
        exit_code = CONSISTENT
    is_rounded = NOISE_KIND in plan.fields or plan["arithmetic"] == "certified"
    exponent = ledger.opened.get("sum_exponent")
    # The mechanism.
    attested = {name: plan[name] for name in sorted(PLAN_FIELDS)}
    attested["noise"] = "rounded to steps of the sums" if is_rounded else "doubles"
    if exponent is not None:
        attested["step of sums and noise at the first C"] = f"2^{-exponent}"
    attested |= {
        "noise multiplier as accounted": plan.accounted,
        "last step done": ledger.last_step,
        "charged attempts": ledger.charged(),
        "commitment of the sampling key": ledger.opened["key_commitment"],
        "last line": ledger.hashes[-1],
        "state of the run": ledger.close_reason or "open",
    }
    finite_epsilon = None
    if folder.epsilon is not None and math.isfinite(folder.epsilon):
        finite_epsilon = folder.epsilon
    if finite_epsilon is not None:
        claim = f"epsilon {rounded_up(finite_epsilon)} at delta {folder.delta:g}"
        if folder.delta * plan["num_examples"] >= 1:
            claim += USELESS_DELTA
    elif ledger.reasons:
        claim = "no epsilon is claimed"
    else:
        claim = "no epsilon was found"
    printable_checks = []
    for name, outcome, sentence in checks:
        printable_checks.append({"name": name, "outcome": outcome, "sentence": printable(sentence)})
    return exit_code, {
        "verdict": verdict,
        "exit_code": exit_code,
        "line": f"{verdict}: {claim}{PAGES_UNREAD}",
        "formal_guarantee": not ledger.reasons,
        "epsilon": finite_epsilon,
        "delta": folder.delta or plan["target_delta"],
        "head_known": head is not None,
        "checks": printable_checks,
        "attested": attested,
        "declared": declarations(folder),
    }


def to_text(report: dict[str, Any]) -> str:
    """Returns the object of `verify` as lines for a reader, the most important one last."""
    marks = {"ok": "ok          ", "violated": "VIOLATED    ", "inconclusive": "undecided   "}
    lines = []
    for check in report["checks"]:
        lines.append(f"{marks[check['outcome']]}{check['name']}: {check['sentence']}")
    if "attested" in report:
        lines.append(
            "attested by the ledger's chain; believe this, and no page that says something else:"
        )
        lines += [f"  {name}: {content}" for name, content in report["attested"].items()]
        lines.append("declared, and checked by nothing:")
        lines += [f"  {name}: {sentence}" for name, sentence in report["declared"].items()]
        if not report["head_known"]:
            lines.append(
                "without a hash from elsewhere (--head), a folder that was forged as a whole looks "
                "like a true one"
            )
        if report["attested"]["state of the run"] == "open":
            lines.append("the ledger is open: the run may go on, or its last lines were cut off")
    lines.append(f"verify: {report['line']}")
    return "\n".join(map(printable, lines))


class Parser(argparse.ArgumentParser):
    """An argument parser whose error is one line."""

    def error(self, message: str) -> NoReturn:
        """Refuses a bad argument."""
        raise BadInput(shown(message))


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """Returns the arguments of the command line; a bad argument is bad input."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    # A run folder has a copy of this file as a program; the module of the library is in no run
    # folder.
    own_folder = Path(__file__).resolve().parent if __name__ == "__main__" else None
    parser.add_argument("folder", nargs="?", type=Path, default=own_folder)
    parser.add_argument(
        "--head", help="hash of a line that the ledger had, as the end of the run printed it"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Verifies one folder, prints the result and returns the exit code.

    Every error is one line, whatever the folder holds.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        options = parse_args(arguments)
        head = None if options.head is None else options.head.strip().lower()
        if head is not None and not is_hex(head):
            raise BadInput("--head must be 64 hexadecimal digits")
        if options.folder is None:
            raise BadInput("give a run folder: auditable-dp verify RUN_DIR")
        if options.folder.is_dir() and not options.json:
            print(
                f"checking {shown(options.folder)}: ledger, epsilon, card and files "
                "(up to a minute)",
                file=sys.stderr,
                flush=True,
            )
        exit_code, report = verify(options.folder, head)
    except ImportError as error:
        print(f"error: {error}: install numpy and dp-accounting", file=sys.stderr)
        return BAD_INPUT
    except (BadInput, OSError, RecursionError, MemoryError) as error:
        print(f"error: {shown(error) or type(error).__name__}", file=sys.stderr)
        return BAD_INPUT
    print(json.dumps(report, allow_nan=False) if options.json else to_text(report))
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
