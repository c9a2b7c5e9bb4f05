"""The same training run from a folder and over HTTP; and what a run says and does when its shards are remote."""

from pathlib import Path

import pytest

from data.index.build import build_index
from tests.data.support.servers import range_server
from tests.distributed.ranks import ROOT
from tests.e2e.launch import alone, count, train_arguments

DEMO = ROOT / "data" / "demo"
SCRIPT = "tests/e2e/repeatable_train.py"


def run(run_dir: Path, shards: str, steps: int) -> tuple[list[str], dict[str, bytes], str]:
    """What the run recorded, its last weights, and what it printed."""
    record = run_dir.with_suffix(".record")
    done = alone(
        train_arguments(run_dir, "--engine", "local", f"data.shards={shards}", f"train.num_steps={steps}"),
        script=SCRIPT,
        RECORD=str(record),
    )
    assert done.returncode == 0, done.stderr
    last = max((run_dir / "checkpoints").glob("step-*"))
    weights = {path.name: path.read_bytes() for path in last.rglob("*.safetensors")}
    assert weights
    return record.read_text().splitlines(), weights, done.stdout


@pytest.mark.full
def test_the_same_run_over_ranges(tmp_path: Path) -> None:
    recorded, weights, said = run(tmp_path / "folder", "data/demo/train-{00000..00002}.tar", 2)
    assert "warning: examples are read from" not in said
    with range_server(DEMO) as server:
        remote, remote_weights, said = run(tmp_path / "remote", f"{server.url}/train-{{00000..00002}}.tar", 2)
        assert f"warning: examples are read from {server.url}" in said and said.count("trust boundary") == 1
        ranges = [span for path, span in server.requests if span is not None]
        assert ranges and len({path for path, _ in server.requests}) == 3
    assert sum(line.startswith("batch ") for line in recorded) >= 2 and len(recorded) > 10
    assert remote == recorded  # batches and reduced clipped sums, in their order
    assert remote_weights == weights


@pytest.mark.full
def test_a_shard_that_vanishes_costs_no_charge(tmp_path: Path) -> None:
    folder = tmp_path / "served"
    folder.mkdir()
    for path in DEMO.glob("train-*.tar"):
        (folder / path.name).write_bytes(path.read_bytes())
    index = build_index(sorted(folder.glob("*.tar")), tmp_path / "index")
    with range_server(folder) as server:
        server.faults.extend([None] * 60 + [410] * 10_000)
        arguments = [f"data.shards={server.url}/train-{{00000..00002}}.tar", f"data.index={index.index_dir}"]
        done = alone(
            train_arguments(tmp_path / "run", "--engine", "local", "train.num_steps=50", *arguments),
            script=SCRIPT,
            RECORD=str(tmp_path / "record"),
        )
    assert done.returncode == 1
    assert done.stderr.count("error") == 1 and "it is gone" in done.stderr and "Traceback" not in done.stderr
    assert count(tmp_path / "run", "intent") == count(tmp_path / "run", "done") > 0
