"""Cleaning of captions, by fixed rules that look at one caption alone.

In this order: HTML entities are resolved and tags removed; Unicode is brought to NFC; web and e-mail addresses are
removed; control, format and unassigned characters become spaces; runs of white space become one space; surrounding
quotes are removed; more than MAX_CHARACTERS are cut at the last whole word. Repeated until nothing changes. What has no
letter left is no caption.
"""

import html
import re
import unicodedata

MAX_CHARACTERS = 1000
_TAG = re.compile(r"</?[a-zA-Z][^<>]{0,500}>")
_ADDRESS = re.compile(r"(?:https?://|www\.)\S+|[\w.+-]+@[\w-]+\.[\w.-]+", re.IGNORECASE)
_NO_TEXT = ("Cc", "Cf", "Cs", "Co", "Cn")
_QUOTES = "\"'“”‘’«»„`"


def clean_caption(text: str) -> str | None:
    """The caption, or None where nothing readable is left; cleaning twice changes nothing more."""
    text = text[: 20 * MAX_CHARACTERS]
    while (cleaned := _cleaned_once(text)) != text:  # what one rule uncovers, an earlier one may have to remove
        text = cleaned
    return text if any(c.isalpha() for c in text) else None


def _cleaned_once(text: str) -> str:
    text = unicodedata.normalize("NFC", _TAG.sub(" ", html.unescape(text)))
    text = _ADDRESS.sub(" ", text)
    text = "".join(" " if unicodedata.category(c) in _NO_TEXT else c for c in text)
    text = " ".join(text.split()).strip(_QUOTES + " ")
    if len(text) > MAX_CHARACTERS:
        text = text[:MAX_CHARACTERS].rpartition(" ")[0] or text[:MAX_CHARACTERS]
    return text
