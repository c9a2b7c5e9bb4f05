"""Every fault ends everybody within two minutes, with at most three lines; its ledger passes, and the same command goes on."""

from pathlib import Path

import pytest

from tests.faults.faults import FAULTS
from tests.faults.runs import Fault, NotHere, inflict


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault(fault: Fault, tmp_path: Path) -> None:
    """`python -m tests.faults` prints the same as a table."""
    try:
        ended = inflict(fault, tmp_path)
    except NotHere as error:
        pytest.skip(str(error))
    assert ended.problem is None, (ended, (tmp_path / "log").read_text()[-3000:])
    # DeepSpeed's command has no handler for SIGINT and ends with a traceback of its own.
    assert ended.tracebacks == (fault.name in ("rank raises", "SIGINT to deepspeed")), (tmp_path / "log").read_text()[
        -3000:
    ]
