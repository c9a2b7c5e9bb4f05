"""Works on many shards at once: in processes of this machine, or on the ranks of an MPI job.

mpi4py is imported only under MPI (`mpirun -n N python ...`): without an MPI library its import
fails.
"""

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar, cast

from data.errors import DataError, ReadError

T = TypeVar("T")
_MAX_WORKERS = 1024
_SIZE_VARIABLES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")


class Pool(NamedTuple):
    """An executor, and whether this process gives out jobs.

    Attributes:
        executor: runs jobs; None runs them in this process.
        is_main: False on MPI ranks that have only served.
    """

    executor: Executor | None
    is_main: bool


@contextmanager
def worker_pool(num_workers: int) -> Iterator[Pool]:
    """Yields workers for `run_all`; under MPI its other ranks, whatever `num_workers` says.

    Raises:
        DataError: an MPI launcher without a usable mpi4py, or fewer than one worker.
    """
    if not 1 <= num_workers <= _MAX_WORKERS:
        raise DataError(
            f"{num_workers} workers; there must be at least 1, and at most {_MAX_WORKERS:,}"
        )
    sizes = {name: os.environ.get(name) or "1" for name in _SIZE_VARIABLES}
    for name, text in sizes.items():
        if not text.isdecimal():
            raise DataError(
                f"the launcher's variable {name} is {text!r}, which is not a number of ranks; "
                "unset it"
            )
    if any(int(text) > 1 for text in sizes.values()):
        try:
            from mpi4py import MPI
            from mpi4py.futures import MPICommExecutor
        except (ImportError, RuntimeError) as error:
            raise DataError(
                f"started by MPI, but mpi4py does not work here ({error}); see requirements.txt"
            ) from error
        if MPI.COMM_WORLD.Get_size() == 1:
            raise DataError(
                "each rank sees world size 1: the MPI launcher does not belong to mpi4py's library"
            )
        with MPICommExecutor(MPI.COMM_WORLD, root=0) as executor:
            # An MPIPoolExecutor on rank 0 and None elsewhere; the type stubs say otherwise.
            yield Pool(cast("Executor | None", executor), executor is not None)
    elif num_workers == 1:
        yield Pool(None, True)
    else:
        # A fresh interpreter per worker inherits no half-finished state of this process.
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(num_workers, mp_context=context) as executor:
            yield Pool(executor, True)


def available_cores() -> int:
    """Returns the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def run_all(
    executor: Executor | None, function: Callable[..., T], jobs: Sequence[tuple[Any, ...]]
) -> Iterator[T]:
    """Yields the results of function(*job) for all jobs, in the order in which they finish.

    The first error ends the iteration, and jobs that have not begun are dropped.

    Raises:
        ReadError: a worker process died.
    """
    if executor is None:
        yield from (function(*job) for job in jobs)
        return
    futures = [executor.submit(function, *job) for job in jobs]
    try:
        for future in as_completed(futures):
            yield future.result()
    except BrokenProcessPool as error:
        raise ReadError(
            "a worker process died (killed, or out of memory); the same command continues"
        ) from error
    finally:
        for future in futures:
            future.cancel()
