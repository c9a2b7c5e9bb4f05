"""Where ledgers and their mirrors may lie: a second copy finds a rollback only if it is another file, away from the first."""

import os
from collections.abc import Mapping
from pathlib import Path

from ..errors import PrivacyConfigError


def require_apart(roles: Mapping[str, Path], run_dir: Path | None = None) -> None:
    """Looks at the names of files before any of them is opened: a pipe blocks its reader, and a file in two roles is no copy.

    Args:
        roles: what each file is for -> the file, which need not be there yet.
        run_dir: a run folder, which none of them may lie in, since what is copied or restored with the run shows no rollback.

    Raises:
        PrivacyConfigError: two roles have one file, also by links; the folder of one is missing; or it is no regular file.
    """
    files: dict[Path | tuple[int, int], str] = {}
    if run_dir is not None:
        inside = (path for pattern in ("*", "private/*") for path in run_dir.glob(pattern) if path.is_file())
        files |= {_inode(path): str(path) for path in inside}  # a link from outside leads to them, too
    for role, path in roles.items():
        if os.path.lexists(path) and not path.is_file():
            raise PrivacyConfigError(
                f"{role} {path}: is no regular file, or a link that leads to none; name another one"
            )
        place = Path(os.path.realpath(path))  # which ends where links lead in a circle
        if run_dir is not None and place.is_relative_to(os.path.realpath(run_dir)):
            raise PrivacyConfigError(
                f"{role} {path}: lies in the run folder {run_dir}, and is rolled back together with it; name a file elsewhere"
            )
        if not place.parent.is_dir():
            raise PrivacyConfigError(f"{role} {path}: its folder is not there; make it, or name another one")
        names: list[Path | tuple[int, int]] = [place]
        if place.exists():
            names.append(_inode(place))
        other = next((files[name] for name in names if name in files), None)
        if other is not None:
            raise PrivacyConfigError(f"{role} {path}: is the same file as {other}; name another one")
        files |= dict.fromkeys(names, f"{role} {path}")


def _inode(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino
