"""TOML in and out: recipes, studies, and the values of overrides."""

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigError


def _refuse_huge(value: Any) -> None:
    """ValueError for an integer that Python cannot write out: hexadecimal ones pass the limit of its own parser."""
    if isinstance(value, int) and value.bit_length() > 1000:
        raise ValueError("a number has hundreds of digits")
    for one in (
        value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else []
    ):
        _refuse_huge(one)


def parse_toml(text: str) -> dict[str, Any]:
    """A TOML tree whose numbers can be written out; ValueError or RecursionError for anything else."""
    tree = tomllib.loads(text)
    _refuse_huge(tree)
    return tree


def read_toml(path: Path, what: str, hint: str) -> dict[str, Any]:
    """The tree of a TOML file; ConfigError says `what` cannot be read."""
    try:
        tree = parse_toml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{what} {path}: {error.strerror}; {hint}") from error
    except ValueError as error:  # no TOML, no UTF-8, or a number of thousands of digits
        swapped = (
            "; it is JSON, so were --recipe and --ds_config swapped?"
            if path.suffix == ".json"
            else ""
        )
        raise ConfigError(f"{what} {path} is not TOML: {error}{swapped}") from error
    except RecursionError as error:
        raise ConfigError(
            f"{what} {path} is nested too deeply; no key lies deeper than three sections"
        ) from error
    return tree


def refuse_nul(value: Any, where: str) -> None:
    """TOML can write the one character that no path and no process argument can hold."""
    if isinstance(value, str) and "\0" in value:
        raise ConfigError(f"{where}: {value!r} holds a NUL character; remove it")
    inner = (
        [*value.keys(), *value.values()]
        if isinstance(value, Mapping)
        else value
        if isinstance(value, list)
        else []
    )
    for one in inner:
        refuse_nul(one, where)


def toml_value(text: str) -> Any:
    """A TOML value; anything that is none is a string, so that paths need no quotes."""
    try:
        value = parse_toml(f"value = {text}")["value"]
    except ValueError:
        return text
    except RecursionError as error:
        raise ConfigError(f"override {text[:40]}... is nested too deeply") from error
    return value


def written(value: Any) -> str:
    """A value as TOML."""
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            # JSON's escapes are TOML's, but for one control character.
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case tuple() | list():
            return "[" + ", ".join(written(v) for v in value) + "]"
        case dict():
            return (
                "{"
                + ", ".join(f"{k} = {written(v)}" for k, v in value.items() if v is not None)
                + "}"
            )
        case _:
            return repr(value)
