"""Starts and ends the processes that read for a trainer."""

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import threading
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset, get_worker_info

from data.batch import Batch
from data.errors import ReadError
from data.index.tar_index import ExampleTable
from data.reading.staging import StagedStorage

_PRELOAD = [
    "data.reading.worker_signals",
    "torch",
    "PIL.Image",
    "tokenizers",
    "data.reading.loader",
]


def worker_context() -> Any:
    """Returns the start method of data workers: a fork server that has imported their modules.

    A fork of the trainer itself would be a fork of a process with threads.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    return context


def end_with_parent(_worker: int) -> None:
    """Ends this worker when its trainer ends, in whatever way.

    torch's own watchdog compares parent ids; a worker's parent is the fork server, which lives as
    long as its workers.
    """
    # Imported here: the import ignores signals, which only a worker may do.
    from data.reading.worker_signals import leave_to_trainer

    leave_to_trainer()
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    sentinel = parent.sentinel

    def wait_and_exit() -> None:
        multiprocessing.connection.wait([sentinel])
        os._exit(1)

    threading.Thread(target=wait_and_exit, daemon=True).start()


def copy_shards(table: ExampleTable) -> None:
    """Copies the shards of this node, in a process of its own.

    A failed copy is reported by the reader that needs the shard.
    """
    end_with_parent(0)
    storage = table.storage()
    assert isinstance(storage, StagedStorage)
    with contextlib.suppress(ReadError):
        storage.stage_all()


def data_loader(
    dataset: Dataset,
    requests: Iterator[Any] | None,
    num_workers: int,
    prefetch_factor: int | None,
    pin_memory: bool,
) -> DataLoader:
    """Returns torch's loader without batching, whose workers end with their trainer.

    Args:
        dataset: makes whole micro-batches.
        requests: arguments of the dataset's `__getitem__`; None for an iterable dataset.
        prefetch_factor: micro-batches that each worker prepares ahead; None without workers.
    """
    return DataLoader(
        dataset,
        sampler=requests,
        batch_size=None,
        collate_fn=keep_batch,
        num_workers=num_workers,
        prefetch_factor=prefetch_factor,
        multiprocessing_context=worker_context() if num_workers else None,
        pin_memory=pin_memory,
        worker_init_fn=end_with_parent,
    )


def move_to_shared_memory(batch: Batch) -> Batch:
    """Moves a worker's micro-batch to shared memory and returns it.

    torch would do so in a thread that prints an error and loses the micro-batch, and the trainer
    would wait for it for ever.

    Raises:
        ReadError: there is too little shared memory.
    """
    if get_worker_info() is not None:
        try:
            for tensor in (*batch.inputs.values(), batch.is_padding_B):
                tensor.share_memory_()
        except RuntimeError as error:
            reason = str(error).split("\n")[0]
            raise ReadError(
                f"a data worker has no shared memory for a micro-batch ({reason}); "
                "use fewer workers"
            ) from error
    return batch


def keep_batch(batch: Any) -> Any:
    """Returns the batch unchanged, so that torch converts nothing; unlike a lambda it pickles."""
    return batch
