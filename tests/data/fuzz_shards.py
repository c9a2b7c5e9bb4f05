"""Indexes and reads mutated shards in a process of bounded memory: `fuzz_shards.py SEED COUNT FOLDER` prints JSON."""

import io
import json
import resource
import sys
import tarfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from data.errors import DataError
from data.examples.examples import CaptionExample
from data.examples.tokenizer import EMBEDDED_TOKENIZER
from data.index.build import build_index
from data.reading.loader import MicroBatchRequest, make_batch
from data.reading.reader import TarReader
from tests.data.conftest import picture

MAKE = CaptionExample(image_size=16, num_tokens=12, tokenizer_path=EMBEDDED_TOKENIZER)
GROWTH_MIB = 1024


def seeds() -> list[bytes]:
    """Good shards of each tar format and image format."""
    made = []
    for fmt in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=fmt) as tar:
            for number, image in enumerate(("JPEG", "PNG", "WEBP", "JPEG")):
                key = f"folder/{number}" if fmt == tarfile.USTAR_FORMAT else f"{'long' * 40}/{number}-é"
                caption = {"txt": b"a caption"} if number % 2 else {"json": b'{"caption": "in json", "x": [1, 2]}'}
                for extension, body in {image.lower(): picture(number, fmt=image), **caption}.items():
                    info = tarfile.TarInfo(f"{key}.{extension}")
                    info.size = len(body)
                    tar.addfile(info, io.BytesIO(body))
        made.append(buffer.getvalue())
    return made


def mutate(data: bytes, rng: np.random.Generator) -> bytes:
    """Flips bytes, cuts, repeats and swaps blocks, or writes numbers into headers whose checksum is then mended."""
    changed = bytearray(data)
    for _ in range(rng.integers(1, 4)):
        match rng.integers(6):
            case 0:
                for position in rng.integers(0, len(changed), rng.integers(1, 20)):
                    changed[position] = rng.integers(256)
            case 1:
                del changed[rng.integers(1, len(changed)) :]
            case 2:
                start = 512 * rng.integers(0, max(1, len(changed) // 512))
                changed[start:start] = changed[start : start + 512 * rng.integers(1, 6)]
            case 3:
                start = 512 * rng.integers(0, max(1, len(changed) // 512))
                del changed[start : start + 512 * rng.integers(1, 4)]
            case _:
                _mutate_header(changed, rng)
        if not changed:
            changed = bytearray(b"\0")
    return bytes(changed)


def _mutate_header(changed: bytearray, rng: np.random.Generator) -> None:
    headers = [at for at in range(0, len(changed) - 511, 512) if changed[at + 257 : at + 262] == b"ustar"]
    if not headers:
        return
    at = int(rng.choice(headers))
    field, length = [(0, 100), (124, 12), (156, 1), (345, 155), (100, 8)][rng.integers(5)]
    choices = [
        rng.bytes(length),
        b"7" * length,
        b"\x80" + rng.bytes(length),
        b"\xff" * length,
        b"LKxgSV015"[rng.integers(9) :],
    ]
    value = choices[rng.integers(len(choices))][:length]
    changed[at + field : at + field + len(value)] = value
    changed[at + 148 : at + 156] = b" " * 8
    changed[at + 148 : at + 156] = b"%06o\0 " % sum(changed[at : at + 512])


def main() -> None:
    seed, count, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    good = seeds()
    outcomes: Counter[str] = Counter()
    slowest = 0.0
    MAKE.padding()  # loads the tokenizer
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (GROWTH_MIB << 20),) * 2)
    for number in range(seed, seed + count):
        rng = np.random.default_rng(number)
        path = folder / "shard.tar"
        path.write_bytes(mutate(good[number % len(good)], rng))
        start = time.perf_counter()
        try:
            table = build_index([path], folder / f"index-{number % 2}")
        except DataError as error:
            outcomes["refused" if "\n" not in str(error) else "refused in several lines"] += 1
        else:
            request = MicroBatchRequest(
                np.arange(len(table)), np.arange(len(table), dtype=np.uint64), np.arange(len(table))
            )
            batch = make_batch(TarReader(table), MAKE, request, len(table))
            assert all(np.isfinite(value.float().numpy()).all() for value in batch.inputs.values()), number
            outcomes["indexed"] += 1
            outcomes["examples"] += len(table)
            outcomes["undecodable"] += batch.num_undecodable
        slowest = max(slowest, time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({**outcomes, "slowest_seconds": slowest, "peak_mib": peak}))


if __name__ == "__main__":
    main()
