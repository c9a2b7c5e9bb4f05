"""What ranks say to one another: control matters, clipped sums and noised gradients.

A program without a process group is one rank, and every collective is then its own answer.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .. import errors
from ..errors import PrivacyConfigError, RemoteError, Said, StepDropped, in_one_line

T = TypeVar("T")


def is_alone() -> bool:
    """Whether this program has no process group."""
    return not dist.is_initialized()


def rank() -> int:
    return 0 if is_alone() else dist.get_rank()


def world_size() -> int:
    return 1 if is_alone() else dist.get_world_size()


def broadcast_object(value: T) -> T:
    """Rank 0's value on every rank."""
    values = [value]
    if not is_alone():
        dist.broadcast_object_list(values, 0)
    return values[0]


def say(line: str) -> None:
    """Prints a line on the console of rank 0, which lies inside the trust boundary."""
    if rank() == 0:
        errors.say(line, folds=True)


def on_main(function: Callable[[], T]) -> T:
    """Runs `function` on rank 0 and returns its result everywhere; an error is raised everywhere.

    The acknowledgement of contract 9: no rank goes on before rank 0's write is durable.
    """
    if rank() == 0:
        try:
            result = function()
        except Exception as error:
            broadcast_object((False, tuple(in_one_line(error) or (str(error), 1))))
            raise
        broadcast_object((True, result))
        return result
    ok, value = broadcast_object((True, None))
    if not ok:
        assert isinstance(value, tuple)
        raise RemoteError(*value)
    return value  # type: ignore[return-value]


def first_on_main(function: Callable[[], T]) -> T:
    """Runs `function` everywhere, but elsewhere only after it succeeded on rank 0.

    An error of all ranks is then printed once, and an error of another host is printed there.
    """
    if rank() == 0:
        result: list[T] = []
        on_main(lambda: result.append(function()))
        return result[0]
    on_main(lambda: None)
    return function()


def refuse_together(check: Callable[[], T]) -> list[T]:
    """Runs `check` here; what one rank refuses, all refuse. Returns what it gave on every rank.

    Raises:
        PrivacyConfigError: on all ranks, in the words of the first that raised it.
        RemoteError: where it failed otherwise on another rank, such as for memory; the first such rank raises the error itself.
    """
    found, said, failed = None, None, None
    try:
        found = check()
    except PrivacyConfigError as error:
        said = str(error)
    except Exception as error:  # the other ranks wait for an answer
        failed = error
    ranks = gather_objects((found, said, failed and (in_one_line(failed) or Said(str(failed), 1))))
    for number, (_, refused, other) in enumerate(ranks):
        if refused is not None:
            raise PrivacyConfigError(refused)
        if other:
            raise (
                failed
                if failed is not None and number == rank()
                else RemoteError(other.line, other.exit_code)
            )
    return [result for result, _, _ in ranks]  # type: ignore[misc]  # none is missing where nothing was refused


def agree(*, ready: bool) -> None:
    """Waits until all ranks are here, without using a device.

    Raises:
        StepDropped: on all ranks, if one is not ready.
    """
    if all_reduce_sum(torch.tensor([0.0 if ready else 1.0])):
        raise StepDropped("a rank dropped the step before its intent")


def gather_objects(value: T) -> list[T]:
    """Every rank's value, in rank order, on every rank; pickled, so nothing that is large."""
    if is_alone():
        return [value]
    gathered: list[T | None] = [None] * world_size()
    dist.all_gather_object(gathered, value)
    return gathered  # type: ignore[return-value]


def all_reduce_sum(values: Tensor) -> Tensor:
    """The sum over ranks, in place."""
    if not is_alone():
        dist.all_reduce(values)
    return values


def on_any(*flags: bool) -> list[bool]:
    """Says for each flag whether it is set on any rank: the same answer on all."""
    votes = torch.tensor(flags, dtype=torch.int64)
    if not is_alone():
        dist.all_reduce(votes, op=dist.ReduceOp.MAX)
    return [bool(vote) for vote in votes]


def reduce_to_main(values: Tensor) -> Tensor:
    """The sum over ranks, in place and on rank 0 alone."""
    if not is_alone():
        dist.reduce(values, 0)
    return values


def require_sound(device: torch.device) -> None:
    """Call it when the device has ended a reduction and before its result is used: after an error what was received may be
    incomplete, and NCCL says so only to who asks, where torch lets one ask. Gloo raises by itself.

    Raises:
        RuntimeError: NCCL reports an error or a timeout.
    """
    if is_alone() or device.type != "cuda" or "nccl" not in dist.get_backend_config():
        return
    ask = getattr(dist.group.WORLD._get_backend(device), "get_error", None)  # type: ignore[union-attr]  # no public way
    if ask is not None and (said := ask().name) != "SUCCESS":
        raise RuntimeError(
            f"NCCL reports {said}: what was received may be incomplete, so nothing of it is used"
        )


class Traffic:
    """Counts the collectives that carry clipped sums or noised gradients, and the bytes that this rank sends in them.

    Bytes are those of an algorithm that sends nothing twice: all but a rank's own part. They follow from shapes alone, so they
    are public. What an engine moves by itself (gathering weights) is not seen here.
    """

    def __init__(self) -> None:
        self.collectives: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def note(self, kind: str, num_bytes: int) -> None:
        self.collectives[kind] += 1
        self.bytes[kind] += num_bytes

    def reset(self) -> None:
        self.collectives.clear()
        self.bytes.clear()


traffic = Traffic()
"""The traffic of this process since the last reset; a logical step resets it at its start."""


def reduce_scatter_sum(out: Tensor, rows: Tensor) -> None:
    """out (K,) = sum over ranks of their rows[this rank], rows (world_size, K)."""
    traffic.note("reduce_scatter", rows.nbytes - out.nbytes)
    if is_alone():
        out.copy_(rows[0])
        return
    if (
        rows.device.type == "cpu"
    ):  # gloo's own reduce-scatter is an all-reduce: it sends nearly twice as many bytes
        received = torch.empty_like(rows)
        dist.all_to_all_single(received, rows)
        out.copy_(received[0])
        for row in received[1:]:
            out += row
        return
    function = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    function(out, rows.view(-1))


def exchange(
    values: Tensor, *, send_counts: Sequence[int], receive_counts: Sequence[int]
) -> Tensor:
    """Sends the r-th run of `values` (of length send_counts[r]) to rank r; returns what all ranks sent here, in rank order."""
    received = values.new_empty(sum(receive_counts))
    traffic.note("exchange", (len(values) - send_counts[rank()]) * values.element_size())
    if is_alone():
        return values
    dist.all_to_all_single(received, values, list(receive_counts), list(send_counts))
    return received


def all_gather_rows(out: Tensor, row: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """out (ranks of the group, K) = every rank's row (K,); the group of all ranks by default."""
    function = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    traffic.note("all_gather", out.nbytes - row.nbytes)
    if is_alone():
        out.copy_(row.view_as(out))
        return
    function(out.view(-1), row, group=group)
