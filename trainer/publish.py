"""A copy of the public files of a run folder (privacy/files/public.py) that tells nothing else."""

import contextlib
import hashlib
import http.client
import os
import re
import stat
import urllib.request
from pathlib import Path

from privacy.card.model import LedgerFile
from privacy.card.report import read_snapshot
from privacy.checkpoints.read import LATEST, MANIFEST, Checkpoint, require_recorded
from privacy.errors import NotRecorded, printable
from privacy.files.durable import replace_file
from privacy.files.public import open_public, read_public, survey, without_folders
from trainer.errors import ConfigError
from trainer.weights import new_folder

_CHECKPOINT = re.compile(r"step-\d{8,}")
_PART = re.compile(r"rank-\d{5,}-of-\d{5,}\.safetensors")
FIXED_TIME = 946684800
"""2000-01-01 UTC: the modification time of everything that is published."""
FINGERPRINT = "report/fingerprint"
_REQUEST = "30390201013031300d060960864801650304020105000420", "0101ff"
"""DER around the SHA-256 in an RFC 3161 request: version 1, and the authority's certificate is asked for."""


def fingerprint(run_dir: Path, ledger: LedgerFile, authority: str | None) -> list[str]:
    """Writes the two values that no published folder can prove, and an RFC 3161 request for a time stamp of them.

    Returns lines that print them. A time stamp shows whoever trusts the authority that the ledger stood there at its time.

    Args:
        authority: where the request is sent; None keeps an answer that was put beside it by hand, if it is one for these values.

    Raises:
        ConfigError: the authority gives no time stamp of these values.
    """
    text, asked, stamp = (f"{FINGERPRINT}.{kind}" for kind in ("txt", "tsq", "tsr"))
    found = {}
    for name in ("verify.py", stamp):
        with contextlib.suppress(OSError):  # it is not there; or a link, which is not followed
            found[name] = read_public(run_dir, name)
    judge, answer = hashlib.sha256(found.get("verify.py", b"")).hexdigest(), found.get(stamp, b"")
    values = (
        f"last line of ledger.jsonl: {ledger.last_line_sha256}\nSHA-256 of verify.py: {judge}\n"
    )
    digest = hashlib.sha256(values.encode()).digest()
    request = bytes.fromhex(_REQUEST[0]) + digest + bytes.fromhex(_REQUEST[1])
    if authority is not None:
        try:
            if not authority.startswith(("http://", "https://")):
                raise ValueError("it is no http:// or https:// address")
            sent = urllib.request.Request(
                authority, request, {"Content-Type": "application/timestamp-query"}
            )
            with urllib.request.urlopen(sent, timeout=30) as reply:
                answer = reply.read(1 << 16)
            if digest not in answer:
                raise ValueError(f"its answer is no time stamp of {text}")
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise ConfigError(
                f"--time_stamp {authority}: {error}; nothing was published"
            ) from error
    answer = answer if digest in answer else b""
    for name, content in ((text, values.encode()), (asked, request), (stamp, answer)):
        replace_file(run_dir / name, content) if content else (run_dir / name).unlink(
            missing_ok=True
        )
    lines = [f"keep elsewhere: {line}" for line in values.splitlines()]
    if not answer:
        return [
            *lines,
            f"not time-stamped: --time_stamp URL sends {asked} to an RFC 3161 authority",
        ]
    return [
        *lines,
        f"time-stamped; to check it: openssl ts -verify -data {text} -in {stamp} -CAfile AUTHORITY.pem",
    ]


def publish(
    run_dir: Path, target: Path, ledger: LedgerFile, *, checkpoints: bool = True
) -> list[str]:
    """Copies what is public into the new folder `target`; returns lines about what was copied and what was left out.

    Every file has mode 0644 and every folder 0755, all have one modification time, and they are made in the order of their
    names. Paths in config.toml lose their folders. The newest whole checkpoint goes with them: it holds noised quantities alone.

    Args:
        ledger: what the privacy card that was just written says of the ledger.

    Raises:
        ConfigError: `target` is not new or lies in the run folder, a file cannot be copied, or the run goes on meanwhile.
        NotRecorded: the newest whole checkpoint is not the one that the ledger recorded.
    """
    if run_dir.resolve() in (target.resolve(), *target.resolve().parents):
        raise ConfigError(
            f"{target} lies in the run folder that is to be published; give a folder elsewhere"
        )
    found = survey(run_dir)
    step, parts = (_newest_whole(run_dir) if checkpoints else None) or ("", [])
    names, latest, size = list(found.public), f"checkpoints/{LATEST}", 0
    if step:
        names += [latest, *(f"checkpoints/{step}/{part}" for part in parts)]
    with new_folder(target) as folder:
        for name in sorted(names):
            copy = folder / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            with copy.open("xb") as file:
                if name == latest:
                    file.write(f"{step}\n".encode())
                else:
                    with open_public(run_dir, name) as source:
                        if name == "config.toml":
                            kept = without_folders(source.read().decode(errors="surrogateescape"))
                            file.write(kept.encode(errors="surrogateescape"))
                        while block := source.read(1 << 24):
                            file.write(block)
                size += file.tell()
        copied = read_snapshot(folder / "ledger.jsonl")
        if (copied.state.num_lines, copied.last_hash) != (ledger.lines, ledger.last_line_sha256):
            raise ConfigError(
                f"{run_dir} is being trained: its ledger grew since the card was made; publish when it stands still"
            )
        if step:
            try:
                require_recorded(folder / "checkpoints" / step, copied.state)
            except NotRecorded as error:
                place = str(error).replace(str(folder), str(run_dir))
                raise NotRecorded(f"{place}; --no_checkpoints publishes the other files") from error
        for path in (*folder.rglob("*"), folder):
            path.chmod(0o755 if path.is_dir() else 0o644)
            os.utime(path, (FIXED_TIME, FIXED_TIME))
    lines = [f"published: {target} ({len(names)} files, {size:,} bytes)"]
    lines += [
        f"left out: {printable(name)}: {reason}" for name, reason in sorted(found.left_out.items())
    ]
    if not step:
        lines.append(
            f"left out: checkpoints: {'there is no whole one' if checkpoints else '--no_checkpoints says so'}"
        )
    else:
        lines.append(f"left out: checkpoints: all but the newest whole one, {step}")
    return [*lines, "left out: private"]


def _newest_whole(run_dir: Path) -> tuple[str, list[str]] | None:
    """(folder, files) of the newest checkpoint that is what its manifest says, all of them regular and named as they must be."""
    folder = run_dir / "checkpoints"
    if folder.is_symlink() or not folder.is_dir():
        return None
    for path in sorted(folder.iterdir(), reverse=True):
        if _CHECKPOINT.fullmatch(path.name) is None or path.is_symlink() or not path.is_dir():
            continue
        files = sorted(
            p.name for p in path.iterdir() if p.name == MANIFEST or _PART.fullmatch(p.name)
        )
        if not all(stat.S_ISREG((path / name).lstat().st_mode) for name in files):
            continue
        try:
            named = set(Checkpoint(path).manifest["files"])
        except ConfigError:
            continue  # damaged, or half removed: an older one may be whole
        if named == {name for name in files if name != MANIFEST}:
            return path.name, files
    return None
