"""Example ids -> micro-batches of fixed shape, read and decoded ahead by worker processes.

Who is in a logical batch is decided elsewhere; a `StepBatch` arrives with ids and keys. Plans are pulled lazily and in
order while micro-batches are prefetched. The number of pulls depends only on the micro-batches consumed so far, so that
ranks with equally many micro-batches pull in lockstep and pulling may communicate. Results do not depend on the number
of workers.
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
from data.reading.workers import data_loader, shared

if TYPE_CHECKING:  # this room reads the type's fields, and knows nothing of privacy
    from privacy.step.batches import StepBatch

KEPT_BYTES = 128 << 20
"""Decoded examples that stay on each rank, shared out among its workers. In memory alone: they are private."""


class MicroBatchRequest(NamedTuple):
    """Ids, keys and distinct rows of the examples of one micro-batch; at most micro_batch_size of them, possibly none."""

    example_ids: np.ndarray
    example_keys: np.ndarray
    rows: np.ndarray


class Failure(NamedTuple):
    """An error of a worker as data: torch would bury its type and message in a traceback."""

    kind: type[Exception]
    message: str


class Prefetched:
    """Takes micro-batches from workers, and the time that this takes.

    Attributes:
        data_wait: seconds that the consumer of the current step has waited for micro-batches so far. Private: it
            follows the bytes of the examples.
        prefetch_factor: micro-batches that each worker prepares ahead; None without workers.
    """

    data_wait = 0.0

    def __init__(self, num_workers: int, prefetch_micro_batches: int, pin_memory: bool):
        """See `Loader`."""
        self._num_workers, self._pin_memory = num_workers, pin_memory
        self.prefetch_factor = (
            math.ceil(prefetch_micro_batches / num_workers) if num_workers else None
        )

    def results(self, dataset: Dataset, requests: Iterator[Any] | None) -> Iterator[Any]:
        """What workers make of requests, ahead of consumption; see `data_loader`.

        Raises:
            ReadError: the machine lets no worker start.
        """
        try:
            return iter(
                data_loader(
                    dataset, requests, self._num_workers, self.prefetch_factor, self._pin_memory
                )
            )
        except OSError as error:
            reason = error.strerror or error
            raise ReadError(
                f"data workers cannot start: {reason}; they need /dev/shm, {tempfile.gettempdir()} and processes: mend that, or "
                "give data.num_workers=0"
            ) from error

    def next_batch(self, results: Iterator[Any]) -> Batch | None:
        """The next micro-batch, None after the last; adds the time it took to `data_wait`.

        Raises:
            ReadError: promised bytes could not be read, or a worker died.
            DataError: what a worker refused.
            MemoryError: a worker had too little memory.
        """
        start = time.perf_counter()
        try:
            result = next(results, None)
        except (
            RuntimeError,
            ConnectionError,
            EOFError,
        ) as error:  # torch's own, or from taking a tensor from a worker
            if isinstance(error, RuntimeError) and "DataLoader worker" not in str(error):
                raise
            raise ReadError(
                "a data worker died (killed, or out of memory); use fewer workers"
            ) from error
        finally:
            self.data_wait += time.perf_counter() - start
        if isinstance(result, Failure):
            raise result.kind(result.message)
        return result


class Loader(Prefetched):
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
        """Prepares; workers start with `steps`.

        Args:
            table: the data set.
            make_example: picklable; see `data.examples`.
            micro_batch_size: B, rows of every micro-batch.
            num_workers: worker processes; 0 works in this process.
            prefetch_micro_batches: how many micro-batches workers prepare ahead, rounded up to a multiple of
                num_workers. Ignored without workers.
            memory_limit_mib: prepare fewer ahead where these would take more than this.
            pin_memory: page-locked tensors, for copies to a GPU.

        Raises:
            DataError: a size below 1, a negative number of workers, or a limit below one micro-batch per worker.
        """
        if micro_batch_size < 1 or num_workers < 0 or prefetch_micro_batches < 1:
            raise DataError(
                "micro_batch_size and prefetch_micro_batches must be at least 1, num_workers at least 0"
            )
        self._dataset = MicroBatches(
            table, make_example, micro_batch_size, KEPT_BYTES // max(num_workers, 1)
        )
        super().__init__(num_workers, prefetch_micro_batches, pin_memory)
        self._micro_batch_size = micro_batch_size
        if self.prefetch_factor is not None and memory_limit_mib is not None:
            mib = (
                sum(row.nbytes for row in make_example.padding().values())
                * micro_batch_size
                / 2**20
            )
            if mib * num_workers > memory_limit_mib:
                raise DataError(
                    f"data.memory_limit_mib is {memory_limit_mib}, but a micro-batch of {micro_batch_size} takes "
                    f"{mib:.0f} MiB and each of {num_workers} workers prepares one; raise it, or lower data.num_workers "
                    "or train.micro_batch_size"
                )
            self.prefetch_factor = min(
                self.prefetch_factor, int(memory_limit_mib / mib) // num_workers
            )

    def steps(
        self, plans: Iterator[StepBatch]
    ) -> Generator[tuple[StepBatch, Iterator[Batch]], None, None]:
        """Pairs every plan with its micro-batches, in order.

        Micro-batches of a step that the caller leaves unread are passed over when the next step is asked for. Closing
        the generator ends the workers.

        Args:
            plans: pulled lazily, ahead of consumption by as many micro-batches as are prefetched.

        Yields:
            (plan, iterator over plan.num_micro_batches batches of micro_batch_size rows).

        Raises:
            ReadError: promised bytes could not be read, or a worker died.
            DataError: a plan that does not fit.
        """
        pulled: deque[StepBatch] = deque()
        size = self._micro_batch_size

        def requests() -> Iterator[MicroBatchRequest]:
            for plan in plans:
                ids, keys = plan.example_ids, plan.example_keys
                if len(ids) != len(keys):
                    raise DataError(f"step {plan.step}: {len(ids)} ids but {len(keys)} keys")
                if plan.num_micro_batches < 1 or len(ids) > plan.num_micro_batches * size:
                    raise DataError(
                        f"step {plan.step}: {len(ids)} examples do not fit {plan.num_micro_batches} micro-batches of {size}"
                    )
                pulled.append(plan)
                rows = np.arange(len(ids)) if plan.rows is None else plan.rows
                order = np.argsort(
                    rows // size, kind="stable"
                )  # micro-batch by micro-batch, and in each as given
                rows, ids, keys = rows[order], ids[order], keys[order]
                bounds = np.searchsorted(rows // size, np.arange(plan.num_micro_batches + 1))
                for some in map(slice, bounds[:-1], bounds[1:]):
                    yield MicroBatchRequest(ids[some], keys[some], rows[some] % size)

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
            plan = pulled.popleft()
            step = batches(first, plan.num_micro_batches)
            yield plan, step
            for _ in step:
                pass


class MicroBatches(Dataset):
    """Request -> Batch, inside a worker. Errors that name an exit code come back as `Failure`.

    Examples that their keys do not change are kept: they are read and decoded once.

    Args:
        room: bytes. The first examples that fit stay, since random batches ask for all of them equally often.
    """

    def __init__(
        self, table: ExampleTable, make_example: MakeExample, micro_batch_size: int, room: int
    ):
        self._reader, self._make_example, self._room = TarReader(table), make_example, room
        self._micro_batch_size = micro_batch_size
        self._made: dict[int, dict[str, np.ndarray]] = {}
        self.padding = make_example.padding

    def __getitem__(self, request: MicroBatchRequest) -> Batch | Failure:
        ids = request.example_ids.tolist()
        raws = self._reader.read_all([i for i in ids if i not in self._made])
        examples = ((i, None if i in self._made else next(raws)) for i in ids)
        try:
            keyed = zip(examples, request.example_keys, strict=True)
            return shared(
                stack_examples(keyed, self, self._micro_batch_size, request.rows.tolist())
            )
        except (ReadError, DataError) as error:
            return Failure(type(error), str(error))
        except MemoryError:
            return Failure(MemoryError, "in a data worker")

    def __call__(
        self, example: tuple[int, RawExample | None], key: int, /
    ) -> dict[str, np.ndarray]:
        number, raw = example
        if raw is None:
            return self._made[number]
        made = self._make_example(raw, key)
        size = sum(array.nbytes for array in made.values())
        if size <= self._room and not self._make_example.draws(raw):
            self._room -= size
            self._made[number] = made
        return made


def stack_examples(
    examples: Iterable[tuple[Any, int]],
    make_example: MakeExample | MicroBatches,
    micro_batch_size: int,
    rows: Iterable[int] | None = None,
) -> Batch:
    """Decodes at most `micro_batch_size` examples with their keys and stacks them; missing and undecodable rows are padding.

    Args:
        rows: where the examples stand; one after the other from row 0 on if None.

    Raises:
        ValueError: the example maker returned arrays of differing names or shapes (a programming error).
    """
    padding = make_example.padding()
    kinds = {name: (array.shape, array.dtype) for name, array in padding.items()}
    stacked = {
        name: np.empty((micro_batch_size, *shape), dtype) for name, (shape, dtype) in kinds.items()
    }

    def fill(row: int, arrays: dict[str, np.ndarray]) -> None:
        """Row by row, while a row is still in the cache and before the next one takes its memory."""
        if kinds != {name: (array.shape, array.dtype) for name, array in arrays.items()}:
            raise ValueError(
                "make_example and its padding() return different names, shapes or types"
            )
        for name, array in arrays.items():
            stacked[name][row] = array

    is_padding_B = torch.ones(micro_batch_size, dtype=torch.bool)
    num_undecodable = 0
    for row, (raw, key) in zip(itertools.count() if rows is None else rows, examples, strict=False):
        try:
            fill(row, make_example(raw, int(key)))
            is_padding_B[row] = False
        except DecodeError:
            num_undecodable += 1
    for row in is_padding_B.nonzero().flatten().tolist():
        fill(row, padding)
    inputs: dict[str, torch.Tensor] = {}
    for name, array in stacked.items():  # images_CHW -> images_BCHW, label -> label_B
        stem, _, suffix = name.rpartition("_")
        inputs[f"{stem}_B{suffix}" if stem and suffix.isupper() else f"{name}_B"] = (
            torch.from_numpy(array)
        )
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
    """Held-out examples in order, split over ranks; every rank gets equally many batches, padded at the end.

    Args:
        table: the held-out data.
        make_example: usually with `train=False`; keys are 0.
        micro_batch_size: B.
        rank: takes the examples rank, rank + world_size, ...
        world_size: number of ranks.
        num_examples: how many of the first examples count; all by default.
        paired: rows 2k and 2k + 1 hold examples that lie half of the data set apart, so that each can take the other's picture;
            of an odd number of examples one stands next to padding. B is then rounded down to an even number, at least 2.
    """
    total = len(table) if num_examples is None else min(num_examples, len(table))
    width = 2 if paired else 1
    rows = math.ceil(total / width)
    # Row k holds k, and with pairs k + rows.
    ids_RW = np.arange(rows)[:, None] + rows * np.arange(width)
    ids = ids_RW[rank::world_size].ravel()
    ids = ids[ids < total]  # where the number is odd, the very last is none
    micro_batch_size = max(micro_batch_size // width, 1) * width
    reader = TarReader(table)
    for batch in range(math.ceil(rows * width / (micro_batch_size * world_size))):
        part = ids[batch * micro_batch_size : (batch + 1) * micro_batch_size]
        yield stack_examples(
            ((raw, 0) for raw in reader.read_all(part)), make_example, micro_batch_size
        )
    reader.close()
