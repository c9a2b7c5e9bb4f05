"""Processes that read for a trainer: how they start and how they end."""

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
    """How data workers start: from a small server that has loaded what they need, never from a process with threads."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    return context


def end_with_parent(_worker: int) -> None:
    """Ends this worker when its trainer is gone, however that ended.

    torch's own watchdog compares parent ids; a worker's parent is the fork server, which lives as long as its workers.
    """
    from data.reading.worker_signals import (
        leave_to_trainer,
    )  # importing it has an effect that only a worker may have

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
    """Copies the shards of this node, in a process of its own. What fails is reported by the reader that needs it."""
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
    """torch's loader of what is batched already, with workers that end with their trainer.

    Args:
        requests: what the dataset is asked for; None for an iterable one.
    """
    return DataLoader(
        dataset,
        sampler=requests,
        batch_size=None,
        collate_fn=as_is,
        num_workers=num_workers,
        prefetch_factor=prefetch_factor,
        multiprocessing_context=worker_context() if num_workers else None,
        pin_memory=pin_memory,
        worker_init_fn=end_with_parent,
    )


def shared(batch: Batch) -> Batch:
    """Moves a micro-batch of a worker to shared memory, on its way to the trainer.

    Torch would do so in a thread of its own that prints what went wrong and loses the micro-batch, for which the trainer would
    wait for ever.

    Raises:
        ReadError: there is too little memory.
    """
    if get_worker_info() is not None:
        try:
            for tensor in (*batch.inputs.values(), batch.is_padding_B):
                tensor.share_memory_()
        except RuntimeError as error:
            reason = str(error).split("\n")[0]
            raise ReadError(
                f"a data worker has no shared memory for a micro-batch ({reason}); use fewer workers"
            ) from error
    return batch


def as_is(batch: Any) -> Any:
    """Keeps torch from converting anything; a named function can be pickled."""
    return batch
