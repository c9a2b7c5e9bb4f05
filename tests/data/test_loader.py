"""Plans in, micro-batches out: order, padding, workers, failures."""

import errno
import itertools
import multiprocessing
import os
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from data.batch import Batch
from data.errors import DataError, ReadError
from data.examples.examples import CaptionExample, MakeExample
from data.examples.tokenizer import EMBEDDED_TOKENIZER
from data.index.build import build_index
from data.index.tar_index import ExampleTable
from data.reading.loader import Loader, MicroBatches, MicroBatchRequest, eval_batches
from data.reading.reader import RawExample, TarReader
from privacy.step.batches import StepBatch
from tests.data.conftest import ROOT
from tests.processes import Forked, kill_group

MAKE = CaptionExample(image_size=16, num_tokens=12, tokenizer_path=EMBEDDED_TOKENIZER)


@pytest.fixture(autouse=True)
def no_worker_is_left() -> Iterator[None]:
    """Workers ignore SIGTERM: those of a step that failed would be waited for, ten seconds, when it is collected."""
    yield
    for child in multiprocessing.active_children():
        child.kill()


def plans(pulls: list[int] | None = None) -> Iterator[StepBatch]:
    """Five steps of two micro-batches of three; counts how many were pulled."""
    rng = np.random.default_rng(0)
    for step in range(5):
        if pulls is not None:
            pulls.append(step)
        ids = np.sort(rng.choice(12, size=[6, 0, 2, 5, 3][step], replace=False))
        keys = rng.integers(0, 2**63, len(ids)).astype(np.uint64)
        yield StepBatch(step, ids.astype(np.int64), keys, 2)


def collect(table: ExampleTable, num_workers: int) -> list[tuple[int, list[Batch]]]:
    loader = Loader(
        table, MAKE, micro_batch_size=3, num_workers=num_workers, prefetch_micro_batches=3
    )
    return [(plan.step, list(batches)) for plan, batches in loader.steps(plans())]


def test_same_batches_for_any_number_of_workers(table: ExampleTable) -> None:
    alone, helped = collect(table, 0), collect(table, 2)
    assert [step for step, _ in alone] == [step for step, _ in helped] == list(range(5))
    for (_, batches), (_, others) in zip(alone, helped, strict=True):
        assert len(batches) == len(others) == 2
        for one, two in zip(batches, others, strict=True):
            assert (
                one.inputs.keys()
                == two.inputs.keys()
                == {"images_BCHW", "tokens_BL", "token_mask_BL"}
            )
            assert all(torch.equal(one.inputs[name], two.inputs[name]) for name in one.inputs)
            assert (
                torch.equal(one.is_padding_B, two.is_padding_B)
                and one.num_undecodable == two.num_undecodable
            )


def test_what_no_key_changes_is_read_and_decoded_once_as_far_as_it_fits(
    table: ExampleTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same batches as without; only what fits stays, and nothing where a key draws a crop or a caption."""
    read: list[int] = []
    read_all = TarReader.read_all
    monkeypatch.setattr(
        TarReader, "read_all", lambda self, ids: (read.extend(ids), read_all(self, ids))[1]
    )
    whole = MicroBatchRequest(np.arange(12), np.arange(12, dtype=np.uint64), np.arange(12))
    everything = set(range(12))
    for changes, room, kept in (
        ({"augment": False}, 1 << 20, everything),
        ({"augment": False}, 7000, {0, 1}),
        ({}, 1 << 20, set()),
        ({"augment": False, "parallel_share": 0.5}, 1 << 20, set()),
    ):
        batches = MicroBatches(table, replace(MAKE, **changes), 12, room)
        first = batches[whole]
        read.clear()
        second = batches[whole]
        bad = set(first.is_padding_B.nonzero().flatten().tolist())  # looked at again
        assert set(read) == everything - kept | bad and 0 < len(bad) < 5
        assert (
            torch.equal(first.is_padding_B, second.is_padding_B)
            and first.num_undecodable == second.num_undecodable
        )
        assert all(torch.equal(first.inputs[name], second.inputs[name]) for name in first.inputs)


def test_examples_stand_in_the_rows_of_the_plan(table: ExampleTable) -> None:
    """Micro-batches of any filling, an empty one among them; 5 and 8 cannot be decoded."""
    ids, rows = np.array([0, 4, 5, 8, 10], dtype=np.int64), np.array([11, 2, 0, 9, 3])
    plan = StepBatch(0, ids, np.arange(5, dtype=np.uint64), 4, rows)
    loader = Loader(table, MAKE, micro_batch_size=4, num_workers=0)
    [(_, batches)] = [(got, list(batches)) for got, batches in loader.steps(iter([plan]))]
    assert [batch.num_undecodable for batch in batches] == [1, 0, 1, 0]
    for batch in batches:
        assert {
            name: (tuple(value.shape), value.dtype) for name, value in batch.inputs.items()
        } == {
            "images_BCHW": ((4, 3, 16, 16), torch.float32),
            "tokens_BL": ((4, 12), torch.int64),
            "token_mask_BL": ((4, 12), torch.bool),
        }
        assert (batch.inputs["token_mask_BL"][batch.is_padding_B].sum(1) == 2).all(), (
            "an empty caption"
        )
    whole = torch.cat([batch.inputs["images_BCHW"] for batch in batches])
    is_padding = torch.cat([batch.is_padding_B for batch in batches])
    assert (~is_padding).nonzero().flatten().tolist() == [2, 3, 11]
    for example, key, row in ((0, 0, 11), (4, 1, 2), (10, 4, 3)):
        assert np.array_equal(
            whole[row].numpy(), MAKE(TarReader(table).read(example), key)["images_CHW"]
        )
    assert not whole[is_padding].any()


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # torch's half-made loader
def test_a_machine_that_lets_no_worker_start_is_named(
    table: ExampleTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queues of processes lie in /dev/shm, and the system names no file when it is read-only or full."""

    def refused(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("multiprocessing.synchronize._multiprocessing.SemLock", refused)
    with pytest.raises(
        ReadError,
        match=r"workers cannot start: Read-only file system; they need /dev/shm, .* data\.num_workers=0",
    ):
        collect(table, num_workers=2)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_plans_are_pulled_in_step_with_consumption(table: ExampleTable, num_workers: int) -> None:
    pulls: list[int] = []
    loader = Loader(
        table, MAKE, micro_batch_size=3, num_workers=num_workers, prefetch_micro_batches=2
    )
    seen = []
    for plan, batches in loader.steps(plans(pulls)):
        for index, _ in enumerate(batches):
            seen.append((plan.step, index, len(pulls)))
    ahead = 2 if num_workers else 0
    assert seen == [(i // 2, i % 2, min(5, (i + ahead) // 2 + 1)) for i in range(10)]


def test_unread_micro_batches_are_passed_over_and_waiting_is_measured(table: ExampleTable) -> None:
    loader = Loader(table, MAKE, micro_batch_size=3, num_workers=0)
    steps = [
        (plan.step, next(batches).is_padding_B.tolist(), loader.data_wait)
        for plan, batches in loader.steps(plans())
    ]
    assert [step for step, _, _ in steps] == list(range(5))
    assert steps[1][1] == [True] * 3 and steps[2][1] == [False, False, True]
    assert all(wait > 0 for _, _, wait in steps)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_read_errors_keep_type_and_message(
    num_workers: int, shards: list[Path], tmp_path: Path
) -> None:
    copy = tmp_path / "copy.tar"
    copy.write_bytes(shards[0].read_bytes())
    table = build_index([copy], tmp_path / "index")
    copy.unlink()
    with pytest.raises(ReadError, match=r"cannot read .*copy\.tar") as caught:
        read_one(table, MAKE, num_workers=num_workers)
    assert "\n" not in str(caught.value) and caught.value.exit_code == 1


def read_one(table: ExampleTable, make: MakeExample, key: int = 1, num_workers: int = 1) -> None:
    plan = StepBatch(0, np.array([1]), np.array([key], dtype=np.uint64), 1)
    list(Loader(table, make, micro_batch_size=1, num_workers=num_workers).steps(iter([plan])))


@dataclass(frozen=True)
class Failing:
    """Ends its process at example key 100; has no memory at keys 101 and 102."""

    def __call__(self, raw: RawExample, key: int, /) -> dict[str, np.ndarray]:
        if key == 100:
            os._exit(9)
        if key == 101:
            raise MemoryError
        if key == 102:  # nothing more can be mapped, whoever asks
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            resource.setrlimit(
                resource.RLIMIT_AS, (pages * resource.getpagesize(), resource.RLIM_INFINITY)
            )
        return self.padding()

    def draws(self, raw: RawExample, /) -> bool:
        return True

    def padding(self) -> dict[str, np.ndarray]:
        return {"label": np.zeros((), dtype=np.int64)}


LITTLE = "in a data worker|a data worker has no shared memory|a data worker died"


@pytest.mark.parametrize(
    ("key", "error", "said"),
    [
        (100, ReadError, "worker died"),
        (101, MemoryError, "in a data worker"),
        pytest.param(102, (MemoryError, ReadError), LITTLE, marks=pytest.mark.full),
    ],
)
def test_a_worker_that_dies_or_has_no_memory(
    table: ExampleTable, key: int, error: type[Exception] | tuple[type[Exception], ...], said: str
) -> None:
    with pytest.raises(error, match=said) as caught:
        read_one(table, Failing(), key)
    assert "Traceback" not in str(caught.value)


ORPHANS = """
import os, sys
sys.path.insert(0, sys.argv[1])
if __name__ == "__main__":
    from pathlib import Path
    import multiprocessing, numpy as np
    from data.reading.loader import Loader
    from privacy.step.batches import StepBatch
    from data.index.tar_index import ExampleTable
    from tests.data.test_loader import Failing
    table = ExampleTable.open(Path(sys.argv[2]), Path(sys.argv[3]))
    loader = Loader(table, Failing(), micro_batch_size=1, num_workers=2)
    plan = StepBatch(0, np.array([1]), np.array([1], dtype=np.uint64), 1)
    steps = loader.steps(plan for _ in range(1000))
    next(steps)
    print(*[child.pid for child in multiprocessing.active_children()], flush=True)
    os._exit(0)
"""


def test_workers_end_with_their_trainer(table: ExampleTable, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(ORPHANS)
    trainer = Forked([script, ROOT, table.index_dir, table.shard_root], stdout=tmp_path / "said")
    try:
        assert trainer.wait(60) == 0
        workers = [int(pid) for pid in (tmp_path / "said").read_text().split()]
        assert len(workers) == 2
        deadline = time.monotonic() + 20
        while any(Path(f"/proc/{pid}/exe").exists() for pid in workers):
            assert time.monotonic() < deadline, "workers outlive their trainer"
            time.sleep(0.02)
    finally:
        kill_group(trainer)


def test_plans_and_sizes_that_do_not_fit(table: ExampleTable) -> None:
    loader = Loader(table, MAKE, micro_batch_size=2, num_workers=0)
    for ids, keys, count in ([1, 2, 3], 3, 1), ([1], 2, 1), ([], 0, 0):
        plan = StepBatch(0, np.array(ids, dtype=np.int64), np.zeros(keys, dtype=np.uint64), count)
        with pytest.raises(DataError, match="step 0"):
            list(loader.steps(iter([plan])))
    plan = StepBatch(0, np.array([12]), np.array([1], dtype=np.uint64), 1)
    with pytest.raises(DataError, match="from 0 to 11"):
        list(loader.steps(iter([plan])))
    with pytest.raises(DataError):
        Loader(table, MAKE, micro_batch_size=0, num_workers=0)


@pytest.mark.parametrize("count", [1, 2, 7, 12])
def test_every_example_is_evaluated_once_by_equally_many_batches_of_every_rank(
    table: ExampleTable, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever their size; in pairs, in the row next to its other's, which lies half of the data apart."""
    requested: list[list[int]] = []
    monkeypatch.setattr(
        TarReader, "read_all", lambda _, ids: requested.append(ids.tolist()) or iter([])
    )
    half = -(-count // 2)
    for size, world_size in itertools.product((1, 2, 3, 5, 12), (1, 2, 3)):
        for width, expected in (
            (1, [(k,) for k in range(count)]),
            (2, [(k, k + half) if k + half < count else (k,) for k in range(half)]),
        ):
            numbers, rows = set(), []
            for rank in range(world_size):
                requested.clear()
                numbers.add(
                    len(
                        [
                            *eval_batches(
                                table,
                                MAKE,
                                size,
                                rank,
                                world_size,
                                num_examples=count,
                                paired=width == 2,
                            )
                        ]
                    )
                )
                rows += [
                    tuple(ids[row : row + width])
                    for ids in requested
                    for row in range(0, len(ids), width)
                ]
            assert len(numbers) == 1 and sorted(rows) == expected
