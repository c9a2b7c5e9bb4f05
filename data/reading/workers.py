"""Processes that read for a trainer: data workers, and the one that copies shards."""

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import threading
from typing import Any

from data.errors import ReadError
from data.index.tar_index import ExampleTable
from data.reading.staging import StagedStorage

_PRELOAD = ["data.reading.worker_signals", "torch", "PIL.Image", "tokenizers", "data.reading.loader"]


def worker_context() -> Any:
    """How data workers start: from a small server that has loaded what they need, never from a process with threads."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    return context


def end_with_parent(_worker: int) -> None:
    """Ends this worker when its trainer is gone, however that ended.

    torch's own watchdog compares parent ids; a worker's parent is the fork server, which lives as long as its workers.
    """
    from data.reading.worker_signals import leave_to_trainer  # importing it has an effect that only a worker may have

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
