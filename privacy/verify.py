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
card         the fields of report/privacy_card.json that follow from the ledger do; the others are listed as not attested. An
             epsilon may be larger than the one that is computed here, never smaller
checkpoints  every manifest is the one that the ledger recorded, remembers a line of it, and its files have their hashes
metrics      metrics.jsonl and held-out results show no step and no charge that the ledger lacks, and no smaller epsilon

Claim and mechanism are printed: believe them and not the pages of the card, which nothing here reads.
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
from dataclasses import dataclass, field
from fractions import Fraction
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
USELESS = "; a delta of 1/n or more protects nobody"
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
    "adaptive_clipping", "arithmetic", "lattice_exponent", "sensitivity_slack", "enabled", "sampling",
    "informal_reasons", "noise_multiplier", "target_delta", "reserved_attempts", "cap", "sample_rate",
    "sampling_threshold", "adjacency", "formal_guarantee",
}  # fmt: skip
CHOICES = {
    "adjacency": ("zero_out",), "arithmetic": ("floating", "certified"), "sampling": ("poisson", "shuffle"),
    "clipping_function": ("flat", "automatic", "per_layer", "grouped"),
}  # fmt: skip
"""Those of them that name an option, and the options that are known here: a plan with another one is refused."""
RECIPE_KEYS = {
    "enabled", "expected_batch_size", "noise_multiplier", "target_epsilon", "target_delta", "max_grad_norm", "clipping_function",
    "target_unclipped_quantile", "clipbound_learning_rate", "unclipped_num_std", "arithmetic", "clipping_mode",
    "reserved_attempts", "allow_small_noise", "simulation", "sampling", "shared_ledger",
    "fixed_in_advance", "max_examples_per_owner", "tuning", "ledger_mirror", "bands", "strategy",
}  # fmt: skip
"""What [privacy] of config.toml may hold."""
TABLES = {"name", "model", "init", "data", "heldout", "privacy", "optimizer", "schedule", "train"}
SLACK, HEAD_SLACK = 1e-3, 1e-6
"""r of floating-point sums, of gradients and of a head's statistics: how far rounding may carry a contribution above C."""
HAIR = 1e-9
"""How much two machines' rounding of one computation may differ."""
FP32 = 1e-7
"""Metrics are published as fp32 numbers: a little more than half a unit of the last place of one."""
FINE = 1e-4
"""Grid of privacy loss distributions."""
SMALLEST_DELTA = 1e-12
"""Below it, distributions are not trusted, and the claim is by Renyi DP."""
LARGE = 50.0
"""Above this epsilon the grid is coarser."""
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
    def bands(self) -> int:
        """b, the number of groups of examples that take turns under correlated noise; 1 without."""
        return int(self.fields.get("bands", 1))

    def turns(self, count: int) -> int:
        """How many of `count` charges the group with most of them has."""
        return -(-count // self.bands)

    def gradient_multiplier(self) -> float:
        """Noise multiplier of the clipped sum alone, where a noised count shares sigma with it (adaptive clipping)."""
        sigma, count_std = self["noise_multiplier"], self["adaptive_clipping"]["unclipped_num_std"]
        return float(sigma / math.sqrt(1 - (sigma / (2 * count_std)) ** 2))

    def releases(self, count: int) -> "Group":
        """`count` charges, as the accountant sees them."""
        largest = -(-self["num_examples"] // self.bands)
        return Group(self.rate, self.accounted, largest, self["cap"], self.turns(count))

    def noise_tail(self) -> float:
        """What the bounded support of the noise costs in delta: Box-Muller from 63 bits ends at sqrt(128 ln 2) sigma.

        One coordinate moved by a / sigma passes the edge e with probability at most g(a) = Q(e - a / sigma) - Q(e); over the at
        most 2^36 coordinates of a vector of norm j that is at most j 2^18 g'(0) + g(j). An example moves a step that it is in by
        a vector of norm 1. Correlated noise spreads an example
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
        return min(1.0, cuts + one.rate * one.count * passes(1))


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
    for name in ("enabled", "formal_guarantee"):
        require(type(fields.get(name)) is bool, f"{name} must be true or false")
    for name, known in CHOICES.items():
        require(fields.get(name) in known, f"{name} must be {' or '.join(known)}")
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
    if fields["sampling"] == "shuffle":
        reasons.append("sampling is 'shuffle', not Poisson")
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
        return [self.plan.releases(count)] if count else []


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


def epsilon(groups: list[Group], delta: float) -> float:
    """An upper bound of epsilon at `delta` of all groups together, as the project reports it.

    Without sampling all releases are one Gaussian, whose epsilon is exact. Below delta 1e-12 the bound is by Renyi DP, with the
    probability of any batch above its cap charged in delta. Else it is by privacy loss distributions, on a grid of 1e-4, or a
    coarser one where epsilon is above 50. Above 1000 nothing is computed.
    """
    from dp_accounting.pld.privacy_loss_mechanism import GaussianPrivacyLoss

    groups = [group for group in groups if group.count and group.rate]
    if not groups:
        return 0.0
    if any(group.sigma == 0 for group in groups) or delta <= 0:
        return math.inf
    if all(group.rate == 1 and group.cap is None for group in groups):
        mu = math.sqrt(math.fsum(group.count / group.sigma**2 for group in groups))
        if mu * mu > 1e6:
            raise Undecided("epsilon is so large that none is computed: it protects nobody")
        gaussian = GaussianPrivacyLoss(1 / mu)
        return smallest(lambda value: float(gaussian.get_delta_for_epsilon(value)) <= delta, 1e6)
    upper = renyi(tuple(groups), delta)
    if upper > 1000:
        raise Undecided("epsilon is so large that none is computed: it protects nobody")
    if delta < SMALLEST_DELTA:
        from scipy.stats import binom  # comes with dp-accounting

        capped = [group for group in groups if group.cap is not None]
        tau = math.fsum(group.count * float(binom.sf(group.cap, group.num_examples, group.rate)) for group in capped)
        value = upper
        while tau > 0:  # the capped run is (value, delta)-DP if the uncapped is (value, delta - tau (1 + e^value))-DP
            candidate = value * (1 + 1e-6)
            left = delta - tau * (1 + math.exp(min(candidate, 700.0)))
            following = renyi(tuple(groups), left) if left > 0 else math.inf
            if following <= candidate or following == math.inf:
                return candidate if following <= candidate else math.inf
            value = following
        return value
    grid = FINE if upper <= LARGE else FINE * 10 ** math.ceil(math.log10(upper / LARGE))
    value = float(composed(tuple(groups), grid).get_epsilon_for_delta(delta))
    if grid == FINE or value > LARGE:
        return value
    return float(composed(tuple(groups), FINE).get_epsilon_for_delta(delta))


def smallest(holds: Callable[[float], bool], largest: float) -> float:
    """The smallest number from 0 to `largest` for which a monotone condition holds, from above, to 15 digits."""
    low, high = 0.0, largest
    if holds(low):
        return low
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


@functools.lru_cache(maxsize=64)
def renyi(groups: tuple[Group, ...], delta: float) -> float:
    """Epsilon by Renyi DP, without caps."""
    from dp_accounting import NeighboringRelation
    from dp_accounting import dp_event as event
    from dp_accounting.rdp import RdpAccountant

    logging.getLogger("absl").setLevel(logging.ERROR)  # Renyi orders that are left out keep the bound sound
    accountant = RdpAccountant(neighboring_relation=NeighboringRelation.REPLACE_SPECIAL)
    for group in groups:
        accountant.compose(event.PoissonSampledDpEvent(group.rate, event.GaussianDpEvent(group.sigma)), group.count)
    return float(accountant.get_epsilon(delta)) if groups else 0.0


@functools.lru_cache(maxsize=8)
def one_release(rate: float, sigma: float, num_examples: int, cap: int | None, grid: float) -> Any:
    """The privacy loss distribution of one release."""
    from dp_accounting import NeighboringRelation
    from dp_accounting.pld import privacy_loss_distribution as pld

    neighbours = NeighboringRelation.REPLACE_SPECIAL
    if cap is None:
        return pld.from_gaussian_mechanism(
            sigma, value_discretization_interval=grid, sampling_prob=rate, neighboring_relation=neighbours
        )
    return pld.from_truncated_subsampled_gaussian_mechanism(
        num_examples, rate, cap, sigma, value_discretization_interval=grid, neighboring_relation=neighbours
    )


@functools.lru_cache(maxsize=8)
def composed(groups: tuple[Group, ...], grid: float) -> Any:
    """The privacy loss distribution of all groups (Koskela et al. 2020)."""
    parts = [
        one_release(group.rate, group.sigma, group.num_examples, group.cap, grid).self_compose(group.count)
        for group in groups
    ]
    return functools.reduce(lambda one, other: one.compose(other), parts)


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
    r"|report/privacy_card\.json|checkpoints/(LATEST|step-.*)"
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
        "max_grad_norm": 1.0, "clipping_function": "flat", "arithmetic": "floating",
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
    return sentence + (USELESS if folder.delta * plan["num_examples"] >= 1 else "")


# ---------------------------------------------------------------- The privacy card


def accountant() -> str:
    from importlib.metadata import version

    return f"dp-accounting {version('dp-accounting')}"


def card_fields(folder: Folder, at: Ledger) -> dict[str, Any]:
    """The fields of a card of the ledger `at` that follow from it, by their places; all others are listed as not attested."""
    plan, opened, last = at.plan, at.opened, at.checkpoints[-1:]
    n, head, claims = plan["num_examples"], at.head, not plan.reasons
    fields: dict[str, Any] = {
        "formal_guarantee": claims, "reasons": list(plan.reasons), "epsilon": None, "delta": plan["target_delta"],
        "steps_done": at.last_done() if plan["enabled"] else plan["num_steps"] if at.closed == "finished" else None,
        "steps_planned": plan["num_steps"], "attempts_charged": at.charged(),
        "released.checkpoints_recorded": len(at.checkpoints),
        "unit_of_privacy.unit": opened.get("unit", "one labelled example" if head else "one image-text pair"),
        "unit_of_privacy.num_examples": n, "adjacency": "zero_out",
        **leaves({name: value for name, value in opened["plan"].items() if name != "target_epsilon"}, "plan"),
        "mechanism.noise_multiplier_accounted": Computed(plan.accounted),
        "sampling.scheme": "full batch" if head else plan["sampling"], "sampling.turns_charged": plan.turns(at.charged()),
        "sampling.key_commitment_sha256": opened["key_commitment"],
        "sampling.data_hmac_sha256": opened.get("data_hmac"),
        "accounting.epsilon": None, "accounting.delta": plan["target_delta"],
        "accounting.max_examples_per_owner": opened.get("max_examples_per_owner"),
        "accounting.attempts.charged": at.charged(), "accounting.attempts.allowed": plan.most_charges,
        "accounting.attempts.done": len(at.done), "accounting.attempts.torn_lines": len(at.torn),
        "accounting.attempts.repeats": sum(attempt > 0 for _, _, attempt, _ in at.intents),
        "accounting.attempts.torn_lines_charged": sum(charged for _, charged in at.torn),
        "tuning.shared_ledger": opened.get("shared_ledger"),
        "provenance.commit": opened.get("commit"), "provenance.opened_utc": opened["time_utc"],
        "provenance.closed": at.closed, "provenance.ledger.format": 1, "provenance.ledger.signer_fingerprint": at.fingerprint,
        "provenance.ledger.signed_lines": max(0, at.signed - 1),
    }  # fmt: skip
    if last:
        ((_, step, name, digest),) = last
        place = "released.last_checkpoint."
        fields |= {f"{place}step": step, f"{place}name": name, f"{place}manifest_sha256": digest}
    if plan.reasons:
        return fields
    delta = plan["target_delta"] - plan.noise_tail()
    own, planned, reserve = (
        Bound(epsilon(groups, delta))
        for groups in (at.groups(), [plan.releases(plan["num_steps"])], [plan.releases(plan.most_charges)])
    )
    fields |= {
        "epsilon": own, "accounting.epsilon": own, "accounting.noise_tail_delta": Computed(plan.noise_tail()),
        "accounting.epsilon_target": plan["target_epsilon"], "accounting.epsilon_planned": planned,
        "accounting.epsilon_with_reserve": reserve, "accounting.epsilon_rdp": Bound(renyi(tuple(at.groups()), delta)),
    }  # fmt: skip
    if folder.chain:
        runs = [at, *folder.chain]
        least = min(run.plan["target_delta"] for run in runs)
        spent = Bound(epsilon_of(folder, runs, least))
        fields |= {"epsilon": spent, "delta": least, "composition.epsilon": spent, "composition.delta": least}
        for number, run in enumerate(runs):
            place, delta = f"composition.runs[{number}].", run.plan["target_delta"]
            fields |= {f"{place}delta": delta, f"{place}attempts_charged": run.charged()}
            fields[f"{place}epsilon"] = Bound(epsilon_of(folder, [run], delta))
    return fields


def leaves(tree: Any, place: str = "") -> dict[str, Any]:
    """Every field of a card that is no object, by its place."""
    found: dict[str, Any] = {}
    if isinstance(tree, dict) and tree:
        for name, value in tree.items():
            found |= leaves(value, f"{place}.{name}" if place else name)
    elif isinstance(tree, list) and tree and isinstance(tree[0], dict):
        for number, value in enumerate(tree):
            found |= leaves(value, f"{place}[{number}]")
    else:
        found[place] = tree
    return found


def compare(what: str, stated: Any, expected: Any, place: str) -> str:
    """How far a stated field is the expected one: "" where it is, "larger" for a bound, or what is wrong with it."""
    if isinstance(expected, Computed | Bound) and type(stated) in (int, float):
        if math.isclose(stated, expected, rel_tol=HAIR):
            return ""
        if isinstance(expected, Bound) and stated > expected:
            return "larger" if stated > expected * (1 + 1e-6) else ""
        return f"{what}'s {place} is {stated:.12g}, and the ledger gives {expected:.12g}"
    infinite = isinstance(expected, Bound) and math.isinf(expected) and stated is None
    same = infinite or (equal(stated, expected) and not isinstance(expected, Computed | Bound))
    return "" if same else f"{what}'s {place} is {shown(stated)}, and the ledger gives {shown(expected)}"


def check_card(folder: Folder) -> str:
    """privacy_card.json where it follows from the ledger, and a head's statement; a card may be older than the ledger."""
    ledger, agreed = folder.ledger, 0
    if folder.has("head.json"):
        if not ledger.plan.reasons and folder.epsilon is None:
            raise Undecided("the epsilon of head.json was not computed")
        statement = {"epsilon": None if folder.epsilon is None else Bound(folder.epsilon), "delta": folder.delta}
        statement |= {"num_examples": ledger.plan["num_examples"], **ledger.opened.get("head", {})}
        head = object_in(folder.path / "head.json")
        require(head.keys() == statement.keys(), "head.json has other fields than a head")
        for name, value in statement.items():
            wrong = compare("head.json", head[name], value, name)
            require(wrong in ("", "larger"), wrong)
        agreed = len(statement)
    if not folder.has("report", "privacy_card.json"):
        return f"there is no privacy card, and {agreed} fields of head.json agree with the ledger"
    if not ledger.plan.reasons and folder.epsilon is None:
        raise Undecided("its first number was not computed")
    card = leaves(object_in(folder.path / "report" / "privacy_card.json"))
    last, lines = card.get("provenance.ledger.last_line_sha256"), card.get("provenance.ledger.lines")
    require(last in ledger.hashes, "the card is of a line that the ledger lacks: ledger or card were replaced")
    position = ledger.hashes.index(str(last)) + 1
    whole_lines = len(ledger.hashes)
    was_torn = lines == position + 1 and position in {line for line, _ in ledger.torn}
    if lines == position + 1 <= whole_lines and not was_torn:
        raise Undecided("the card was made while a line of the ledger was being written")
    require(type(lines) is int and (lines == position or was_torn), "the card counts other lines")
    current = lines == whole_lines + ledger.unterminated
    at = ledger if current else read_ledger(folder.path / "ledger.jsonl", lines)
    expected = folder.within("what the card says", functools.partial(card_fields, folder, at))
    found = {place: compare("the card", card.get(place, ...), value, place) for place, value in expected.items()}
    larger = [place for place, outcome in found.items() if outcome == "larger"]
    differing = {place: outcome for place, outcome in found.items() if outcome not in ("", "larger")}
    version, ours = card.get("accounting.accountant"), accountant()
    for place, outcome in differing.items():
        rounding = isinstance(expected[place], Computed | Bound) and type(card.get(place)) is float
        close = rounding and math.isclose(card[place], expected[place], rel_tol=1e-3)
        require(version != ours and close, outcome)
    if differing:
        raise Undecided(
            f"{'; '.join([*differing.values()][:9])}: it was computed with {shown(version)}, this with {ours}"
        )
    attested = {*expected, "provenance.ledger.lines", "provenance.ledger.last_line_sha256"}
    folder.not_attested = [place for place in card if place not in attested]
    if at.charged() != ledger.charged():
        raise Undecided(
            f"the card is of the first {lines} lines; {ledger.charged() - at.charged()} attempts were charged since"
        )
    sentence = f"{len(attested) + agreed} fields agree with the ledger; {len(folder.not_attested)} are not attested"
    return f"{sentence}; larger than they need be are the bounds {shown_list(larger)}" if larger else sentence


# ---------------------------------------------------------------- Checkpoints and metrics


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


def torn_entry(line: bytes, where: str) -> dict[str, Any]:
    """The whole fields of an entry that a crash cut off, those that end in a comma."""
    text = line.decode(errors="replace").removesuffix("\n")
    value = r'("[^"\\]*"|\[[^\]]*\]|[^,"{}\[\]]+)'
    begun = rf'\{{"step": [0-9]*(, "[^"\\]+": {value})*(, ?("[^"\\]*("(: ?(["\[][^"\]]*|[^,"{{}}]*))?)?)?)?'
    known = '{"step": '.startswith(text) or re.fullmatch(begun, text) is not None
    require(known, f"{where} is neither an entry nor the beginning of one")
    whole_fields: dict[str, Any] = parsed(f"{text.rpartition(',')[0] or '{'}}}".encode(), with_nan=True)
    return whole_fields


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
                *begun, rest = re.split(
                    rb'(?<=.)(?=\{"step": )', line
                )  # an entry may go on in the line that a crash cut off
                for part in begun:
                    require(
                        not torn_entry(part, where).keys() & set(KNOWN_METRICS), f"{where} is torn, and states a claim"
                    )
                torn, torn_here = torn + 1, torn_here + 1
                restarts = len(ledger.sessions) - 1 + (not line.endswith(b"\n"))
                explained = not plan["enabled"] or torn_here <= restarts
                require(explained, f"{where} is torn, and no restart of the ledger explains it: {error.msg}")
                try:
                    entry = parsed(rest, with_nan=True)
                except ValueError:
                    entry = torn_entry(rest, where)
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
    check_files, check_signature, check_order, check_plan, check_budget, check_behind, check_epsilon, check_card,
    check_checkpoints, check_metrics,
)  # fmt: skip


# ---------------------------------------------------------------- What follows, and who says what cannot be checked


def shown_list(names: list[str]) -> str:
    text = ", ".join(map(shown, names[:60]))
    return text if len(names) <= 60 else f"{text} and {len(names) - 60} more"


def declarations(folder: Folder) -> list[tuple[str, str | None, str]]:
    """(what, the words or None where nothing is stated, who says so): nothing here can check them."""
    config, ledger, opened = folder.config or {}, folder.ledger, folder.ledger.opened

    def said(section: str, key: str) -> str | None:
        table = config.get(section)
        value = table.get(key) if isinstance(table, dict) else None
        return None if value in (None, "") else shown(value)

    origins = dict.fromkeys(filter(None, (said("data", "provenance"), folder.facts.get("training_data"))))
    disjoint = "yes, so one example bears one of them" if opened.get("disjoint_from_start") is True else None
    audits = [name for name in folder.unread if re.fullmatch(r"report/audit[^/]*", name)]
    fields = dict.fromkeys(re.sub(r"\[\d+\]", "[]", place) for place in folder.not_attested)
    again = "make them again with audit.py of the project, which needs private/ for most of it"
    signer = [
        ("that the program did what the ledger says", "see audit.py of the project"),
        ("time of the first start; all records repeat it, since clocks depend on the data", shown(opened["time_utc"])),
        ("commit of the code", shown(opened["commit"]) if opened.get("commit") else None),
        ("what one example is", shown(opened.get("unit", "one example"))),
        ("in ledger.jsonl", shown_list(sorted(ledger.loose))),
    ]  # fmt: skip
    operator = [
        ("the most examples of one owner", said("privacy", "max_examples_per_owner")),
        ("provenance of the training data", " in config.toml, and in a manifest ".join(origins) or None),
        *((f"{name} of the training data", said("data", f"dataset_{name}")) for name in ("name", "owner", "purpose", "licence")),
        ("how duplicates were removed", said("data", "deduplication")),
        ("how hyper-parameters were chosen", said("privacy", "tuning")),
        ("that the held-out data are public", said("heldout", "is_public")),
    ]  # fmt: skip
    if opened.get("behind"):
        fixed = "the composed epsilon takes it for granted; a shared ledger's RDP filter does without it"
        operator += [
            ("that the data are disjoint from those behind the initial weights", disjoint),
            ("that no later schedule was chosen after looking at outputs of the earlier runs", fixed),
        ]
    publisher: list[tuple[str, str]] = [*folder.partly]
    for there, what, words in (
        (folder.has("metrics.jsonl"), "in metrics.jsonl", "all values but step, charged attempts and epsilon"),
        (folder.has("evaluation", "heldout.jsonl"), "in evaluation/heldout.jsonl", "all values but step"),
        (config, "in config.toml", "all but [privacy] as the plan holds it, number of steps and examples, init.disjoint_data"),
        (folder.has("verify.py"), "verify.py", "judges nothing about itself: take it from the project, not from the folder"),
        (folder.has("private"), "private/", "nothing here looks at it, and it is not for publication"),
        (folder.has("checkpoints"), "in checkpoints/*/manifest.json", "all but step, charges, guarantee, line and hashes"),
        (folder.elsewhere, "files that somebody can change by another name (a hard link)", shown_list(folder.elsewhere)),
        (fields, "in privacy_card.json", shown_list([*fields])),
        (audits, f"audits: {again}", shown_list(audits)),
        (set(folder.unread) - {*audits}, "what other files say", shown_list([f for f in folder.unread if f not in audits])),
    ):  # fmt: skip
        publisher += [(what, words)] if there else []
    return [
        (what, words, who)
        for who, stated in (
            ("the holder of the signing key" if ledger.fingerprint else "whoever wrote the ledger", signer),
            ("whoever ran the training, in config.toml", operator),
            ("whoever publishes the folder", publisher),
        )
        for what, words in stated
    ]


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
            f"attested by the ledger's {by}; believe this, and no page that says something else:",
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
        claim += USELESS if found["delta"] * found["attested"]["examples"] >= 1 else ""
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
