"""Which shards a pattern means: local files or URLs, with a clear complaint for everything that is no shard."""

import glob
import itertools
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
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
        hint: what a message of a missing shard adds, where the pattern may have been taken apart by mistake.
    """

    root: str
    names: tuple[str, ...]
    hint: str = field(default="", compare=False)

    @classmethod
    def of_files(cls, paths: Sequence[Path], hint: str = "") -> "ShardSet":
        """Local files; the root is the deepest folder that holds them all.

        Raises:
            DataError: none, or one twice.
        """
        if not paths:
            raise DataError("no shards to index")
        root = common_root(paths)
        names = sorted(path.absolute().relative_to(root).as_posix() for path in paths)
        if len(set(names)) != len(names):
            raise DataError("a shard is listed twice")
        return cls(str(root), tuple(names), hint)

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
        pattern: what `expand_shards` takes, or a comma list of URLs with braces:
            `https://host/train-{0000..0127}.tar`, `s3://bucket/{a,b}/000.tar`. All of one scheme and host.
        root: what relative local items are relative to.

    Raises:
        DataError: nothing found, local and remote shards mixed, or a URL that is none of a shard. That each shard is
            there is for its storage to say (`data.reading.storage.Storage.status`).
    """
    items = _items(pattern, root)
    urls = [item for item in items if is_url(item)]
    if not urls:
        return ShardSet.of_files(_find_files(items, root, _hint(pattern)), _hint(pattern))
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


def expand_shards(pattern: str, root: Path) -> list[Path]:
    """Finds the local shards that a pattern names.

    Args:
        pattern: a comma list; each item a file, a glob, a folder (all `*.tar` directly in it) or any of these with
            braces: `{000..012}` counts with leading zeros kept, `{a,b}` takes each. A file or folder of just that name, with
            its commas and braces, comes first, also where the rest of the pattern lies in such a folder.
        root: what relative items are relative to.

    Returns:
        Existing, non-empty files, each once, sorted by path.

    Raises:
        DataError: nothing found, or a file missing or empty.
    """
    shards = _find_files(_items(pattern, root), root, _hint(pattern))
    missing = [path for path in shards if not os.path.isfile(path)]
    if bad := missing or [path for path in shards if path.stat().st_size == 0]:
        state = ("missing" if missing else "empty") + (f" (and {len(bad) - 1} more)" if len(bad) > 1 else "")
        raise DataError(
            f"missing or empty shards: {bad[0]} is {state}; mend the path or fetch it again{_hint(pattern)}"
        )
    return shards


def require_a_shard(pattern: str, root: Path) -> None:
    """Refuses local shards of which none is there, in the words of `expand_shards`.

    Whether all are there is for the index to say, which may exclude some.

    Raises:
        DataError: as `find_shards`; or no shard is there.
    """
    shards = find_shards(pattern, root)
    if not is_url(shards.root) and not any(os.path.isfile(f"{shards.root}/{name}") for name in shards.names):
        expand_shards(pattern, root)


def read_shard_list(path: Path, shards: ShardSet) -> frozenset[str]:
    """Names of the shards that a text file lists.

    Args:
        path: one shard per line: its name in the index, its path or its URL. Empty lines and lines that begin with # do not
            count.
        shards: the data set that they belong to.

    Raises:
        DataError: the file cannot be read, or names a shard that the data set has not.
    """
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines()]
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read the list of shards {path}: {error}") from error
    names_of = {f"{shards.root}/{name}": name for name in shards.names} | {name: name for name in shards.names}
    listed: set[str] = set()
    for line in lines:
        if line and not line.startswith("#"):
            name = names_of.get(line) or names_of.get(os.path.abspath(line))
            if name is None:
                raise DataError(f"{path} lists {line}, which is none of the shards at {shards.root}; correct that line")
            listed.add(name)
    return frozenset(listed)


def is_url(text: str) -> bool:
    """Whether this names something that is read over the network."""
    return _URL.match(text) is not None


def common_root(shards: Sequence[Path]) -> Path:
    """The deepest folder that holds all shards; their names in an index are relative to it."""
    return Path(os.path.commonpath([str(path.absolute().parent) for path in shards]))


def _hint(pattern: str) -> str:
    """What a message adds about a pattern that may have been taken apart by mistake."""
    does = [what for mark, what in ((",", "commas separate shards"), ("{", "braces expand")) if mark in pattern]
    return f"; {' and '.join(does)}, except where a file or folder has that very name" if does else ""


def _items(pattern: str, root: Path) -> list[str]:
    """The items of a comma list, with their braces expanded; commas inside of braces separate no items."""
    if pattern.strip() and os.path.exists(_path(pattern, root)):
        return [pattern]
    folder, _, name = pattern.rpartition("/")
    if ("," in folder or "{" in folder) and os.path.isdir(_path(folder, root)):
        return [f"{folder}/{item}" for item in _items(name, _path(folder, root))]
    if _PIPE.search(pattern):
        url = re.search(r"[a-z0-9+.-]+://[^\s'\"]+", pattern)
        named = f"here {url[0]}" if url else "a path or URL such as s3://bucket/train-{000..127}.tar"
        raise DataError(f"{pattern[:200]} is a command, and none is run; name the shards themselves: {named}")
    if "::" in pattern:
        raise DataError(f"{pattern[:200]} holds ::, but commas separate shards: {pattern.replace('::', ',')[:200]}")
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
    return [word for item in items for word in ([item] if os.path.exists(_path(item, root)) else _expand_braces(item))]


def _path(item: str, root: Path) -> Path:
    return root / os.path.expanduser(item)


def _expand_braces(item: str) -> list[str]:
    """Expands ranges and lists as a shell does; a word without braces is itself."""
    most = 1
    for first, last in _RANGE.findall(item):  # before any name is made
        if max(len(first), len(last)) > _MAX_DIGITS:
            raise DataError(f"a range in the shard pattern {item[:100]} has a number of more than {_MAX_DIGITS} digits")
        if not 0 <= int(last) - int(first) < _MAX_SHARDS:
            raise DataError(f"the range {{{first}..{last}}} in the shard pattern {item} is empty or too long")
        most *= int(last) - int(first) + 1
    words = list(itertools.islice(braceexpand(item, escape=False), _MAX_SHARDS + 1)) if most <= _MAX_SHARDS else []
    if not 0 < len(words) <= _MAX_SHARDS:
        raise DataError(f"the shard pattern {item[:200]} names more than {_MAX_SHARDS:,} shards; name fewer at a time")
    return words


def _find_files(items: Sequence[str], root: Path, hint: str) -> list[Path]:
    """The files that local items name, each once, sorted; those that are named one by one need not exist."""
    shards: set[Path] = set()
    for item in items:
        if is_url(item):
            raise DataError(f"{item} is a URL; only local shards can be used here")
        path = _path(item, root)
        if path.is_relative_to(root / FASHION_FOLDER):
            unpack_fashion(root)
        if os.path.isdir(path):  # unlike that of Path, it knows no error
            if not any(path.glob("*.tar")):
                raise DataError(
                    f"the folder {path} holds no *.tar files; prepare.py import makes shards of a folder of pictures{hint}"
                )
            shards.update(path.glob("*.tar"))
        elif not os.path.exists(path) and glob.has_magic(item):
            folder = glob.escape(str(path.parent)) if os.path.isdir(path.parent) else str(path.parent)
            matches = glob.glob(os.path.join(folder, path.name))
            if not matches:
                raise DataError(f"no shards match {path}{hint}")
            shards.update(map(Path, matches))
        else:
            shards.add(path)
    return sorted(shards)
