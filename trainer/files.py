"""Writes that survive a power cut: to a temporary name, fsynced, renamed, and the folder fsynced."""

import os
from pathlib import Path


def fsync_path(path: Path) -> None:
    """Makes a file's or folder's content durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, content: str | bytes) -> None:
    """Replaces `path` by `content`: readers see the old or the new content, never a part."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(content.encode() if isinstance(content, str) else content)
    fsync_path(temporary)
    temporary.replace(path)
    fsync_path(path.parent)
