"""Public data in the order of the shards, shuffled by `webdataset`: synthetic pre-training.

Shuffled streaming is not Poisson sampling and amplifies no privacy, so a private run never reads like this. Every epoch
shuffles the shards, splits them over all readers (ranks times workers), and shuffles examples in a buffer. The same seed,
number of ranks and number of workers give the same micro-batches; a stream that starts later passes over what was
consumed without decoding it.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import random
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch.utils.data import IterableDataset, get_worker_info

from data.batch import Batch
from data.errors import DataError, ReadError
from data.examples.examples import MakeExample
from data.reading.loader import Failure, Prefetched, stack_examples
from data.reading.reader import RawExample, read_in_order
from data.reading.workers import shared

if TYPE_CHECKING:
    from privacy.step.batches import StepBatch


@dataclass(frozen=True)
class Stream:
    """What is streamed.

    Attributes:
        shards: tar files.
        seed: decides all shuffling and the examples' keys; public.
        shuffle_buffer: examples among which the next is drawn; 0 keeps the order of shards and examples.
    """

    shards: Sequence[Path]
    seed: int = 0
    shuffle_buffer: int = 1000

    def examples(self, reader: int, num_readers: int) -> Iterator[tuple[RawExample, int]]:
        """Examples with their keys for augmentation, without end.

        Raises:
            DataError: a shard is no whole tar archive, keeps members of an example apart, or this reader finds no example.
            ReadError: a shard cannot be read.
        """
        for epoch in itertools.count():
            is_empty = True
            for name, raw in self.epoch(epoch, reader, num_readers):
                is_empty = False
                identity = f"{self.seed} {epoch} {name}".encode("utf-8", "surrogatepass")
                yield raw, int.from_bytes(hashlib.blake2b(identity, digest_size=8).digest(), "big")
            if is_empty:  # so is every later epoch, or this reader's shard is
                raise DataError(
                    f"reader {reader + 1} of {num_readers} (ranks times data.num_workers) finds no example in {len(self.shards)} "
                    f"shards, {self.shards[0]} and others: lower data.num_workers, or leave out shards without examples"
                )

    def epoch(
        self, epoch: int, reader: int = 0, num_readers: int = 1
    ) -> Iterator[tuple[str, RawExample]]:
        """Names and examples of one epoch for one of the readers, which are ranks times workers.

        Each reads other shards; where there are fewer shards than readers, each reads all of them and takes every
        num_readers-th example.
        """
        shards = [str(path) for path in self.shards]
        if self.shuffle_buffer:
            random.Random(f"{self.seed} {epoch}").shuffle(shards)
        by_shard = len(shards) >= num_readers
        chosen = shards[reader::num_readers] if by_shard else shards
        named: Iterator[tuple[str, RawExample]]
        named = (
            (f"{path} {os.fsdecode(key)}", raw)
            for path in chosen
            for key, raw in read_in_order(Path(path))
        )
        if not by_shard:
            named = itertools.islice(named, reader, None, num_readers)
        if self.shuffle_buffer:
            import webdataset

            rng = random.Random(f"{self.seed} {epoch} {reader}")
            named = webdataset.shuffle(self.shuffle_buffer, initial=self.shuffle_buffer, rng=rng)(
                named
            )
        yield from named


class StreamingLoader(Prefetched, IterableDataset):
    """Micro-batches of a stream, step by step: the counterpart of `loader.Loader` for public data.

    In a worker it yields the micro-batches whose number leaves the worker's remainder.
    """

    def __init__(
        self,
        stream: Stream,
        make_example: MakeExample,
        *,
        micro_batch_size: int,
        batch_size: int,
        num_workers: int = 0,
        rank: int = 0,
        world_size: int = 1,
        start_step: int = 0,
        prefetch_micro_batches: int = 8,
        pin_memory: bool = False,
    ):
        """Prepares the stream; workers start with `steps`.

        Args:
            micro_batch_size: rows of every micro-batch; the last ones of a step may be padded.
            batch_size: exact size of the logical batch over all ranks, which have equally many micro-batches.
            start_step: number of steps that an earlier run has consumed.
            num_workers, prefetch_micro_batches, pin_memory: as for Loader.
        """
        mine = batch_size // world_size + (rank < batch_size % world_size)
        starts = range(0, -(-batch_size // world_size), micro_batch_size)
        self._sizes = [max(0, min(micro_batch_size, mine - start)) for start in starts]
        self._stream, self._make_example, self._micro_batch_size = (
            stream,
            make_example,
            micro_batch_size,
        )
        self._first, self._rank, self._world_size = start_step * len(self._sizes), rank, world_size
        super().__init__(num_workers, prefetch_micro_batches, pin_memory)

    def steps(
        self, plans: Iterator[StepBatch]
    ) -> Generator[tuple[StepBatch, Iterator[Batch]], None, None]:
        """Pairs every plan, of which only the step's number stays, with the next micro-batches of the stream.

        Raises:
            DataError: a damaged shard, or none that holds an example.
            ReadError: a shard cannot be read, or a worker died.
        """
        results = self.results(self, None)
        batches = iter(lambda: self.next_batch(results), None)
        for plan in plans:
            self.data_wait = 0.0
            mine = itertools.islice(batches, len(self._sizes))
            nobody = plan._replace(
                example_ids=plan.example_ids[:0], example_keys=plan.example_keys[:0]
            )
            yield nobody, mine
            for _ in mine:
                pass

    def __iter__(self) -> Iterator[Batch | Failure]:
        info = get_worker_info()
        worker, num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        # DataLoader asks worker 0 first, and the number of the first micro-batch says whose turn that is.
        turn = (self._first + worker) % num_workers
        examples = self._stream.examples(
            self._rank * num_workers + turn, self._world_size * num_workers
        )
        try:
            for ordinal in itertools.count(turn, num_workers):
                rows = list(itertools.islice(examples, self._sizes[ordinal % len(self._sizes)]))
                if (
                    ordinal >= self._first
                ):  # What an earlier run consumed is passed over without decoding it.
                    yield shared(stack_examples(rows, self._make_example, self._micro_batch_size))
        except (DataError, ReadError) as error:
            yield Failure(type(error), str(error))
        except MemoryError:
            yield Failure(MemoryError, "in a data worker")
