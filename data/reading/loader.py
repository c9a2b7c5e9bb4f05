"""Example ids -> micro-batches of fixed shape, read and decoded ahead by worker processes.

A `StepBatch` brings the ids and keys of a logical batch. Plans are pulled lazily and in order while
micro-batches are prefetched. The number of pulls depends only on the micro-batches consumed so far:
ranks with equally many micro-batches pull in lockstep, so pulling may communicate. The batches do
not depend on the number of workers.
"""

from __future__ import annotations

import itertools
import math
import tempfile
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from data.batch import Batch
from data.errors import DataError, DecodeError, ReadError
from data.examples.examples import MakeExample
from data.index.tar_index import ExampleTable
from data.reading.reader import RawExample, TarReader
from data.reading.workers import data_loader, move_to_shared_memory

# The type alone: `data` never imports `privacy`.
if TYPE_CHECKING:
    from privacy.step.batches import StepBatch

CACHE_BYTES = 128 << 20
"""Limit of decoded examples that stay on each rank, divided among its workers.

They are private and so stay in memory alone.
"""


class MicroBatchRequest(NamedTuple):
    """Ids, keys and distinct rows of a micro-batch's examples; 0 to micro_batch_size of them."""

    example_ids: np.ndarray
    example_keys: np.ndarray
    rows: np.ndarray


class Failure(NamedTuple):
    """A worker's error, sent in place of a micro-batch.

    An exception would reach the trainer with its type and message buried in torch's traceback.
    """

    kind: type[Exception]
    message: str


class Prefetcher:
    """Takes micro-batches from workers, and measures the wait for them.

    Attributes:
        data_wait: seconds that the consumer of the current step has waited for micro-batches so
            far. Private: it depends on the bytes of the examples.
        prefetch_factor: micro-batches that each worker prepares ahead; None without workers.
    """

    data_wait = 0.0

    def __init__(self, num_workers: int, prefetch_micro_batches: int, pin_memory: bool):
        """See `Loader`."""
        self._num_workers = num_workers
        self._pin_memory = pin_memory
        self.prefetch_factor: int | None = None
        if num_workers:
            self.prefetch_factor = math.ceil(prefetch_micro_batches / num_workers)

    def results(self, dataset: Dataset, requests: Iterator[Any] | None) -> Iterator[Any]:
        """Starts the workers and returns an iterator over their results; see `data_loader`.

        Raises:
            ReadError: the machine does not let workers start.
        """
        try:
            loader = data_loader(
                dataset, requests, self._num_workers, self.prefetch_factor, self._pin_memory
            )
            return iter(loader)
        except OSError as error:
            reason = error.strerror or error
            raise ReadError(
                f"data workers cannot start: {reason}; they need /dev/shm, {tempfile.gettempdir()} "
                "and processes: mend that, or give data.num_workers=0"
            ) from error

    def next_batch(self, results: Iterator[Any]) -> Batch | None:
        """Returns the next micro-batch, None after the last; adds the wait for it to `data_wait`.

        Raises:
            ReadError: promised bytes could not be read, or a worker died.
            DataError: a worker refused the data.
            MemoryError: a worker had too little memory.
        """
        start = time.perf_counter()
        try:
            batch = next(results, None)
        # torch raises a RuntimeError; receiving a dead worker's tensor raises the other two.
        except (RuntimeError, ConnectionError, EOFError) as error:
            if isinstance(error, RuntimeError) and "DataLoader worker" not in str(error):
                raise
            raise ReadError(
                "a data worker died (killed, or out of memory); use fewer workers"
            ) from error
        finally:
            self.data_wait += time.perf_counter() - start
        if isinstance(batch, Failure):
            raise batch.kind(batch.message)
        return batch


class Loader(Prefetcher):
    """Delivers the micro-batches of planned steps."""

    def __init__(
        self,
        table: ExampleTable,
        make_example: MakeExample,
        *,
        micro_batch_size: int,
        num_workers: int,
        prefetch_micro_batches: int = 8,
        memory_limit_mib: int | None = None,
        pin_memory: bool = False,
    ):
        """Prepares the loader; `steps` starts the workers.

        Args:
            table: the data set.
            make_example: picklable; see `data.examples`.
            micro_batch_size: B, rows of every micro-batch.
            num_workers: worker processes; 0 works in this process.
            prefetch_micro_batches: micro-batches that workers prepare ahead, rounded up to a
                multiple of num_workers. Ignored without workers.
            memory_limit_mib: limits the memory of micro-batches that are prepared ahead.
            pin_memory: page-locked tensors, for copies to a GPU.

        Raises:
            DataError: a size below 1, a negative number of workers, or a limit below one
                micro-batch per worker.
        """
        if micro_batch_size < 1 or num_workers < 0 or prefetch_micro_batches < 1:
            raise DataError(
                "micro_batch_size and prefetch_micro_batches must be at least 1, num_workers at "
                "least 0"
            )
        cache_bytes = CACHE_BYTES // max(num_workers, 1)
        self._dataset = MicroBatches(table, make_example, micro_batch_size, cache_bytes)
        super().__init__(num_workers, prefetch_micro_batches, pin_memory)
        self._micro_batch_size = micro_batch_size
        if self.prefetch_factor is not None and memory_limit_mib is not None:
            row_bytes = sum(array.nbytes for array in make_example.padding().values())
            batch_mib = row_bytes * micro_batch_size / 2**20
            if batch_mib * num_workers > memory_limit_mib:
                raise DataError(
                    f"data.memory_limit_mib is {memory_limit_mib}, but a micro-batch of "
                    f"{micro_batch_size} takes {batch_mib:.0f} MiB and each of {num_workers} "
                    "workers prepares one; raise it, or lower data.num_workers or "
                    "train.micro_batch_size"
                )
            max_batches = int(memory_limit_mib / batch_mib)
            self.prefetch_factor = min(self.prefetch_factor, max_batches // num_workers)

    def steps(
        self, plans: Iterator[StepBatch]
    ) -> Generator[tuple[StepBatch, Iterator[Batch]], None, None]:
        """Pairs every plan with its micro-batches, in order.

        The next step skips the micro-batches that the caller has not read. Closing the generator
        ends the workers.

        Args:
            plans: pulled lazily, ahead of consumption by as many micro-batches as are prefetched.

        Yields:
            (plan, iterator over plan.num_micro_batches batches of micro_batch_size rows).

        Raises:
            ReadError: promised bytes could not be read, or a worker died.
            DataError: ids, keys and number of micro-batches of a plan do not fit each other.
        """
        pending_plans: deque[StepBatch] = deque()
        size = self._micro_batch_size

        def requests() -> Iterator[MicroBatchRequest]:
            for plan in plans:
                ids = plan.example_ids
                keys = plan.example_keys
                if len(ids) != len(keys):
                    raise DataError(f"step {plan.step}: {len(ids)} ids but {len(keys)} keys")
                if plan.num_micro_batches < 1 or len(ids) > plan.num_micro_batches * size:
                    raise DataError(
                        f"step {plan.step}: {len(ids)} examples do not fit "
                        f"{plan.num_micro_batches} micro-batches of {size}"
                    )
                pending_plans.append(plan)
                rows = np.arange(len(ids)) if plan.rows is None else plan.rows
                # Sorted by micro-batch; a stable sort keeps the plan's order inside each.
                order = np.argsort(rows // size, kind="stable")
                rows = rows[order]
                ids = ids[order]
                keys = keys[order]
                bounds = np.searchsorted(rows // size, np.arange(plan.num_micro_batches + 1))
                for part in map(slice, bounds[:-1], bounds[1:]):
                    yield MicroBatchRequest(ids[part], keys[part], rows[part] % size)

        results = self.results(self._dataset, requests())

        def batches(first: Batch, count: int) -> Iterator[Batch]:
            yield first
            for _ in range(count - 1):
                batch = self.next_batch(results)
                if batch is None:
                    raise ReadError("the data workers ended in the middle of a step")
                yield batch

        while True:
            self.data_wait = 0.0
            first = self.next_batch(results)
            if first is None:
                return
            plan = pending_plans.popleft()
            step_batches = batches(first, plan.num_micro_batches)
            yield plan, step_batches
            # The next step starts behind the micro-batches that the caller has not read.
            for _ in step_batches:
                pass


class MicroBatches(Dataset):
    """Makes the micro-batch of a request, inside a worker.

    Errors that name an exit code come back as `Failure`. Examples that their keys do not change are
    cached: they are read and decoded once.

    Args:
        cache_bytes: limit of the cache. The first examples that fit stay, since random batches ask
            for all of them equally often.
    """

    def __init__(
        self,
        table: ExampleTable,
        make_example: MakeExample,
        micro_batch_size: int,
        cache_bytes: int,
    ):
        self._reader = TarReader(table)
        self._make_example = make_example
        self._free_bytes = cache_bytes
        self._micro_batch_size = micro_batch_size
        self._cache: dict[int, dict[str, np.ndarray]] = {}
        self.padding = make_example.padding

    def __getitem__(self, request: MicroBatchRequest) -> Batch | Failure:
        ids = request.example_ids.tolist()
        raws = self._reader.read_all([i for i in ids if i not in self._cache])
        examples = ((i, None if i in self._cache else next(raws)) for i in ids)
        try:
            keyed_examples = zip(examples, request.example_keys, strict=True)
            rows = request.rows.tolist()
            batch = stack_examples(keyed_examples, self, self._micro_batch_size, rows)
            return move_to_shared_memory(batch)
        except (ReadError, DataError) as error:
            return Failure(type(error), str(error))
        except MemoryError:
            return Failure(MemoryError, "in a data worker")

    def __call__(
        self, example: tuple[int, RawExample | None], key: int, /
    ) -> dict[str, np.ndarray]:
        example_id, raw = example
        if raw is None:
            return self._cache[example_id]
        arrays = self._make_example(raw, key)
        size = sum(array.nbytes for array in arrays.values())
        if size <= self._free_bytes and not self._make_example.draws(raw):
            self._free_bytes -= size
            self._cache[example_id] = arrays
        return arrays


def stack_examples(
    examples: Iterable[tuple[Any, int]],
    make_example: MakeExample | MicroBatches,
    micro_batch_size: int,
    rows: Iterable[int] | None = None,
) -> Batch:
    """Decodes at most `micro_batch_size` examples with their keys and stacks them.

    Rows without an example, or with an undecodable one, are padding.

    Args:
        rows: the row of each example; the first rows, in order, if None.

    Raises:
        ValueError: the example maker returned arrays of differing names or shapes (a programming
            error).
    """
    padding = make_example.padding()
    kinds = {name: (array.shape, array.dtype) for name, array in padding.items()}
    stacked = {
        name: np.empty((micro_batch_size, *shape), dtype) for name, (shape, dtype) in kinds.items()
    }

    # Row by row, while a row is in the processor's cache and before the next one takes its memory.
    def fill(row: int, arrays: dict[str, np.ndarray]) -> None:
        if kinds != {name: (array.shape, array.dtype) for name, array in arrays.items()}:
            raise ValueError(
                "make_example and its padding() return different names, shapes or types"
            )
        for name, array in arrays.items():
            stacked[name][row] = array

    is_padding_B = torch.ones(micro_batch_size, dtype=torch.bool)
    num_undecodable = 0
    row_numbers = itertools.count() if rows is None else rows
    for row, (raw, key) in zip(row_numbers, examples, strict=False):
        try:
            fill(row, make_example(raw, int(key)))
            is_padding_B[row] = False
        except DecodeError:
            num_undecodable += 1
    for row in is_padding_B.nonzero().flatten().tolist():
        fill(row, padding)
    inputs: dict[str, torch.Tensor] = {}
    # images_CHW becomes images_BCHW, and label becomes label_B.
    for name, array in stacked.items():
        stem, _, suffix = name.rpartition("_")
        has_shape = stem and suffix.isupper()
        batch_name = f"{stem}_B{suffix}" if has_shape else f"{name}_B"
        inputs[batch_name] = torch.from_numpy(array)
    return Batch(inputs, is_padding_B, num_undecodable)


def eval_batches(
    table: ExampleTable,
    make_example: MakeExample,
    micro_batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    *,
    num_examples: int | None = None,
    paired: bool = False,
) -> Iterator[Batch]:
    """Yields held-out examples in order, split over ranks.

    Every rank gets equally many batches, padded at the end.

    Args:
        table: the held-out data.
        make_example: usually with `train=False`; keys are 0.
        micro_batch_size: B.
        rank: takes the examples rank, rank + world_size, ...
        world_size: number of ranks.
        num_examples: takes only this many of the first examples; all by default.
        paired: rows 2k and 2k + 1 hold examples half of the data set apart, so that each can take
            the other's picture; of an odd number of examples one is paired with padding. B is then
            rounded down to an even number, at least 2.
    """
    total = len(table) if num_examples is None else min(num_examples, len(table))
    row_size = 2 if paired else 1
    num_rows = math.ceil(total / row_size)
    # Row k has example k, and with pairs also example k + num_rows.
    ids_RW = np.arange(num_rows)[:, None] + num_rows * np.arange(row_size)
    ids = ids_RW[rank::world_size].ravel()
    # The last pair of an odd number of examples has one id too many.
    ids = ids[ids < total]
    micro_batch_size = max(micro_batch_size // row_size, 1) * row_size
    reader = TarReader(table)
    num_batches = math.ceil(num_rows * row_size / (micro_batch_size * world_size))
    for batch in range(num_batches):
        batch_ids = ids[batch * micro_batch_size : (batch + 1) * micro_batch_size]
        keyed_examples = ((raw, 0) for raw in reader.read_all(batch_ids))
        yield stack_examples(keyed_examples, make_example, micro_batch_size)
    reader.close()
