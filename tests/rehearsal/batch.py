"""The project's main command on two ranks, with logical batches of 1,310,720 out of 1.4 million pictures of 8 x 8 pixels.

Two steps are taken; the run is killed in the second, resumed by the same command, verified and audited.
"""

import json
import os
import signal
import struct
import subprocess
import sys
import tarfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data.files import atomic_file
from tests.e2e.launch import count, ledger_lines
from tests.processes import quiet_environment
from tests.rehearsal.part import ROOT, Part, command, say

NUM_EXAMPLES, BATCH = 1_400_000, 1_310_720
EXAMPLES_A_SHARD = 10_000
WORDS = ("bag", "boot", "coat", "dress", "jumper", "sandal", "shirt", "sneaker")
SECONDS_INTO_STEP_2 = 30.0
"""The run is killed so long after its first step is done."""


def rehearse(
    part: Part, num_examples: int = NUM_EXAMPLES, batch: int = BATCH, micro_batch_size: int = 2048
) -> None:
    """Makes the shards, takes step 1, is killed in step 2, takes it again, and has three programs check the run."""
    shards, run_dir, index = part.folder / "shards", part.folder / "run", part.folder / "index"
    python = sys.executable
    settings = [
        f"data.shards={shards}",
        f"data.index={index}",
        f"privacy.expected_batch_size={batch}",
        f"train.micro_batch_size={micro_batch_size}",
    ]
    train = [
        *(Path(sys.executable).parent / "deepspeed", "--num_gpus", "2", "launch_scripts/train.py"),
        *(
            "--ds_config",
            "ds_configs/zero3.json",
            "--recipe",
            "tests/rehearsal/batch.toml",
            "--run_dir",
            run_dir,
        ),
        *settings,
    ]
    part.stage("write shards", lambda: write_shards(shards, num_examples))
    prepare = (python, "launch_scripts/prepare.py", "index", shards, "--output", index)
    part.stage(
        "prepare.py index",
        lambda: {"verdict": command(*prepare).strip().splitlines()[-1].partition(": ")[0]},
    )
    part.stage(
        "dry run",
        lambda: {"dealt": dealt_step(command(*train, "--dry_run", log=part.folder / "dry.log"))},
    )
    part.stage(
        "step 1, killed in step 2",
        lambda: killed_in_step_2(train, run_dir, part.folder / "killed.log"),
    )
    part.stage("resume, step 2", lambda: resumed(train, run_dir, part.folder / "resumed.log"))
    part.stage(
        "verify.py", lambda: last_line(command(python, "-I", run_dir / "verify.py", run_dir))
    )
    for audit in ("ledger", "schedule"):
        words = (python, "launch_scripts/audit.py", audit, "--run_dir", run_dir)
        part.stage(f"audit {audit}", lambda words=words: last_line(command(*words)))
    part.ran(expected_batch_size=batch)


def write_shards(folder: Path, num_examples: int) -> dict[str, Any]:
    """Writes `num_examples` different pictures with captions, 10,000 a shard; shards that are there stay."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, first in enumerate(range(0, num_examples, EXAMPLES_A_SHARD)):
        path = folder / f"train-{number:05}.tar"
        if not path.exists():
            with atomic_file(path) as temporary, temporary.open("wb") as file:
                file.writelines(
                    tar_blocks(number, first, min(first + EXAMPLES_A_SHARD, num_examples))
                )
    paths = list(folder.glob("*.tar"))
    return {
        "examples": num_examples,
        "shards": len(paths),
        "bytes": sum(path.stat().st_size for path in paths),
    }


def tar_blocks(number: int, first: int, stop: int) -> Iterator[bytes]:
    """Yields the blocks of shard `number`: examples `first` to `stop`, each noise as a PNG and two words, and the end."""
    pictures = np.random.default_rng(number).integers(
        0, 256, (stop - first, 8, 8, 3), dtype=np.uint8
    )
    for example in range(first, stop):
        words = (
            f"{WORDS[example % 8]} {WORDS[example // 8 % 8]}".encode()
        )  # of the recipe's tokenizer
        for extension, payload in (("png", png_of(pictures[example - first])), ("txt", words)):
            member = tarfile.TarInfo(f"{example:08}.{extension}")
            member.size = len(payload)
            yield member.tobuf(tarfile.USTAR_FORMAT)
            yield payload + bytes(-len(payload) % 512)
    yield bytes(1024)


def png_of(pixels_HWC: NDArray[np.uint8]) -> bytes:
    """Returns a picture as an uncompressed PNG; PIL takes ten times as long for so small a one."""
    height, width, _ = pixels_HWC.shape
    rows = b"".join(b"\0" + row.tobytes() for row in pixels_HWC)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows, 0)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(content))
        + kind
        + content
        + struct.pack(">I", zlib.crc32(kind + content))
        for kind, content in chunks
    )


def killed_in_step_2(train: list[object], run_dir: Path, log: Path) -> dict[str, Any]:
    """Starts the run, waits for its first step, and kills launcher and ranks while the second one runs."""
    began = time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(
            [str(word) for word in train],
            cwd=ROOT,
            env=quiet_environment(),
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    while count(run_dir, "checkpoint") == 0:
        assert process.poll() is None, log.read_text()[-3000:]
        time.sleep(1)
    to_step_1 = time.monotonic() - began
    time.sleep(SECONDS_INTO_STEP_2)
    assert process.poll() is None, log.read_text()[-3000:]
    end_session(process)
    say(log.read_text()[-2000:])
    kinds = [line["type"] for line in ledger_lines(run_dir)]
    assert kinds.count("done") == 1 and kinds.count("intent") == 1, kinds
    return {"seconds_to_checkpoint_1": round(to_step_1, 1), **private_counts(run_dir)}


def end_session(process: "subprocess.Popen[bytes]") -> None:
    """Kills every process of the started session: the launcher's ranks have sessions of their own, so they are asked for."""
    children = [int(line) for line in pids_of("launch_scripts/train.py")]
    os.killpg(process.pid, signal.SIGKILL)
    for pid in children:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()


def pids_of(words: str) -> list[str]:
    """The processes of this user whose command line holds `words` and the part's recipe."""
    listed = subprocess.run(
        ["pgrep", "-f", f"{words}.*rehearsal/batch.toml"],
        capture_output=True,
        text=True,
        check=False,
    )
    return listed.stdout.split()


def resumed(train: list[object], run_dir: Path, log: Path) -> dict[str, Any]:
    """Gives the same command again: it takes the second step from the checkpoint of the first, and ends the run."""
    command(*train, log=log, OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore")
    lines = ledger_lines(run_dir)
    kinds = [line["type"] for line in lines]
    assert kinds.count("done") == 2 and kinds.count("session") == 2, kinds
    assert 2 <= kinds.count("intent") <= 3, kinds
    nonces = [line["nonce"] for line in lines if line["type"] == "session"]
    assert len(set(nonces)) == 2, nonces
    return private_counts(run_dir)


SHOWN = {
    "train/batch_size": "examples",
    "train/undecodable_examples": "undecodable",
    "performance/step_seconds": "step_seconds",
    "performance/examples_per_second": "examples_per_second",
    "performance/data_wait_fraction": "data_wait_fraction",
    "performance/peak_memory_gib": "peak_gib_a_rank",
}
"""Of the private read-out of a step, and how the record calls it."""


def private_counts(run_dir: Path) -> dict[str, Any]:
    """Realised batch, seconds and memory of the last step, from the private read-out."""
    last = json.loads((run_dir / "private" / "metrics.jsonl").read_text().splitlines()[-1])
    return {name: last[key] for key, name in SHOWN.items()}


def dealt_step(output: str) -> str:
    """What the dry run says of the step that it dealt, unfolded."""
    words = " ".join(output.split())
    start = words.index("one step is dealt")
    return words[start : words.index("would take", start)].strip()


def last_line(output: str) -> dict[str, Any]:
    """The last line of a program's output: its verdict."""
    return {"verdict": output.strip().splitlines()[-1]}
