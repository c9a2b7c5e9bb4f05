"""Captions for the embedded demo: clip-art titles, file names and keywords -> short clean English.

Most titles of the source are the name of a collection ("Part of the Flat Icon Collection"), a copy of another file's
title or the artist's mother tongue; file names end in the artist's name. So: a title is used when few files share it,
the file name otherwise; words that no English word list knows are translated (a small table), split ("leftarrow"), or
dropped, except in names of places.
"""

import html
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.demo_words import COLORS, COMPOUNDS, DROPPED_KEYWORDS, DROPPED_WORDS, KEPT_WORDS, SHORT_WORDS, TRANSLATIONS

MAX_TITLE_WORDS = 6
MAX_KEYWORDS = 3
_MIN_KEYWORD_COUNT = 3
_MAX_SHARED_TITLE = 3
_COLLECTION_TITLE = re.compile(
    r"clipart by|collection|theme|icons|part of|gramastar|submission|cliparts", re.IGNORECASE
)
_SUITS = {"c": "clubs", "d": "diamonds", "h": "hearts", "s": "spades"}
_NUMBERS = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
_RANKS = {"a": "ace", "j": "jack", "q": "queen", "k": "king"} | {str(i): _NUMBERS[i - 2] for i in range(2, 11)}
_FOREIGN_PLACES = ("signs_and_symbols/flags", "geography")


@dataclass(frozen=True)
class Metadata:
    """What an SVG file says about itself; `path` is relative to the source's svg folder, without the extension."""

    path: str
    title: str
    keywords: tuple[str, ...]
    licence: str


def read_metadata(svg: Path, root: Path) -> Metadata | None:
    """Title, keywords and licence of an SVG file; None when it is no XML."""
    try:
        tree = ElementTree.parse(svg)
    except ElementTree.ParseError:
        return None
    title, licence = "", ""
    keywords: list[str] = []
    for element in tree.iter():
        tag = element.tag.rpartition("}")[2].lower() if isinstance(element.tag, str) else ""
        if tag == "license" and element.attrib:
            licence = licence or next(iter(element.attrib.values()))
        elif tag == "work":
            for child in element:
                kind = child.tag.rpartition("}")[2].lower() if isinstance(child.tag, str) else ""
                if kind == "title":
                    title = "".join(child.itertext()).strip()
                elif kind == "subject":
                    items = [item for item in child.iter() if isinstance(item.tag, str) and item.tag.endswith("}li")]
                    keywords += [item.text.strip().lower() for item in items if item.text]
    return Metadata(svg.relative_to(root).with_suffix("").as_posix(), title, tuple(sorted(keywords)), licence)


class Captioner:
    """Writes captions; knows how often titles and keywords occur in the whole source."""

    def __init__(self, files: Sequence[Metadata], words: frozenset[str]):
        """Args: files: all of the source. words: English, in lower case where they are no names."""
        self._words = frozenset(word for word in words if word.islower() and word.isalpha() and len(word) > 2)
        self._places = frozenset(word.lower() for word in words if word.isalpha() and len(word) > 2)
        self._title_counts = Counter(file.title.lower() for file in files)
        self._keyword_counts = Counter(keyword for file in files for keyword in file.keywords)

    def caption(self, file: Metadata) -> str | None:
        """Returns "title, keyword, keyword" in lower case, or None when nothing can be said about the picture."""
        if file.path.startswith(("recreation/games/cards/", "shapes/stars/star_")):
            return _caption_of_series(file.path)
        title = file.title
        if not title or self._title_counts[title.lower()] > _MAX_SHARED_TITLE or _COLLECTION_TITLE.search(title):
            title = file.path.rpartition("/")[2]
        head = self._clean(title, is_place=file.path.startswith(_FOREIGN_PLACES))[:MAX_TITLE_WORDS]
        while head and head[-1] in ("of", "and", "the", "with", "in", "on", "for", "to", "or", "at", "by", "a"):
            head.pop()
        if len(head) > 1 and head[-1] in COLORS and head[0] not in COLORS:
            head = [head[-1], *head[:-1]]  # "folder blue" -> "blue folder"
        is_flag = "signs_and_symbols/flags" in file.path and "flag" in " ".join(file.keywords)
        if is_flag and head and not {"flag", "flags", "map"} & set(head):
            head = ["flag", "of", *head]
        tail = self._keywords(file, head)
        is_theme_icon = re.search(r"computer/icons/.*-theme", file.path) is not None
        if is_theme_icon:
            tail = ["icon"] if "icon" not in head else []
        if not head and (is_theme_icon or len(tail) < 2):
            return None  # one general word such as "people" describes nothing
        if not tail and set(head) <= {"icon", "symbol", "sport", "pattern", "sign", "logo", "picture", "hotel"}:
            return None
        return ", ".join([" ".join(head), *tail] if head else tail)

    def _clean(self, text: str, *, is_place: bool) -> list[str]:
        """Words that mean something, none twice."""
        text = re.sub(r"benji_pa\w*", " ", text)  # a prolific artist with an English name
        text = re.sub(r"\S+@\S+|https?:\S+|\(\w{3} \w{3} \d.*?\)|hash\(\w+\)", " ", html.unescape(text))
        text = re.sub(r"([a-z])([A-Z])", r"\1 \2", text).lower().replace("'s ", " ")
        known: list[str] = []
        for token in re.split(r"[^a-zà-ÿ]+", text):
            for word in COMPOUNDS.get(token, token).split():
                word = TRANSLATIONS.get(word, word)
                is_known = " " in word or word in SHORT_WORDS or word in KEPT_WORDS or word in self._words
                if word in DROPPED_WORDS or not word:
                    continue
                if is_known or (is_place and len(word) > 2):
                    known += word.split()
                elif len(word) > 6:
                    cuts = ((word[:cut], word[cut:]) for cut in range(3, len(word) - 2))
                    known += next((pair for pair in cuts if self._words.issuperset(pair)), ())
        return list(dict.fromkeys(known))

    def _keywords(self, file: Metadata, head: Sequence[str]) -> list[str]:
        """The rarer the more telling: specific first, then general."""
        candidates = [word for word in file.keywords if self._keyword_counts[word] >= _MIN_KEYWORD_COUNT]
        chosen: list[str] = []
        for keyword in sorted(set(candidates), key=lambda word: (self._keyword_counts[word], word)):
            if keyword in DROPPED_KEYWORDS:
                continue
            words = self._clean(keyword, is_place="geography" in file.path or "flags" in file.path)
            seen = {_stem(word) for word in " ".join([*head, *chosen]).split()}
            if words and not all(_stem(word) in seen for word in words):
                chosen.append(" ".join(words))
        return chosen[:MAX_KEYWORDS]


def _stem(word: str) -> str:
    return word.removesuffix("s") if len(word) > 3 else word


def _caption_of_series(path: str) -> str | None:
    """Playing cards and stars are told apart by their file names alone.

    recreation/games/cards/white/white_h_9 -> "nine of hearts, white playing card";
    shapes/stars/star_07pt03step -> "star with seven points, geometry, shape"; above twelve they all look alike.
    """
    card = re.fullmatch(r"recreation/games/cards/(\w+)/\w+_([cdhs])_(\w+)", path)
    if card is not None and card[3] in _RANKS:
        return f"{_RANKS[card[3]]} of {_SUITS[card[2]]}, {card[1]} playing card"
    star = re.fullmatch(r"shapes/stars/star_(\d+)pt(\d+)step", path)
    if star is not None and 5 <= int(star[1]) <= 12:
        return f"star with {_NUMBERS[int(star[1]) - 2]} points, geometry, shape"
    return None
