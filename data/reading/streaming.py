"""Public data in the order of the shards, shuffled by `webdataset`: synthetic pre-training.

Shuffled streaming is not Poisson sampling and amplifies no privacy, so a private run never reads like this. Every epoch
shuffles the shards, splits them over all readers (ranks times workers), and shuffles examples in a buffer. The same seed,
number of ranks and number of workers give the same micro-batches; a stream that starts later passes over what was
consumed without decoding it.
"""

import hashlib
import itertools
import os
import random
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch.utils.data import IterableDataset, get_worker_info

from data.batch import Batch
from data.errors import DataError, ReadError
from data.examples.examples import MakeExample
from data.index.shard import walk_shard
from data.index.tar_format import TarFormatError
from data.reading.loader import Failure, Prefetched, StepPlan, stack_examples
from data.reading.reader import MAX_EXAMPLE_BYTES, RawExample, parse_example
from data.reading.workers import data_loader, shared

Keyed = tuple[RawExample, int]


@dataclass(frozen=True)
class Stream:
    """What is streamed, and which part of it is ours.

    Attributes:
        shards: tar files.
        seed: decides all shuffling and the examples' keys; public.
        shuffle_buffer: examples among which the next is drawn; 0 keeps the order of shards and examples.
        epochs: how often; None means without end.
        reader: which of the readers this is.
        num_readers: ranks times workers. Each reads other shards; where there are fewer shards than readers, each reads
            all of them and takes every num_readers-th example.
    """

    shards: Sequence[Path]
    seed: int = 0
    shuffle_buffer: int = 1000
    epochs: int | None = None
    reader: int = 0
    num_readers: int = 1

    def examples(self) -> Iterator[Keyed]:
        """Examples with their keys for augmentation.

        Raises:
            DataError: a shard is no whole tar archive, keeps members of an example apart, or no shard holds an example.
            ReadError: a shard cannot be read.
        """
        for epoch in itertools.count() if self.epochs is None else range(self.epochs):
            is_empty = True
            for name, raw in self._epoch(epoch):
                is_empty = False
                identity = f"{self.seed} {epoch} {name}".encode("utf-8", "surrogatepass")
                yield raw, int.from_bytes(hashlib.blake2b(identity, digest_size=8).digest(), "big")
            if is_empty and self.epochs is None and len(self.shards) >= self.num_readers:
                raise DataError(f"the shards {self.shards[0]} ... hold no examples")

    def _epoch(self, epoch: int) -> Iterator[tuple[str, RawExample]]:
        shards = [str(path) for path in self.shards]
        if self.shuffle_buffer:
            random.Random(f"{self.seed} {epoch}").shuffle(shards)
        by_shard = len(shards) >= self.num_readers
        named = _in_order(shards[self.reader :: self.num_readers] if by_shard else shards)
        if not by_shard:
            named = itertools.islice(named, self.reader, None, self.num_readers)
        if self.shuffle_buffer:
            import webdataset

            rng = random.Random(f"{self.seed} {epoch} {self.reader}")
            named = webdataset.shuffle(self.shuffle_buffer, initial=self.shuffle_buffer, rng=rng)(named)
        yield from named


def _in_order(shards: Sequence[str]) -> Iterator[tuple[str, RawExample]]:
    """Names and examples of shards. Each shard is walked as the index does it before it is read.

    Raises:
        DataError: a shard is damaged.
        ReadError: a shard cannot be read.
    """
    for path in shards:
        try:
            extents = walk_shard(Path(path), path)
            with open(path, "rb") as file:
                for key, (start, end) in zip(extents.keys, extents.bounds_K2.tolist(), strict=True):
                    file.seek(start)
                    is_readable = end - start <= MAX_EXAMPLE_BYTES
                    raw = parse_example(file.read(end - start)) if is_readable else RawExample(None, {})
                    yield f"{path} {os.fsdecode(key)}", raw
        except TarFormatError as error:
            raise ReadError(f"the shard {path} changed while it was read ({error})") from error
        except OSError as error:
            if isinstance(error, ReadError):
                raise
            raise ReadError(f"cannot read a shard: {error.strerror}: {path}") from error


class StreamingLoader(Prefetched):
    """Micro-batches of a stream, step by step: the counterpart of `loader.Loader` for public data."""

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
            stream: shards and seed; which reader is set here.
            make_example: picklable; see `data.examples`.
            micro_batch_size: rows of every micro-batch; the last ones of a step may be padded.
            batch_size: exact size of the logical batch over all ranks.
            num_workers: worker processes of this rank.
            rank: this process's.
            world_size: number of ranks; each has equally many micro-batches.
            start_step: number of steps that an earlier run has consumed.
            prefetch_micro_batches: as for Loader.
            pin_memory: page-locked tensors.

        Raises:
            DataError: a number out of range, no shards, or a stream that ends.
        """
        if not stream.shards:
            raise DataError("there are no shards to stream")
        if batch_size < 1 or micro_batch_size < 1:
            raise DataError("the batch size and the micro-batch size must be at least 1")
        if stream.epochs is not None:
            raise DataError("steps of a fixed batch size need a stream without end (epochs = None)")
        mine = batch_size // world_size + (rank < batch_size % world_size)
        most = -(-batch_size // world_size)
        starts = range(0, -(-most // micro_batch_size) * micro_batch_size, micro_batch_size)
        self._sizes = [max(0, min(micro_batch_size, mine - start)) for start in starts]
        whole = replace(stream, reader=rank * max(num_workers, 1), num_readers=world_size * max(num_workers, 1))
        first = start_step * len(self._sizes)
        self._dataset = _MicroBatchStream(whole, make_example, micro_batch_size, self._sizes, first)
        self._num_workers, self._pin_memory = num_workers, pin_memory
        self.prefetch_factor = -(-prefetch_micro_batches // num_workers) if num_workers else None

    def steps(self, plans: Iterator[StepPlan]) -> Generator[tuple[StepPlan, Iterator[Batch]], None, None]:
        """Pairs every plan, of which only the step's number stays, with the next micro-batches of the stream.

        Raises:
            DataError: a damaged shard, or none that holds an example.
            ReadError: a shard cannot be read, or a worker died.
        """
        results = iter(data_loader(self._dataset, None, self._num_workers, self.prefetch_factor, self._pin_memory))
        batches = iter(lambda: self.next_batch(results), None)
        for plan in plans:
            self.data_wait = 0.0
            mine = itertools.islice(batches, len(self._sizes))
            nobody = plan._replace(example_ids=plan.example_ids[:0], example_keys=plan.example_keys[:0])
            yield nobody, mine
            for _ in mine:
                pass


class _MicroBatchStream(IterableDataset):
    """The micro-batches of one worker: those whose number leaves its remainder.

    `sizes` says how many examples each micro-batch of a step has, and `first` which one comes first over all steps.
    """

    def __init__(
        self, stream: Stream, make_example: MakeExample, micro_batch_size: int, sizes: Sequence[int], first: int
    ):
        self._stream, self._make_example, self._first = stream, make_example, first
        self._micro_batch_size, self._sizes = micro_batch_size, sizes

    def __iter__(self) -> Iterator[Batch | Failure]:
        info = get_worker_info()
        worker, num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        # DataLoader asks worker 0 first, and the number of the first micro-batch says whose turn that is.
        turn = (self._first + worker) % num_workers
        examples = replace(self._stream, reader=self._stream.reader + turn).examples()
        try:
            for ordinal in itertools.count(turn, num_workers):
                rows = list(itertools.islice(examples, self._sizes[ordinal % len(self._sizes)]))
                if ordinal >= self._first:  # What an earlier run consumed is passed over without decoding it.
                    yield shared(stack_examples(rows, self._make_example, self._micro_batch_size))
        except (DataError, ReadError) as error:
            yield Failure(type(error), str(error))
        except MemoryError:
            yield Failure(MemoryError, "in a data worker")
