"""Real ranks that stage shards: two nodes, a kill, another number of ranks; the server's log is equal for two keys.

So it is for held-out examples, which are not staged, whether they are public or not.
"""

import json
import time
from collections import Counter
from pathlib import Path

import pytest

from data.index.build import build_index
from data.index.repack import repack
from tests.data.support.servers import range_server
from tests.distributed.ranks import ROOT
from tests.e2e.launch import alone, count, ledger_lines, start_ranks, train_arguments
from tests.processes import kill_group, run_python

NUM_STEPS = 20


@pytest.mark.full
@pytest.mark.timeout(900)
def test_two_nodes_a_kill_and_another_number_of_ranks(tmp_path: Path) -> None:
    demo = sorted((ROOT / "data" / "demo").glob("train-*.tar"))
    served = tmp_path / "served"
    written = repack(demo, served, shard_bytes=sum(path.stat().st_size for path in demo) // 64)
    assert 64 <= written.shards <= 70
    index = build_index(sorted(served.glob("*.tar")), tmp_path / "index")
    logs = []
    with range_server(served) as server:
        for number in range(2):  # each run draws a key of its own
            server.requests.clear()
            run_dir, stores = tmp_path / f"run{number}", tmp_path / f"stores{number}"
            arguments = train_arguments(
                run_dir, "--engine", "local", f"data.shards={server.url}/train-{{00000..{written.shards - 1:05d}}}.tar",
                f"data.index={index.index_dir}", f"data.staging={stores}/$LOCAL_RANK", f"train.num_steps={NUM_STEPS}",
                "data.num_workers=1", "privacy.expected_batch_size=240", ds_config="ds_configs/zero1.json",
            )  # fmt: skip
            ranks = start_ranks(arguments, 2, tmp_path / f"log{number}")
            deadline = time.monotonic() + 240
            while count(run_dir, "done") < 3 or len(list(stores.glob("*/*/*.tar"))) < written.shards:
                assert time.monotonic() < deadline, (tmp_path / f"log{number}").read_text()[-3000:]
                time.sleep(0.1)
            for rank in ranks:
                kill_group(rank)
            assert count(run_dir, "done") < NUM_STEPS
            logs.append([Counter(server.requests)])
            server.requests.clear()
            ranks = start_ranks(arguments, 3, tmp_path / f"log{number}-again")
            try:
                assert [rank.wait(240) for rank in ranks] == [0] * 3, (tmp_path / f"log{number}-again").read_text()[
                    -3000:
                ]
            finally:
                for rank in ranks:
                    kill_group(rank)
            logs[-1].append(Counter(server.requests))
            steps = {line["step"] for line in ledger_lines(run_dir) if line["type"] == "done"}
            assert steps == set(range(1, NUM_STEPS + 1))
            # The members of every attempt are drawn again by independent code, which knows nothing of staging.
            done = run_python(["launch_scripts/audit.py", "schedule", "--run_dir", str(run_dir), "--json"], timeout=120)
            checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
            assert checks["trained_members"]["outcome"] == "ok", checks["trained_members"]
    assert logs[0] == logs[1]
    first, again = logs[0]
    assert all(span is None for _, span in first | again)
    assert set(first) == {(f"/{entry.name}", None) for entry in index.entries} and first.total() <= written.shards + 1
    # The third node is new and fetches its third; the second now needs what the first had.
    assert again.total() < written.shards


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
