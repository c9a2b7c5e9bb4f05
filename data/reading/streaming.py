"""Reads public data in the order of the shards, shuffled by `webdataset`: synthetic pre-training.

Shuffled streaming is not Poisson sampling and amplifies no privacy, so a private run never reads
like this. Every epoch shuffles the shards, splits them over all readers (ranks times workers), and
shuffles examples in a buffer. The same seed, number of ranks and number of workers give the same
micro-batches; a stream that starts later skips the examples before its start without decoding them.
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
from data.reading.loader import Failure, Prefetcher, stack_examples
from data.reading.reader import RawExample, read_in_order
from data.reading.workers import move_to_shared_memory

if TYPE_CHECKING:
    from privacy.step.batches import StepBatch


@dataclass(frozen=True)
class Stream:
    """A stream of shuffled examples.

    Attributes:
        shards: tar files.
        seed: decides all shuffling and the examples' keys; public.
        shuffle_buffer: examples among which the next is drawn; 0 keeps the order of shards and
            examples.
    """

    shards: Sequence[Path]
    seed: int = 0
    shuffle_buffer: int = 1000

    def examples(self, reader: int, num_readers: int) -> Iterator[tuple[RawExample, int]]:
        """Yields examples with their keys for augmentation, without end.

        Raises:
            DataError: a shard is not a whole tar archive, has members of an example in two places,
                or this reader finds no example.
            ReadError: a shard cannot be read.
        """
        for epoch in itertools.count():
            is_empty = True
            for name, raw in self.epoch(epoch, reader, num_readers):
                is_empty = False
                identity = f"{self.seed} {epoch} {name}".encode("utf-8", "surrogatepass")
                digest = hashlib.blake2b(identity, digest_size=8).digest()
                yield raw, int.from_bytes(digest, "big")
            # Every later epoch would be empty too, or this reader's shard has no example.
            if is_empty:
                raise DataError(
                    f"reader {reader + 1} of {num_readers} (ranks times data.num_workers) finds no "
                    f"example in {len(self.shards)} shards, {self.shards[0]} and others: lower "
                    "data.num_workers, or leave out shards without examples"
                )

    def epoch(
        self, epoch: int, reader: int = 0, num_readers: int = 1
    ) -> Iterator[tuple[str, RawExample]]:
        """Yields names and examples of one epoch for one of the readers (ranks times workers).

        Readers have distinct shards. With fewer shards than readers, each reads all of them and
        takes every num_readers-th example.
        """
        shards = [str(path) for path in self.shards]
        if self.shuffle_buffer:
            random.Random(f"{self.seed} {epoch}").shuffle(shards)
        by_shard = len(shards) >= num_readers
        reader_shards = shards[reader::num_readers] if by_shard else shards
        named_examples: Iterator[tuple[str, RawExample]]
        named_examples = (
            (f"{path} {os.fsdecode(key)}", raw)
            for path in reader_shards
            for key, raw in read_in_order(Path(path))
        )
        if not by_shard:
            named_examples = itertools.islice(named_examples, reader, None, num_readers)
        if self.shuffle_buffer:
            import webdataset

            rng = random.Random(f"{self.seed} {epoch} {reader}")
            size = self.shuffle_buffer
            named_examples = webdataset.shuffle(size, initial=size, rng=rng)(named_examples)
        yield from named_examples


class StreamingLoader(Prefetcher, IterableDataset):
    """Delivers the micro-batches of a stream, step by step: `loader.Loader` for public data.

    Of num_workers workers, worker k yields each num_workers-th micro-batch.
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
        """Prepares the stream; `steps` starts the workers.

        Args:
            micro_batch_size: rows of every micro-batch; the last ones of a step may be padded.
            batch_size: exact size of the logical batch over all ranks, which have equally many
                micro-batches.
            start_step: number of steps that an earlier run has consumed.
            num_workers, prefetch_micro_batches, pin_memory: as for Loader.
        """
        rank_size = batch_size // world_size + (rank < batch_size % world_size)
        max_rank_size = -(-batch_size // world_size)
        # Every rank has the micro-batches of the largest rank; the last may be empty.
        starts = range(0, max_rank_size, micro_batch_size)
        self._sizes = [max(0, min(micro_batch_size, rank_size - start)) for start in starts]
        self._stream = stream
        self._make_example = make_example
        self._micro_batch_size = micro_batch_size
        self._first = start_step * len(self._sizes)
        self._rank = rank
        self._world_size = world_size
        super().__init__(num_workers, prefetch_micro_batches, pin_memory)

    def steps(
        self, plans: Iterator[StepBatch]
    ) -> Generator[tuple[StepBatch, Iterator[Batch]], None, None]:
        """Pairs every plan with the next micro-batches of the stream.

        The plans are yielded without ids and keys, which do not describe the stream.

        Raises:
            DataError: a damaged shard, or no shard that has an example.
            ReadError: a shard cannot be read, or a worker died.
        """
        results = self.results(self, None)
        batches = iter(lambda: self.next_batch(results), None)
        for plan in plans:
            self.data_wait = 0.0
            step_batches = itertools.islice(batches, len(self._sizes))
            empty_plan = plan._replace(
                example_ids=plan.example_ids[:0], example_keys=plan.example_keys[:0]
            )
            yield empty_plan, step_batches
            # The next step starts behind the micro-batches that the caller has not read.
            for _ in step_batches:
                pass

    def __iter__(self) -> Iterator[Batch | Failure]:
        worker_info = get_worker_info()
        worker = 0 if worker_info is None else worker_info.id
        num_workers = 1 if worker_info is None else worker_info.num_workers
        # DataLoader asks worker 0 first, so worker 0 has to serve the first micro-batch.
        turn = (self._first + worker) % num_workers
        examples = self._stream.examples(
            self._rank * num_workers + turn, self._world_size * num_workers
        )
        try:
            for number in itertools.count(turn, num_workers):
                size = self._sizes[number % len(self._sizes)]
                batch_examples = list(itertools.islice(examples, size))
                # Micro-batches of an earlier run are skipped without decoding them.
                if number >= self._first:
                    batch = stack_examples(
                        batch_examples, self._make_example, self._micro_batch_size
                    )
                    yield move_to_shared_memory(batch)
        except (DataError, ReadError) as error:
            yield Failure(type(error), str(error))
        except MemoryError:
            yield Failure(MemoryError, "in a data worker")
