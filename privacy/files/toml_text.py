"""TOML in and out: recipes, studies, and the values of overrides."""

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigError


def _refuse_huge(value: Any) -> None:
    """Raises ValueError for an integer that Python cannot write out.

    Hexadecimal integers pass the limit of Python's parser.
    """
    if isinstance(value, int) and value.bit_length() > 1000:
        raise ValueError("a number has hundreds of digits")
    if isinstance(value, Mapping):
        children = list(value.values())
    elif isinstance(value, list):
        children = value
    else:
        children = []
    for child in children:
        _refuse_huge(child)


def parse_toml(text: str) -> dict[str, Any]:
    """Returns a TOML tree whose numbers can be written out.

    Raises:
        ValueError, RecursionError: any other text.
    """
    tree = tomllib.loads(text)
    _refuse_huge(tree)
    return tree


def read_toml(path: Path, role: str, hint: str) -> dict[str, Any]:
    """Returns the tree of a TOML file.

    Args:
        role: of the file, which begins the error; `hint` ends it.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        tree = parse_toml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{role} {path}: {error.strerror}; {hint}") from error
    # No TOML, no UTF-8, or a number of thousands of digits.
    except ValueError as error:
        fault = f"{role} {path} is not TOML: {error}"
        if path.suffix == ".json":
            fault += "; it is JSON, so were --recipe and --ds_config swapped?"
        raise ConfigError(fault) from error
    except RecursionError as error:
        raise ConfigError(
            f"{role} {path} is nested too deeply; keys are at most three sections deep"
        ) from error
    return tree


def refuse_nul(value: Any, place: str) -> None:
    """Refuses text with a NUL character, which no path and no process argument can hold.

    Args:
        place: of the value, which begins the error.
    """
    if isinstance(value, str) and "\0" in value:
        raise ConfigError(f"{place}: {value!r} holds a NUL character; remove it")
    if isinstance(value, Mapping):
        children = [*value.keys(), *value.values()]
    elif isinstance(value, list):
        children = value
    else:
        children = []
    for child in children:
        refuse_nul(child, place)


def toml_value(text: str) -> Any:
    """Returns the value of a TOML text, or the text itself, so that paths need no quotes."""
    try:
        return parse_toml(f"value = {text}")["value"]
    except ValueError:
        return text
    except RecursionError as error:
        raise ConfigError(f"override {text[:40]}... is nested too deeply") from error


def toml_literal(value: Any) -> str:
    """Returns a value as TOML."""
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            # JSON leaves one control character as it is that TOML has to escape.
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case tuple() | list():
            return "[" + ", ".join(toml_literal(element) for element in value) + "]"
        case dict():
            entries = []
            for key, element in value.items():
                if element is not None:
                    entries.append(f"{key} = {toml_literal(element)}")
            return "{" + ", ".join(entries) + "}"
        case _:
            return repr(value)
