"""Copies the public files of a run folder (privacy/files/public.py) without further facts."""

import contextlib
import hashlib
import http.client
import os
import re
import stat
import urllib.request
from pathlib import Path

from privacy.card.ledger_card import read_snapshot
from privacy.card.model import LedgerFile
from privacy.checkpoints.read import LATEST, MANIFEST, Checkpoint, require_recorded
from privacy.errors import NotRecorded, printable
from privacy.files.durable import replace_file
from privacy.files.public import open_public, read_public, survey, without_folders
from privacy.ledger.records import MIXED_EXAMPLES, WHY_MIXED, read_ledger
from trainer.errors import ConfigError
from trainer.weights import new_folder

_CHECKPOINT = re.compile(r"step-\d{8,}")
_PART = re.compile(r"rank-\d{5,}-of-\d{5,}\.safetensors")
FIXED_TIME = 946684800
"""2000-01-01 UTC: the modification time of all published files."""
FINGERPRINT = "report/fingerprint"
_REQUEST = "30390201013031300d060960864801650304020105000420", "0101ff"
"""DER before and after the SHA-256 in an RFC 3161 request of version 1.

It asks for the authority's certificate."""


def fingerprint(run_dir: Path, ledger: LedgerFile, authority: str | None) -> list[str]:
    """Writes hashes that no published folder can prove, with a request for their time stamp.

    Returns lines that print the two hashes. A time stamp (RFC 3161) proves that the ledger existed
    at its time, to a reader who trusts the authority.

    Args:
        authority: URL of the authority; None keeps an answer for these hashes that was put beside
            the request by hand.

    Raises:
        ConfigError: the authority gives no time stamp of these values.
    """
    text_name = f"{FINGERPRINT}.txt"
    request_name = f"{FINGERPRINT}.tsq"
    stamp_name = f"{FINGERPRINT}.tsr"
    contents = dict[str, bytes]()
    for name in ("verify.py", stamp_name):
        # The file may be missing, or a link, which is not followed.
        with contextlib.suppress(OSError):
            contents[name] = read_public(run_dir, name)
    verifier_sha256 = hashlib.sha256(contents.get("verify.py", b"")).hexdigest()
    stamp = contents.get(stamp_name, b"")
    text = (
        f"last line of ledger.jsonl: {ledger.last_line_sha256}\n"
        f"SHA-256 of verify.py: {verifier_sha256}\n"
    )
    digest = hashlib.sha256(text.encode()).digest()
    request = bytes.fromhex(_REQUEST[0]) + digest + bytes.fromhex(_REQUEST[1])
    if authority is not None:
        try:
            if not authority.startswith(("http://", "https://")):
                raise ValueError("it is no http:// or https:// address")
            http_request = urllib.request.Request(
                authority, request, {"Content-Type": "application/timestamp-query"}
            )
            with urllib.request.urlopen(http_request, timeout=30) as reply:
                stamp = reply.read(1 << 16)
            if digest not in stamp:
                raise ValueError(f"its answer is no time stamp of {text_name}")
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise ConfigError(
                f"--time_stamp {authority}: {error}; nothing was published"
            ) from error
    replace_file(run_dir / text_name, text.encode())
    replace_file(run_dir / request_name, request)
    lines = [f"keep elsewhere: {line}" for line in text.splitlines()]
    if digest in stamp:
        replace_file(run_dir / stamp_name, stamp)
        lines.append(
            f"time-stamped; to check it: openssl ts -verify -data {text_name} -in {stamp_name} "
            "-CAfile AUTHORITY.pem"
        )
    else:
        (run_dir / stamp_name).unlink(missing_ok=True)
        lines.append(
            f"not time-stamped: --time_stamp URL sends {request_name} to an RFC 3161 authority"
        )
    return lines


def publish(
    run_dir: Path, target: Path, ledger: LedgerFile, *, checkpoints: bool = True
) -> list[str]:
    """Copies the public files into the new folder `target`, and returns lines about all files.

    Every file has mode 0644 and every folder 0755, all have one modification time, and they are
    made in the order of their names. Paths in config.toml lose their folders. The newest whole
    checkpoint is copied too, since it has noised quantities alone.

    Args:
        ledger: the facts of the ledger in the privacy card that was just written.

    Raises:
        ConfigError: `target` is not new or lies in the run folder, a file cannot be copied, the
            run goes on meanwhile, or its examples were mixed.
        NotRecorded: the newest whole checkpoint is not the one that the ledger recorded.
    """
    if run_dir.resolve() in (target.resolve(), *target.resolve().parents):
        raise ConfigError(
            f"{target} lies in the run folder that is to be published; give a folder elsewhere"
        )
    state = read_ledger(run_dir / "ledger.jsonl")
    if state.closed == MIXED_EXAMPLES:
        # metrics.jsonl states the epsilon of each step as it was claimed then.
        raise ConfigError(f"{run_dir}: {WHY_MIXED}: nothing of it is published")
    files = survey(run_dir)
    newest = _newest_whole(run_dir) if checkpoints else None
    step, parts = newest or ("", [])
    names = list(files.public)
    latest = f"checkpoints/{LATEST}"
    size = 0
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
                            recipe = source.read().decode(errors="surrogateescape")
                            short_recipe = without_folders(recipe)
                            file.write(short_recipe.encode(errors="surrogateescape"))
                        while block := source.read(1 << 24):
                            file.write(block)
                size += file.tell()
        copied = read_snapshot(folder / "ledger.jsonl")
        if (copied.state.num_lines, copied.last_hash) != (ledger.lines, ledger.last_line_sha256):
            raise ConfigError(
                f"{run_dir} is being trained: its ledger grew since the card was made; publish "
                "when it stands still"
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
    for name, reason in sorted(files.left_out.items()):
        lines.append(f"left out: {printable(name)}: {reason}")
    if step:
        lines.append(f"left out: checkpoints: all but the newest whole one, {step}")
    elif checkpoints:
        lines.append("left out: checkpoints: there is no whole one")
    else:
        lines.append("left out: checkpoints: --no_checkpoints says so")
    return [*lines, "left out: private"]


def _newest_whole(run_dir: Path) -> tuple[str, list[str]] | None:
    """Returns (folder, files) of the newest checkpoint that matches its manifest, or None.

    All its files are regular and have the names of a checkpoint's files.
    """
    folder = run_dir / "checkpoints"
    if folder.is_symlink() or not folder.is_dir():
        return None
    for path in sorted(folder.iterdir(), reverse=True):
        if _CHECKPOINT.fullmatch(path.name) is None or path.is_symlink() or not path.is_dir():
            continue
        names = sorted(p.name for p in path.iterdir())
        files = [name for name in names if name == MANIFEST or _PART.fullmatch(name)]
        if not all(stat.S_ISREG((path / name).lstat().st_mode) for name in files):
            continue
        try:
            listed_files = set(Checkpoint(path).manifest["files"])
        except ConfigError:
            continue  # damaged, or half removed: an older one may be whole
        if listed_files == set(files) - {MANIFEST}:
            return path.name, files
    return None
