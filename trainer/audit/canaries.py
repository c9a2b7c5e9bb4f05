"""Input canaries: random pictures with random captions that are in the training data or not, one secret coin each.

    OUTPUT/ (0700)   canaries-000000.tar   the canaries whose coin came up "in"; add it to data.shards
                     coins.json (0600)     seed, coins and the shard's hash: keep it from whoever attacks, or trains

A canary is made again from the seed alone, so those that were kept out need no file.
"""

import hashlib
import io
import json
import os
import secrets
import stat
import tarfile
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from data.reading.reader import RawExample
from privacy.ledger.durable import write_new
from trainer.errors import ConfigError

COINS = "coins.json"
SHARD = "canaries-000000.tar"
_BLOCKS = 8  # a picture is 8 x 8 flat squares: it survives any crop and scaling
_MAX_PIXELS = 1024
_MAX_CANARIES = 100_000
_WORDS = 8
_SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]


@dataclass(frozen=True)
class CanaryCoins:
    """What coins.json holds: everything about the canaries, and so as secret as the coins."""

    seed: str
    present: str
    image_size: int
    shard_sha256: str
    caption_field: str | None = None

    @property
    def present_N(self) -> np.ndarray:
        return np.array([coin == "1" for coin in self.present])

    def example(self, index: int) -> RawExample:
        """Canary `index` as the reader would give it."""
        return make_canary(self.seed, index, self.image_size, self.caption_field)


def make_canary(seed: str, index: int, image_size: int, caption_field: str | None) -> RawExample:
    """A picture of random squares and a caption of made-up words, from the seed; the caption where the recipe looks for it."""
    digest = hashlib.sha256(f"{seed}:{index}".encode()).digest()
    rng = np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))
    squares = rng.integers(0, 256, (_BLOCKS, _BLOCKS, 3), dtype=np.uint8)
    picture = Image.fromarray(squares).resize((image_size, image_size), Image.Resampling.NEAREST)
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    text = " ".join("".join(rng.choice(_SYLLABLES, 2)) for _ in range(_WORDS))
    caption = {"txt": text.encode()} if caption_field is None else {"json": json.dumps({caption_field: text}).encode()}
    return RawExample(buffer.getvalue(), {"png": buffer.getvalue(), **caption})


def write_canaries(output: Path, num_canaries: int, image_size: int, caption_field: str | None = None) -> str:
    """Writes shard and coins; returns a line that says what to do with them.

    Raises:
        ConfigError: the folder holds something, or numbers make no sense.
    """
    if not (20 <= num_canaries <= _MAX_CANARIES and _BLOCKS <= image_size <= _MAX_PIXELS):
        raise ConfigError(f"20 to {_MAX_CANARIES:,} canaries of {_BLOCKS} to {_MAX_PIXELS:,} pixels are needed")
    try:
        output.mkdir(parents=True, exist_ok=True, mode=0o700)
        if any(output.iterdir()):
            raise ConfigError(f"{output} is not empty: canaries and coins are never overwritten")
        output.chmod(0o700)
        # From the operating system's entropy: an attacker who guesses coins need not attack the model.
        seed = secrets.token_hex(32)
        present = "".join(str(secrets.randbits(1)) for _ in range(num_canaries))
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            for index in (index for index, coin in enumerate(present) if coin == "1"):
                canary = make_canary(seed, index, image_size, caption_field)
                for extension, payload in canary.fields.items():
                    member = tarfile.TarInfo(f"canary-{index:06d}.{extension}")
                    member.size = len(payload)
                    tar.addfile(member, io.BytesIO(payload))
        shard = buffer.getvalue()
        coins = CanaryCoins(seed, present, image_size, hashlib.sha256(shard).hexdigest(), caption_field)
        # Shard first: coins without their shard would look like canaries that can be trained on.
        write_new(output / SHARD, shard, 0o600)
        write_new(output / COINS, json.dumps(asdict(coins)).encode(), 0o600)
    except OSError as error:
        raise ConfigError(f"{output}: cannot write the canaries: {error.strerror or error}") from error
    count = present.count("1")
    return f"{count} of {num_canaries} canaries are in {output / SHARD}: append it to data.shards, then train"


def read_canaries(folder: Path) -> CanaryCoins:
    """The coins; ConfigError when there are none, or when others could read them."""
    path = folder / COINS
    try:
        mode = path.stat().st_mode
        # A reader of the coins knows the answers, so a file that others can read proves nothing any more.
        coins = CanaryCoins(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path}: no coins of canaries ({error}); write them with audit.py canaries") from error
    if stat.S_IMODE(mode) & 0o077 or os.stat(path).st_uid != os.geteuid():
        raise ConfigError(f"{path}: the coins must belong to you and be readable by nobody else (mode 0600)")
    return coins
