"""Which shards a pattern means: local files or URLs, with a clear complaint for everything that is no shard."""

import glob
import itertools
import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from urllib.parse import urlsplit

from braceexpand import braceexpand

from data.embedded import FASHION_FOLDER, unpack_fashion
from data.errors import DataError
from data.index.tar_format import MACOS_PREFIX

_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_PIPE = re.compile(r"(^|,|::)\s*pipe:")
_URL = re.compile(r"^[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_MAX_SHARDS = 1_000_000
"""The most that one pattern names: LAION-5B has 230,000."""
_MAX_DIGITS = 18
_ARCHIVE = re.compile(
    r"\.tar\.(?!.*\b(md5|sha\d+|idx|index|json|txt|sig|asc)$)|"
    r"\.(tgz|taz|tbz2?|tlz|txz|tzst|zip|7z|rar|gz|bz2|xz|zst|lz4|lzma|br|cpio)$",
    re.IGNORECASE,
)
"""Files that may hold examples and are no tars as training reads them."""
_MAGIC = (b"\x1f\x8b", b"PK\x03\x04", b"BZh", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd", b"7z\xbc\xaf")
"""How gzip, zip, bzip2, xz, zstd and 7z begin: for files without a suffix."""
_HEADER_BYTES = 262
"""Of a tar: they end in its magic."""
_HELD_OUT = "heldout"
"""Where an import puts what it holds out, inside of the training shards' folder: it is meant to be left out."""
_NAMED = 3


@dataclass(frozen=True)
class ShardSet:
    """The shards of one data set.

    Attributes:
        root: a folder, or everything of a URL that all shards share, without the last slash.
        names: relative to the root, sorted; the order of ids follows them.
        unread_names: what else there is in folders that were named, and may hold examples.
    """

    root: str
    names: tuple[str, ...]
    unread_names: tuple[str, ...] = ()

    @classmethod
    def of_files(cls, paths: Sequence[Path], unread_names: Sequence[str] = ()) -> "ShardSet":
        """Local files; the root is the deepest folder that holds them all.

        Raises:
            DataError: none, or one twice, under whatever path: its examples would have two copies.
        """
        if not paths:
            raise DataError("no shards to index")
        root = Path(os.path.commonpath([str(path.absolute().parent) for path in paths]))
        names = sorted(path.absolute().relative_to(root).as_posix() for path in paths)
        by_file: dict[Path, str] = {}
        for name in names:
            file = (root / name).resolve()
            if file in by_file:
                raise DataError(
                    f"{root / by_file[file]} is listed twice, also as {root / name}: name each shard once"
                )
            by_file[file] = name
        return cls(str(root), tuple(names), tuple(unread_names))

    def remarks(self) -> Iterator[str]:
        """A line where files or folders beside the shards are not read."""
        if self.unread_names:
            names = ", ".join(self.unread_names[:_NAMED]) + ", ..." * (
                len(self.unread_names) > _NAMED
            )
            yield (
                f"{len(self.unread_names)} files or folders beside the shards are not read ({names}): only uncompressed tars "
                "directly in a folder are; unpack archives, and name folders one by one"
            )

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
        pattern: a comma list; each item a file, a glob, a folder (all `*.tar` directly in it, of any case) or any with braces:
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
        return ShardSet.of_files(*_find_files(items, root))
    if len(urls) != len(items):
        raise DataError(
            f"{_without_secrets(pattern)} mixes URLs and local files; one data set lies in one place"
        )
    urls = sorted(set(urls))
    for url in urls:
        parts = urlsplit(url)
        if "@" in parts.netloc or parts.query or parts.fragment:
            raise DataError(
                f"the URL of {parts.hostname or url} carries a password, a query or a fragment, which would end up in "
                "records; give plain URLs and leave credentials to the driver's own environment"
            )
        if glob.has_magic(url) or url.endswith("/") or "/../" in url:
            raise DataError(
                f"{url} is no single shard; name URLs one by one or by ranges such as {{0000..0127}}.tar"
            )
    if len({urlsplit(url)[:2] for url in urls}) > 1:
        raise DataError("the shards lie on several hosts; one data set has one scheme and one host")
    folder = os.path.commonpath(
        [os.path.dirname(urlsplit(url).path) or "/" for url in urls]
    ).rstrip("/")
    shared = "://".join(urlsplit(urls[0])[:2]) + folder
    return ShardSet(shared, tuple(url[len(shared) + 1 :] for url in urls))


def local_shards(pattern: str, root: Path) -> list[Path]:
    """Finds shards that are read without an index: files that are there and not empty, each once, sorted.

    Raises:
        DataError: as `find_shards`; or one is missing, empty or behind a URL.
    """
    shards = find_shards(pattern, root)
    paths = [Path(shards.root, name) for name in shards.names]
    bad = [
        path for path in paths if shards.is_remote or not path.is_file() or path.stat().st_size == 0
    ]
    if bad:
        more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
        raise DataError(
            f"missing or empty shards: {bad[0]}{more}; data.streaming needs whole files on this machine"
        )
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
        raise DataError(
            f"missing or empty shards: {paths[0]} is missing{more}; mend the path or fetch it again"
        )


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
            f"{_without_secrets(pattern)[:200]} is a command or holds ::. Name shards, such as "
            "s3://bucket/train-{000..127}.tar, with commas between them: no command is run, and all are drawn at one rate, so "
            "that one epsilon is true of every example"
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
        raise DataError(
            "no shards given; name tar files, a folder of them or a pattern such as train-{000..012}.tar"
        )
    words: list[str] = []
    for item in items:  # Ranges and lists are expanded as a shell does.
        ranges = _RANGE.findall(item)
        is_long = any(max(len(first), len(last)) > _MAX_DIGITS for first, last in ranges)
        sizes = [0 if is_long else int(last) - int(first) + 1 for first, last in ranges]
        is_there, found = os.path.exists(_path(item, root)), [item]
        if (
            not is_there and min(sizes, default=1) > 0 and math.prod(sizes) <= _MAX_SHARDS
        ):  # before any name is made
            found = list(itertools.islice(braceexpand(item, escape=False), _MAX_SHARDS + 1))
        elif not is_there:
            found = []
        if not 0 < len(found) <= _MAX_SHARDS:
            raise DataError(
                f"the shard pattern {item[:200]} has an empty range or names more than {_MAX_SHARDS:,} shards; name fewer"
            )
        words += found
    return words


def _without_secrets(pattern: str) -> str:
    """The pattern without passwords and queries of URLs."""
    return (
        re.sub(r"(?<=//)[^/\s,]*@|\?[^\s,]*(?=[\s,]|\Z)", "", pattern)
        if "//" in pattern
        else pattern
    )


def _path(item: str, root: Path) -> Path:
    return root / os.path.expanduser(item)


def _find_files(items: Sequence[str], root: Path) -> tuple[list[Path], list[str]]:
    """(the files that local items name, each once, sorted; names of what is not read in folders). Files that are named one by one
    need not exist."""
    shards: set[Path] = set()
    unread: set[Path] = set()
    for item in items:
        path = _path(item, root)
        if path.is_relative_to(root / FASHION_FOLDER):
            unpack_fashion(root)
        if os.path.isdir(path):  # unlike that of Path, it knows no error
            entries = sorted(path.iterdir())
            tars = [entry for entry in entries if _is_tar(entry)]
            archives = [
                entry for entry in entries if not _is_tar(entry) and _may_hold_examples(entry)
            ]
            if not tars:
                there = f", but {archives[0].name}, which is not read" if archives else ""
                raise DataError(
                    f"the folder {path} holds no *.tar files{there}; prepare.py import makes shards of a folder of pictures"
                )
            shards.update(tars)
            unread.update(archives)
        elif not os.path.exists(path) and glob.has_magic(item):
            folder = (
                glob.escape(str(path.parent)) if os.path.isdir(path.parent) else str(path.parent)
            )
            matches = glob.glob(os.path.join(folder, path.name))
            if not matches:
                raise DataError(
                    f"no shards match {path}: give their folder or pattern, from the current folder"
                )
            shards.update(map(Path, matches))
        else:
            shards.add(path)
    unread -= shards | {_path(item, root) for item in items}
    return sorted(shards), [path.name for path in sorted(unread)]


def _is_tar(path: Path) -> bool:
    """Whether a name is that of a tar; macOS keeps attributes of `a.tar` in `._a.tar`."""
    return path.name.lower().endswith(".tar") and not path.name.startswith(MACOS_PREFIX)


def _may_hold_examples(path: Path) -> bool:
    """Whether something that is no tar may hold shards all the same: an archive, a folder with tars, what cannot be read."""
    try:
        if path.is_dir():
            return path.name != _HELD_OUT and any(map(_is_tar, path.iterdir()))
        if path.suffix or not path.is_file():
            return _ARCHIVE.search(path.name) is not None or path.name.lower().endswith(".tar")
        with open(path, "rb") as file:
            start = file.read(_HEADER_BYTES)
    except OSError:
        return True
    return start.startswith(_MAGIC) or start[-5:] == b"ustar"
