"""A second derivation of the Poisson coins, from the contract's text alone and sharing no code with privacy/sampling/poisson.py.

    K = HKDF-SHA256(key, info = "poisson coins v1\\0" | session nonce | attempt)
    example i is in step t  iff  word (i mod 2) of AES-256_K(t, i div 2) < floor(B 2^64 / n)

One block at a time: slow, and simple enough to be checked by eye.
"""

from __future__ import annotations

import hashlib
import hmac

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes


def coin_key(secret: bytes, nonce: bytes, attempt: int) -> bytes:
    """HKDF-SHA256 (RFC 5869) without salt, one block of output."""
    extracted = hmac.new(bytes(32), secret, hashlib.sha256).digest()
    info = b"poisson coins v1\0" + nonce + attempt.to_bytes(8, "big")
    return hmac.new(extracted, info + b"\x01", hashlib.sha256).digest()


def is_chosen(key: bytes, step: int, example: int, expected_batch_size: int, num_examples: int) -> bool:
    """The coin of one example in one step, before the cap."""
    encryptor = Cipher(algorithms.AES(key), modes.ECB()).encryptor()
    block = encryptor.update(step.to_bytes(8, "big") + (example // 2).to_bytes(8, "big"))
    word = block[8 * (example % 2) :][:8]
    return int.from_bytes(word, "little") < (expected_batch_size << 64) // num_examples
