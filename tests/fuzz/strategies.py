"""Recipes, ds_configs, studies and command lines that no author had in mind, made from the schemas and the parsers themselves."""

import argparse
import copy
import importlib
import json
import math
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin
from unittest import mock

from hypothesis import strategies as st
from pydantic import BaseModel

from trainer.config.recipe import RunConfig

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ("train", "plan", "prepare", "evaluate", "export", "audit", "report", "study", "shared_ledger")
DIGITS = "9" * 5000
"""More than Python turns into a number."""
HUGE = [10**6, 10**9, 10**12, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**23]
FLOATS = [math.nan, math.inf, -math.inf, 1e308, -1e308, 5e-324, 1e-300, 1e-12, 0.0, -0.0, -1.0, 0.5, 1.0, 1e12, 1e23]
ODD = [
    "", " ", "\t", "a\nb", "\u202egnp", "\ufeff", "\x7f", "é", "\U0001f98a", "%s%n", "{}", "{", "{0..9}", "{0..99999}{0..99999}",
    "[", "*", "**", "~", "~nobody", "-", "--", "=", "nan", "inf", "1e9", "0x10", "true", "null", "auto", "../..", "a=b",
    "x" * 3000, "x/" * 1500, "é" * 1500, "../" * 1000,
]  # fmt: skip
PLACES = [
    ".", "/", "/dev/null", "/proc/self/mem", "/sys/x", "nowhere/at/all", "README.md/inside", "data/demo",
    "data/demo/train-00000.tar", "ftp://host.invalid/a.tar", "http://127.0.0.1:9/a.tar", "s3://bucket/a.tar",
    "file:///etc/passwd", "hf:nowhere", "memory://a.tar", "://", "http://[::1/a.tar", "sftp://u:p@host.invalid/a.tar",
]  # fmt: skip
MODEL_KEYS = (
    "encoder_width",
    "encoder_depth",
    "encoder_num_heads",
    "patch_size",
    "max_logits",
    "tied_head",
    "vocab_size",
)


class Raw(str):
    """Text that stands in a file as it is, JSON or TOML: Python could not hold, or not print, what it says."""


integers = st.sampled_from([0, -1, 1, 2, 3, 7, -(10**12), *HUGE]) | st.integers(1, 10**12)
numbers = st.sampled_from(FLOATS) | st.floats()
texts = st.sampled_from([*ODD, *PLACES]) | st.text(
    st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20
)
deep = st.sampled_from(
    [Raw(a * n + "1" + b * n) for n in (3, 900, 30_000) for a, b in (("[", "]"), ('{"a":', "}"), ("{a=", "}"))]
)
values = st.recursive(
    st.booleans() | integers | numbers | texts | deep | st.just(Raw(DIGITS)),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "enabled", "é"]), inner, max_size=2)
    ),
    max_leaves=4,
)
"""What a file may hold in any place."""


def leaves(kind: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every key of a section and of its sections, with its type."""
    for name, found in kind.model_fields.items():
        yield (*path, name), found.annotation
        for one in (found.annotation, *get_args(found.annotation)):
            if isinstance(one, type) and issubclass(one, BaseModel):
                yield from leaves(one, (*path, name))


def flat(annotation: Any) -> Iterator[Any]:
    """The plain types, and the words, that a key may have."""
    if get_origin(annotation) is Literal or get_args(annotation):
        for one in get_args(annotation):
            yield from flat(one)
    else:
        yield annotation


def of_type(annotation: Any) -> st.SearchStrategy[Any]:
    """Mostly what the schema asks for, so that more than the first check is reached."""
    kinds = set(flat(annotation))
    words = [kind for kind in kinds if isinstance(kind, str)]
    made = {int: integers, float: numbers, str: texts, bool: st.booleans()}
    good = [made[kind] for kind in made if kind in kinds] + ([st.sampled_from(words)] if words else [])
    return st.one_of(*good, values)


def settings(kind: type[BaseModel]) -> st.SearchStrategy[tuple[tuple[str, ...], Any]]:
    """A key of a schema, now and then one that it does not have, and a value."""
    known = list(leaves(kind))
    if kind is RunConfig:
        known += [(("model", "overrides", name), int | float) for name in MODEL_KEYS]
    unknown = st.tuples(
        st.tuples(st.sampled_from(["train", "é", "model"]), st.sampled_from(["nosuch", "", "a b"])), values
    )
    keys = st.sampled_from(known).flatmap(lambda leaf: st.tuples(st.just(leaf[0]), of_type(leaf[1])))
    return st.one_of(*[keys] * 9, unknown)


def changed(tree: dict[str, Any], kind: type[BaseModel]) -> st.SearchStrategy[dict[str, Any]]:
    """The tree of a good file with one to three keys set to something else."""

    def apply(changes: list[tuple[tuple[str, ...], Any]]) -> dict[str, Any]:
        made = copy.deepcopy(tree)
        for path, value in changes:
            place = made
            for key in path[:-1]:
                if not isinstance(place.get(key), dict):
                    place[key] = {}
                place = place[key]
            place[path[-1]] = value
        return made

    return st.lists(settings(kind), min_size=1, max_size=3).map(apply)


TINY: dict[str, Any] = tomllib.loads((ROOT / "recipes" / "tiny.toml").read_text())
STUDY: dict[str, Any] = {
    "name": "fuzz", "recipe": str(ROOT / "recipes" / "tiny.toml"), "seeds": [0], "base": {"data": {"provenance": "public"}},
    "axis": {"batch": {"privacy": {"expected_batch_size": [24, 48]}}},
    "tan": {"reference_batch_size": 24, "reference_noise_multiplier": 1.2},
}  # fmt: skip
recipes = changed(TINY, RunConfig)
overrides = settings(RunConfig).map(lambda setting: f"{'.'.join(setting[0])}={word(setting[1])}")


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """A file as a disk, an editor or somebody else may have left it."""
    at = draw(st.integers(0, len(content) - 1))
    whole = [b"", b"\0" * 100, b"[" * 20_000, b'{"a":' * 20_000, b"a." * 500 + b"b = 1", b"null", b"[]", b"1"]
    return draw(
        st.one_of(
            st.binary(min_size=1, max_size=9).map(lambda new: content[:at] + new + content[at + len(new) :]),
            st.sampled_from([b"{", b"}", b'"', b"\\u", b"\xff", b"\n[train]\n", b"1e999"]).map(
                lambda new: content[:at] + new + content[at:]
            ),
            st.just(content[:at]),
            st.just(b"\xef\xbb\xbf" + content),
            st.just(content.decode(errors="replace").encode("utf-16")),
            st.just(content + f"\nx = {DIGITS}\n".encode()),
            st.sampled_from(whole),
        )
    )


def word(value: Any) -> str:
    """A word of a command line, which holds no NUL and is no longer than 128 KiB."""
    said = value if isinstance(value, str) and not isinstance(value, Raw) else to_toml(value)
    return said.replace("\0", "")[:100_000]


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


def toml_file(tree: dict[str, Any]) -> bytes:
    return "".join(f"{key} = {to_toml(value)}\n" for key, value in tree.items()).encode(errors="surrogatepass")


class _Found(Exception):
    def __init__(self, parser: argparse.ArgumentParser) -> None:
        super().__init__()
        self.parser = parser


def parser_of(script: str) -> argparse.ArgumentParser:
    """The parser that a script makes."""

    def caught(self: argparse.ArgumentParser, *_: object) -> None:
        raise _Found(self)

    parser = argparse.ArgumentParser
    with mock.patch.object(parser, "parse_args", caught), mock.patch.object(parser, "parse_intermixed_args", caught):
        try:
            importlib.import_module(f"launch_scripts.{script}").parse_args([])
        except _Found as found:
            return found.parser
    raise AssertionError(f"{script} parses nothing")


def options(
    parser: argparse.ArgumentParser, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], argparse.Action]]:
    """Options with the subcommand that they belong to; argparse has no public list of them."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, sub in action.choices.items():
                yield from options(sub, (*path, name))
        elif action.option_strings and action.dest != "help":
            yield path, action


@st.composite
def command_lines(draw: st.DrawFn, script: str) -> list[str]:
    """Options of one subcommand with values that fit or do not, and words that nobody asked for."""
    found = list(options(parser_of(script)))
    path = draw(st.sampled_from(sorted({path for path, _ in found})))
    line = list(path)
    for action in draw(st.lists(st.sampled_from([action for where, action in found if where == path]), max_size=4)):
        line.append(draw(st.sampled_from(action.option_strings)))
        if action.nargs != 0:
            choices = [st.sampled_from([*map(str, action.choices)])] if action.choices else []
            line.append(draw(st.one_of(*choices, integers.map(str), numbers.map(str), texts, st.just("caf\udce9"))))
    if draw(st.integers(0, 3)) == 0:
        line.insert(draw(st.integers(0, len(line))), draw(texts))
    return [one.replace("\0", "") for one in line]
