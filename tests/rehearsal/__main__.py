"""Each dimension of the mission at its true size, everything else tiny: on two cores and 24 GiB, without a GPU.

    make rehearsal                    # every part, about four hours
    make rehearsal PART=data          # one part
    python -m tests.rehearsal --part data --anew      # from its first stage, whatever is there

A part that was interrupted goes on where it was. Its files lie in runs/rehearsal/PART. What ran is written into one record,
tests/records/rehearsal.md and .json: a part takes the place of its last run there. Exit 0: all stages hold. Exit 1: one does
not.
"""

import argparse
import importlib
import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.rehearsal.part import ROOT, Part, say
from tests.rehearsal.record import JSON_RECORD, PARTS, commit, machine, page_of


def run_part(name: str, folder: Path, *, anew: bool) -> None:
    """Runs one part and puts it into the record."""
    part = Part(name, folder / name, anew=anew)
    module = importlib.import_module(f"tests.rehearsal.{name}")
    module.rehearse(part)
    record: dict[str, Any] = json.loads(JSON_RECORD.read_text()) if JSON_RECORD.exists() else {}
    record[name] = {
        "about": (module.__doc__ or "").strip().splitlines()[0],
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
        "machine": machine(),
        "sizes": part.sizes,
        "stages": part.stages,
    }
    JSON_RECORD.write_text(
        json.dumps({name: record[name] for name in PARTS if name in record}, indent=1) + "\n"
    )
    JSON_RECORD.with_suffix(".md").write_text(page_of())


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=PARTS, help="this one alone")
    parser.add_argument(
        "--folder",
        type=Path,
        default=ROOT / "runs" / "rehearsal",
        help="where the parts' files lie",
    )
    parser.add_argument("--anew", action="store_true", help="forget the stages that are done")
    parser.add_argument("--run", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        run_part(options.run, options.folder, anew=options.anew)
        return 0
    failed = []
    for name in [options.part] if options.part else PARTS:
        words = [
            sys.executable,
            "-m",
            "tests.rehearsal",
            "--run",
            name,
            "--folder",
            str(options.folder),
        ]
        if subprocess.run(words + ["--anew"] * options.anew, cwd=ROOT, check=False).returncode != 0:
            failed.append(name)
    for name in failed:
        say(f"failed: {name}")
    say(f"record: {JSON_RECORD.with_suffix('.md').relative_to(ROOT)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
