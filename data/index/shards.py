"""Which shards a pattern means: local files or URLs, with a clear complaint for everything that is no shard."""

import glob
import itertools
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from urllib.parse import urlsplit

from braceexpand import braceexpand

from data.embedded import FASHION_FOLDER, unpack_fashion
from data.errors import DataError

_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_PIPE = re.compile(r"(^|,|::)\s*pipe:")
_URL = re.compile(r"^[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_MAX_SHARDS = 1_000_000
"""The most that one pattern names: LAION-5B has 230,000."""
_MAX_DIGITS = 18


@dataclass(frozen=True)
class ShardSet:
    """The shards of one data set.

    Attributes:
        root: a folder, or everything of a URL that all shards share, without the last slash.
        names: relative to the root, sorted; the order of ids follows them.
    """

    root: str
    names: tuple[str, ...]

    @classmethod
    def of_files(cls, paths: Sequence[Path]) -> "ShardSet":
        """Local files; the root is the deepest folder that holds them all.

        Raises:
            DataError: none, or one twice.
        """
        if not paths:
            raise DataError("no shards to index")
        root = Path(os.path.commonpath([str(path.absolute().parent) for path in paths]))
        names = sorted(path.absolute().relative_to(root).as_posix() for path in paths)
        if len(set(names)) != len(names):
            raise DataError("a shard is listed twice")
        return cls(str(root), tuple(names))

    @property
    def is_remote(self) -> bool:
        return is_url(self.root)

    def locations(self) -> list[str]:
        """Paths, with links resolved, or URLs: equal for equal files."""
        if self.is_remote:
            return [f"{self.root}/{name}" for name in self.names]
        return [str((Path(self.root) / name).resolve()) for name in self.names]


def find_shards(pattern: str, root: Path) -> ShardSet:
    """Finds the shards that a pattern names.

    Args:
        pattern: a comma list; each item a file, a glob, a folder (all `*.tar` directly in it) or any of these with braces:
            `{000..012}` counts with leading zeros kept, `{a,b}` takes each. A file or folder of just that name, with its commas
            and braces, comes first, also where the rest of the pattern lies in such a folder. Or a comma list of URLs with
            braces: `https://host/train-{0000..0127}.tar`, `s3://bucket/{a,b}/000.tar`. All of one scheme and host.
        root: what relative local items are relative to.

    Raises:
        DataError: nothing found, local and remote shards mixed, or a URL that is none of a shard. That each shard is
            there is for its storage to say (`data.reading.storage.Storage.status`).
    """
    items = _items(pattern, root)
    urls = [item for item in items if is_url(item)]
    if not urls:
        return ShardSet.of_files(_find_files(items, root))
    if len(urls) != len(items):
        raise DataError(f"{pattern} mixes URLs and local files; one data set lies in one place")
    urls = sorted(set(urls))
    for url in urls:
        parts = urlsplit(url)
        if "@" in parts.netloc or parts.query or parts.fragment:
            raise DataError(
                f"the URL of {parts.hostname or url} carries a password, a query or a fragment, which would end up in "
                "records; give plain URLs and leave credentials to the driver's own environment"
            )
        if glob.has_magic(url) or url.endswith("/") or "/../" in url:
            raise DataError(f"{url} is no single shard; name URLs one by one or by ranges such as {{0000..0127}}.tar")
    if len({urlsplit(url)[:2] for url in urls}) > 1:
        raise DataError("the shards lie on several hosts; one data set has one scheme and one host")
    folder = os.path.commonpath([os.path.dirname(urlsplit(url).path) or "/" for url in urls]).rstrip("/")
    shared = "://".join(urlsplit(urls[0])[:2]) + folder
    return ShardSet(shared, tuple(url[len(shared) + 1 :] for url in urls))


def local_shards(pattern: str, root: Path) -> list[Path]:
    """Finds shards that are read without an index: files that are there and not empty, each once, sorted.

    Raises:
        DataError: as `find_shards`; or one is missing, empty or behind a URL.
    """
    shards = find_shards(pattern, root)
    paths = [Path(shards.root, name) for name in shards.names]
    bad = [path for path in paths if shards.is_remote or not path.is_file() or path.stat().st_size == 0]
    if bad:
        more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
        raise DataError(f"missing or empty shards: {bad[0]}{more}; data.streaming needs whole files on this machine")
    return paths


def require_a_shard(pattern: str, root: Path) -> None:
    """Refuses local shards of which none is there. Whether all are there is for the index to say.

    Raises:
        DataError: as `find_shards`; or no shard is there.
    """
    shards = find_shards(pattern, root)
    paths = [] if shards.is_remote else [f"{shards.root}/{name}" for name in shards.names]
    if paths and not any(map(os.path.isfile, paths)):
        more = f" (and {len(paths) - 1} more)" if len(paths) > 1 else ""
        raise DataError(f"missing or empty shards: {paths[0]} is missing{more}; mend the path or fetch it again")


def is_url(text: str) -> bool:
    """Whether this names something that is read over the network."""
    return _URL.match(text) is not None


def _items(pattern: str, root: Path) -> list[str]:
    """The items of a comma list, with their braces expanded; commas inside of braces separate no items."""
    if pattern.strip() and os.path.exists(_path(pattern, root)):
        return [pattern]
    folder, _, name = pattern.rpartition("/")
    if ("," in folder or "{" in folder) and os.path.isdir(_path(folder, root)):
        return [f"{folder}/{item}" for item in _items(name, _path(folder, root))]
    if "::" in pattern or _PIPE.search(pattern):
        raise DataError(
            f"{pattern[:200]} is a command or holds ::. Name shards, such as s3://bucket/train-{{000..127}}.tar, with commas "
            "between them: no command is run, and all are drawn at one rate, so that one epsilon is true of every example"
        )
    cuts, depth = [-1], 0
    for place, character in enumerate(pattern):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if character == "," and depth == 0:
            cuts.append(place)
    if depth != 0:
        raise DataError(f"unbalanced braces in the shard pattern {pattern}")
    items = [pattern[start + 1 : end].strip() for start, end in pairwise([*cuts, len(pattern)])]
    items = [item for item in items if item]
    if not items:
        raise DataError("no shards given; name tar files, a folder of them or a pattern such as train-{000..012}.tar")
    words: list[str] = []
    for item in items:  # Ranges and lists are expanded as a shell does.
        ranges = _RANGE.findall(item)
        is_long = any(max(len(first), len(last)) > _MAX_DIGITS for first, last in ranges)
        sizes = [0 if is_long else int(last) - int(first) + 1 for first, last in ranges]
        is_there, found = os.path.exists(_path(item, root)), [item]
        if not is_there and min(sizes, default=1) > 0 and math.prod(sizes) <= _MAX_SHARDS:  # before any name is made
            found = list(itertools.islice(braceexpand(item, escape=False), _MAX_SHARDS + 1))
        elif not is_there:
            found = []
        if not 0 < len(found) <= _MAX_SHARDS:
            raise DataError(
                f"the shard pattern {item[:200]} has an empty range or names more than {_MAX_SHARDS:,} shards; name fewer"
            )
        words += found
    return words


def _path(item: str, root: Path) -> Path:
    return root / os.path.expanduser(item)


def _find_files(items: Sequence[str], root: Path) -> list[Path]:
    """The files that local items name, each once, sorted; those that are named one by one need not exist."""
    shards: set[Path] = set()
    for item in items:
        path = _path(item, root)
        if path.is_relative_to(root / FASHION_FOLDER):
            unpack_fashion(root)
        if os.path.isdir(path):  # unlike that of Path, it knows no error
            if not any(path.glob("*.tar")):
                raise DataError(
                    f"the folder {path} holds no *.tar files; prepare.py import makes shards of a folder of pictures"
                )
            shards.update(path.glob("*.tar"))
        elif not os.path.exists(path) and glob.has_magic(item):
            folder = glob.escape(str(path.parent)) if os.path.isdir(path.parent) else str(path.parent)
            matches = glob.glob(os.path.join(folder, path.name))
            if not matches:
                raise DataError(f"no shards match {path}: give their folder or pattern, from the current folder")
            shards.update(map(Path, matches))
        else:
            shards.add(path)
    return sorted(shards)
