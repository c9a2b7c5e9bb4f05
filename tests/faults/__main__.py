"""`python -m tests.faults [NAME ...]`: inflicts each fault on a real run of two ranks under a real launcher, and prints a table.

After the fault nobody may be left within two minutes, the ledger must pass its audit, and the same command must go on.
"""

import sys
import tempfile
from pathlib import Path

from tests.faults.faults import FAULTS
from tests.faults.runs import Ended, Fault, NotHere, inflict

HEADER = (
    "| fault | launcher | exit code | seconds to the end | lines that say why | tracebacks | audit of the ledger | resumed |\n"
    "|---|---|---|---|---|---|---|---|"
)


def row(fault: Fault, ended: Ended) -> str:
    problem = f" **{ended.problem}**" if ended.problem else ""
    resumed = "yes" if fault.resume_code == 7 else f"refused, exit code {fault.resume_code}"
    audit = {0: "passes", None: "no ledger was begun"}.get(ended.audit, f"exit code {ended.audit}")
    said = "<br>".join(line.replace("|", "/") for line in ended.lines) or "none"
    return (
        f"| {fault.name}{problem} | {fault.launcher} | {ended.code} | {ended.seconds:.1f} | {said} | {ended.tracebacks} | "
        f"{audit} | {resumed if ended.resumed else 'NO'} |"
    )


def main(names: list[str]) -> int:
    """The number of faults that did not end as they should."""
    print(HEADER, flush=True)
    bad = 0
    for fault in FAULTS:
        if names and fault.name not in names:
            continue
        with tempfile.TemporaryDirectory(prefix="fault-") as folder:
            try:
                ended = inflict(fault, Path(folder))
            except NotHere as error:
                print(f"| {fault.name} | {fault.launcher} | not here: {error} | | | | | |", flush=True)
                continue
        bad += ended.problem is not None
        print(row(fault, ended), flush=True)
    return bad


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
