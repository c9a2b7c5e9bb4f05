"""What a misspelt key or value of a recipe was probably meant to be."""

import difflib
from collections.abc import Iterable, Sequence
from typing import Any, get_args

from pydantic import BaseModel


def did_you_mean(wrong: object, known: Iterable[str]) -> str:
    """ "; did you mean X?", or nothing where no known word is like it."""
    close = difflib.get_close_matches(str(wrong), list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def known_words(kind: type[BaseModel], location: Sequence[Any]) -> tuple[str, ...]:
    """The keys of the section at `location` of a configuration."""
    section: type[BaseModel] = kind
    for part in location:
        field = section.model_fields.get(part)
        if field is None:
            return ()
        options = (field.annotation, *get_args(field.annotation))
        inner = next((one for one in options if isinstance(one, type) and issubclass(one, BaseModel)), None)
        if inner is None:
            return ()
        section = inner
    return tuple(section.model_fields)
