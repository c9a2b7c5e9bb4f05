"""The ledger's signature: Ed25519 (RFC 8032) over the hash of the ledger's last line, after every checkpoint and at the end.

The public key stands in the `open` record, so a valid signature alone says only that the lines were signed by the key that they
name: whoever writes a ledger anew writes a key of their own into it. It says who signed only to somebody who kept the key's
fingerprint elsewhere when the run began. The operator holds the private key (private/signing.key), and a copy of the run folder
copies it: a signature is the operator's word that nobody else edited the lines, and no proof against the operator.
"""

import hashlib
import secrets
from pathlib import Path
from typing import Self

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from ..errors import PrivacyStateRefused
from ..sampling.keys import read_secret
from . import durable

SIGNING_KEY = "signing.key"
KEY_BYTES = 32
_LABEL = b"dp-trainer ledger head v1\n"


class SigningKey:
    """An Ed25519 private key; `repr` and `str` show the public one alone.

    Attributes:
        public: the raw public key, 64 hex characters.
    """

    def __init__(self, secret: bytes) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(secret)
        self.public = self._key.public_key().public_bytes_raw().hex()

    def __repr__(self) -> str:
        return f"SigningKey(public={self.public})"

    def __reduce__(self) -> str:
        raise TypeError("a signing key is not pickled: it must not reach a checkpoint or another machine's memory")

    @classmethod
    def create(cls, path: Path) -> Self:
        """Draws a key from the operating system and writes it durably, for a run that has no ledger yet.

        A file that is there is left from a start that ended before its ledger named the key: it is replaced.

        Raises:
            PrivacyStateRefused: it cannot be written.
        """
        secret = secrets.token_bytes(KEY_BYTES)
        try:
            durable.unlink(path)
            durable.write_new(path, secret, 0o600)
        except OSError as error:
            raise PrivacyStateRefused(f"{path}: cannot write the signing key: {error.strerror or error}") from error
        return cls(secret)

    @classmethod
    def load(cls, path: Path, public: object) -> Self:
        """Reads the key; PrivacyStateRefused when others may have read it, or when it is not the one that signs for `public`."""
        key = cls(read_secret(path, KEY_BYTES, "signing key"))
        if key.public != public:
            raise PrivacyStateRefused(f"{path}: not the signing key that the ledger names; bring back the run's own")
        return key

    def sign(self, line_hash: str) -> str:
        """The signature of a ledger whose last line has this SHA-256 (hex), as 128 hex characters."""
        return self._key.sign(_LABEL + line_hash.encode()).hex()


def fingerprint(public: str) -> str:
    """SHA-256 of the raw public key, in hex: what somebody keeps elsewhere to recognise the signer by."""
    return hashlib.sha256(bytes.fromhex(public)).hexdigest()


def is_signed(public: str, line_hash: str, signature: str) -> bool:
    """Whether `signature` is that of the key `public` for a ledger whose last line has this SHA-256; all in hex."""
    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(public))
        key.verify(bytes.fromhex(signature), _LABEL + line_hash.encode())
    except (InvalidSignature, ValueError):
        return False
    return True
