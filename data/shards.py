"""Which files a shard pattern means, with a clear complaint for everything that is no shard."""

import glob
import itertools
import os
import re
from collections.abc import Sequence
from pathlib import Path

from data.errors import DataError

_RANGE = re.compile(r"^(\d+)\.\.(\d+)$")
_MAX_SHARDS = 10_000_000


def expand_shards(pattern: str, root: Path) -> list[Path]:
    """Finds the shards that a pattern names.

    Args:
        pattern: a comma list; each item a file, a glob, a folder (all `*.tar` directly in it) or any of these with
            braces: `{000..012}` counts with leading zeros kept, `{a,b}` takes each.
        root: what relative items are relative to.

    Returns:
        Existing, non-empty files, each once, sorted by path.

    Raises:
        DataError: nothing found, or a file missing or empty.
    """
    items = [item.strip() for item in _split_commas(pattern) if item.strip()]
    if not items:
        raise DataError("no shards given; name tar files, a folder of them or a pattern such as train-{000..012}.tar")
    found: set[Path] = set()
    for item in itertools.chain.from_iterable(_expand_braces(item) for item in items):
        found.update(_expand_item(item, root))
    shards = sorted(found)
    _check_files(shards)
    return shards


def common_root(shards: Sequence[Path]) -> Path:
    """The deepest folder that holds all shards; their names in an index are relative to it."""
    return Path(os.path.commonpath([str(path.absolute().parent) for path in shards]))


def _expand_item(item: str, root: Path) -> list[Path]:
    path = root / Path(item).expanduser()
    if path.is_dir():
        shards = sorted(path.glob("*.tar"))
        if not shards:
            raise DataError(f"the folder {path} holds no *.tar files")
        return shards
    if not path.exists() and glob.has_magic(item):
        shards = [Path(name) for name in sorted(glob.glob(str(path)))]
        if not shards:
            raise DataError(f"no shards match {path}")
        return shards
    return [path]


def _check_files(shards: Sequence[Path]) -> None:
    missing = [path for path in shards if not path.is_file()]
    empty = [path for path in shards if path not in missing and path.stat().st_size == 0]
    for what, paths in (("missing", missing), ("empty", empty)):
        if paths:
            more = f" (and {len(paths) - 1} more)" if len(paths) > 1 else ""
            raise DataError(f"missing or empty shards: {paths[0]} is {what}{more}; mend the path or fetch it again")


def _split_commas(pattern: str) -> list[str]:
    """Splits at commas outside braces."""
    items, depth = [""], 0
    for character in pattern:
        depth += {"{": 1, "}": -1}.get(character, 0)
        if character == "," and depth == 0:
            items.append("")
        else:
            items[-1] += character
    if depth != 0:
        raise DataError(f"unbalanced braces in the shard pattern {pattern}")
    return items


def _expand_braces(item: str) -> list[str]:
    """Expands the first pair of braces, then the rest."""
    match = re.search(r"\{([^{}]*)\}", item)
    if match is None:
        return [item]
    head, tail = item[: match.start()], item[match.end() :]
    return [expanded for choice in _choices(match[1], item) for expanded in _expand_braces(head + choice + tail)]


def _choices(inside: str, item: str) -> list[str]:
    span = _RANGE.match(inside)
    if span is None:
        return inside.split(",")
    first, last = int(span[1]), int(span[2])
    if last < first or last - first >= _MAX_SHARDS:
        raise DataError(f"the range {{{inside}}} in the shard pattern {item} is empty or too long")
    return [str(number).zfill(len(span[1])) for number in range(first, last + 1)]
