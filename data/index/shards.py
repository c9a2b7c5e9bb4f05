"""Finds the shards that a pattern names, local files or URLs, and refuses everything else."""

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
"""Limit of the shards that one pattern names: LAION-5B has 230,000."""
_MAX_DIGITS = 18
_ARCHIVE = re.compile(
    r"\.tar\.(?!.*\b(md5|sha\d+|idx|index|json|txt|sig|asc)$)|"
    r"\.(tgz|taz|tbz2?|tlz|txz|tzst|zip|7z|rar|gz|bz2|xz|zst|lz4|lzma|br|cpio)$",
    re.IGNORECASE,
)
"""Names of files that may have examples but are not tars as training reads them."""
_MAGIC = (b"\x1f\x8b", b"PK\x03\x04", b"BZh", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd", b"7z\xbc\xaf")
"""First bytes of gzip, zip, bzip2, xz, zstd and 7z, to recognise files without a suffix."""
_HEADER_BYTES = 262
"""First bytes of a tar, which end in its magic."""
_HELD_OUT = "heldout"
"""Folder of an import's held-out shards in that of its training shards, left out on purpose."""
_MAX_NAMES = 3
"""Unread files that a remark names."""


@dataclass(frozen=True)
class ShardSet:
    """The shards of one data set.

    Attributes:
        root: a folder, or the part of a URL that all shards share, without the last slash.
        names: relative to the root, sorted; the order of ids follows them.
        unread_names: other files and folders in the named folders that may have examples.
    """

    root: str
    names: tuple[str, ...]
    unread_names: tuple[str, ...] = ()

    @classmethod
    def of_files(cls, paths: Sequence[Path], unread_names: Sequence[str] = ()) -> "ShardSet":
        """Returns the set of local files, whose root is the deepest folder above them all.

        Raises:
            DataError: no path, or two paths of one file: its examples would have two copies.
        """
        if not paths:
            raise DataError("no shards to index")
        folders = [str(path.absolute().parent) for path in paths]
        root = Path(os.path.commonpath(folders))
        names = sorted(path.absolute().relative_to(root).as_posix() for path in paths)
        by_file: dict[Path, str] = {}
        for name in names:
            file = (root / name).resolve()
            if file in by_file:
                raise DataError(
                    f"{root / by_file[file]} is listed twice, also as {root / name}: name each "
                    "shard once"
                )
            by_file[file] = name
        return cls(str(root), tuple(names), tuple(unread_names))

    def remarks(self) -> Iterator[str]:
        """Yields a line if files or folders beside the shards are not read."""
        if self.unread_names:
            names = ", ".join(self.unread_names[:_MAX_NAMES])
            if len(self.unread_names) > _MAX_NAMES:
                names += ", ..."
            yield (
                f"{len(self.unread_names)} files or folders beside the shards are not read "
                f"({names}): only uncompressed tars directly in a folder are; unpack archives, and "
                "name folders one by one"
            )

    @property
    def is_remote(self) -> bool:
        return is_url(self.root)

    def locations(self) -> list[str]:
        """Returns paths, with links resolved, or URLs: equal for equal files."""
        if self.is_remote:
            return [f"{self.root}/{name}" for name in self.names]
        return [str((Path(self.root) / name).resolve()) for name in self.names]


def find_shards(pattern: str, root: Path) -> ShardSet:
    """Returns the shards that a pattern names.

    Their storage says later whether each exists (`data.reading.storage.Storage.status`).

    Args:
        pattern: a comma list of files, globs and folders (a folder means all `*.tar` directly in
            it, of any case), each with braces or without: `{000..012}` counts with leading zeros
            kept, `{a,b}` takes each. A file or folder of just that name, with its commas and
            braces, comes first, also where the rest of the pattern is in such a folder. Or a comma
            list of URLs of one scheme and host, with braces:
            `https://host/train-{0000..0127}.tar`, `s3://bucket/{a,b}/000.tar`.
        root: the folder that relative local paths start from.

    Raises:
        DataError: no shards, local and remote shards mixed, or a URL that cannot be a shard's.
    """
    sources = _sources(pattern, root)
    urls = [source for source in sources if is_url(source)]
    if not urls:
        return ShardSet.of_files(*_find_files(sources, root))
    if len(urls) != len(sources):
        raise DataError(
            f"{_without_secrets(pattern)} mixes URLs and local files; one data set is in one place"
        )
    urls = sorted(set(urls))
    for url in urls:
        parts = urlsplit(url)
        if "@" in parts.netloc or parts.query or parts.fragment:
            raise DataError(
                f"the URL of {parts.hostname or url} carries a password, a query or a fragment, "
                "which would end up in records; give plain URLs and leave credentials to the "
                "driver's own environment"
            )
        if glob.has_magic(url) or url.endswith("/") or "/../" in url:
            raise DataError(
                f"{url} is not a single shard; name URLs one by one or by ranges such as "
                "{0000..0127}.tar"
            )
    if len({urlsplit(url)[:2] for url in urls}) > 1:
        raise DataError("the shards are on several hosts; one data set has one scheme and one host")
    folders = [os.path.dirname(urlsplit(url).path) or "/" for url in urls]
    folder = os.path.commonpath(folders).rstrip("/")
    scheme, host, *_ = urlsplit(urls[0])
    shared_root = f"{scheme}://{host}{folder}"
    names = tuple(url[len(shared_root) + 1 :] for url in urls)
    return ShardSet(shared_root, names)


def local_shards(pattern: str, root: Path) -> list[Path]:
    """Returns shards to read without an index: files that exist, are not empty and sorted.

    Raises:
        DataError: as `find_shards`; or a shard is missing, empty or behind a URL.
    """
    shards = find_shards(pattern, root)
    paths = [Path(shards.root, name) for name in shards.names]
    bad = [
        path for path in paths if shards.is_remote or not path.is_file() or path.stat().st_size == 0
    ]
    if bad:
        rest = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
        raise DataError(
            f"missing or empty shards: {bad[0]}{rest}; data.streaming needs whole files on this "
            "machine"
        )
    return paths


def require_a_shard(pattern: str, root: Path) -> None:
    """Refuses local shards if none of them exists; the index later checks that all do.

    Raises:
        DataError: as `find_shards`; or all shards are missing.
    """
    shards = find_shards(pattern, root)
    if shards.is_remote:
        return
    paths = [f"{shards.root}/{name}" for name in shards.names]
    if not any(map(os.path.isfile, paths)):
        rest = f" (and {len(paths) - 1} more)" if len(paths) > 1 else ""
        raise DataError(
            f"missing or empty shards: {paths[0]} is missing{rest}; mend the path or fetch it again"
        )


def is_url(text: str) -> bool:
    """Returns whether this names a place that is read over the network."""
    return _URL.match(text) is not None


def _sources(pattern: str, root: Path) -> list[str]:
    """Returns the files, globs, folders or URLs of a comma list, with their braces expanded.

    Commas inside of braces separate nothing.
    """
    if pattern.strip() and os.path.exists(_path(pattern, root)):
        return [pattern]
    folder, _, name = pattern.rpartition("/")
    if ("," in folder or "{" in folder) and os.path.isdir(_path(folder, root)):
        return [f"{folder}/{source}" for source in _sources(name, _path(folder, root))]
    if "::" in pattern or _PIPE.search(pattern):
        raise DataError(
            f"{_without_secrets(pattern)[:200]} is a command or holds ::. Name shards, such as "
            "s3://bucket/train-{000..127}.tar, with commas between them: no command is run, and "
            "all are drawn at one rate, so that one epsilon is true of every example"
        )
    cuts = [-1]
    depth = 0
    for place, character in enumerate(pattern):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if character == "," and depth == 0:
            cuts.append(place)
    if depth != 0:
        raise DataError(f"unbalanced braces in the shard pattern {pattern}")
    parts = [pattern[start + 1 : end].strip() for start, end in pairwise([*cuts, len(pattern)])]
    parts = [part for part in parts if part]
    if not parts:
        raise DataError(
            "no shards given; name tar files, a folder of them or a pattern such as "
            "train-{000..012}.tar"
        )
    sources: list[str] = []
    # Ranges and lists are expanded as a shell does.
    for part in parts:
        if os.path.exists(_path(part, root)):
            sources.append(part)
            continue
        ranges = _RANGE.findall(part)
        is_long = any(max(len(first), len(last)) > _MAX_DIGITS for first, last in ranges)
        sizes = [0 if is_long else int(last) - int(first) + 1 for first, last in ranges]
        expanded: list[str] = []
        # The sizes are checked before any name is made.
        if min(sizes, default=1) > 0 and math.prod(sizes) <= _MAX_SHARDS:
            all_names = braceexpand(part, escape=False)
            expanded = list(itertools.islice(all_names, _MAX_SHARDS + 1))
        if not 0 < len(expanded) <= _MAX_SHARDS:
            raise DataError(
                f"the shard pattern {part[:200]} has an empty range or names more than "
                f"{_MAX_SHARDS:,} shards; name fewer"
            )
        sources += expanded
    return sources


def _without_secrets(pattern: str) -> str:
    """Returns the pattern without passwords and queries of URLs."""
    if "//" not in pattern:
        return pattern
    return re.sub(r"(?<=//)[^/\s,]*@|\?[^\s,]*(?=[\s,]|\Z)", "", pattern)


def _path(source: str, root: Path) -> Path:
    return root / os.path.expanduser(source)


def _find_files(sources: Sequence[str], root: Path) -> tuple[list[Path], list[str]]:
    """Returns the files that local sources name, and the names of unread files in folders.

    Both are sorted, and each file comes once. Files that are named one by one need not exist.
    """
    shards: set[Path] = set()
    unread: set[Path] = set()
    for source in sources:
        path = _path(source, root)
        if path.is_relative_to(root / FASHION_FOLDER):
            unpack_fashion(root)
        # Unlike Path.is_dir, this never raises.
        if os.path.isdir(path):
            entries = sorted(path.iterdir())
            tars = [entry for entry in entries if _is_tar(entry)]
            archives = [
                entry for entry in entries if not _is_tar(entry) and _may_hold_examples(entry)
            ]
            if not tars:
                archive = f", but {archives[0].name}, which is not read" if archives else ""
                raise DataError(
                    f"the folder {path} has no *.tar files{archive}; prepare.py import makes "
                    "shards of a folder of pictures"
                )
            shards.update(tars)
            unread.update(archives)
        elif not os.path.exists(path) and glob.has_magic(source):
            folder = str(path.parent)
            # A folder's own name may have characters of a glob.
            if os.path.isdir(folder):
                folder = glob.escape(folder)
            matches = glob.glob(os.path.join(folder, path.name))
            if not matches:
                raise DataError(
                    f"no shards match {path}: give their folder or pattern, from the current folder"
                )
            shards.update(map(Path, matches))
        else:
            shards.add(path)
    unread -= shards
    unread -= {_path(source, root) for source in sources}
    return sorted(shards), [path.name for path in sorted(unread)]


def _is_tar(path: Path) -> bool:
    """Returns whether a file is named as a tar; `._a.tar` has macOS's attributes of `a.tar`."""
    return path.name.lower().endswith(".tar") and not path.name.startswith(MACOS_PREFIX)


def _may_hold_examples(path: Path) -> bool:
    """Returns whether a path that is not a tar may hold shards.

    It may be an archive, a folder with tars, or a path that cannot be read.
    """
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
