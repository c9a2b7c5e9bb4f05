"""`python -m tests.faults [NAME ...]`: inflicts each fault on a real run of two ranks under a real launcher, and prints a table.

After the fault nobody may be left within two minutes, the ledger must pass its audit, and the same command must go on.
"""

import sys
import tempfile
from pathlib import Path

from tests.faults.faults import FAULTS
from tests.faults.runs import Ended, Fault, NotHere, inflict

COLUMNS = (
    *("fault", "launcher", "exit code", "of ranks that end by themselves", "seconds to the end", "lines that say why"),
    *("tracebacks", "audit of the ledger", "resumed"),
)


def line(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def row(fault: Fault, ended: Ended) -> str:
    problem = f" **{ended.problem}**" if ended.problem else ""
    resumed = "yes" if fault.resume_code == 7 else f"refused, exit code {fault.resume_code}"
    audit = {0: "passes", 6: "contradicts nothing", None: "no ledger was begun"}.get(
        ended.audit, f"exit code {ended.audit}"
    )
    said = "<br>".join(one.replace("|", "/") for one in ended.lines) or "none"
    ranks = ", ".join(map(str, ended.rank_codes)) or "none"
    return line(
        fault.name + problem, fault.launcher, ended.code, ranks, f"{ended.seconds:.1f}", said, ended.tracebacks, audit,
        resumed if ended.resumed else "NO",
    )  # fmt: skip


def main(names: list[str]) -> int:
    """The number of faults that did not end as they should."""
    print(line(*COLUMNS), line(*["---"] * len(COLUMNS)), sep="\n", flush=True)
    bad = 0
    for fault in FAULTS:
        if names and fault.name not in names:
            continue
        with tempfile.TemporaryDirectory(prefix="fault-") as folder:
            try:
                ended = inflict(fault, Path(folder))
            except NotHere as error:
                print(line(fault.name, fault.launcher, f"not here: {error}", *[""] * (len(COLUMNS) - 3)), flush=True)
                continue
        bad += ended.problem is not None
        print(row(fault, ended), flush=True)
    return bad


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
