"""Collectives of ranks: control messages, clipped sums and noised gradients.

A program without a process group is one rank, for which each collective returns its own input.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .. import errors
from ..errors import ErrorLine, PrivacyConfigError, RemoteError, StepDropped, in_one_line

T = TypeVar("T")


def is_alone() -> bool:
    """Returns whether this program has no process group."""
    return not dist.is_initialized()


def rank() -> int:
    return 0 if is_alone() else dist.get_rank()


def world_size() -> int:
    return 1 if is_alone() else dist.get_world_size()


def broadcast_object(value: T) -> T:
    """Returns rank 0's value on every rank."""
    values = [value]
    if not is_alone():
        dist.broadcast_object_list(values, 0)
    return values[0]


def say(line: str) -> None:
    """Prints a line on the console of rank 0, which is inside of the trust boundary."""
    if rank() == 0:
        errors.say(line, folds=True)


def on_main(function: Callable[[], T]) -> T:
    """Runs `function` on rank 0 and returns its result everywhere; an error is raised everywhere.

    The acknowledgement of contract 9: no rank goes on before rank 0's write is durable.
    """
    if rank() == 0:
        try:
            returned = function()
        except Exception as error:
            line, exit_code = in_one_line(error) or (str(error), 1)
            broadcast_object((False, (line, exit_code)))
            raise
        broadcast_object((True, returned))
        return returned
    has_succeeded, answer = broadcast_object((True, None))
    if not has_succeeded:
        assert isinstance(answer, tuple)
        raise RemoteError(*answer)
    return answer  # type: ignore[return-value]


def first_on_main(function: Callable[[], T]) -> T:
    """Runs `function` on rank 0, and on the other ranks once it has succeeded there.

    An error of all ranks is then printed once, and an error of another host is printed there.
    """
    if rank() == 0:
        # A list takes the return value, which need not be picklable, past the broadcast.
        returned: list[T] = []
        on_main(lambda: returned.append(function()))
        return returned[0]
    on_main(lambda: None)
    return function()


def refuse_together(check: Callable[[], T]) -> list[T]:
    """Runs `check` on every rank and returns the answers of all ranks; one refusal refuses all.

    Raises:
        PrivacyConfigError: on all ranks, in the words of the first that raised it.
        RemoteError: another rank failed in another way, such as for memory; the first such rank
            raises the error itself.
    """
    answer = None
    refusal = None
    failure = None
    try:
        answer = check()
    except PrivacyConfigError as error:
        refusal = str(error)
    # Any other error, too: the other ranks wait for an answer.
    except Exception as error:
        failure = error
    failure_line = failure and (in_one_line(failure) or ErrorLine(str(failure), 1))
    ranks = gather_objects((answer, refusal, failure_line))
    for number, (_, rank_refusal, rank_failure) in enumerate(ranks):
        if rank_refusal is not None:
            raise PrivacyConfigError(rank_refusal)
        if rank_failure:
            if failure is not None and number == rank():
                raise failure
            raise RemoteError(rank_failure.line, rank_failure.exit_code)
    # No answer is missing where no rank refused.
    return [rank_answer for rank_answer, _, _ in ranks]  # type: ignore[misc]


def agree(*, ready: bool) -> None:
    """Waits until all ranks have called it, without using a device.

    Raises:
        StepDropped: on all ranks, if one is not ready.
    """
    num_unready = all_reduce_sum(torch.tensor([0.0 if ready else 1.0]))
    if num_unready:
        raise StepDropped("a rank dropped the step before its intent")


def gather_objects(value: T) -> list[T]:
    """Returns every rank's value, in rank order, on every rank; pickled, so only small objects."""
    if is_alone():
        return [value]
    gathered: list[T | None] = [None] * world_size()
    dist.all_gather_object(gathered, value)
    return gathered  # type: ignore[return-value]


def all_reduce_sum(values: Tensor) -> Tensor:
    """Adds the tensors of all ranks up, in place, and returns the sum."""
    if not is_alone():
        dist.all_reduce(values)
    return values


def on_any(*flags: bool) -> list[bool]:
    """Returns whether any rank has set a flag, for each flag; all ranks get the same answer."""
    votes = torch.tensor(flags, dtype=torch.int64)
    if not is_alone():
        dist.all_reduce(votes, op=dist.ReduceOp.MAX)
    return [bool(vote) for vote in votes]


def reduce_to_main(values: Tensor) -> Tensor:
    """Adds the tensors of all ranks up, in place and on rank 0 alone."""
    if not is_alone():
        dist.reduce(values, 0)
    return values


def require_sound(device: torch.device) -> None:
    """Refuses the result of a reduction after an error of NCCL, which may have left it incomplete.

    Call it once the device has ended the reduction, and before its result is used. NCCL reports an
    error only when asked, where torch has a way to ask. Gloo raises by itself.

    Raises:
        RuntimeError: NCCL reports an error or a timeout.
    """
    if is_alone() or device.type != "cuda" or "nccl" not in dist.get_backend_config():
        return
    # Torch has no public way to the backend.
    backend = dist.group.WORLD._get_backend(device)  # type: ignore[union-attr]
    get_error = getattr(backend, "get_error", None)
    state = "SUCCESS" if get_error is None else get_error().name
    if state != "SUCCESS":
        raise RuntimeError(
            f"NCCL reports {state}: the received sums may be incomplete, and are not used"
        )


class Traffic:
    """Counts collectives of clipped sums or noised gradients, and the bytes that this rank sends.

    Bytes are those of an algorithm that sends no byte twice: all but a rank's own part. They follow
    from shapes alone, so they are public. An engine's own traffic (gathering weights) is not
    counted.
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
"""Traffic of this process since the last reset; a logical step resets it at its start."""


def reduce_scatter_sum(out: Tensor, rows: Tensor) -> None:
    """Sets out (K,) to the sum over ranks of their rows[this rank], rows (world_size, K)."""
    traffic.note("reduce_scatter", rows.nbytes - out.nbytes)
    if is_alone():
        out.copy_(rows[0])
        return
    # Gloo's own reduce-scatter is an all-reduce, which sends nearly twice as many bytes.
    if rows.device.type == "cpu":
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
    """Sends the r-th run of `values`, send_counts[r] long, to rank r.

    Returns:
        The runs that all ranks sent to this one, in rank order.
    """
    received = values.new_empty(sum(receive_counts))
    traffic.note("exchange", (len(values) - send_counts[rank()]) * values.element_size())
    if is_alone():
        return values
    dist.all_to_all_single(received, values, list(receive_counts), list(send_counts))
    return received


def all_gather_rows(out: Tensor, row: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Sets out (ranks, K) to every rank's row (K,), in a group, by default that of all ranks."""
    function = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    traffic.note("all_gather", out.nbytes - row.nbytes)
    if is_alone():
        out.copy_(row.view_as(out))
        return
    function(out.view(-1), row, group=group)
