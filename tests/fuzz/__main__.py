"""`python -m tests.fuzz SEED END FOLDER [FIRST [WHOLE]]`: runs cases FIRST (0) to END - 1 and prints one JSON object.

A single case is printed in full. Cases from WHOLE on end once most refusals would have come and a good command begins to work.

Works in a namespace of its own, where everything but FOLDER can only be read and `full` and `readonly` are file systems that are.
"""

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from tests import loss_distributions
from tests.fuzz import forks
from tests.fuzz.cases import MACHINE, Case, made_toml, make_case, tiny
from tests.fuzz.forks import Ended, run_case
from tests.fuzz.known import KNOWN, SLOW
from tests.fuzz.values import to_json

MOUNTS = """
mount --bind "$0" "$0" && mount -o remount,bind,ro / && mount -o remount,bind,ro /dev && mount -t tmpfs tmpfs /dev/shm &&
mkdir -p "$0/made/full" "$0/made/readonly" && mount -t tmpfs -o size=64k tmpfs "$0/made/full" &&
mount -t tmpfs -o ro tmpfs "$0/made/readonly" && exec "$@"
"""
MANY = 100
"""With as many whole cases, all that are known are tried, and not a sample of the fast ones."""
INSIDE = "FUZZ_IN_A_NAMESPACE"
ENVIRONMENT = {
    INSIDE: "1",
    "OMP_NUM_THREADS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}  # the last as train.py sets it, before torch


def sandbox(folder: Path, *command: str) -> list[str]:
    """The command line that runs `command` where only `folder` can be written to."""
    return [
        "unshare",
        "--user",
        "--map-root-user",
        "--mount",
        "--kill-child",
        "sh",
        "-c",
        MOUNTS,
        str(folder),
        *command,
    ]


def prepare(folder: Path, made: Path) -> None:
    """What good command lines need: a finished run, an index, pictures."""
    import numpy as np
    from PIL import Image

    pictures = made / "pictures"
    pictures.mkdir()
    for number in range(3):
        shade = np.full((24, 24, 3), 80 * number, np.uint8)
        shade[number : number + 9] = 255
        Image.fromarray(shade).save(pictures / f"{number}.png")
        (pictures / f"{number}.txt").write_text("a picture")
    (made / "table.csv").write_text(f"image,caption\n{pictures}/0.png,one\n{pictures}/1.png,two\n")
    (made / "words").write_text("\n".join("abcdefgh") + "\n")
    rng = np.random.default_rng(0)
    images = rng.integers(0, 255, (12, 8, 8, 3)).astype(np.uint8)
    np.savez(made / "digits.npz", images=images, labels=np.arange(12) % 2)
    content = {"recipe": made_toml(tiny()), "machine": to_json(MACHINE).encode(), "study": b""}
    files = "--ds_config {case}/machine.json --recipe {case}/recipe.toml"
    train = f"--engine local {files} --run_dir {{made}}/run train.max_minutes=5.0"
    for script, line in (
        ("train", train),
        ("prepare", "index data/demo/heldout-00000.tar --output {made}/index --workers 1"),
        ("audit", "canaries --output {made}/canaries --num_canaries 20 --image_size 16"),
        ("shared_ledger", "create {made}/shared.jsonl --target_epsilon 8 --delta 1e-9"),
    ):
        ended = run_case(Case(script, line.split(), **content), folder / "case", made)
        assert ended.code == 0, ended.out + ended.err


def main(seed: int, end: int, folder: Path, first: int = 0, whole: int | None = None) -> int:
    whole = end if whole is None else whole
    made = folder / "made"
    made.mkdir(exist_ok=True)
    (made / "full" / "filler").write_bytes(bytes(60_000))
    forks.preload()
    kept = folder / "loss-distributions"  # the one of the session can only be read here
    if loss_distributions.FOLDER in os.environ:
        shutil.copytree(os.environ[loss_distributions.FOLDER], kept, ignore=shutil.ignore_patterns("*.*"))
    kept.mkdir(exist_ok=True)
    os.environ[loss_distributions.FOLDER] = str(kept)
    loss_distributions.share()
    prepare(folder, made)
    codes: Counter[int] = Counter()
    problems, slowest = [], 0.0
    start = time.monotonic()
    known = {} if first else KNOWN
    if known and whole < MANY:
        known = {name: KNOWN[name] for name in random.Random(seed).sample(sorted(KNOWN.keys() - SLOW), 6)}
    for number in [*known, *range(first, end)]:
        case, wanted = known[number] if number in known else (make_case(seed, number), None)
        ended = run_case(case, folder / "case", made, is_whole=number in known or int(number) < whole)
        codes[ended.code] += 1
        if codes.total() % 50 == 0:
            print(f"{codes.total()} cases in {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
        slowest = max(slowest, ended.seconds)
        if end == first + 1 or ended.problem() or wanted not in (None, ended.code):
            problems.append(described(number, case, ended))
            print(json.dumps(problems[-1], indent=1), file=sys.stderr, flush=True)
    seconds = time.monotonic() - start
    print(json.dumps({"codes": codes, "slowest": slowest, "seconds": seconds, "problems": problems}))
    return 0


def described(number: int | str, case: Case, ended: Ended) -> dict[str, object]:
    """For a person: how to see it again, and its ends."""
    said = {
        name: value.decode(errors="replace")[:1500] if isinstance(value, bytes) else value
        for name, value in asdict(case).items()
    }
    said["arguments"] = [
        word if len(word) < 200 else f"{word[:80]}... ({len(word)} characters)" for word in case.arguments
    ]
    if case.recipe == made_toml(tiny()):
        del said["recipe"]
    if case.script != "study":
        del said["study"]
    return {
        "number": number,
        "problem": ended.problem(),
        "code": ended.code,
        "seconds": round(ended.seconds, 1),
        **said,
        "out": ended.out[-300:],
        "err": ended.err[-1800:],
    }


if __name__ == "__main__":
    target = Path(sys.argv[3]).resolve()
    if INSIDE not in os.environ:
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        command = sandbox(target, sys.executable, "-m", "tests.fuzz", *sys.argv[1:])
        sys.exit(subprocess.run(command, env={**os.environ, **ENVIRONMENT}, check=False).returncode)
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), target, *map(int, sys.argv[4:])))
