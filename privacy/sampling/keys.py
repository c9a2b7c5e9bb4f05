"""The sampling key: 32 secret bytes from which every coin and every per-example key is derived.

Amplification by sampling assumes that the members of a batch stay secret outside of the trust
boundary. So the key is in a 0600 file, and in no checkpoint, log, environment variable or ledger
(the ledger holds a commitment). Derivation is HKDF-SHA256 (RFC 5869) with one info string per
purpose, so that no two purposes share a key.
"""

import hashlib
import hmac
import os
import secrets
import stat
from pathlib import Path
from typing import Self

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from ..errors import PrivacyStateRefused, refusing
from ..files import durable

KEY_BYTES = 32
NONCE_BYTES = 16
_COMMITMENT = b"sampling key commitment v1\0"


class SamplingKey:
    """Holds 32 secret bytes, which `repr` and `str` never show."""

    def __init__(self, secret: bytes) -> None:
        if len(secret) != KEY_BYTES:
            raise PrivacyStateRefused(f"a sampling key has {KEY_BYTES} bytes, not {len(secret)}")
        self._secret = bytes(secret)

    def __repr__(self) -> str:
        return f"SamplingKey(commitment={self.commitment()[:12]}...)"

    def __reduce__(self) -> str:
        raise TypeError(
            "a sampling key is not pickled: it must not reach a checkpoint or another machine's "
            "memory"
        )

    @classmethod
    def create(cls, path: Path | str) -> Self:
        """Draws a key from the operating system and writes it durably.

        Raises:
            PrivacyStateRefused: `path` exists, or cannot be written.
        """
        key = cls(secrets.token_bytes(KEY_BYTES))
        with refusing(f"{path}: cannot write the sampling key"):
            try:
                durable.write_new(Path(path), key._secret, 0o600)
            except FileExistsError as error:
                raise PrivacyStateRefused(
                    f"{path}: exists; a sampling key is never overwritten"
                ) from error
        return key

    @classmethod
    def stage(cls, path: Path | str) -> Self:
        """Writes a new key next to `path`; `publish` names it once the ledger has committed to it.

        The order stage -> ledger `open` -> publish leaves no moment at which a crash makes a run
        folder unusable. Without a ledger a staged key was never used, and is replaced. With one,
        `load(path, commitment)` reads it, and `publish` names it once the ledger is durable.
        """
        path = Path(path)
        if path.exists():
            raise PrivacyStateRefused(
                f"{path}: a sampling key without its ledger; restore the ledger.jsonl of its run "
                "folder"
            )
        staged_path = _staged(path)
        durable.unlink(staged_path)
        return cls.create(staged_path)

    @staticmethod
    def publish(path: Path | str) -> None:
        """Gives a staged key its final name; a key that has it stays."""
        path = Path(path)
        if not path.exists() and _staged(path).exists():
            durable.rename(_staged(path), path)
        durable.fsync_directory(path.parent)

    @classmethod
    def load(cls, path: Path | str, commitment: str | None = None) -> Self:
        """Reads the key.

        Writes nothing: a key gets its name (`publish`) only once the ledger that committed to it is
        durable, and the ledger of a killed program is durable only once it is opened. A power cut
        in between would lose the ledger and keep the key.

        Args:
            path: a regular file of 32 bytes, owned by this user, without permissions for others.
            commitment: the ledger's `key_commitment`. If there is no key, a staged one is read.

        Raises:
            PrivacyStateRefused: others may have read the key, or it contradicts the commitment.
        """
        path = Path(path)
        if commitment is not None and not path.exists() and _staged(path).exists():
            path = _staged(path)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError as error:
            reason = f"cannot read the sampling key: {error.strerror or error}"
            if isinstance(error, FileNotFoundError):
                reason += "; a published copy has none: take the run's own folder"
            raise PrivacyStateRefused(f"{path}: {reason}") from error
        try:
            status = os.fstat(descriptor)
            mode = status.st_mode & 0o777
            if not stat.S_ISREG(status.st_mode):
                raise PrivacyStateRefused(f"{path}: the sampling key must be a regular file")
            if mode & 0o077:
                raise PrivacyStateRefused(
                    f"{path}: readable by others (mode {mode:04o}); it must be 0600"
                )
            if status.st_uid != os.geteuid():
                raise PrivacyStateRefused(
                    f"{path}: owned by user {status.st_uid}, not by the user of this process"
                )
            if status.st_size != KEY_BYTES:
                raise PrivacyStateRefused(
                    f"{path}: {status.st_size} bytes; a sampling key has {KEY_BYTES}"
                )
            key = cls(os.read(descriptor, KEY_BYTES + 1))
        finally:
            os.close(descriptor)
        if commitment is not None and not hmac.compare_digest(key.commitment(), commitment):
            raise PrivacyStateRefused(f"{path}: not the sampling key that the ledger committed to")
        return key

    def commitment(self) -> str:
        """Returns the SHA-256 of a label and the key, in hex.

        It is binding, and hiding because the key is 256 random bits.
        """
        return hashlib.sha256(_COMMITMENT + self._secret).hexdigest()

    def hmac(self, data: bytes) -> str:
        """Returns the HMAC-SHA256 of `data` in hex, the one form of private data in the ledger."""
        return hmac.new(self._derive(b"ledger hmac v1\0"), data, hashlib.sha256).hexdigest()

    def coin_key(self, session_nonce: bytes, attempt: int) -> bytes:
        """Returns the AES-256 key of the Poisson coins of one attempt in one start."""
        return self._derive(b"poisson coins v1\0" + _context(session_nonce, attempt))

    def example_key(self, session_nonce: bytes, attempt: int) -> bytes:
        """Returns the AES-256 key of an attempt's example keys (augmentation, dropout, masking)."""
        return self._derive(b"example keys v1\0" + _context(session_nonce, attempt))

    def row_key(self, session_nonce: bytes, attempt: int) -> bytes:
        """Returns the AES-256 key of the rows of one attempt's members (rows.py)."""
        return self._derive(b"rows of members v1\0" + _context(session_nonce, attempt))

    def schedule_key(self) -> bytes:
        """Returns the AES-256 key of a schedule for all sessions and attempts (shuffle.py)."""
        return self._derive(b"epoch schedule v1\0")

    def _derive(self, info: bytes) -> bytes:
        return HKDF(algorithm=hashes.SHA256(), length=32, salt=None, info=info).derive(self._secret)


def _context(session_nonce: bytes, attempt: int) -> bytes:
    assert len(session_nonce) == NONCE_BYTES, (
        "another length could give two pairs of nonce and attempt one context"
    )
    return session_nonce + attempt.to_bytes(8, "big")


def _staged(path: Path) -> Path:
    return path.with_name(path.name + ".staged")
