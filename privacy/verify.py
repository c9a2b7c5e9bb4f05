"""Rechecks a published run folder. It needs this file, numpy, dp-accounting and cryptography, and nothing of the trainer.

    python -I verify.py [FOLDER] [--fingerprint F] [--head H] [--json]

FOLDER is by default the one that holds this file. A published folder is a run folder without `private/`. The start of a run puts
this file there; whoever does not trust the publisher takes it from the project instead, since it judges the folder that it is in.

files        the folder holds no other code, no link, and no ledger that nothing names; LATEST names a checkpoint that is here
chain        every line of ledger.jsonl is canonical JSON, repeats the SHA-256 of the line before and has known fields
signature    the key in the first line has signed what it should have; with --fingerprint, it is the key that you were told
order        sessions, intents, attempts, `done`, checkpoints and repairs follow each other as they must; with --head, the ledger
             has that line
plan         the plan is consistent, every intent states its noise and sensitivity, and config.toml asks for this plan
budget       no more attempts are charged than planned and reserved
epsilon      is recomputed from the ledger alone by privacy loss distributions (zero-out neighbours), the cap of the batches and
             every charged attempt included, and composed with the ledgers of private runs whose weights the run started from
card         every field of report/privacy_card.json follows from the ledger, or is listed as not attested; counts are equal,
             and an epsilon may be larger than the one that is computed here, never smaller
pages        every number of privacy_card.md and .html is the one that privacy_card.json gives for its line
checkpoints  every manifest is the one that the ledger recorded, remembers a line of it, and its files have their hashes
metrics      metrics.jsonl and held-out results show no step and no charge that the ledger lacks, and no smaller epsilon

The documentation of the ledger's format is docs/running.md of the project. This is a second implementation of it.
Exit codes: 0 consistent; 5 violated: something contradicts the ledger; 6 inconclusive: nothing does, but something is missing
that a check needs, as config.toml, a ledger in behind/, a checkpoint's file or a signature; 2 bad input. A folder from a
stranger may hold anything: what is too large, too deep, no plain file or of a wrong type ends in one line.
"""

import os
import sys

if (
    __name__ == "__main__"
):  # modules that lie next to this file are part of what is judged, so nothing is imported from there
    _beside = {
        os.path.realpath(os.path.dirname(place)) for place in (os.path.abspath(__file__), os.path.realpath(__file__))
    }
    sys.path[:] = [place for place in sys.path if os.path.realpath(place or os.curdir) not in _beside]

# Hence no `from __future__`, which is a file too and would be looked for first; os is loaded before any script.
import argparse
import functools
import hashlib
import html
import io
import json
import logging
import math
import re
import signal
import stat
import time
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")
CONSISTENT, BAD_INPUT, VIOLATED, INCONCLUSIVE = 0, 2, 5, 6
LARGEST_LEDGER, LARGEST_LINE, LARGEST_FILE = 1 << 30, 1 << 20, 1 << 26
MINUTES = 20
MOST = 10**12
MOST_COUNTS = 20
KNOWN_METRICS = (
    "privacy/epsilon",
    "privacy/charged_attempts",
    "privacy/clipping_bound",
    "privacy/noised_unclipped_fraction",
)
SIGNED = b"dp-trainer ledger head v1\n"
TORN = b" #torn"
HEADER = ("seq", "type", "time_utc", "previous")
FIELDS: dict[object, set[str]] = {
    "open": {
        "format", "plan", "key_commitment", "signer", "data_hmac", "commit", "accountant", "unit", "tuning", "deduplication",
        "shared_ledger", "max_examples_per_owner", "head", "behind", "disjoint_from_start",
    },
    "session": {"nonce", "mirror", "environment", "restarted_from_step_0", "shared_seq", "shared_hash"},
    "intent": {"step", "attempt", "releases", "group"},
    "done": {"step", "attempt", "params_digest"},
    "checkpoint": {"step", "path", "digest"},
    "signature": {"signature"},
    "repair": {"torn_lines", "charged"},
    "close": {"reason", "num_charged"},
}  # fmt: skip
"""What a line of each type may state besides its header; whatever else stands there would be believed and checked by nothing."""
LOOSE = {
    "data_hmac", "commit", "accountant", "unit", "tuning", "deduplication", "shared_ledger", "max_examples_per_owner", "head",
    "disjoint_from_start", "mirror", "environment", "restarted_from_step_0", "shared_seq", "shared_hash", "params_digest",
    "reason",
}  # fmt: skip
"""Those of them that nothing here can check."""
PLAN_FIELDS = {
    "num_examples", "expected_batch_size", "num_steps", "target_epsilon", "max_grad_norm", "clipping_function",
    "adaptive_clipping", "arithmetic", "lattice_exponent", "sensitivity_slack", "enabled", "sampling", "shuffle_as_gaussian",
    "informal_reasons", "noise_multiplier", "target_delta", "reserved_attempts", "cap", "sample_rate",
    "sampling_threshold", "adjacency", "formal_guarantee",
}  # fmt: skip
RECIPE_KEYS = {
    "enabled", "expected_batch_size", "noise_multiplier", "target_epsilon", "target_delta", "max_grad_norm", "clipping_function",
    "target_unclipped_quantile", "clipbound_learning_rate", "unclipped_num_std", "arithmetic", "clipping_mode",
    "reserved_attempts", "allow_small_noise", "simulation", "sampling", "shuffle_as_gaussian", "shared_ledger",
    "fixed_in_advance", "max_examples_per_owner", "tuning", "ledger_mirror", "bands", "strategy",
}  # fmt: skip
"""What [privacy] of config.toml may hold."""
TABLES = {"name", "model", "init", "data", "heldout", "privacy", "optimizer", "schedule", "train"}
ENVIRONMENT = ("commit", "modified", "python", "packages")
SLACK, HEAD_SLACK = 1e-3, 1e-6
"""r of floating-point sums, of gradients and of a head's statistics: how far rounding may carry a contribution above C."""
HAIR = 1e-9
"""How much two machines' rounding of one computation may differ."""
FP32 = 1e-7
"""Metrics are published as fp32 numbers: a little more than half a unit of the last place of one."""
FINE, COARSE = 1e-4, 1e-3
"""Grids of privacy loss distributions."""
SMALLEST_DELTA = 1e-12
"""Below it, distributions are not trusted, and the claim is by Renyi DP."""
DETAILED = 50.0
"""Above this epsilon a card leaves out what surrounds its claim."""


OPEN = "open"
"""The state of a run that no `close` has ended."""


class BadInput(Exception):
    """Something that is no run folder, or that cannot be read."""


class Violated(Exception):
    """What a check found wrong."""


class Undecided(Exception):
    """What a check could not find out."""


class Computed(float):
    """A number that is computed here and was computed elsewhere: equal but for rounding. Any other number is equal exactly."""


class Bound(float):
    """An upper bound, of epsilon or of what an attack can reach: whoever states more is careful, and nobody may state less."""


class Rough(Bound):
    """A bound on a curve, whose smallest values different machines round differently."""


# ---------------------------------------------------------------- Reading files that a stranger wrote


def open_plain(path: Path, largest: int) -> int:
    """A descriptor of a plain file that is at most this long; no link, pipe or device is followed or waited for."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise BadInput(f"{shown(path)}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and status.st_size <= largest:
        return descriptor
    os.close(descriptor)
    raise BadInput(f"{shown(path)}: is no plain file of at most {largest:,} bytes")


def read_file(path: Path, largest: int = LARGEST_FILE) -> bytes:
    with os.fdopen(open_plain(path, largest), "rb") as file:
        return file.read(largest)


def lines_of(path: Path) -> Iterator[bytes]:
    """The lines of a file with their line ends; one that is too long is bad input."""
    with os.fdopen(open_plain(path, LARGEST_LEDGER), "rb") as file:
        number = 1
        while line := file.readline(LARGEST_LINE):
            if len(line) == LARGEST_LINE:
                raise BadInput(f"{shown(path)}: line {number} has {LARGEST_LINE:,} bytes or more")
            yield line
            number += 1


def is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def parsed(text: bytes, *, with_nan: bool = False) -> Any:
    """JSON whose numbers are finite and of sensible length, and whose keys differ; ValueError for anything else.

    Args:
        with_nan: also takes NaN and Infinity, which held-out losses may be.
    """
    rules: dict[str, Any] = {"parse_int": _whole, "parse_float": _finite}
    rules |= {} if with_nan else {"parse_constant": _refuse}
    try:
        return json.loads(text.decode(), object_pairs_hook=_unique, **rules)
    except (RecursionError, UnicodeDecodeError) as error:
        raise ValueError("it is nested too deeply, or no UTF-8") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands twice in an object, so readers may see different values")
    return found


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")


def _whole(text: str) -> int:
    return int(text) if len(text) <= 40 else _refuse("an integer of more than 40 digits")


def _finite(text: str) -> float:
    value = float(text)
    return value if len(text) <= 40 and math.isfinite(value) else _refuse("an infinite or overlong number")


def object_in(path: Path) -> dict[str, Any]:
    """The JSON object in a file; Violated where it holds anything else."""
    try:
        value = parsed(read_file(path))
    except ValueError as error:
        raise Violated(f"{path.name} is no JSON: {shown(error)}") from error
    if not isinstance(value, dict):
        raise Violated(f"{path.name} holds no JSON object")
    return value


def shown(value: object) -> str:
    """Text from a file on one line of printable characters, cut to a length that can be read."""
    try:
        text = printable(str(value)[:300])
    except ValueError:  # Python writes out no integer of more than 4,300 digits
        return "a number of thousands of digits"
    return text if len(text) <= 200 else f"{text[:160]}..."


def printable(text: str) -> str:
    """The text on one line; no name of a file can add a line of its own to what is printed."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)


def rounded_up(value: float, digits: int = 6) -> str:
    """An epsilon as text, never below its value."""
    if math.isinf(value):
        return "inf"
    return f"{math.ceil(Fraction(repr(float(value))) * 10**digits) / 10**digits:.{digits}f}"


def is_hex(value: object, digits: int) -> bool:
    return isinstance(value, str) and re.fullmatch(f"[0-9a-f]{{{digits}}}", value) is not None


def require(condition: bool, sentence: str) -> None:
    if not condition:
        raise Violated(sentence)


def equal(one: object, other: object) -> bool:
    """Equality in which true is not 1."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def whole(record: dict[str, Any], name: str, least: int, most: int = MOST) -> int:
    value: Any = record.get(name)
    if type(value) is not int or not least <= value <= most:
        raise Violated(f"{name} must be an integer from {least} to {most}")
    return value


def number(record: dict[str, Any], name: str, least: float, most: float) -> float:
    value: Any = record.get(name)
    if type(value) not in (int, float) or not least <= value <= most:
        raise Violated(f"{name} must be a number from {least:g} to {most:g}")
    return float(value)


# ---------------------------------------------------------------- The plan, frozen in the first line


@dataclass(frozen=True)
class Plan:
    """What an `open` record plans, checked.

    Attributes:
        rate: q, rounded up.
        accounted: the noise multiplier that the accountant is charged with, sigma / (1 + r); r is 0 where the arithmetic is
            certified to keep every contribution within C.
        reasons: why nothing is claimed; empty where something is.
    """

    fields: dict[str, Any]
    rate: float
    accounted: float
    reasons: tuple[str, ...]

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]

    @property
    def most_charges(self) -> int:
        return int(self["num_steps"]) + int(self["reserved_attempts"])

    @property
    def shuffled(self) -> bool:
        return bool(self["sampling"] == "shuffle")

    @property
    def bands(self) -> int:
        """b, the number of groups of examples that take turns under correlated noise; 1 without."""
        return int(self.fields.get("bands", 1))

    def turns(self, count: int) -> int:
        """How many of `count` charges the group with most of them has."""
        return -(-count // self.bands)

    def participations(self, last_step: int, replays: int) -> int:
        """The most releases that one example of shuffled data can be in: epochs, rounded up, and repeats."""
        per_epoch: int = -(-self["num_examples"] // self["expected_batch_size"])
        return -(-last_step // per_epoch) + replays

    def gradient_multiplier(self) -> float:
        """Noise multiplier of the clipped sum alone, where a noised count shares sigma with it (adaptive clipping)."""
        sigma, count_std = self["noise_multiplier"], self["adaptive_clipping"]["unclipped_num_std"]
        return float(sigma / math.sqrt(1 - (sigma / (2 * count_std)) ** 2))

    def releases(self, count: int) -> "Group":
        """`count` charges, as the accountant sees them; shuffled, the first ones are all different steps."""
        if self.shuffled:
            steps = min(count, self["num_steps"])
            return Group(1.0, self.accounted, self["num_examples"], None, self.participations(steps, count - steps))
        largest = -(-self["num_examples"] // self.bands)
        return Group(self.rate, self.accounted, largest, self["cap"], self.turns(count))

    def noise_tail(self, copies: int = 1) -> float:
        """What the bounded support of the noise costs in delta: Box-Muller from 63 bits ends at sqrt(128 ln 2) sigma.

        One coordinate moved by a / sigma passes the edge e with probability at most g(a) = Q(e - a / sigma) - Q(e); over the at
        most 2^36 coordinates of a vector of norm j that is at most j 2^18 g'(0) + g(j). An example moves a step that it is in by
        a vector of norm 1, several together by one of norm j where j of them are drawn. Correlated noise spreads an example
        over the fresh noise of b steps, which has b times as many coordinates.
        """
        if self.reasons or self.fields.get("arithmetic") == "certified":  # whose noise is exact, without an edge
            return 0.0
        edge, one = math.sqrt(128 * math.log(2)), self.releases(self.most_charges)
        slope = math.exp(-edge * edge / 2) / math.sqrt(2 * math.pi) * math.sqrt(2**36 * self.bands)

        def passes(drawn: int) -> float:
            shift = drawn / self.accounted
            return slope * shift + math.erfc((edge - shift) / math.sqrt(2)) / 2 if edge - shift > 1 else 1.0

        cuts, usual = 0.0, self["usual_cap"]
        if usual is not None and one.cap is not None and one.cap < usual:
            from scipy.stats import binom

            # Who pushes another one out of a batch that is cut moves its sum by up to 2.
            cuts = one.rate * one.count * float(binom.sf(one.cap - 1, one.num_examples - 1, one.rate)) * passes(2)
        if copies == 1:
            return min(1.0, cuts + one.rate * one.count * passes(1))
        from scipy.stats import binom

        certain = min(copies, int((edge - 1) * self.accounted))  # more than these pass the edge for certain
        chances = [float(chance) for chance in binom.pmf(range(certain + 1), copies, one.rate)]
        tail = math.fsum(chances[drawn] * passes(drawn) for drawn in range(1, certain + 1))
        return min(1.0, cuts + one.count * (tail + float(binom.sf(certain, copies, one.rate))))


def read_plan(fields: Any, head: bool) -> Plan:
    """Checks every field of a plan that something here depends on, and that the derived ones follow from the others."""
    require(isinstance(fields, dict), "the frozen plan is no object")
    odd = sorted((fields.keys() - {"correlated"}) ^ PLAN_FIELDS)
    require(not odd, f"the frozen plan lacks {shown(odd[:1])}, or this verifier does not know it")
    n = whole(fields, "num_examples", 1)
    batch = whole(fields, "expected_batch_size", 1, n)
    steps, reserve = whole(fields, "num_steps", 1), whole(fields, "reserved_attempts", 0)
    sigma, slack = number(fields, "noise_multiplier", 0, 1e4), number(fields, "sensitivity_slack", 0, 1e-3)
    number(fields, "target_delta", 1e-300, 1 - 1e-9)
    number(fields, "max_grad_norm", 1e-12, 1e12)
    for name in ("enabled", "shuffle_as_gaussian", "formal_guarantee"):
        require(type(fields.get(name)) is bool, f"{name} must be true or false")
    require(fields.get("sampling") in ("poisson", "shuffle"), "sampling must be poisson or shuffle")
    require(fields.get("adjacency") == "zero_out", "adjacency must be zero_out")
    require(fields.get("arithmetic") in ("floating", "certified"), "arithmetic must be floating or certified")
    functions = ("flat", "automatic", "per_layer", "grouped")
    require(fields.get("clipping_function") in functions, f"clipping_function must be one of {', '.join(functions)}")
    certified = fields.get("arithmetic") == "certified"
    usual_slack = 0 if certified else HEAD_SLACK if head else SLACK
    require(slack == usual_slack or not sigma, f"sensitivity_slack must be {usual_slack:g}: as much as rounding moves")
    if fields.get("target_epsilon") is not None:
        number(fields, "target_epsilon", 1e-12, 1e12)
    cap = None if fields.get("cap") is None else whole(fields, "cap", 1)
    correlated = read_correlated(fields, n, batch, steps)
    threshold = correlated["bands"] * batch * 2**64 // n
    require(
        fields.get("sampling_threshold") == str(threshold),
        f"sampling_threshold is not floor(b B 2^64 / n) = {threshold}",
    )
    exact = Fraction(threshold, 2**64)
    rate = float(exact) if Fraction(float(exact)) >= exact else math.nextafter(float(exact), 1.0)
    require(fields.get("sample_rate") == rate, f"sample_rate is not {rate!r}, which is b B / n rounded up")
    usual = None if fields["sampling"] == "shuffle" else min(n, math.ceil(batch + 8 * math.sqrt(batch)))
    require(head or not fields["enabled"] or cap is None or cap <= n, f"cap {cap} is above the number of examples")
    full = batch == n and cap is None and correlated["bands"] == 1 and fields["sampling"] == "poisson"
    require(full or not head, "a private head takes all examples in every step, and this plan does not")
    uneven = n % correlated["bands"] > 0
    bites = usual is not None and cap is not None and cap < min(usual, -(-n // correlated["bands"]))
    require(not (uneven and bites), f"cap {cap} would cut batches of groups of unequal size")
    exponent = lattice_exponent(fields["max_grad_norm"], sigma, min(n, cap or n)) if certified else None
    require(
        fields.get("lattice_exponent") == exponent, f"lattice_exponent is not {exponent}, which C, cap and noise give"
    )
    adaptive = fields.get("adaptive_clipping")
    if adaptive is not None:
        names = {"target_unclipped_quantile", "clipbound_learning_rate", "unclipped_num_std"}
        require(
            isinstance(adaptive, dict) and adaptive.keys() == names, f"adaptive_clipping has {', '.join(sorted(names))}"
        )
        require(
            fields["clipping_function"] == "flat", "adaptive clipping is flat, so clipping_function cannot be another"
        )
        number(adaptive, "target_unclipped_quantile", 0, 1)
        number(adaptive, "clipbound_learning_rate", 1e-300, 1e300)
        count_std = number(adaptive, "unclipped_num_std", 1e-300, 1e300)
        require(2 * count_std > sigma, "unclipped_num_std leaves no noise to the gradient")
    informal = fields.get("informal_reasons")
    require(isinstance(informal, list) and all(isinstance(why, str) for why in informal), "informal_reasons are words")
    reasons = [] if fields["enabled"] else ["privacy is disabled (privacy.enabled = false)"]
    reasons += ["the noise multiplier is 0"] if fields["enabled"] and sigma == 0 else []
    if fields["sampling"] == "shuffle" and not fields["shuffle_as_gaussian"]:
        reasons.append("sampling is 'shuffle', not Poisson, and shuffle_as_gaussian is not set")
    reasons += informal or []
    require(fields["formal_guarantee"] == (not reasons), "formal_guarantee does not follow from the rest of the plan")
    accounted = sigma / (1 + slack)
    plan = Plan({**fields, **correlated, "cap": cap, "usual_cap": usual}, rate, accounted, tuple(reasons))
    require(
        steps + reserve <= MOST and plan.noise_tail() < fields["target_delta"], "delta is below the tail of the noise"
    )
    return plan


def lattice_exponent(bound: float, sigma: float, cap: int) -> int:
    """f of certified arithmetic: sums and noise are multiples of 2^-f, the finest on which an entry has 32 bits and a sum 63."""
    exponent = 32 - math.frexp(bound)[1]
    deviation = Fraction(sigma) * Fraction(bound)
    most = (cap + 1) * Fraction(bound) + 64 * deviation
    while most * Fraction(2) ** exponent > 2**62 or deviation * Fraction(2) ** exponent > 2**49:
        exponent -= 1
    return exponent


GROUP_OF_EXAMPLE = "its number modulo bands"
GROUP_OF_ATTEMPT = "the number of attempts charged before it modulo bands"


def read_correlated(fields: dict[str, Any], n: int, batch: int, steps: int) -> dict[str, Any]:
    """Bands and strategy of a plan's noise: 1 band where it is independent.

    With b bands, step t releases its sum plus w_t, where c_0 w_t + ... + c_{b-1} w_{t-b+1} is fresh noise of standard deviation
    sigma. The examples are in b groups, which take turns, so that those of a group are b steps apart; then an attempt tells no
    more than one release of the sampled group with noise sigma if the squares of c add up to at most 1.
    """
    if "correlated" not in fields:
        return {"bands": 1, "strategy": "square_root"}
    noise = fields["correlated"]
    names = {"bands", "strategy", "coefficients", "group_of_example", "group_of_attempt"}
    require(isinstance(noise, dict) and noise.keys() == names, "correlated noise has other fields than are known")
    bands, coefficients = whole(noise, "bands", 2, min(n, steps)), noise["coefficients"]
    require(bands * batch <= n, f"{bands} groups would have a sample rate above 1")
    is_list = isinstance(coefficients, list) and all(type(c) is float and 0 < c <= 1 for c in coefficients)
    require(
        is_list and len(coefficients) == bands, f"correlated noise of {bands} bands has as many coefficients, above 0"
    )
    require(
        sum(Fraction(c) ** 2 for c in coefficients) <= 1,
        "the coefficients are longer than 1: examples are undercharged",
    )
    require(all(a >= b for a, b in pairwise(coefficients)), "the coefficients of correlated noise must not grow")
    require(noise["strategy"] in ("square_root", "optimised"), "the strategy of correlated noise is unknown")
    root = 1.0
    for k, c in enumerate(coefficients if noise["strategy"] == "square_root" else []):
        root *= (2 * k - 1) / (2 * k) if k else 1.0
        require(
            math.isclose(c, root * coefficients[0], rel_tol=1e-9), f"coefficient {k} is not that of the square root"
        )
    require(
        (noise["group_of_example"], noise["group_of_attempt"]) == (GROUP_OF_EXAMPLE, GROUP_OF_ATTEMPT),
        "groups of examples and their turns are not those that epsilon is computed for",
    )
    fits = fields.get("sampling") == "poisson" and fields.get("adaptive_clipping") is None
    fits = fits and fields.get("arithmetic") == "floating" and fields.get("enabled") is True
    require(fits and fields["noise_multiplier"] > 0, "correlated noise in a run that cannot have it")
    return {"bands": bands, "strategy": noise["strategy"]}


def check_turn(ledger: "Ledger", record: dict[str, Any], *, retries: bool) -> None:
    """An intent draws from the group whose turn it is at its place, and a session is one unbroken run of steps.

    Args:
        retries: whether the intent repeats a step of its own session.
    """
    bands = ledger.plan.bands
    if bands == 1:
        require("group" not in record, "an intent names a group of examples, and the plan has none")
        return
    turn = ledger.charged() % bands
    require(
        whole(record, "group", 0) == turn,
        f"the attempt drew from another group of examples than {turn}, whose turn it is",
    )
    require(not retries, "a retry in the session of the step that did not end: its past noise would be used again")


def check_releases(plan: Plan, head: bool, releases: Any) -> "Releases":
    """Every intent states the planned noise for the planned sensitivity; the first sensitivity is C."""
    require(isinstance(releases, list) and 1 <= len(releases) <= 1000, "an intent lists its releases")
    for release in releases:
        fields = isinstance(release, dict) and set(release) == {"name", "std", "sensitivity"}
        require(fields and isinstance(release["name"], str), "a release has name, std and sensitivity")
    stated = tuple(
        (one["name"], number(one, "std", 0, 1e300), number(one, "sensitivity", 1e-300, 1e300)) for one in releases
    )
    sigma, bound, adaptive = plan["noise_multiplier"], plan["max_grad_norm"], plan["adaptive_clipping"]
    if head:  # several Gaussian releases of one sample are one, with 1 / sigma^2 = sum of (sensitivity / std)^2
        joint = math.hypot(*(sensitivity / std if std else math.inf for _, std, sensitivity in stated))
        require(
            math.isclose(1 / joint if joint else math.inf, sigma, rel_tol=1e-9),
            f"the noise is not the planned {sigma:g}",
        )
        return stated
    planned = [("gradient", sigma * bound, bound)]
    if (
        adaptive is not None
    ):  # C moves within a factor of 10^4; a noised count of unclipped examples shares sigma with the sum
        bound, first = stated[0][2], plan["max_grad_norm"]
        require(first / 1e4 <= bound <= first * 1e4, f"C = {bound:g} is outside of its range")
        planned = [
            ("gradient", plan.gradient_multiplier() * bound, bound),
            ("unclipped_count", adaptive["unclipped_num_std"], 0.5),
        ]
    require([name for name, _, _ in stated] == [name for name, _, _ in planned], "other releases than the plan has")
    for (name, *theirs), (_, *ours) in zip(stated, planned, strict=True):
        agree = all(math.isclose(a, b, rel_tol=1e-9) for a, b in zip(theirs, ours, strict=True))
        require(
            agree,
            f"{name} states std, sensitivity = {theirs[0]:g}, {theirs[1]:g}; the plan has {ours[0]:g}, {ours[1]:g}",
        )
    return stated


# ---------------------------------------------------------------- The ledger, line by line


Releases = tuple[tuple[str, float, float], ...]
"""(name, standard deviation, sensitivity) of what one attempt releases."""


@dataclass
class Ledger:
    """What the lines of a ledger say; positions are numbers of lines from 0.

    Attributes:
        charges: the line of every charged attempt, done or not, and of torn lines that may have been one.
        intents: (line, step, attempt, releases).
        done: (line, step).
        checkpoints: (line, step, name, digest of the manifest).
        sessions: (line, record) of every start.
        torn: (line, whether it is charged) of torn lines, an unterminated last one included.
        signed: how many lines the last signature covers.
        loose: fields of lines that are the word of whoever wrote them.
    """

    name: str
    hashes: list[str] = field(default_factory=list)
    opened: dict[str, Any] = field(default_factory=dict)
    plan: Plan = field(default_factory=lambda: Plan({}, 0.0, 0.0, ()))
    nonces: set[str] = field(default_factory=set)
    charges: list[int] = field(default_factory=list)
    intents: list[tuple[int, int, int, Releases]] = field(default_factory=list)
    done: list[tuple[int, int]] = field(default_factory=list)
    checkpoints: list[tuple[int, int, str, str]] = field(default_factory=list)
    sessions: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    torn: list[tuple[int, bool]] = field(default_factory=list)
    closed: str | None = None
    signatures: int = 0
    signed: int = 0
    other_times: int = 0
    loose: set[str] = field(default_factory=set)
    unterminated: bool = False

    @property
    def head(self) -> bool:
        """A private linear head: one release of noised statistics instead of steps."""
        return "head" in self.opened

    @property
    def fingerprint(self) -> str | None:
        signer = self.opened.get("signer")
        return None if signer is None else hashlib.sha256(bytes.fromhex(signer)).hexdigest()

    def charged(self, num_lines: int | None = None) -> int:
        """The charges of the first lines, or of all."""
        return len(self.charges) if num_lines is None else bisect_right(self.charges, num_lines - 1)

    def last_done(self) -> int:
        return max((step for _, step in self.done), default=0)

    def groups(self, count: int | None = None) -> "list[Group]":
        """The first charges, or all, for the accountant."""
        count = self.charged() if count is None else count
        group = self.plan.releases(count)
        if not count or not self.plan.shuffled:
            return [group] if count else []
        steps = {step for line, step, _, _ in self.intents if line <= self.charges[count - 1]}
        return [replace(group, count=self.plan.participations(max(steps, default=0), count - len(steps)))]


def check_description(opened: dict[str, Any]) -> None:
    """The types of what an `open` record says of its run besides the plan."""
    for name in ("commit", "accountant", "unit", "tuning", "deduplication"):
        require(isinstance(opened.get(name, ""), str), f"{name} is text")
    require("data_hmac" not in opened or is_hex(opened["data_hmac"], 64), "data_hmac has 32 bytes in hex")
    require(
        opened.get("shared_ledger") is None or is_hex(opened["shared_ledger"], 64), "shared_ledger is a SHA-256 in hex"
    )
    require(type(opened.get("disjoint_from_start", False)) is bool, "disjoint_from_start is true or false")
    require(isinstance(opened.get("head", {}), dict), "head is an object")
    if opened.get("max_examples_per_owner") is not None:
        whole(opened, "max_examples_per_owner", 1)
    behind = opened.get("behind", [])
    require(isinstance(behind, list) and len(behind) <= 100, "`behind` lists ledgers")
    for place in behind:
        known = isinstance(place, dict) and place.keys() == {"file", "run", "lines", "hash"}
        require(known and is_hex(place["hash"], 64), "`behind` names ledgers by file, run, lines and hash")
        whole(place, "lines", 1)
        ledger = re.fullmatch(r"behind/ledger-[0-9]{1,3}\.jsonl", str(place["file"])) is not None
        require(ledger and isinstance(place["run"], str), "`behind` names no ledger")


def read_ledger(path: Path, most: int | None = None) -> Ledger:
    """Reads a ledger, or its first `most` lines, once from top to bottom; Violated names the first line that is wrong."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    ledger, key = Ledger(path.name), None
    active = False  # a session may write steps
    pending: tuple[int, int] | None = None  # the intent whose `done` has not come
    position: int | None = None  # the last step that this session finished
    attempts: Counter[int] = Counter()
    furthest = 0
    ended = False  # nothing can follow `close` and its signature
    unsigned = False  # the last record is a checkpoint, whose signature only a crash can prevent
    torn_run: list[bool] = []  # of the torn lines that wait for their `repair`: whether each was charged
    known: dict[Releases, Releases] = {}  # equal releases once: a ledger may have a million intents

    def take_torn() -> None:
        """An attempt may have been under way wherever one could stand; then the torn line is charged as one."""
        require(bool(ledger.hashes) and not ended, "a torn line where no line can be written")
        plan = ledger.plan
        room = not plan["formal_guarantee"] or ledger.charged() < plan.most_charges
        may_be = active and pending is None and not torn_run and (position or 0) < plan["num_steps"] and room
        if may_be:
            ledger.charges.append(len(ledger.hashes))
        torn_run.append(may_be)
        ledger.torn.append((len(ledger.hashes), may_be))

    try:
        for raw in lines_of(path):
            if len(ledger.hashes) == most:
                break
            seq, line = len(ledger.hashes), raw.removesuffix(b"\n")
            if raw == line:  # a crash, or a write that is under way: the next start of the program marks it as torn
                take_torn()
                ledger.unterminated = True
                break
            previous = ledger.hashes[-1] if ledger.hashes else "0" * 64
            if line.endswith(TORN) or b"\0" in line:
                take_torn()
                ledger.hashes.append(hashlib.sha256(line).hexdigest())
                continue
            try:
                record = parsed(line)
                require(isinstance(record, dict) and list(record)[:4] == list(HEADER), "it is no ledger record")
                body = json.loads(
                    json.dumps({name: record[name] for name in record.keys() - set(HEADER)}, sort_keys=True)
                )
                header = {name: record[name] for name in HEADER}
                canonical = json.dumps({**header, **body}, separators=(",", ":"), ensure_ascii=True).encode()
            except (ValueError, RecursionError) as error:
                raise Violated(f"it is no ledger record: {shown(error)}") from error
            require(canonical == line, "it is not in canonical form")
            kind, time = record["type"], record["time_utc"]
            require(
                type(record["seq"]) is int and record["seq"] == seq, f"its number is {shown(record['seq'])}, not {seq}"
            )
            require(
                record["previous"] == previous, "the chain of hashes is broken: it does not continue the line before"
            )
            require(isinstance(kind, str) and isinstance(time, str), "type and time are words")
            require(kind in FIELDS, f"unknown record type {shown(kind)}")
            odd = sorted(body.keys() - FIELDS[kind])
            require(not odd, f"`{kind}` states {shown(odd)}, which this verifier does not know")
            require((kind == "open") == (seq == 0), "the first record, and no other, is `open`")
            require(not ledger.closed or kind in ("signature", "repair"), "a record after `close`")
            require(not ended, "a record after the end")
            require((kind == "repair") == bool(torn_run), "a `repair` follows torn lines, and nothing else does")
            require(
                not (unsigned and key) or kind in ("signature", "session", "repair"),
                "the checkpoint in the line before is not signed",
            )
            unsigned = kind == "checkpoint"
            ledger.loose |= body.keys() & LOOSE
            ledger.other_times += seq > 0 and time != ledger.opened["time_utc"]
            if kind == "open":
                whole(record, "format", 1, 1)
                require(is_hex(record.get("key_commitment"), 64), "`open` needs the commitment of the sampling key")
                signer = record.get("signer")
                require(signer is None or is_hex(signer, 64), "signer must be an Ed25519 public key in hex")
                check_description(record)
                ledger.opened, ledger.plan = record, read_plan(record.get("plan"), "head" in record)
                key = None if signer is None else Ed25519PublicKey.from_public_bytes(bytes.fromhex(signer))
            elif kind == "session":
                nonce = record.get("nonce")
                require(is_hex(nonce, 32), "a session has a nonce of 16 bytes in hex")
                require(nonce not in ledger.nonces, "the session nonce was used before: coins would repeat")
                require(type(record.get("mirror")) is bool, "a session says whether the ledger is mirrored")
                require(isinstance(record.get("environment"), dict), "a session has an environment")
                again, number_there, hash_there = (
                    record.get(name) for name in ("restarted_from_step_0", "shared_seq", "shared_hash")
                )
                require(again is None or type(again) is bool, "restarted_from_step_0 is true or false")
                named = type(number_there) is int and number_there >= 0 and is_hex(hash_there, 64)
                require(named or number_there is hash_there is None, "a line is named by number and SHA-256")
                ledger.nonces.add(str(nonce))
                ledger.sessions.append((seq, record))
                active, pending, position = True, None, None
            elif kind == "intent":
                step, attempt = whole(record, "step", 1, ledger.plan["num_steps"]), whole(record, "attempt", 0)
                require(active, "an intent outside of a session")
                check_turn(ledger, record, retries=pending is not None)
                if pending is not None:
                    require(step == pending[0], f"step {step} begins while step {pending[0]} is not done")
                elif position is not None:
                    require(step == position + 1, f"step {step} does not follow step {position}")
                else:
                    require(step <= furthest + 1, f"step {step} skips step {furthest + 1}")
                require(attempt == attempts[step], f"attempt {attempt} of step {step}, where {attempts[step]} is next")
                releases = check_releases(ledger.plan, ledger.head, record.get("releases"))
                adapted = ledger.plan["adaptive_clipping"] is not None and not ledger.head
                require(
                    not (adapted and step == 1) or releases[0][2] == ledger.plan["max_grad_norm"],
                    "C does not start at the plan's",
                )
                attempts[step] += 1
                pending = (step, attempt)
                ledger.charges.append(seq)
                ledger.intents.append((seq, step, attempt, known.setdefault(releases, releases)))
            elif kind == "done":
                finished = (whole(record, "step", 1), whole(record, "attempt", 0))
                digest = record.get("params_digest", "00")
                require(isinstance(digest, str) and is_hex(digest, len(digest)), "params_digest is a digest in hex")
                require(finished == pending, "`done` without its intent just before")
                position, pending, furthest = finished[0], None, max(furthest, finished[0])
                ledger.done.append((seq, finished[0]))
            elif kind == "checkpoint":
                require(active, "a checkpoint outside of a session")
                step, digest, name = whole(record, "step", 0), record.get("digest"), record.get("path")
                require(step <= furthest, f"a checkpoint of step {step}, which is not done")
                require(name == f"step-{step:08d}", f"a checkpoint of step {step} has the name {shown(name)}")
                require(is_hex(digest, 64), "a checkpoint has a SHA-256 digest in hex")
                ledger.checkpoints.append((seq, step, str(name), str(digest)))
            elif kind == "signature":
                require(key is not None, "a signature, and no key in the first line")
                require(is_hex(record.get("signature"), 128), "a signature has 64 bytes in hex")
                try:
                    assert key is not None
                    key.verify(bytes.fromhex(record["signature"]), SIGNED + previous.encode())
                except InvalidSignature as error:
                    raise Violated(
                        "the signature is not that of the line before by the key in the first line"
                    ) from error
                ledger.signatures += 1
                ledger.signed = seq + 1
                ended = ledger.closed is not None
            elif kind == "repair":
                stated = (whole(record, "torn_lines", 1), whole(record, "charged", 0))
                require(stated == (len(torn_run), sum(torn_run)), "the repair does not match the torn lines before it")
                torn_run, active, pending, position = [], False, None, None
            else:
                require(record.get("reason") in ("finished", "budget_spent", "stopped"), "`close` needs a known reason")
                whole_run = furthest == ledger.plan["num_steps"] or not ledger.plan["enabled"]
                require(record["reason"] != "finished" or whole_run, f"the run finished after step {furthest}")
                require(
                    whole(record, "num_charged", 0) == ledger.charged(),
                    f"`close` states other charges than {ledger.charged()}",
                )
                ledger.closed, active, ended = record["reason"], False, key is None
            ledger.hashes.append(hashlib.sha256(line).hexdigest())
        require(bool(ledger.hashes), "no whole record")
    except Violated as error:
        raise Violated(f"{path.name}: line {len(ledger.hashes) + 1}: {error}") from error
    return ledger


# ---------------------------------------------------------------- Epsilon


@dataclass(frozen=True)
class Group:
    """`count` releases of a Poisson-subsampled Gaussian; batches above `cap` are cut down uniformly."""

    rate: float
    sigma: float
    num_examples: int
    cap: int | None
    count: int


def claimed(groups: list[Group], delta: float) -> tuple[float, float | None]:
    """(an upper bound of epsilon at `delta` of all groups together, the grid of its distribution), as the project reports them.

    Without sampling all releases are one Gaussian, whose epsilon is exact. Below delta 1e-12 the bound is by Renyi DP, with the
    probability of any batch above its cap charged in delta. Else it is by privacy loss distributions, on a grid of 1e-4, or a
    coarser one where epsilon is above 50. Above 1000 nothing is computed.
    """
    from dp_accounting.pld.privacy_loss_mechanism import GaussianPrivacyLoss

    groups = [group for group in groups if group.count and group.rate]
    if not groups:
        return 0.0, None
    if any(group.sigma == 0 for group in groups) or delta <= 0:
        return math.inf, None
    if all(group.rate == 1 and group.cap is None for group in groups):
        mu = math.sqrt(math.fsum(group.count / group.sigma**2 for group in groups))
        if mu * mu > 1e6:
            raise Undecided("epsilon is so large that none is computed: it protects nobody")
        gaussian = GaussianPrivacyLoss(1 / mu)
        return smallest(lambda value: float(gaussian.get_delta_for_epsilon(value)) <= delta, 1e6), None
    upper = renyi(tuple(groups), delta)
    if upper > 1000:
        raise Undecided("epsilon is so large that none is computed: it protects nobody")
    if delta < SMALLEST_DELTA:
        from scipy.stats import binom  # comes with dp-accounting

        capped = [group for group in groups if group.cap is not None]
        tau = math.fsum(group.count * float(binom.sf(group.cap, group.num_examples, group.rate)) for group in capped)
        value = upper
        while (
            tau > 0
        ):  # the capped run is (value, delta)-DP if the uncapped one is (value, delta - tau (1 + e^value))-DP
            candidate = value * (1 + 1e-6)
            left = delta - tau * (1 + math.exp(min(candidate, 700.0)))
            following = renyi(tuple(groups), left) if left > 0 else math.inf
            if following <= candidate or following == math.inf:
                return candidate if following <= candidate else math.inf, None
            value = following
        return value, None
    grid = FINE if upper <= DETAILED else FINE * 10 ** math.ceil(math.log10(upper / DETAILED))
    value = float(composed(tuple(groups), grid).get_epsilon_for_delta(delta))
    if grid == FINE or value > DETAILED:
        return value, grid
    return float(composed(tuple(groups), FINE).get_epsilon_for_delta(delta)), FINE


def epsilon(groups: list[Group], delta: float) -> float:
    return claimed(groups, delta)[0]


def smallest(holds: Callable[[float], bool], largest: float) -> float:
    """The smallest number from 0 to `largest` for which a monotone condition holds, from above, to 15 digits."""
    low, high = 0.0, largest
    if holds(low):
        return low
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def renyi(groups: tuple[Group, ...], delta: float) -> float:
    """Epsilon by Renyi DP, without caps."""
    return float(renyi_accountant(groups).get_epsilon(delta)) if groups else 0.0


@functools.lru_cache(maxsize=64)  # one run is asked for at many values of delta
def renyi_accountant(groups: tuple[Group, ...]) -> Any:
    from dp_accounting import NeighboringRelation
    from dp_accounting import dp_event as event
    from dp_accounting.rdp import RdpAccountant

    logging.getLogger("absl").setLevel(logging.ERROR)  # Renyi orders that are left out keep the bound sound
    accountant = RdpAccountant(neighboring_relation=NeighboringRelation.REPLACE_SPECIAL)
    for group in groups:
        accountant.compose(event.PoissonSampledDpEvent(group.rate, event.GaussianDpEvent(group.sigma)), group.count)
    return accountant


@functools.lru_cache(maxsize=8)
def composed(groups: tuple[Group, ...], grid: float, relation: str = "REPLACE_SPECIAL") -> Any:
    """The privacy loss distribution of all groups (Koskela et al. 2020); None of none."""
    whole_loss: Any = None
    for group in groups:
        part = one_release(group.rate, group.sigma, group.num_examples, group.cap, grid, relation)
        part = part.self_compose(group.count)
        whole_loss = part if whole_loss is None else whole_loss.compose(part)
    return whole_loss


@functools.lru_cache(maxsize=8)
def one_release(
    rate: float, sigma: float, num_examples: int, cap: int | None, grid: float, relation: str = "REPLACE_SPECIAL"
) -> Any:
    from dp_accounting import NeighboringRelation
    from dp_accounting.pld import privacy_loss_distribution as pld

    neighbours = NeighboringRelation[relation]
    if cap is None:
        return pld.from_gaussian_mechanism(
            sigma, value_discretization_interval=grid, sampling_prob=rate, neighboring_relation=neighbours
        )
    return pld.from_truncated_subsampled_gaussian_mechanism(
        num_examples, rate, cap, sigma, value_discretization_interval=grid, neighboring_relation=neighbours
    )


def epsilon_of_copies(groups: list[Group], delta: float, copies: int, grid: float) -> float:
    """Epsilon of several examples of one owner, all zeroed out; caps are left out (Schuchardt et al. 2024)."""
    from dp_accounting import NeighboringRelation
    from dp_accounting import dp_event as event
    from dp_accounting.pld import PLDAccountant
    from scipy.stats import binom

    if all(group.rate == 1 and group.cap is None for group in groups):  # one Gaussian, of a larger shift
        return epsilon([replace(group, sigma=group.sigma / copies) for group in groups], delta)
    accountant = PLDAccountant(NeighboringRelation.REPLACE_SPECIAL, grid)
    for group in groups:
        chances = [float(chance) for chance in binom.pmf(range(copies + 1), copies, group.rate)]
        chances[0] = 1 - math.fsum(chances[1:])
        shifts = [float(hits) for hits in range(copies + 1)]
        mixture = event.MixtureOfGaussiansDpEvent(group.sigma, shifts, chances)
        accountant.compose(event.SelfComposedDpEvent(mixture, group.count))
    return float(accountant.get_epsilon(delta))


def epsilon_of_any(groups: list[Group], delta: float, copies: int) -> float:
    """Epsilon of `copies` examples, which may be in groups that take turns: generic group privacy (Dwork and Roth 2014).

    If one example has (e, d), all have (copies e, d (1 + exp(e) + ... + exp((copies - 1) e))); d is found by halving.
    """
    low, high, best = math.log(delta) - 700.0, math.log(delta), math.inf
    for _ in range(20):
        middle = (low + high) / 2
        one = renyi(tuple(groups), math.exp(middle)) if math.exp(middle) > 0 else math.inf
        if one == math.inf:
            break
        # log(1 + exp(one) + ... + exp((copies - 1) one)), without overflow
        growth = (
            (copies - 1) * one + math.log((1 - math.exp(-copies * one)) / (1 - math.exp(-one)))
            if one
            else math.log(copies)
        )
        if middle + growth <= math.log(delta):
            low, best = middle, copies * one
        else:
            high = middle
    return best


def curves(groups: list[Group], claim: float, tail: float) -> dict[str, Any]:
    """[epsilon, delta] of everything charged, and what that leaves to any membership inference attack (Dong et al. 2022)."""
    import numpy as np

    epsilons, deltas = np.zeros(1), np.full(1, tail)
    if groups:
        distribution = composed(tuple(groups), COARSE)
        last = distribution.get_epsilon_for_delta(1e-11)
        epsilons = (last if math.isfinite(last) else 2 * claim) * np.linspace(0, 1, 96) ** 1.5
        deltas = np.clip(np.asarray(distribution.get_delta_for_epsilon(epsilons), dtype=np.float64), 1e-12, 1)
        deltas = np.minimum(np.minimum.accumulate(deltas + tail), 1.0)

    def true_positive(rate: float) -> Rough:
        growth = np.exp(epsilons)
        bounds = np.minimum(deltas + growth * rate, 1 - (1 - deltas - rate) / growth)
        return Rough(min(max(rate, bounds.min()), 1.0))

    rates = [float(rate) for rate in np.unique(np.concatenate([np.geomspace(1e-5, 1, 101), [1e-3, 1e-2]]))]
    return {
        "delta_by_epsilon": [[Rough(one), Rough(two)] for one, two in zip(epsilons, deltas, strict=True)],
        "attack": {
            "advantage": Rough(deltas[0]),
            "true_positive": {f"{rate:g}": true_positive(rate) for rate in (1e-3, 1e-2)},
            "curve": [[Computed(rate), true_positive(rate)] for rate in rates],
        },
    }


# ---------------------------------------------------------------- The checks, each of which ends in one sentence


@dataclass
class Folder:
    """A published folder under examination: what is read once, and what the checks find out."""

    path: Path
    ledger: Ledger
    fingerprint: str | None
    head: str | None = None
    config: dict[str, Any] | None = None
    chain: list[Ledger] = field(default_factory=list)
    chain_is_whole: bool = False
    own_epsilon: float | None = None
    epsilon: float | None = None
    delta: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)
    not_attested: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)
    partly: list[tuple[str, str]] = field(default_factory=list)

    def has(self, *names: str) -> bool:
        """Whether there is anything of this name; a link in place of a folder is bad input."""
        path = self.path
        for name in names[:-1]:
            path = path / name
            if not path.exists() and not path.is_symlink():
                return False
            if not is_folder(path):
                raise BadInput(f"{shown(path)}: is no folder")
        return (path / names[-1]).exists() or (path / names[-1]).is_symlink()

    def within(self, what: str, compute: Callable[[], T]) -> T:
        """What takes memory to compute; a folder that asks for too much is not judged."""
        try:
            return compute()
        except (MemoryError, OverflowError, ValueError, ArithmeticError) as error:
            raise Undecided(f"{what} cannot be computed here: {type(error).__name__}: {shown(error)}") from error


JUDGED = re.compile(
    r"(ledger|metrics|evaluation/heldout)\.jsonl|config\.toml|verify\.py|head\.json|behind/ledger-[0-9]{1,3}\.jsonl"
    r"|report/privacy_card\.(json|md|html)|checkpoints/(LATEST|step-.*)"
)
"""The files that some check looks at; all others are named at the end."""
USUAL = {"behind", "checkpoints", "evaluation", "evaluation/tensorboard", "private", "report", "tensorboard"}


def check_files(folder: Folder) -> str:
    """What has no place in a run folder: code that a start of this file could have run, links, ledgers that nothing names."""
    named = {place["file"] for place in folder.ledger.opened.get("behind", [])}
    for number, (root, folders, files) in enumerate(os.walk(folder.path)):
        if number > 10_000 or len(folder.unread) > 100_000:
            raise Undecided("there are more than 10,000 folders, or 100,000 files that nothing here looks at")
        top = Path(root) == folder.path
        folders[:] = sorted(
            name for name in folders if not (top and name == "private" and is_folder(folder.path / name))
        )
        for entry in sorted([*folders, *files]):
            path = Path(root) / entry
            place, status = str(path.relative_to(folder.path)), path.lstat()
            if stat.S_ISLNK(status.st_mode) and place in USUAL:
                raise BadInput(f"{shown(path)}: is no folder")
            regular = stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)
            require(regular, f"{shown(place)} is a link or a device, and no run has any")
            code = top and entry.endswith((".py", ".pyc", ".pyd", ".so")) and entry != "verify.py"
            package = top and os.path.lexists(path / "__init__.py")
            require(not code and not package, f"{shown(place)} is code, which no run writes here: python may run it")
            behind = place.startswith("behind/")
            require(not behind or place in named, f"{shown(place)} is no ledger that ledger.jsonl names")
            judged = place in USUAL or JUDGED.fullmatch(place) is not None
            if stat.S_ISREG(status.st_mode):
                folder.unread += [] if judged else [place]
                folder.elsewhere += [place] if status.st_nlink > 1 else []
            elif not judged and not any(path.iterdir()):
                folder.unread.append(f"{place}/")
    if folder.has("checkpoints", "LATEST"):
        entries = os.listdir(folder.path / "checkpoints")
        steps = [name for name in entries if re.fullmatch(r"step-\d{8,20}", name)]
        latest = read_file(folder.path / "checkpoints" / "LATEST", 1 << 12).decode(errors="replace").removesuffix("\n")
        require(latest in steps, f"checkpoints/LATEST names {shown(latest)}, and no checkpoint here has that name")
        newest = max(steps, key=lambda name: int(name.removeprefix("step-")))
        if latest != newest:
            raise Undecided(
                f"checkpoints/LATEST names {latest}, and {newest} is here: a crash came between, or it was changed"
            )
    return "no other code, no link, and no ledger that ledger.jsonl does not name"


def check_signature(folder: Folder) -> str:
    ledger, told = folder.ledger, folder.fingerprint
    if told is not None:
        require(
            ledger.fingerprint == told,
            f"the ledger's key is {ledger.fingerprint or 'missing'}, and not the {told} you were told",
        )
    if ledger.fingerprint is None:
        raise Undecided(
            "the ledger names no key and nothing in it is signed: whoever has the file can have written it anew"
        )
    after = len(ledger.hashes) - ledger.signed
    if ledger.signatures == 0 or (ledger.closed and after):
        raise Undecided(f"{after} lines at the end are not signed: the run ended there, or the last line was cut off")
    who = (
        "which is the one you were told"
        if told
        else "which anybody can make: it attests nothing about who signed (--fingerprint)"
    )
    rest = f"; the last {after} lines are not signed yet" if after else ""
    return f"{ledger.signatures} signatures over {ledger.signed} lines by key {ledger.fingerprint}, {who}{rest}"


def check_order(folder: Folder) -> str:
    ledger = folder.ledger
    if ledger.other_times:
        raise Undecided(f"{ledger.other_times} records state another time than the first, as no trainer writes them")
    if folder.head is not None:
        require(
            folder.head in ledger.hashes,
            f"the ledger lacks the line {folder.head} that you were told: it was cut or replaced",
        )
    state = f"closed ({ledger.closed})" if ledger.closed else f"{OPEN}: the run may go on, or its end was cut off"
    return (
        f"{len(ledger.hashes)} lines, {len(ledger.sessions)} starts, {len(ledger.intents)} attempts, {len(ledger.done)} done, "
        f"{len(ledger.torn)} torn lines; {state}"
    )


def check_plan(folder: Folder) -> str:
    """config.toml asks for this very plan; what it leaves open has its default."""
    ledger, plan = folder.ledger, folder.ledger.plan
    if ledger.head:
        return f"all {len(ledger.intents)} intents state the planned noise; a private head has no config.toml"
    if folder.config is None:
        raise Undecided("config.toml is missing: only the ledger itself says what was asked for")
    tables = {name: folder.config.get(name, {}) for name in ("privacy", "train", "data", "init")}
    require(all(isinstance(table, dict) for table in tables.values()), f"config.toml: {', '.join(tables)} are tables")
    unknown = [f"privacy.{name}" for name in tables["privacy"].keys() - RECIPE_KEYS]
    unknown += sorted(folder.config.keys() - TABLES)
    require(not unknown, f"config.toml has {shown(unknown[:1])}, which no recipe has")
    asked, planned = tables["privacy"], {**plan.fields, **(plan["adaptive_clipping"] or {})}
    disjoint = bool(ledger.opened.get("behind")) and tables["init"].get("disjoint_data", False)
    for name, value, known in (
        ("privacy.enabled", asked.get("enabled", True), plan["enabled"]),
        ("train.num_steps", tables["train"].get("num_steps", plan["num_steps"]), plan["num_steps"]),
        ("privacy.max_examples_per_owner", *(one.get("max_examples_per_owner") for one in (asked, ledger.opened))),
        ("privacy.shared_ledger", "shared_ledger" in asked, ledger.opened.get("shared_ledger") is not None),
        ("init.disjoint_data", disjoint, ledger.opened.get("disjoint_from_start", False)),
    ):
        require(equal(value, known), f"config.toml has {name} = {shown(value)}, and the ledger states {shown(known)}")
    if not plan["enabled"]:
        return "config.toml asks for a run without privacy, as the plan is"
    if plan["adaptive_clipping"] is not None:
        planned["clipping_function"] = "adaptive"
    n, batch = plan["num_examples"], plan["expected_batch_size"]
    defaults = {
        "reserved_attempts": max(2, -(-plan["num_steps"] // 100)), "target_delta": 1 / (2 * n), "sampling": "poisson",
        "shuffle_as_gaussian": False, "max_grad_norm": 1.0, "clipping_function": "flat", "arithmetic": "floating",
        "cap": plan["usual_cap"], "bands": 1, "strategy": "square_root",
    }  # fmt: skip
    if plan["adaptive_clipping"] is not None:
        defaults |= {"target_unclipped_quantile": 0.5, "clipbound_learning_rate": 0.2, "unclipped_num_std": batch / 20}
    wanted = defaults | {name: value for name, value in asked.items() if name in planned}
    wanted |= {"num_examples": tables["data"].get("num_examples", n)}
    for name, value in wanted.items():
        require(
            equal(value, planned[name]),
            f"config.toml asks for {name} = {shown(value)}, and the plan has {shown(planned[name])}",
        )
    require("expected_batch_size" in asked, "config.toml states no expected_batch_size")
    require(
        bool(asked.get("simulation", False)) <= bool(plan.reasons), "config.toml has a simulation, the plan a guarantee"
    )
    target, sigma = plan["target_epsilon"], plan["noise_multiplier"]
    require(("target_epsilon" in asked) == (target is not None), "one of config.toml and plan has a target_epsilon")
    if target is None:
        require("noise_multiplier" in asked, "config.toml states neither noise nor epsilon")
    elif not plan.reasons:
        delta, most = plan["target_delta"] - plan.noise_tail(), plan.releases(plan.most_charges)
        reached = folder.within("epsilon of the plan", lambda: epsilon([most], delta))
        require(
            reached <= target * 1.001,
            f"the plan spends epsilon {reached:.6g}, and config.toml asks for at most {target:g}",
        )
        less = Group(most.rate, 0.95 * most.sigma, n, None, most.count)
        enough = sigma > 0.3 and folder.within("epsilon of less noise", lambda: epsilon([less], delta)) <= target
        require(not enough, f"the plan states noise of {sigma:g}, more than epsilon {target:g} of config.toml takes")
    if "num_examples" not in tables["data"]:
        folder.partly.append(("number of examples", "config.toml does not state it: the ledger alone does"))
    return (
        f"q = {plan.rate:.6g} ({batch} of {n}), sigma = {sigma:.6g}, C = {plan['max_grad_norm']:g}, as config.toml asks"
    )


def check_budget(folder: Folder) -> str:
    charged, most = folder.ledger.charged(), folder.ledger.plan.most_charges
    require(
        bool(folder.ledger.plan.reasons) or charged <= most, f"{charged} attempts are charged where {most} are allowed"
    )
    return f"{charged} attempts are charged; planned steps and reserve allow {most}"


def check_behind(folder: Folder) -> str:
    """The ledgers of private runs behind the initial weights are here, whole, and each names those behind itself."""
    listed = folder.ledger.opened.get("behind", [])
    places = [(place["lines"], place["hash"]) for place in listed]
    for place in listed:
        if not folder.has(*place["file"].split("/")):
            raise Undecided(f"{place['file']} is missing: what the initial weights had spent cannot be recomputed")
        ledger = read_ledger(folder.path / place["file"])
        found = (len(ledger.hashes), ledger.hashes[-1])
        require(found == (place["lines"], place["hash"]), f"{place['file']} is not the one that the ledger names")
        require(not ledger.plan.reasons, f"{place['file']} is of a run without a guarantee")
        folder.chain.append(ledger)
    for position, ledger in enumerate(folder.chain):
        named = [(place["lines"], place["hash"]) for place in ledger.opened.get("behind", [])]
        complete = named == places[position + 1 :]
        require(complete, f"{listed[position]['file']} names other ledgers behind it than there are")
    folder.chain_is_whole = True
    if not listed:
        return "the ledger names no private run whose weights the run started from"
    return f"the run started from weights that {len(listed)} private runs had made; their ledgers are here and whole"


def alternatives(chain: list[Ledger]) -> list[list[Ledger]]:
    """Which runs of a chain, the newest first, one example can be in: all, but for those whose data are declared disjoint."""
    own, *before = chain
    if not before:
        return [[own]]
    if own.opened.get("disjoint_from_start") is True:
        return [[own], *alternatives(before)]
    return [[own, *runs] for runs in alternatives(before)]


def epsilon_of(folder: Folder, chain: list[Ledger], delta: float, count: int | None = None) -> float:
    """Epsilon of a chain of runs, the newest first, or of `count` charges of the newest: the worst that any example bears."""
    values = []
    for runs in alternatives(chain):
        groups = [group for run in runs for group in run.groups(count if run is chain[0] else None)]
        left = delta - math.fsum(run.plan.noise_tail() for run in runs)
        values.append(folder.within("epsilon", functools.partial(epsilon, groups, left)))
    return max(values)


def check_epsilon(folder: Folder) -> str:
    ledger, plan = folder.ledger, folder.ledger.plan
    folder.delta = plan["target_delta"]
    if plan.reasons:
        return f"nothing is claimed: {shown('; '.join(plan.reasons))}"
    folder.own_epsilon = epsilon_of(folder, [ledger], plan["target_delta"])
    if not folder.chain_is_whole:
        raise Undecided(
            f"this run alone spent epsilon {rounded_up(folder.own_epsilon)}; what its initial weights had spent is unknown"
        )
    folder.delta = min(one.plan["target_delta"] for one in (ledger, *folder.chain))
    folder.epsilon = epsilon_of(folder, [ledger, *folder.chain], folder.delta) if folder.chain else folder.own_epsilon
    own = rounded_up(folder.own_epsilon)
    sentence = f"epsilon {own} at delta {plan['target_delta']:g} for {ledger.charged()} charged attempts"
    if folder.chain:
        sentence += (
            f"; with what the initial weights had spent, epsilon {rounded_up(folder.epsilon)} at delta {folder.delta:g}"
        )
    useless = folder.delta >= 1 / plan["num_examples"]
    return f"{sentence}; a delta of 1/n or more protects nobody" if useless else sentence


# ---------------------------------------------------------------- The privacy card, field by field

SAID = object()
"""In the place of what nothing in the folder proves."""
STATED = {"text": SAID, "file": SAID, "attested": False}


def expected_card(folder: Folder, at: Ledger) -> dict[str, Any]:
    """What a card of the ledger `at` holds. Every field is here: one that is not is violated, so that none is forgotten."""
    plan, opened, claims, head = at.plan, at.opened, not at.plan.reasons, at.head
    n, sigma, batch = plan["num_examples"], plan["noise_multiplier"], plan["expected_batch_size"]
    fields, releases = plan.fields, dict[str, list[tuple[float, float]]]()
    for *_, one in at.intents:
        for name, std, sensitivity in one:
            releases.setdefault(name, []).append((std / sensitivity, sensitivity))
    bounds = [one[0][2] for *_, one in at.intents]
    adaptive = plan["adaptive_clipping"]
    finished = plan["num_steps"] if at.closed == "finished" else None
    last = at.checkpoints[-1] if at.checkpoints else None
    mirrors = [record["mirror"] for _, record in at.sessions]
    deduplication, tuning = (
        {"text": opened[name], "file": "ledger.jsonl", "attested": True} if opened.get(name) else STATED
        for name in ("deduplication", "tuning")
    )
    accounting = accounting_of(folder, at)
    composition = composition_of(folder, at, accounting["epsilon"]) if folder.chain and claims else None
    return {
        "card_format": 1, "run_dir": SAID, "run_name": SAID, "formal_guarantee": claims, "reasons": list(plan.reasons),
        "epsilon": accounting["epsilon"] if composition is None else composition["epsilon"],
        "delta": plan["target_delta"] if composition is None else composition["delta"],
        "steps_done": at.last_done() if plan["enabled"] else finished, "steps_planned": plan["num_steps"],
        "attempts_charged": at.charged(), "warnings": SAID, "not_stated": SAID, "setting": SAID,
        "released": {
            "statement": SAID, "checkpoints_recorded": len(at.checkpoints), "post_processing": SAID,
            "last_checkpoint": None if last is None else {
                "step": last[1], "name": last[2], "manifest_sha256": last[3], "manifest_matches": SAID,
            },
        },
        "unit_of_privacy": {
            "unit": opened.get("unit", "one labelled example" if head else "one image-text pair"), "num_examples": n,
            "statement": SAID, "deduplication": deduplication,
            "data_set": dict.fromkeys(("name", "owner", "purpose", "licence"), STATED),
        },
        "adjacency": {"relation": "zero_out", "statement": SAID},
        "mechanism": {
            "name": SAID, "statement": SAID, "head": {"covers": None, **opened["head"]} if head else None,
            "clipping_function": None if head else fields.get("clipping_function"),
            "max_grad_norm": None if head else plan["max_grad_norm"],
            "adaptive_clipping": None if adaptive is None else {
                **adaptive, "gradient_noise_multiplier": Computed(plan.gradient_multiplier()),
                "smallest_bound": min(bounds, default=None), "largest_bound": max(bounds, default=None),
                "last_bound": bounds[-1] if bounds else None,
            },
            "arithmetic": fields.get("arithmetic"), "lattice_exponent": fields.get("lattice_exponent"),
            "sensitivity_slack": plan["sensitivity_slack"], "noise_multiplier": sigma,
            "noise_multiplier_accounted": Computed(plan.accounted),
            "expected_batch_size": batch,
            "correlated_noise": None if plan.bands == 1 else {
                "bands": plan.bands, "strategy": plan["strategy"], "coefficients": plan["correlated"]["coefficients"],
                "segments": len(at.sessions),
            },
            "releases": [
                {
                    "name": name, "count": len(found), "smallest_noise_multiplier": Computed(min(ratio for ratio, _ in found)),
                    "largest_sensitivity": max(sensitivity for _, sensitivity in found),
                }
                for name, found in releases.items()
            ],
        },
        "sampling": {
            "scheme": "full batch" if head else plan["sampling"], "sample_rate": plan.rate, "expected_batch_size": batch,
            "groups": None if plan.bands == 1 else {
                "number": plan.bands, "of_example": GROUP_OF_EXAMPLE, "of_attempt": GROUP_OF_ATTEMPT,
                "largest": -(-n // plan.bands), "turns_charged": plan.turns(at.charged()),
            },
            "cap": plan["cap"], "matches_accounting": claims, "key_commitment_sha256": opened["key_commitment"],
            "data_hmac_sha256": opened.get("data_hmac"), "statement": SAID,
        },
        "accounting": accounting, "composition": composition,
        "tuning": {
            "included": False, "statement": SAID, "stated": tuning,
            "shared_ledger": {"identity": opened.get("shared_ledger"), "summary": SAID},
        },
        "public_data": SAID, "logged_without_noise": SAID, "not_covered": SAID, "audits": SAID, "utility": SAID,
        "provenance": {
            "commit": opened.get("commit"), "opened_utc": opened["time_utc"], "closed": at.closed,
            "ledger": {
                "file": "ledger.jsonl", "format": 1, "lines": len(at.hashes) + at.unterminated,
                "last_line_sha256": at.hashes[-1], "mirrored_sessions": sum(mirrors), "signer_fingerprint": at.fingerprint,
                "signed_lines": max(0, at.signed - 1),
            },
            "sessions": [
                {"mirror": record["mirror"], **{name: environment.get(name) for name in ENVIRONMENT}}
                for _, record in at.sessions for environment in [record["environment"]]
            ],
        },
    }  # fmt: skip


def accounting_of(folder: Folder, at: Ledger) -> dict[str, Any]:
    """The card's account of this run alone: its claim, and what surrounds the claim where that protects anybody."""
    plan, owner = at.plan, at.opened.get("max_examples_per_owner")
    delta, tail = plan["target_delta"], plan.noise_tail()
    found: dict[str, Any] = {
        "delta": delta, "delta_times_n": Computed(delta * plan["num_examples"]), "statement": SAID, "accountant": SAID,
        "accountant_at_opening": at.opened.get("accountant"), "accountant_python": SAID, "max_examples_per_owner": owner,
        **dict.fromkeys((
            "epsilon", "value_interval", "noise_tail_delta", "epsilon_target", "epsilon_planned", "epsilon_with_reserve",
            "epsilon_rdp", "epsilon_prv", "prv_accountant", "epsilon_replace_one", "epsilon_owner", "attack", "tan",
        )),
        "epsilon_group": {"2": None, "5": None}, "epsilon_by_delta": [], "epsilon_by_attempts": [], "delta_by_epsilon": [],
        "attempts": {
            "charged": at.charged(), "allowed": plan.most_charges, "done": len(at.done), "torn_lines": len(at.torn),
            "repeats": sum(attempt > 0 for _, _, attempt, _ in at.intents),
            "torn_lines_charged": sum(charged for _, charged in at.torn),
        },
    }  # fmt: skip
    if plan.reasons:
        return found
    groups, left = at.groups(), delta - tail
    claim, grid = claimed(groups, left)
    planned, reserve = (epsilon([plan.releases(count)], left) for count in (plan["num_steps"], plan.most_charges))
    eta = math.fsum((group.rate / group.sigma) ** 2 * group.count / 2 for group in groups)
    found |= {
        "epsilon": Bound(claim), "value_interval": None if grid is None else Computed(grid), "noise_tail_delta": Computed(tail),
        "epsilon_target": plan["target_epsilon"], "epsilon_planned": Bound(planned), "epsilon_with_reserve": Bound(reserve),
        "epsilon_rdp": Bound(renyi(tuple(groups), left)), "tan": Computed(1 / math.sqrt(eta)) if eta else None,
    }  # fmt: skip
    if claim > DETAILED:
        return found
    found |= {"epsilon_by_attempts": SAID} if planned <= DETAILED else {}
    found |= curves(groups, claim, tail)
    if left < SMALLEST_DELTA:
        return found
    others = [other for other in (1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 1e-9, 1e-10) if other > 2 * tail]
    guide = min(max(claim / 400, COARSE), 2e-2)

    def coarse(delta: float, grid: float, relation: str = "REPLACE_SPECIAL") -> Bound:
        return Bound(composed(tuple(groups), grid, relation).get_epsilon_for_delta(delta) if groups else 0.0)

    def of_copies(copies: int) -> Bound:
        rest = delta - plan.noise_tail(copies)
        if rest < SMALLEST_DELTA:
            return Bound(math.inf)
        if plan.bands > 1:  # they may be in groups that take different turns
            return Bound(epsilon_of_any(groups, rest, copies))
        return Bound(epsilon_of_copies(groups, rest, copies, guide))

    by_delta = {one: coarse(one - tail, COARSE) for one in others} | {delta: Bound(claim)}
    return found | {
        "epsilon_owner": None if owner is None else of_copies(owner),
        "epsilon_replace_one": coarse(left, guide, "REPLACE_ONE"),
        "epsilon_group": {str(size): of_copies(size) for size in (2, 5)},
        "epsilon_by_delta": [[one, by_delta[one]] for one in sorted(by_delta, reverse=True)],
        "epsilon_prv": SAID, "prv_accountant": SAID,
    }  # fmt: skip


def composition_of(folder: Folder, at: Ledger, own: float) -> dict[str, Any]:
    """What the card says of the runs behind the initial weights."""
    chain, names = [at, *folder.chain], [("this run", "ledger.jsonl")]
    names += [(place["run"], place["file"]) for place in at.opened["behind"]]
    disjoint = [run.opened.get("disjoint_from_start") is True for run in chain]
    delta = min(run.plan["target_delta"] for run in chain)
    return {
        "epsilon": Bound(epsilon_of(folder, chain, delta)), "delta": delta, "disjoint_by_declaration": any(disjoint[:-1]),
        "statement": SAID,
        "runs": [
            {
                "name": name, "file": file, "delta": run.plan["target_delta"], "attempts_charged": run.charged(),
                "epsilon": own if run is at else Bound(epsilon_of(folder, [run], run.plan["target_delta"])),
                "disjoint_from_those_before": declared,
            }
            for (name, file), run, declared in zip(names, chain, disjoint, strict=True)
        ],
    }  # fmt: skip


@dataclass
class Comparison:
    """Counts what agrees, and collects what nothing attests, what a version explains, and bounds that are larger than need be.

    Attributes:
        other_version: why a small difference is no contradiction; None where it is one.
    """

    what: str
    other_version: str | None = None
    agreed: int = 0
    not_attested: list[str] = field(default_factory=list)
    undecided: list[str] = field(default_factory=list)
    larger: list[str] = field(default_factory=list)

    def compare(self, stated: Any, expected: Any, place: str = "") -> None:
        """Raises Violated at the first field that is unknown, lacking or another."""
        if expected is SAID:
            self.not_attested.append(place)  # an emptied field too: that nothing stands there is a statement
        elif isinstance(stated, dict) and isinstance(expected, dict):
            for name in [*stated, *expected]:
                where = f"{place}.{name}" if place else name
                require(name in expected, f"{self.what} states {shown(where)}, which this verifier does not know")
                require(name in stated, f"{self.what} lacks {where}")
            for name, value in expected.items():
                self.compare(stated[name], value, f"{place}.{name}" if place else name)
        elif isinstance(stated, list) and isinstance(expected, list):
            require(len(stated) == len(expected), f"{self.what} lists {len(stated)} {place}, not {len(expected)}")
            for number, (one, other) in enumerate(zip(stated, expected, strict=True)):
                self.compare(one, other, f"{place}[{number}]")
        else:
            if isinstance(expected, Computed | Bound) and type(stated) in (int, float):
                self._compare_computed(float(stated), expected, place)
            elif isinstance(expected, Bound) and math.isinf(expected):
                require(stated is None, f"{self.what}'s {place} is {shown(stated)}, and no finite epsilon holds")
            else:
                same = type(stated) is type(expected) or {type(stated), type(expected)} == {int, float}
                same = same and type(expected) not in (Computed, Bound, Rough) and stated == expected
                said = f"{self.what}'s {shown(place)} is {shown(stated)}, and the ledger gives {shown(expected)}"
                require(same, said)
            self.agreed += 1

    def _compare_computed(self, stated: float, computed: Computed | Bound, place: str) -> None:
        """A bound may be larger than the one that is computed here, but for rounding never smaller."""
        hair = (
            1e-2 if isinstance(computed, Rough) and computed < 1e-8 else 1e-6 if isinstance(computed, Rough) else HAIR
        )
        if math.isclose(stated, computed, rel_tol=hair):
            return
        if isinstance(computed, Bound) and stated > computed:
            self.larger += [place] if stated > computed * (1 + 1e-6) else []
            return
        said = f"{self.what}'s {shown(place)} is {stated:.12g}, and "
        require(
            self.other_version is not None and math.isclose(stated, computed, rel_tol=1e-3),
            f"{said}the ledger gives {computed:.12g}",
        )
        self.undecided.append(f"{said}{computed:.12g} here: {self.other_version}")


def check_card(folder: Folder) -> str:
    """Every field of privacy_card.json, and of a head's statement; a card may be older than the ledger."""
    ledger, agreed = folder.ledger, 0
    if folder.has("head.json"):
        if not ledger.plan.reasons and folder.epsilon is None:
            raise Undecided("the epsilon of head.json was not computed")
        statement = {"epsilon": None if folder.epsilon is None else Bound(folder.epsilon), "delta": folder.delta}
        statement |= {"num_examples": ledger.plan["num_examples"], **ledger.opened.get("head", {})}
        heads = Comparison("head.json")
        heads.compare(object_in(folder.path / "head.json"), statement)
        agreed = heads.agreed
    if not folder.has("report", "privacy_card.json"):
        return f"there is no privacy card, and {agreed} fields of head.json agree with the ledger"
    if not ledger.plan.reasons and folder.epsilon is None:
        raise Undecided("its first number was not computed")
    card = object_in(folder.path / "report" / "privacy_card.json")
    try:
        last, lines = (card["provenance"]["ledger"][name] for name in ("last_line_sha256", "lines"))
        version, ours = card["accounting"]["accountant"], accountant()
    except (KeyError, TypeError) as error:
        raise Violated("the card lacks provenance.ledger or accounting.accountant") from error
    require(last in ledger.hashes, "the card is of a line that the ledger lacks: ledger or card were replaced")
    position = ledger.hashes.index(last) + 1
    whole_lines = len(ledger.hashes)
    was_torn = lines == position + 1 and position in {line for line, _ in ledger.torn}
    if lines == position + 1 <= whole_lines and not was_torn:
        raise Undecided("the card was made while a line of the ledger was being written")
    require(type(lines) is int and (lines == position or was_torn), "the card counts other lines")
    current = lines == whole_lines + ledger.unterminated
    at = ledger if current else read_ledger(folder.path / "ledger.jsonl", lines)
    comparison = Comparison("the card")
    if version != ours:
        comparison.other_version = f"the card was computed with {shown(version)}, this with {ours}"
    expected = folder.within("what the card says", functools.partial(expected_card, folder, at))
    expected["provenance"]["ledger"] |= {"lines": lines, "last_line_sha256": last}
    comparison.compare(card, expected)
    folder.not_attested = comparison.not_attested
    if comparison.undecided:
        raise Undecided("; ".join(comparison.undecided[:9]))
    if at.charged() != ledger.charged():
        raise Undecided(
            f"the card is of the first {lines} lines; {ledger.charged() - at.charged()} attempts were charged since"
        )
    sentence = f"{comparison.agreed + agreed} fields agree with the ledger; {len(folder.not_attested)} are not attested"
    if comparison.larger:
        sentence += f"; larger than they need be are the bounds {shown_list(comparison.larger)}"
    return sentence


# ---------------------------------------------------------------- The card's pages, line by line


def page_lines(card: dict[str, Any]) -> Iterator[str]:
    """Every line of the pages that holds a number or is marked as attested, as the card's fields give it."""
    for section in (claim_lines, mechanism_lines, accounting_lines, other_lines):
        yield from section(card)


def word(value: object) -> str:
    return "unknown" if value in (None, "") else str(value)


def number_word(value: int | None) -> str:
    return "unknown" if value is None else f"{value:,}"


def epsilon_word(value: float | None) -> str:
    return "none" if value is None else rounded_up(value, 3)


def percent(value: float) -> str:
    """A rate in percent, never below its value."""
    return f"{math.ceil(min(Fraction(repr(float(value))), Fraction(1)) * 10**4) / 100:.2f} %"


def attested(name: str, value: str) -> str:
    return f"{name} | {value} | attested"


def claim_lines(card: dict[str, Any]) -> Iterator[str]:
    """The claim, and what stands before the first section."""
    numbers, composition, ledger = card["accounting"], card["composition"], card["provenance"]["ledger"]
    unit = card["unit_of_privacy"]
    progress = f"{number_word(card['steps_done'])} of {number_word(card['steps_planned'])} steps are done and "
    progress += f"{number_word(card['attempts_charged'])} attempts are charged."
    protected = f"for {unit['unit']} out of {unit['num_examples']:,}, under zero-out adjacency."
    if not card["formal_guarantee"]:
        yield f"The run has no formal guarantee, and no epsilon is claimed. {progress}"
        yield from card["reasons"]
    elif card["epsilon"] is None:
        yield f"The accountant gives no finite epsilon at delta = {card['delta']:.6g} {protected}"
    else:
        what = "The run" if composition is None else "What is released"
        claim = f"(epsilon = {epsilon_word(card['epsilon'])}, delta = {card['delta']:.6g})"
        yield f"{what} is {claim}-differentially private {protected}"
    if card["formal_guarantee"]:
        yield f"The run has a formal guarantee; {progress}"
        more = "" if composition is None else ", and from the ledgers in behind/ that it names by their hashes"
        yield (
            f"Every number of sections 1 to 8 and 12 is computed from ledger.jsonl alone{more}; where another file is used, the "
            "card names it. Epsilons are rounded up."
        )
        signed = " and signed" if ledger["signer_fingerprint"] else ""
        yield (
            f"attested marks what follows from the lines of the ledger, which are chained{signed}: python verify.py in this "
            "folder recomputes it without the trainer. declared marks the words of whoever ran the training, which nothing "
            "checks. That the program did what the ledger says is declared, too (section 13)."
        )
    if card["formal_guarantee"] and composition is not None:
        others, own = len(composition["runs"]) - 1, epsilon_word(numbers["epsilon"])
        yield (
            f"This includes what the private runs behind the initial weights had spent ({others} of them), and holds if no "
            "schedule among them was chosen after looking at what the earlier ones had released (section 7). This run alone has "
            f"epsilon {own} at delta {numbers['delta']:.6g}."
        )


def mechanism_lines(card: dict[str, Any]) -> Iterator[str]:
    """Sections 2 to 6: what is released, protected, done to the data and sampled."""
    released, unit, mechanism, sampling = (
        card[name] for name in ("released", "unit_of_privacy", "mechanism", "sampling")
    )
    adaptive, head = mechanism["adaptive_clipping"], mechanism["head"]

    yield attested("checkpoints in the ledger", number_word(released["checkpoints_recorded"]))
    if (last := released["last_checkpoint"]) is not None:
        file = {None: "", True: " (the file in the run folder matches)", False: " (the file in the run folder differs)"}
        yield attested("last checkpoint", f"{last['name'] or 'unknown'}, step {number_word(last['step'])}")
        yield attested("SHA-256 of its manifest", last["manifest_sha256"] + file[last["manifest_matches"]])
    many = f"the number of examples is n = {unit['num_examples']:,} (attested)"
    yield f"The unit of privacy is {unit['unit']} (declared), and {many}. {unit['statement']}"

    if head is None and adaptive is None:
        yield attested("clipping bound C", f"{mechanism['max_grad_norm']:g}")
    elif head is None:
        moved = " and no step is taken yet"
        if adaptive["last_bound"] is not None:
            low, high, now = (f"{adaptive[f'{which}_bound']:.4g}" for which in ("smallest", "largest", "last"))
            moved = f", is now {now} and was between {low} and {high}"
        yield attested("clipping bound C", f"adaptive: C starts at {mechanism['max_grad_norm']:g}{moved}")
        yield attested("target quantile of unclipped examples", f"{adaptive['target_unclipped_quantile']:g}")
        yield attested("learning rate of C", f"{adaptive['clipbound_learning_rate']:g}")
        what = "noise on the count of unclipped examples (standard deviation)"
        yield attested(what, f"{adaptive['unclipped_num_std']:g}")
        yield attested("noise multiplier of the sum alone", f"{adaptive['gradient_noise_multiplier']:.6g}")
    yield attested("noise multiplier sigma", f"{mechanism['noise_multiplier']:.6g}")
    if head is None:
        exponent = mechanism["lattice_exponent"]
        lattice = "" if exponent is None else f", multiples of 2^{-exponent}"
        yield attested("clipping function", word(mechanism["clipping_function"]))
        yield attested("arithmetic", mechanism["arithmetic"] + lattice)
        yield attested("divisor (expected batch size B)", number_word(mechanism["expected_batch_size"]))
    else:
        yield attested("number of classes", number_word(head["num_classes"]))
        options = (name for name in head if name not in ("method", "num_classes", "covers"))
        yield from (f"option {name} | {word(head[name])} | declared" for name in options)
    yield attested("slack r of the sensitivity", f"{mechanism['sensitivity_slack']:g}")
    yield attested("sigma / (1 + r), as accounted", f"{mechanism['noise_multiplier_accounted']:.6g}")
    if (correlated := mechanism["correlated_noise"]) is not None:
        segments = f"sigma is that of the fresh noise; {correlated['segments']:,} segments"
        said = f"{correlated['bands']:,} bands, {correlated['strategy']} coefficients; {segments}"
        yield attested("correlated noise", said)
    for one in mechanism["releases"]:
        ratio, most = (f"{one[name]:.6g}" for name in ("smallest_noise_multiplier", "largest_sensitivity"))
        said = f"{one['count']:,} times; standard deviation / sensitivity is at least {ratio}; the sensitivity is at most {most}"
        yield attested(f"released: {one['name']}", said)

    yield attested("scheme", sampling["scheme"])
    yield attested("the accountant assumes this scheme", "yes" if sampling["matches_accounting"] else "no")
    yield attested("sample rate q", f"{sampling['sample_rate']:.6g}")
    if (groups := sampling["groups"]) is None:
        yield attested("expected batch size B = q n", number_word(sampling["expected_batch_size"]))
    else:
        yield attested("expected batch size B = q n / b", number_word(sampling["expected_batch_size"]))
        whose = f"an example's is {groups['of_example']}, an attempt's {groups['of_attempt']}"
        turns = f"{groups['number']:,} of at most {groups['largest']:,} examples; {whose}"
        yield attested("groups b that take turns", turns)
        yield attested("charged attempts of the group with most of them", number_word(groups["turns_charged"]))
    yield attested("cap of a batch", "none" if sampling["cap"] is None else f"{sampling['cap']:,} examples")
    yield attested("commitment to the sampling key (SHA-256)", sampling["key_commitment_sha256"])
    yield attested("identity of the data (HMAC-SHA256 under that key)", str(sampling["data_hmac_sha256"]))


def accounting_lines(card: dict[str, Any]) -> Iterator[str]:
    """Section 7."""
    numbers, composition, n = card["accounting"], card["composition"], card["unit_of_privacy"]["num_examples"]
    attempts, delta = numbers["attempts"], numbers["delta"]
    if card["formal_guarantee"]:
        yield f"at delta = {delta:.6g} | epsilon"
        yield f"the claim: {attempts['charged']:,} attempts charged | {epsilon_word(numbers['epsilon'])}"
        yield f"planned, {number_word(card['steps_planned'])} steps without a crash | {epsilon_word(numbers['epsilon_planned'])}"
        yield f"with the whole reserve, {attempts['allowed']:,} attempts | {epsilon_word(numbers['epsilon_with_reserve'])}"
        if numbers["epsilon_target"] is not None:
            yield f"target that sigma was calibrated to | {numbers['epsilon_target']:g}"
        if numbers["epsilon_prv"] is not None:
            low, high = numbers["epsilon_prv"]
            low = "none" if low is None else f"{math.floor(low * 1000) / 1000:.3f}"
            yield f"cross-check: PRV bracket, without the cap | {low} to {epsilon_word(high)}"
        yield f"cross-check: RDP upper bound, without the cap | {epsilon_word(numbers['epsilon_rdp'])}"
        above, tail = "at most" if numbers["delta_times_n"] <= 1 else "above", numbers["noise_tail_delta"]
        paid = f"The bounded support of the noise pays for {tail:.3g} of delta. " if tail else ""
        prv = f", {numbers['prv_accountant']}" if numbers["prv_accountant"] else ""
        yield (
            f"The delta is {above} 1/n: 1/n = {1 / n:.4g}, delta times n = {numbers['delta_times_n']:.4g}. {paid}This card was "
            f"computed with {numbers['accountant']}{prv} and Python {numbers['accountant_python']}; the run was planned with "
            f"{numbers['accountant_at_opening'] or 'an unknown accountant'}."
        )
    if composition is not None:
        for place, run in enumerate(composition["runs"], start=1):
            relation = "declared disjoint" if run["disjoint_from_those_before"] else "may overlap: all compose"
            relation = "none before" if place == len(composition["runs"]) else relation
            spent = f"{epsilon_word(run['epsilon'])} | {run['delta']:.6g} | {run['attempts_charged']:,}"
            yield f"{run['name']} | {spent} | {run['file']} | {relation}"
        yield f"what is released | {epsilon_word(composition['epsilon'])} | {composition['delta']:.6g} | | |"
    yield attested(
        "highest step done, of planned", f"{number_word(card['steps_done'])} of {number_word(card['steps_planned'])}"
    )
    yield attested("attempts charged, of allowed", f"{attempts['charged']:,} of {attempts['allowed']:,}")
    yield attested("attempts whose update was applied", number_word(attempts["done"]))
    yield attested("repeats of a step", number_word(attempts["repeats"]))
    yield attested("torn lines (of them charged)", f"{attempts['torn_lines']:,} ({attempts['torn_lines_charged']:,})")
    owner, replaced = numbers["max_examples_per_owner"], numbers["epsilon_replace_one"]
    if replaced is not None:
        yield f"one example exchanged for an arbitrary other one (replace-one) | {epsilon_word(replaced)}"
        for size, value in numbers["epsilon_group"].items():
            yield f"{size} examples of one person, or copies | {epsilon_word(value)}"
        if owner is not None:
            spent = epsilon_word(numbers["epsilon_owner"])
            yield f"one owner of at most {owner} examples, as the recipe states | {spent}"
        limit = ", but the most examples of one owner is declared" if owner is not None else ""
        tan = numbers["tan"]
        noise = "" if tan is None else f" The total amount of noise (TAN, Sander et al. 2023) is {tan:.4g}."
        how = "They are PLD upper bounds on a coarser grid; the groups leave out the cap."
        if card["sampling"]["groups"] is not None:
            how = "Several examples may be in groups that take different turns: theirs is generic group privacy, by Renyi DP, "
            how += "without the cap. "
            how += "Replace-one is a PLD upper bound on a coarser grid."
        if None in numbers["epsilon_group"].values() or (owner is not None and numbers["epsilon_owner"] is None):
            how += " None is stated where that many examples together may pass the edge of the noise, or no bound is finite."
        yield f"All of these follow from the ledger (attested){limit}. {how}{noise}"
    if numbers["epsilon_by_delta"]:
        yield "delta | " + " | ".join(f"{one:.6g}" for one, _ in numbers["epsilon_by_delta"])
        yield "epsilon | " + " | ".join(epsilon_word(value) for _, value in numbers["epsilon_by_delta"])
    if numbers["attack"] is not None:
        for rate, bound in numbers["attack"]["true_positive"].items():
            yield f"true-positive rate at false-positive rate {rate} | at most {percent(bound)}"
        advantage = percent(numbers["attack"]["advantage"])
        yield f"advantage: true-positive less false-positive rate, anywhere | at most {advantage}"
        yield "The bounds follow from epsilon(delta) for all delta (trade-off function, Dong et al. 2022)."


def other_lines(card: dict[str, Any]) -> Iterator[str]:
    """Sections 8 to 14: tuning, public data, ledger and sessions, utility."""
    ledger, sessions, shared = (
        card["provenance"]["ledger"],
        card["provenance"]["sessions"],
        card["tuning"]["shared_ledger"],
    )
    if (found := shared["summary"]) is not None:
        reserved = f"epsilon {epsilon_word(found['epsilon_reserved'])} (by {found['accounting']})"
        yield (
            f"The run belongs to the data owner's shared ledger {shared['identity']} (hash of its first line, in the run's "
            f"ledger). All runs together reserved {reserved} out of a total of {found['epsilon']:g} at delta "
            f"{found['delta']:.6g} for {found['unit']}."
        )
        for run in found["runs"]:
            chosen = "yes" if run["chosen_after_outputs"] else "no"
            this = " (this run)" if run["is_this_run"] else ""
            yield f"{run['name']}{this} | {run['time_utc']} | {epsilon_word(run['epsilon'])} | {chosen}"
        informal = "; ".join(f"{run['name']} ({run['reason']})" for run in found["informal_runs"])
        if informal:
            more = f"{len(found['informal_runs'])} more runs on the same data have no guarantee"
            yield f"{more}, and no epsilon here covers them: {informal}."
    if (public := card["public_data"])["file"]:
        standing = "which matches the SHA-256 in the ledger" if public["attested"] else "not attested"
        yield f"{public['statement']} The card reads this from {public['file']} ({standing}):"
    for fact, value in public["facts"].items():
        if isinstance(value, dict):
            items = (
                (name, json.dumps(item) if isinstance(item, dict | list) else item) for name, item in value.items()
            )
            value = ", ".join(f"{name} {item}" for name, item in items)
        yield f"{fact} | {'none' if value is None else value}"

    state = f"closed: {card['provenance']['closed']}" if card["provenance"]["closed"] else "open: the run may go on"
    yield attested("state", state)
    chained = f"{ledger['file']}, {ledger['lines']:,} lines, format {ledger['format']}, hash chain verified"
    yield attested("ledger", chained)
    yield attested("SHA-256 of its last line", ledger["last_line_sha256"])
    signature = "none"
    if ledger["signer_fingerprint"] is not None:
        signature = f"{ledger['signed_lines']:,} of {ledger['lines']:,} lines, by the key with the fingerprint "
        signature += (
            f"{ledger['signer_fingerprint']}; it says who signed only to somebody who kept the fingerprint elsewhere "
        )
        signature += "when the run began"
    yield attested("signature", signature)
    mirrored = f"in {ledger['mirrored_sessions']:,} of {len(sessions):,} sessions"
    if ledger["mirrored_sessions"]:
        yield f"mirror of the ledger | {mirrored} | declared"
    for place, one in enumerate(sessions, start=1):
        changed = {None: "unknown", True: "yes", False: "no"}[one["modified"]]
        versions = "".join(f", {name} {version}" for name, version in (one["packages"] or {}).items())
        code, mirror = word((one["commit"] or "")[:12]), "yes" if one["mirror"] else "no"
        yield f"{place} | {code} | {changed} | {mirror} | python {word(one['python'])}{versions}"

    utility = card["utility"] or {"heldout_loss": [], "samples": None}
    points = utility["heldout_loss"]
    baselines = any(point[name] for point in points for name in ("blind_loss", "shuffled_loss"))
    for point in points if len(points) <= 12 else [points[0], points[-1]]:
        losses = ["not a number" if point["loss"] is None else f"{point['loss']:.4f}"]
        for name in ("blind_loss", "shuffled_loss") if baselines else ():
            losses.append("" if point[name] is None else f"{point[name]:.4f}")
        yield f"{point['step']:,} | {' | '.join(losses)}"
    if utility["samples"] is not None:
        file, step = utility["samples"]["file"], utility["samples"]["step"]
        yield f"Samples of held-out examples after step {step:,} are in {file}."


PLOT_WORDS = (
    "charged so far (upper bound)", "charged attempts", "the claim", "delta (log scale)", "epsilon", "guessing",
    "no attack can be above", "false-positive rate (log scale)", "true-positive rate, upper bound", "the model",
    "without looking", "with another picture", "not attested", "step", "held-out loss",
    "Epsilon by delta. Every point of the curve holds at once, for everything that the ledger charges.",
)  # fmt: skip
"""Titles, axes and legends of plots that hold no number."""


def plot_lines(card: dict[str, Any]) -> Iterator[str]:
    """All that the plots and pictures say, other than the numerals at the axes."""
    yield from PLOT_WORDS
    numbers, attempts = card["accounting"], card["accounting"]["attempts"]
    charged = f"{attempts['charged']:,} of {attempts['allowed']:,} allowed attempts are charged, as the ledger says."
    yield f"Epsilon over charged attempts. {charged}"
    yield f"epsilon at delta = {numbers['delta']:.6g}"
    yield f"1/n, n = {card['unit_of_privacy']['num_examples']:,}"
    for name, value in (("budget with the reserve", "epsilon_with_reserve"), ("planned", "epsilon_planned")):
        yield "" if numbers[value] is None else f"{name}: {rounded_up(numbers[value], 3)}"
    if numbers["attack"] is not None:
        rates = numbers["attack"]["true_positive"]
        yield from map(percent, rates.values())
        yield (
            "What an attack can reach. The curve bounds membership inference on one example, whatever the attacker knows, from "
            f"the ledger alone; the dots are at the false-positive rates {' and '.join(rates)}."
        )
    if card["utility"] is not None and card["utility"]["heldout_file"] is not None:
        losses = f"The losses come from {card['utility']['heldout_file']}, which nothing protects against changes."
        yield f"Held-out loss. {losses}"
    if card["utility"] is not None and card["utility"]["samples"] is not None:
        file, step = (card["utility"]["samples"][name] for name in ("file", "step"))
        shows = f"The picture shows what the model makes of held-out examples after step {step:,} ({file})."
        yield f"Samples. {shows} It is not attested."


def plain(text: object) -> str:
    """Text without the marks of Markdown and HTML, on one line."""
    line = re.sub(r"[*`\\]", "", printable(" ".join(str(text).split())))
    while (read := html.unescape(line)) != line:
        line = read
    return " ".join(line.split())


def squeezed(value: Any) -> Any:
    """A card whose texts are on one line each, as pages show them."""
    if isinstance(value, dict):
        return {" ".join(name.split()): squeezed(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [squeezed(inner) for inner in value]
    return " ".join(value.split()) if isinstance(value, str) else value


def words_of(card: Any) -> Iterator[str]:
    """Every text of a card."""
    if isinstance(card, str):
        yield card
    for inner in card.values() if isinstance(card, dict) else card if isinstance(card, list) else ():
        yield from words_of(inner)


def figures(text: str) -> set[str]:
    """The words of a text that hold a numeral, of whatever script."""
    return {word.strip(".,;:()[]|'\"%") for word in text.split() if any(letter.isnumeric() for letter in word)}


def markdown_lines(text: str) -> Iterator[str]:
    for line in text.split("\n"):
        row = line.removeprefix("|").rstrip().removesuffix("|") if line.startswith("|") else line
        yield plain(re.sub(r"^(> ?|\* |#+ )", "", row))


INLINE = {"code", "em", "strong", "td", "th", "tspan"}
PLOTTED = {"circle", "clippath", "defs", "g", "line", "path", "rect", "style", "svg", "text", "use"}
TAGS = INLINE | PLOTTED | {
    "blockquote", "body", "div", "figcaption", "figure", "h1", "h2", "head", "html", "img", "li", "main", "meta", "p", "table",
    "tbody", "thead", "title", "tr", "ul",
}  # fmt: skip
"""What pages of cards are made of: within a line, in a plot, and all."""
ATTRIBUTES = {
    "alt", "aria-label", "charset", "class", "clip-path", "content", "cx", "cy", "d", "height", "href", "id", "lang", "name", "r",
    "role", "src", "style", "transform", "type", "version", "viewbox", "width", "x", "x1", "x2", "xlink:href", "xmlns",
    "xmlns:xlink", "y", "y1", "y2",
}  # fmt: skip
STYLES = {
    "clip-path", "fill", "fill-opacity", "font", "font-family", "font-size", "font-weight", "opacity", "stroke",
    "stroke-dasharray", "stroke-dashoffset", "stroke-linecap", "stroke-linejoin", "stroke-miterlimit", "stroke-opacity",
    "stroke-width", "text-anchor",
}  # fmt: skip
SHEETS = {
    "2fd0f9d938fc015650966d8c11ea27365aece0ab0a6387f79b8a831f059186c8",
    "d88aaee0c5b43f89fbf5ba959930df2d684ef134bb331c11267ec754d0ebec44",
}
"""SHA-256 of the style sheets that a page and its plots have: another one could show, hide or turn around text."""
HEADING = re.compile(
    r"\d{1,2}\. (Setting and trust boundary|What is released|Unit of privacy|Adjacency|Mechanism|Sampling|Accounting|"
    r"Hyper-parameter tuning|Public pre-training data|What was logged without noise, and where|What is not covered|"
    r"Code, ledger and sessions|Audit|Utility \(not attested\))"
)


class Page(HTMLParser):
    """The text of a card's HTML page: a line for each paragraph, row and label.

    Raises:
        Violated: a tag or an attribute that no page of a card has, and that could show other text than this.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.plots: list[str] = []
        self._open, self._sheet, self._cells, self._in_plot, self._in_figure = "", False, 0, False, False
        self.feed(text)
        self.close()
        self._end()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        require(tag in TAGS, f"a page of a card has no <{shown(tag)}>")
        for name, value in attrs:
            inside = name not in ("href", "src", "xlink:href") or str(value).startswith(("#", "data:image/png;base64,"))
            require(inside and name in ATTRIBUTES, f"a page of a card has no {shown(name)} of this kind")
            if name in ("alt", "aria-label", "title"):
                (self.plots if tag == "svg" else self.lines).append(plain(value))
            elif name == "style":
                named = {part.partition(":")[0].strip() for part in str(value).split(";")}
                known = self._in_plot and tag in PLOTTED | {"tspan"} and named <= STYLES | {""}
                fetches = re.search(r"\\|url\((?!#)", str(value))
                require(known and not fetches, f"a page of a card has no <{tag}> of this style")
        self._in_figure = tag == "figure" or self._in_figure
        require(tag != "svg" or self._in_figure, "a plot of a card's page lies in a figure")
        if tag not in INLINE:
            self._end()
            self._in_plot = tag == "svg" or (self._in_plot and tag in PLOTTED)
        elif tag in ("td", "th"):
            self._open += " | " if self._cells else ""
            self._cells += 1
        self._sheet = tag == "style"

    def handle_endtag(self, tag: str) -> None:
        if tag not in INLINE:
            self._end()
        self._in_figure = tag != "figure" and self._in_figure
        self._sheet = False

    def handle_data(self, data: str) -> None:
        if self._sheet:
            known = hashlib.sha256(data.encode()).hexdigest() in SHEETS
            require(known, "the style sheet of a card's page is another one, and may show or hide text")
        else:
            self._open += data

    def unknown_decl(self, data: str) -> None:
        raise Violated("a page of a card has no section of this kind")

    def handle_comment(self, data: str) -> None:
        raise Violated("a page of a card has no comments, in which programs do not agree where they end")

    def handle_pi(self, data: str) -> None:
        raise Violated("a page of a card has no instructions to programs")

    def _end(self) -> None:
        lines = [self._open] if self._cells else self._open.split("\n")
        (self.plots if self._in_plot else self.lines).extend(map(plain, lines))
        self._open, self._cells = "", 0


def check_pages(folder: Folder) -> str:
    """Every number on privacy_card.md and .html is the one that privacy_card.json gives for its line."""
    pages = [name for name in ("privacy_card.md", "privacy_card.html") if folder.has("report", name)]
    if not pages:
        return "the card has no page here"
    if not folder.has("report", "privacy_card.json"):
        raise Undecided(f"report/{pages[0]} is here without privacy_card.json, of which it was made")
    card = squeezed(object_in(folder.path / "report" / "privacy_card.json"))
    expected, drawn = ({plain(line) for line in of(card)} for of in (page_lines, plot_lines))
    said = {text: figures(text) for text in map(plain, words_of(card))}
    for name in pages:
        text = read_file(folder.path / "report" / name).decode()
        page = Page(text) if name.endswith("html") else None
        bare = re.sub(r"(?<![\\`])`[^`\n]+`(?!`)", "", text)  # what code spans hold is shown as it stands
        hides = page is None and re.search("<[a-zA-Z!/?]", bare)
        require(not hides, f"{name} holds HTML, which may hide what follows")
        found = list(markdown_lines(text)) if page is None else page.lines
        plotted = [] if page is None else page.plots
        labels = {line for line in plotted if not re.fullmatch(r"[-\N{MINUS SIGN}0-9.,e+ ]*", line)}  # not of an axis
        missing = sorted(expected.difference(found))
        require(not missing, f"{name} lacks {shown(missing[:1])}, which the card gives")
        invented = sorted(labels - drawn)
        require(not invented, f"a plot of {name} says {shown(invented[:1])}, and no plot of a card does")
        for line in sorted({*found} - expected - drawn):
            quoted = (there for text, there in said.items() if text in line)
            odd = set() if HEADING.fullmatch(line) else figures(line).difference(*quoted)
            require(not odd, f"{name} says {shown(sorted(odd)[:1])} in {shown(line)}, and the card does not")
            marked = line.endswith("| attested")
            require(not marked, f"{name} calls attested what the card does not hold: {shown(line)}")
    names = " and ".join(pages)
    return f"{len(expected)} lines of {names} are as privacy_card.json gives them, and no other has a number of its own"


def accountant() -> str:
    from importlib.metadata import version

    return f"dp-accounting {version('dp-accounting')}"


def check_checkpoints(folder: Folder) -> str:
    """Manifests against the ledger, and files against manifests; checkpoints that were removed are nobody's loss."""
    ledger, plan = folder.ledger, folder.ledger.plan
    if not folder.has("checkpoints"):
        return "there is no checkpoint here"
    if not is_folder(folder.path / "checkpoints"):
        raise BadInput("checkpoints: is no folder")
    names = sorted(entry.name for entry in os.scandir(folder.path / "checkpoints") if entry.name.startswith("step-"))
    require(len(names) <= 10_000, "checkpoints/ holds more than 10,000 checkpoints")
    recorded = {(step, digest): line for line, step, _, digest in ledger.checkpoints}
    undecided, hashed = [], 0
    for name in names:
        place = folder.path / "checkpoints" / name
        if not is_folder(place):
            raise BadInput(f"{shown(place)}: is no folder")
        if not folder.has("checkpoints", name, "manifest.json"):
            raise Violated(f"{shown(name)} has no manifest.json")
        digest = hashlib.sha256(read_file(place / "manifest.json")).hexdigest()
        manifest = object_in(place / "manifest.json")
        step, position = whole(manifest, "step", 0), manifest.get("ledger")
        require(name == f"step-{step:08d}", f"{shown(name)} is of step {step}")
        require(isinstance(position, dict), f"{name} remembers no line of the ledger")
        assert isinstance(position, dict)
        line = whole(position, "seq", 0)
        known = line < len(ledger.hashes) and ledger.hashes[line] == position.get("hash")
        require(known, f"{name} remembers another line {line + 1}: the ledger was cut or replaced")
        guarantee = manifest.get("formal_guarantee") == (not plan.reasons)
        require(guarantee, f"{name} says something else about the guarantee")
        charged = manifest.get("charged_attempts", ledger.charged(line + 1))
        require(
            charged == ledger.charged(line + 1),
            f"{name} states {shown(charged)} charges, the ledger {ledger.charged(line + 1)}",
        )
        if plan["enabled"] and (step, digest) not in recorded:
            # A crash may come between a checkpoint and its record. Then it is of the step that its session had reached, and the
            # ledger knows of nothing after it: a session begins with a record of the checkpoint that it goes on from.
            session = max((at for at, _ in ledger.sessions if at <= line), default=len(ledger.hashes))
            again = [at for at, record in ledger.sessions if at <= line and record.get("restarted_from_step_0") is True]
            done = bisect_right(ledger.done, (line, MOST))  # of the session, the last one up to that line
            is_after = done > 0 and ledger.done[done - 1][0] > session
            since, reached = ledger.done[done - 1] if is_after else (max(again, default=0), 0)
            require(
                step == reached and session <= line,
                f"{name} is of step {step}, and the line that it remembers follows another one",
            )
            later = any(at > since and of_step >= step for at, of_step, *_ in ledger.checkpoints) or ledger.closed
            require(not later, f"{name}: manifest.json is not the one that the ledger recorded")
            undecided.append(f"{name}: the ledger has no record of it, as after a crash between the two")
        elif plan["enabled"] and ledger.fingerprint and recorded[step, digest] >= ledger.signed:
            undecided.append(f"{name}: the ledger's record of it is not signed: anybody can have added it")
        files = manifest.get("files", {})
        require(isinstance(files, dict) and len(files) <= 100_000, f"{name} lists its files")
        unlisted = sorted({entry.name for entry in os.scandir(place)} - {"manifest.json", *files})
        require(not unlisted, f"{name} holds {', '.join(map(shown, unlisted[:9]))}, which its manifest does not list")
        for file, stated in files.items():
            plain = re.fullmatch(r"[A-Za-z0-9._-]{1,200}", file) is not None and file not in (".", "..")
            require(plain, f"{name} lists no file names")
            if not folder.has("checkpoints", name, file):
                undecided.append(f"{name}: {file} is missing")
                continue
            with os.fdopen(open_plain(place / file, 1 << 50), "rb") as opened:
                found = hashlib.file_digest(opened, "sha256").hexdigest()
            require(found == stated, f"{name}: {file} has another hash than its manifest says")
            hashed += 1
        spent, start = 0, manifest.get("initialisation")
        while isinstance(start, dict) and spent <= 100:  # weights of a run with a guarantee bring its charges along
            spent += bool(start.get("guarantee"))
            start = start.get("before_that")
        require(
            bool(plan.reasons) or spent <= len(ledger.opened.get("behind", ())),
            f"{name}: its weights started from private runs that the ledger does not name",
        )
        data = manifest.get("training_data")
        folder.facts["training_data"] = shown(data.get("provenance")) if isinstance(data, dict) else None
    if undecided:
        raise Undecided("; ".join(undecided[:3]))
    return f"{len(names)} manifests are those that the ledger recorded, and {hashed} files have their hashes"


def torn_entry(line: bytes) -> dict[str, Any] | None:
    """The whole fields of an entry that a crash cut off; None for what is not the beginning of an entry."""
    text = line.decode(errors="replace").removesuffix("\n")
    start = '{"step": '
    if start.startswith(text):
        return {}
    if not text.startswith(start):
        return None
    pair = r'"[^"\\]*("(:( (-?[0-9.eE+-]*|[A-Za-z]*|"([^"\\]|\\.)*\\?|\[.*))?)?)?'
    for end in (place for place in range(len(text), 0, -1) if place == len(text) or text[place] == ","):
        try:
            entry = parsed(f"{text[:end]}}}".encode(), with_nan=True)
        except ValueError:
            continue
        rest = text[end + 1 :].removeprefix(" ")
        whole = rest == "" or re.fullmatch(pair, rest) is not None
        return entry if whole and isinstance(entry, dict) else None
    return {} if re.fullmatch(r"[0-9]*", text.removeprefix(start)) else None


def checked_counts(counts: list[int]) -> set[int]:
    """Up to MOST_COUNTS counts: all. Of more, the first, the last, and the next one after equal parts of what lies between."""
    if len(counts) <= MOST_COUNTS:
        return set(counts)
    first, last = counts[0], counts[-1]
    marks = (first + (last - first) * part // MOST_COUNTS for part in range(MOST_COUNTS + 1))
    return {counts[bisect_left(counts, mark)] for mark in marks}


def check_metrics(folder: Folder) -> str:
    """What other files say of steps and charges: each pair is one that the ledger passed through, and no step is beyond it."""
    ledger, plan, torn, lines, last = folder.ledger, folder.ledger.plan, 0, 0, folder.ledger.last_done()
    passed = {(step, ledger.charged(line + 1)) for line, step in ledger.done}
    fewest = dict(sorted(passed, reverse=True))  # step -> charges when it was first done
    claims: dict[int, float] = {}  # charges -> epsilon
    for file in ("metrics.jsonl", "evaluation/heldout.jsonl"):
        if not folder.has(*file.split("/")):
            continue
        torn_here = 0
        for number_of_line, line in enumerate(lines_of(folder.path / file), start=1):
            where, lines = f"{file}: line {number_of_line}", lines + 1
            try:
                entry = parsed(line, with_nan=True)
            except json.JSONDecodeError as error:
                cut, torn, torn_here = torn_entry(line), torn + 1, torn_here + 1
                later = line.rfind(b'{"step": ')
                if cut is None and later > 0 and file != "metrics.jsonl" and torn_entry(line[:later]) is not None:
                    cut = torn_entry(line[later:])  # held-out results go on in the line that a crash has cut off
                    try:
                        cut = parsed(line[later:], with_nan=True) if cut is None else cut
                    except ValueError:
                        cut = None
                    require(
                        b"privacy/" not in line[:later], f"{where} is torn, and states what no held-out result does"
                    )
                require(cut is not None, f"{where} is neither an entry nor the beginning of one")
                restarts = len(ledger.sessions) - 1 + (not line.endswith(b"\n"))
                explained = not plan["enabled"] or torn_here <= restarts
                require(explained, f"{where} is torn, and no restart of the ledger explains it: {error.msg}")
                entry = cut or {}
                if "step" not in entry:
                    continue
                if "privacy/epsilon" in entry and "privacy/charged_attempts" not in entry:
                    entry["privacy/charged_attempts"] = fewest.get(entry["step"])
            except ValueError as error:  # what other readers would read, each in its own way
                raise Violated(f"{where}: {shown(error)}") from error
            require(isinstance(entry, dict) and type(entry.get("step")) is int, f"{where} has no step")
            for key in entry:
                strange = key not in KNOWN_METRICS and re.search("privacy|epsilon", key, re.IGNORECASE)
                require(not strange, f"{where} states {shown(key)}, which this verifier does not know")
            step, charged, claim = entry["step"], entry.get("privacy/charged_attempts"), entry.get("privacy/epsilon")
            require(
                not plan["enabled"] or 0 <= step <= last,
                f"{where} shows step {shown(step)}, which the ledger never finished",
            )
            if charged is not None or claim is not None:
                require(type(charged) is int, f"{where} shows {shown(charged)} charges, which is no count")
                stood = f"{where} shows {shown(charged)} charges, as the ledger never stood after step {step}"
                require((step, charged) in passed, stood)
            if claim is not None:
                require(not plan.reasons, f"{where} states an epsilon, and nothing is claimed")
                require(type(claim) in (int, float), f"{where} states epsilon {shown(claim)}")
                claims[charged] = min(claim, claims.get(charged, claim))
    if folder.has("evaluation") and is_folder(folder.path / "evaluation"):
        for entry in os.scandir(folder.path / "evaluation"):
            drawn = re.fullmatch(r"samples-(\d{1,20})\.png", entry.name)
            require(
                drawn is None or not plan["enabled"] or int(drawn[1]) <= last,
                f"evaluation/{shown(entry.name)} is of a step that the ledger never finished",
            )
    counts = sorted(claims)
    for before, after in pairwise(counts):
        require(claims[before] <= claims[after], f"epsilon falls from {before} to {after} charges")
    if counts and folder.epsilon is not None:
        chosen, true = checked_counts(counts), 0.0
        for count in counts:  # one that is not chosen is at least the epsilon of the last one that was
            if count in chosen:
                true = epsilon_of(folder, [ledger, *folder.chain], folder.delta, count)
            require(
                claims[count] >= true * (1 - FP32),
                f"epsilon {claims[count]:.8g} after {count}, where it is {rounded_up(true)} or more",
            )
        if len(chosen) < len(counts):
            said = f"recomputed for {len(chosen)} of {len(counts)} counts of charges; the others are no less than the one before"
            folder.partly.append(("epsilon in metrics.jsonl", said))
    return f"{lines} lines show nothing that the ledger lacks" + (f"; {torn} of them are torn" if torn else "")


CHECKS = (
    check_files, check_signature, check_order, check_plan, check_budget, check_behind, check_epsilon, check_card, check_pages,
    check_checkpoints, check_metrics,
)  # fmt: skip


# ---------------------------------------------------------------- What follows, and who says what cannot be checked


def shown_list(names: list[str]) -> str:
    text = ", ".join(map(shown, names[:60]))
    return text if len(names) <= 60 else f"{text} and {len(names) - 60} more"


def declarations(folder: Folder) -> list[tuple[str, str | None, str]]:
    """(what, the words or None where nothing is stated, who says so): nothing here can check them."""
    config, ledger, operator = folder.config or {}, folder.ledger, "whoever ran the training, in config.toml"

    def said(section: str, key: str) -> str | None:
        table = config.get(section)
        value = table.get(key) if isinstance(table, dict) else None
        return None if value in (None, "") else shown(value)

    origins = dict.fromkeys(filter(None, (said("data", "provenance"), folder.facts.get("training_data"))))
    signer = "the holder of the signing key" if ledger.fingerprint else "whoever wrote the ledger"
    words = [
        ("that the program did what the ledger says", "see audit.py of the project", signer),
        (
            "time of the first start; all records repeat it, since clocks depend on the data",
            shown(ledger.opened["time_utc"]),
            signer,
        ),
        ("commit of the code", shown(ledger.opened["commit"]) if ledger.opened.get("commit") else None, signer),
        ("what one example is", shown(ledger.opened.get("unit", "one example")), signer),
        ("the most examples of one owner", said("privacy", "max_examples_per_owner"), operator),
        ("in ledger.jsonl", shown_list(sorted(ledger.loose)), signer),
        ("provenance of the training data", " in config.toml, and in a manifest ".join(origins) or None, operator),
    ]
    for name in ("name", "owner", "purpose", "licence"):
        words.append((f"{name} of the training data", said("data", f"dataset_{name}"), operator))
    words += [
        ("how duplicates were removed", said("data", "deduplication"), operator),
        ("how hyper-parameters were chosen", said("privacy", "tuning"), operator),
        ("that the held-out data are public", said("heldout", "is_public"), operator),
    ]
    if ledger.opened.get("behind"):
        disjoint = "yes, so one example bears one of them" if ledger.opened.get("disjoint_from_start") is True else None
        words.append(("that the data are disjoint from those behind the initial weights", disjoint, operator))
        fixed = "the composed epsilon takes it for granted; a shared ledger's RDP filter does without it"
        words.append(
            ("that no later schedule was chosen after looking at outputs of the earlier runs", fixed, operator)
        )
    publisher = "whoever publishes the folder"
    words += [(what, how, publisher) for what, how in folder.partly]
    unchecked = "all values but step, charged attempts and epsilon"
    for name in ("metrics.jsonl", "evaluation/heldout.jsonl"):
        if folder.has(*name.split("/")):
            words.append((f"in {name}", unchecked, publisher))
    if folder.config is not None:
        compared = (
            "all but [privacy] as far as the plan holds it, train.num_steps, data.num_examples and init.disjoint_data"
        )
        words.append(("in config.toml", compared, publisher))
    if folder.has("verify.py"):
        words.append(
            ("verify.py", "judges nothing about itself: take it from the project, not from the folder", publisher)
        )
    if folder.has("private"):
        words.append(("private/", "nothing here looks at it, and it is not for publication", publisher))
    if any(folder.has("report", f"privacy_card.{kind}") for kind in ("md", "html")):
        words.append(
            (
                "in privacy_card.md and .html",
                "words outside of plots, looks, pictures, and the curves and numerals at the axes of plots",
                publisher,
            )
        )
    if folder.has("checkpoints"):
        kept = "all but step, charges, guarantee, place in the ledger and the hashes of files"
        words.append(("in checkpoints/*/manifest.json", kept, signer))
    if folder.elsewhere:
        linked = (
            f"each has a further name (a hard link) by which somebody can change it: {shown_list(folder.elsewhere)}"
        )
        words.append(("files with two names", linked, publisher))
    if folder.not_attested:
        named = dict.fromkeys(re.sub(r"\[\d+\]", "[]", place) for place in folder.not_attested)
        words.append(("in privacy_card.json", shown_list(list(named)), publisher))
    audits = [name for name in folder.unread if re.fullmatch(r"report/audit[^/]*", name)]
    for name in audits[:20]:
        words.append(
            (shown(name), "make it again with audit.py of the project, which needs private/ for most of it", publisher)
        )
    others = [name for name in folder.unread if name not in audits]
    if others:
        words.append(("what other files say", shown_list(others), publisher))
    return words


def verify(
    path: Path, fingerprint: str | None, head: str | None = None, *, quiet: bool = True
) -> tuple[int, dict[str, Any]]:
    """All checks of a folder: the exit code, and what --json prints; unless quiet, stderr says what is done.

    Raises:
        BadInput: no such folder, or a file in it that cannot be judged.
    """
    if not path.is_dir():
        raise BadInput(f"{shown(path)}: is no folder")
    checks: list[tuple[str, str, str]] = []
    begun, lines = time.monotonic(), sum(1 for _ in lines_of(path / "ledger.jsonl"))
    if not quiet:
        print(f"checking {lines:,} lines of the ledger, then epsilon, card and files", file=sys.stderr, flush=True)
    try:
        ledger = read_ledger(path / "ledger.jsonl")
    except Violated as error:
        checks = [("ledger", "violated", str(error))]
        return VIOLATED, {"verdict": "violated", "exit_code": VIOLATED, "checks": [_named(check) for check in checks]}
    folder = Folder(path, ledger, fingerprint, head)
    if folder.has("config.toml"):
        import tomllib

        try:
            folder.config = tomllib.loads(read_file(path / "config.toml", 1 << 18).decode())
        except (ValueError, RecursionError) as error:
            raise BadInput(f"config.toml is no TOML: {shown(error)}") from error
    checks.append(("chain", "ok", f"{len(ledger.hashes)} lines are canonical and chained by their hashes"))
    for judge in CHECKS:
        name = judge.__name__.removeprefix("check_")
        if not quiet and time.monotonic() > begun + 2:
            print(f"checking {name}", file=sys.stderr, flush=True)
        try:
            checks.append((name, "ok", judge(folder)))
        except Violated as error:
            checks.append((name, "violated", str(error)))
        except Undecided as error:
            checks.append((name, "inconclusive", str(error)))
        except (
            LookupError,
            TypeError,
            ValueError,
            ArithmeticError,
            AttributeError,
        ) as error:  # of what the folder holds
            said = f"a field is missing or has another type ({type(error).__name__}: {shown(error)})"
            checks.append((name, "violated", said))
    outcomes = {outcome for _, outcome, _ in checks}
    verdict = next((word for word in ("violated", "inconclusive") if word in outcomes), "consistent")
    code = {"consistent": CONSISTENT, "inconclusive": INCONCLUSIVE, "violated": VIOLATED}[verdict]
    plan, stated = ledger.plan, declarations(folder)
    attested = {
        "examples": plan["num_examples"], "expected batch": plan["expected_batch_size"], "sample rate": plan.rate,
        "cap": plan["cap"], "sampling": plan["sampling"], "noise multiplier": plan["noise_multiplier"],
        "noise multiplier as accounted": plan.accounted, "clipping bound": plan["max_grad_norm"],
        "planned steps": plan["num_steps"], "last step done": ledger.last_done(), "charged attempts": ledger.charged(),
        "state of the run": ledger.closed or OPEN,
        "commitment of the sampling key": ledger.opened["key_commitment"], "last line": ledger.hashes[-1],
    }  # fmt: skip
    if plan.bands > 1:
        most = plan.turns(ledger.charged())
        attested |= {"groups that take turns": plan.bands, "charged attempts of the group with most of them": most}
    finite = folder.epsilon is not None and math.isfinite(folder.epsilon)
    return code, {
        "verdict": verdict,
        "exit_code": code,
        "formal_guarantee": not plan.reasons,
        "epsilon": folder.epsilon if finite else None,
        "delta": folder.delta or plan["target_delta"],
        "epsilon_of_this_run_alone": folder.own_epsilon if finite else None,
        "fingerprint": ledger.fingerprint,
        "signer_known": fingerprint is not None and ledger.fingerprint == fingerprint,
        "checks": [_named(check) for check in checks],
        "attested": attested,
        "card_not_attested": [shown(place) for place in folder.not_attested],
        "declared": [{"what": what, "words": words, "by": who} for what, words, who in stated if words is not None],
        "not_stated": [what for what, words, _ in stated if words is None],
    }


def _named(check: tuple[str, str, str]) -> dict[str, str]:
    return dict(zip(("name", "outcome", "sentence"), map(printable, check), strict=True))


def to_text(found: dict[str, Any]) -> str:
    """What a reader needs to know, in the order of its importance from the bottom upwards."""
    marks = {"ok": "ok          ", "violated": "VIOLATED    ", "inconclusive": "undecided   "}
    lines = [f"{marks[check['outcome']]}{check['name']}: {check['sentence']}" for check in found["checks"]]
    if "attested" in found:
        by = "chain and signature" if found["fingerprint"] else "chain alone"
        lines += [
            f"attested by the ledger's {by}:",
            *(f"  {name}: {value}" for name, value in found["attested"].items()),
        ]
        lines += ["declared, and checked by nothing:"]
        lines += [f"  {one['what']}: {one['words']} (says {one['by']})" for one in found["declared"]]
        lines += [f"  {what}: NOT STATED" for what in found["not_stated"]]
        if not found["signer_known"]:
            lines.append(
                "without the signer's fingerprint from elsewhere (--fingerprint), a folder that was forged as a whole, with "
                "another key, cannot be told from a true one"
            )
    if found.get("attested", {}).get("state of the run") == OPEN:
        lines.append(
            "the ledger is open: the run may go on, or lines after a signature were cut off; only the hash of its last line, "
            "kept elsewhere, can tell (--head)"
        )
    claim = ""
    if found.get("epsilon") is not None:
        claim = f": epsilon {rounded_up(found['epsilon'], 4)} at delta {found['delta']:g}"
    return "\n".join(map(printable, [*lines, f"verify: {found['verdict']}{claim}"]))


class Parser(argparse.ArgumentParser):
    """A bad argument ends in one line."""

    def error(self, message: str) -> NoReturn:
        raise BadInput(shown(message))


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line; a bad argument is bad input."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).resolve().parent)
    parser.add_argument("--fingerprint", help="SHA-256 of the signer's key in hex, as the start of the run printed it")
    parser.add_argument("--head", help="hash of a line that the ledger had, as the end of the run printed it")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Verifies one folder, prints, and returns the exit code; whatever the folder holds, errors are one line."""

    def too_long(*_: object) -> NoReturn:
        raise BadInput(f"it takes more than {MINUTES} minutes to judge this folder")

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        options = parse_args(arguments)
        told = [None if value is None else value.strip().lower() for value in (options.fingerprint, options.head)]
        for name, value in zip(("fingerprint", "head"), told, strict=True):
            if value is not None and not is_hex(value, 64):
                raise BadInput(f"--{name} is 64 hexadecimal digits")
        if hasattr(signal, "SIGALRM"):
            signal.signal(signal.SIGALRM, too_long)
            signal.alarm(60 * MINUTES)
        code, found = verify(options.folder, *told, quiet=options.json)
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:  # of what the folder holds
        print(
            f"error: a record lacks a field or has one of another type ({type(error).__name__}: {shown(error)})",
            file=sys.stderr,
        )
        return VIOLATED
    except ImportError as error:
        print(f"error: {error}: install numpy, dp-accounting and cryptography", file=sys.stderr)
        return BAD_INPUT
    except (BadInput, OSError, RecursionError, MemoryError) as error:
        print(f"error: {shown(error) or type(error).__name__}", file=sys.stderr)
        return BAD_INPUT
    print(json.dumps(found, allow_nan=False) if options.json else to_text(found))
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
