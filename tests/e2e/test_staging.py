"""A real run that stages its shards, and reads held-out examples where they lie: the server's log is equal for two keys.

`tests/data/test_staging.py` has two nodes, a kill and another number of ranks.
"""

import json
from pathlib import Path

from data.index.build import build_index
from tests.data.support.servers import range_server
from tests.distributed.ranks import ROOT
from tests.e2e.launch import alone, train_arguments


def test_requests_for_private_heldout_data_say_nothing_about_members(tmp_path: Path) -> None:
    """The same examples in the same order at every evaluation; the shards of the training data are staged."""
    demo = ROOT / "data" / "demo"
    index = build_index(sorted(demo.glob("train-*.tar")), tmp_path / "index")
    logs, members = [], []
    with range_server(demo) as server:
        for number in range(2):  # each run draws a key of its own
            server.requests.clear()
            run_dir = tmp_path / f"run{number}"
            done = alone(train_arguments(
                run_dir, "--engine", "local", f"data.shards={server.url}/train-{{00000..00002}}.tar",
                f"data.index={index.index_dir}", f"data.staging={tmp_path}/store{number}", "data.remote.connections=1",
                f"heldout.shards={server.url}/heldout-00000.tar", "train.num_steps=2", "heldout.every_steps=1",
                ds_config="ds_configs/zero1.json",
            ))  # fmt: skip
            assert done.returncode == 0, done.stderr
            public, private = ((run_dir / name).read_text() for name in ("metrics.jsonl", "private/metrics.jsonl"))
            assert "heldout/loss" in private and "heldout/loss" not in public, "naming the data made them private"
            staged = [request for request in server.requests if "train" in request[0]]
            logs.append((staged, [request for request in server.requests if "heldout" in request[0]]))
            members.append([line.get("train/loss") for line in map(json.loads, private.splitlines())])
    assert members[0] != members[1], "other keys"
    assert logs[0] == logs[1]
    staged, heldout = logs[0]
    assert [path for path, span in staged] == [f"/{entry.name}" for entry in index.entries]
    assert all(span is None for _, span in staged)
    spans = [span for _, span in heldout if span is not None]
    each = len(set(spans))
    assert each >= 16 and len(spans) >= 3 * 16
