"""A ledger that cannot be written stops the run before the step it would have charged (contract 9)."""

import shutil
from pathlib import Path

from privacy.ledger.records import read_ledger
from tests.e2e.launch import PLANTED, alone, train_arguments


def test_a_full_disk_or_a_read_only_ledger_stops_the_run_before_its_step(tmp_path: Path) -> None:
    run_dir, noise = tmp_path / "run", tmp_path / "noise"
    arguments = train_arguments(run_dir, "--engine", "local", "heldout.num_captions=0")
    # The first write is the session, the second the intent of step 1.
    done = alone(["full_disk:2", *arguments], script=PLANTED, NOISE_LOG=str(noise))
    assert done.returncode == 4 and "cannot write the ledger: No space left" in done.stderr, (
        done.stderr[-2000:]
    )
    assert not noise.exists()
    state = read_ledger(run_dir / "ledger.jsonl")
    assert (state.num_charged, state.last_done_step, len(state.nonces)) == (0, 0, 1)
    # Root may write anything, so the file is replaced by a folder of the same name: it cannot be opened for writing.
    ledger, aside = run_dir / "ledger.jsonl", tmp_path / "ledger.jsonl"
    shutil.move(ledger, aside)
    ledger.mkdir()
    done = alone(arguments, NOISE_LOG=str(noise))
    assert (
        done.returncode == 4 and "ledger" in done.stderr and done.stderr.strip().count("\n") == 0
    ), done.stderr[-2000:]
    assert not list((run_dir / "checkpoints").glob("step-0*"))
