"""What every source delivers: items, in parts that can be read apart from each other."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, Protocol

REASONS = {
    "unsafe_path": "the image's path leaves the folder, or goes through a symbolic link",
    "missing_image": "there is no image, or no such file",
    "undecodable_image": "the image cannot be decoded",
    "large_image": "the image has more than {} million pixels (--max_megapixels)",
    "small_image": "the image's shorter side is below the limit",
    "no_caption": "no caption is left after cleaning, and there is no label",
    "duplicate_key": "an earlier item of the source has the same key",
    "exact_duplicate": "pixels and caption equal those of an earlier example",
    "near_duplicate": "the picture looks like that of an earlier example (--keep_near_duplicates)",
    "no_owner": "the owner is not given",
    "owner_limit": "its owner has reached the limit",
}
"""Why items are dropped, in the order in which it is looked at."""


class Item(NamedTuple):
    """One image with its captions.

    Attributes:
        key: its name in the source, for the report only.
        image: a file, bytes, or None where there is none.
        captions: all of them, uncleaned.
        owner: whose it is, where the source says.
        problem: a key of REASONS, where it cannot be used at all.
        label: number of its class, where the source says.
    """

    key: str
    image: Path | bytes | None
    captions: tuple[str, ...]
    owner: str | None = None
    problem: str | None = None
    label: int | None = None


class Part(Protocol):
    """A picklable piece of a source, read by a worker."""

    def items(self) -> Iterator[Item]:
        """Its items, always in the same order."""


@dataclass(frozen=True)
class ListedPart:
    """Items whose images are files."""

    listed: tuple[Item, ...]

    def items(self) -> Iterator[Item]:
        return iter(self.listed)


class Source(NamedTuple):
    """Everything to import.

    Attributes:
        parts: in order.
        fingerprint: changes when the source does; a resumed import insists on the same.
        other_files: how many files of a folder are neither pictures of a known format nor texts of one, by suffix.
    """

    parts: Sequence[Part]
    fingerprint: str
    other_files: Mapping[str, int] = MappingProxyType({})


def in_parts(items: Sequence[Item], size: int = 500) -> list[Part]:
    """Cuts a list of items."""
    return [ListedPart(tuple(items[start : start + size])) for start in range(0, len(items), size)]


def file_item(
    root: Path, name: str, captions: tuple[str, ...], owner: str | None = None, label: int | None = None
) -> Item:
    """An item whose image is a file below `root` (a resolved folder); a name that leads elsewhere is its problem."""
    path = root / name
    unsafe = not name or "\0" in name or os.path.isabs(name) or ".." in Path(name).parts
    if unsafe or os.path.realpath(path) != str(path):
        return Item(name, None, captions, owner, "unsafe_path" if name else "missing_image")
    return Item(name, path, captions, owner, label=label)
