"""Values that no author of a recipe or a command line had in mind, by the type that a schema asks for."""

import json
import math
import random
import string
from typing import Any

HUGE = [10**6, 10**9, 10**12, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**23]
DIGITS = "9" * 5000
"""More than Python turns into a number."""
INTEGERS = [0, -1, 1, 2, 3, 7, -(10**12), *HUGE]
FLOATS = [
    math.nan,
    math.inf,
    -math.inf,
    1e308,
    -1e308,
    5e-324,
    1e-300,
    1e-12,
    1e-9,
    0.0,
    -0.0,
    -1.0,
    0.5,
    1.0,
    1e6,
    1e12,
    1e23,
]
LONG = ["x" * 3000, "x/" * 1500, "é" * 1500, "/" * 3000, "../" * 1000]
ODD = [
    "", " ", "\t", "a\nb", "\u202egnp", "\ufeff", "\x7f", "é", "\U0001f98a", "%s%n", "{}", "{", "{0..9}",
    "{0..99999}{0..99999}", "[", "]", "*", "**", "~", "~nobody", "-", "--", "=", "nan", "NaN", "inf", "1e9", "0x10", "true",
    "null", "auto", "../..", "a=b",
]  # fmt: skip
PLACES = [
    ".", "/", "/dev/null", "/dev/full", "/dev/zero", "/proc/self/mem", "/proc/1/fd", "/sys/x", "/sys/kernel",
    "nowhere/at/all", "{case}/recipe.toml/inside", "{case}/full/x", "{case}/full", "{case}/readonly", "{case}/readonly/x",
    "data/demo", "data/demo/train-00000.tar", "README.md", "ftp://host.invalid/a.tar", "http://127.0.0.1:9/a.tar",
    "https://host.invalid/x.tar", "s3://bucket/a.tar", "file:///etc/passwd", "hf:nowhere", "memory://a.tar", "://", "http://",
    "http://[::1/a.tar", "sftp://u:p@host.invalid/a.tar", "github://a:b@c/d.tar",
]  # fmt: skip
"""What a path, a pattern or a source may be; {case} is the case's own folder."""


def integer(rng: random.Random) -> int:
    return rng.choice([*INTEGERS, rng.randrange(1, 10 ** rng.randrange(1, 13))])


def number(rng: random.Random) -> float:
    return rng.choice([*FLOATS, float(integer(rng)), 10 ** rng.uniform(-12, 12)])


def text(rng: random.Random) -> str:
    """No NUL and nothing that is not Unicode: see `argument` and `in_file`."""
    kind = rng.randrange(5)
    if kind == 0:
        return rng.choice(LONG)
    if kind == 1:
        return "".join(rng.choice(string.printable) for _ in range(rng.randrange(1, 20)))
    return rng.choice(ODD if kind == 2 else PLACES)


def argument(rng: random.Random) -> str:
    """One word of a command line, which may be no UTF-8."""
    kind = rng.randrange(4)
    if kind == 0:
        return str(rng.choice(INTEGERS)) if rng.random() < 0.95 else DIGITS
    if kind == 1:
        return str(rng.choice(FLOATS))
    return rng.choice(["\udcff", "x\udcc3", "caf\udce9"]) if rng.random() < 0.1 else text(rng)


def in_file(rng: random.Random) -> Any:
    """One value of a file: any type, nested now and then."""
    match rng.randrange(7):
        case 0:
            return rng.random() < 0.5
        case 1:
            return integer(rng) if rng.random() < 0.95 else Raw(DIGITS)
        case 2:
            return number(rng)
        case 3:
            return [in_file(rng) for _ in range(rng.randrange(3))]
        case 4:
            return {rng.choice(["a", "enabled", "é", "device"]): in_file(rng)}
        case 5:
            return nested(rng.choice([3, 50, 900, 30_000]), rng)
        case _:
            return text(rng) + rng.choice(["", "\x00"])


class Raw(str):
    """Text that stands in a file as it is, JSON or TOML: Python could not hold, or not print, what it says."""


def nested(depth: int, rng: random.Random) -> Raw:
    opening = rng.choice(["[", '{"a":', "{a="])  # good in both, in JSON, in TOML
    return Raw(opening * depth + "1" + ("]" if opening == "[" else "}") * depth)


def to_json(value: Any) -> str:
    """JSON with NaN and Infinity, as Python reads it."""
    match value:
        case Raw():
            return str(value)
        case dict():
            return "{" + ", ".join(f"{json.dumps(key)}: {to_json(one)}" for key, one in value.items()) + "}"
        case list():
            return "[" + ", ".join(map(to_json, value)) + "]"
        case _:
            return json.dumps(value)


def to_toml(value: Any) -> str:
    """A TOML value."""
    match value:
        case Raw():
            return str(value)
        case dict():
            return "{" + ", ".join(f"{to_toml(key)} = {to_toml(one)}" for key, one in value.items()) + "}"
        case list() | tuple():
            return "[" + ", ".join(map(to_toml, value)) + "]"
        case bool():
            return "true" if value else "false"
        case str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case _:
            return repr(value)
