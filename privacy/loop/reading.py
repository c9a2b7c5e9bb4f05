# ruff: noqa: NPY002  (the global random numbers are those that data sets draw)
"""Items of a map-style data set -> micro-batches of fixed shape, in the rows that the sampler deals.

An item is read as a function of itself and of its own secret key: Python's, numpy's and torch's random numbers are seeded with
the key before `dataset[i]`, so that a random augmentation of one item never depends on the others (contract 13). An item that
cannot be read, or is not what the fields say, stays in the batch and counts as zero (contract 2). What a machine does wrong (a
file that cannot be opened, a network, memory) ends the run instead: it is no property of the item.

Items of a plain `TensorDataset` draw nothing, and those of a micro-batch are read together, with the same checks of each.
"""

import hashlib
import itertools
import math
import random
from collections import Counter, defaultdict, deque
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from ..card.render import one_line
from ..errors import PrivacyConfigError
from ..step.batches import StepBatch
from .fields import Example, Unusable

LOOKED_AT_TWICE = 16
LOOKED_AT = 512
"""Items that are looked at where nobody asks for the hash of all: a loss of 2 % is seen with 93 %, and takes some seconds."""
NO_ACCIDENT = 1e-6
"""Where chance loses so many items of any one label with less than this probability, it was not chance."""


class Items(Protocol):
    """A map-style data set of torch or Hugging Face, or a list."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class ItemNotRead(RuntimeError):
    """A file, a network or memory failed while an item was read; the step is not taken."""

    exit_code = 1


class MicroBatch(NamedTuple):
    """See `privacy.step.step.MicroBatch`."""

    inputs: dict[str, Tensor]
    is_padding_B: Tensor
    num_undecodable: int


Request = list[tuple[int, int, int]]
"""The items of one micro-batch: index, key and row of each."""


@contextmanager
def kept_random_numbers() -> Iterator[None]:
    """Restores the global random state afterwards, so that dropout does not depend on what items draw."""
    states = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.default_generator.set_state(states[2])


class Reader(Dataset["MicroBatch | ItemNotRead"]):
    """Request -> MicroBatch, in a worker or in this process.

    Raises:
        PrivacyConfigError: batches cannot be drawn from the data set by coins; it names the replacement.
    """

    unusable = ""  # how many items the last look found that count as zero, and why, for the console

    def __init__(
        self,
        dataset: Items,
        example: Example,
        micro_batch_size: int,
        *,
        unusable_as_zero: bool = False,
    ) -> None:
        if isinstance(dataset, DataLoader):
            raise PrivacyConfigError(
                "give the data set, not a DataLoader: its batches are shuffled or in order, and the guarantee is for batches "
                "that secret coins draw (Poisson sampling); the loop makes its own, with num_workers and micro_batch_size"
            )
        if isinstance(dataset, IterableDataset) or not (
            hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
        ):
            raise PrivacyConfigError(
                f"{type(dataset).__name__} cannot be read item by item: Poisson sampling needs len(dataset) and dataset[i]; take "
                "a map-style data set, in Hugging Face's datasets one that is loaded without streaming=True"
            )
        if len(dataset) < 1:
            raise PrivacyConfigError("the data set is empty")
        self.dataset, self.example, self.micro_batch_size = dataset, example, micro_batch_size
        self.unusable_as_zero = unusable_as_zero

    def item(self, index: int, key: int) -> dict[str, Tensor]:
        """One item, read with its own random numbers; the caller keeps the global ones.

        Raises:
            Unusable: it counts as zero.
            ItemNotRead: the machine failed.
        """
        random.seed(key)
        np.random.seed([key & 0xFFFFFFFF, key >> 32])
        torch.default_generator.manual_seed(key & (2**63 - 1))
        try:
            return self.example.read(self.dataset[index])
        except (
            Unusable,
            KeyboardInterrupt,
            SystemExit,
        ):  # the last two are how somebody ends the program
            raise
        except BaseException as error:  # a panic of a decoder in Rust is no Exception
            if _is_of_the_machine(error):
                raise ItemNotRead(
                    f"item {index} could not be read: {type(error).__name__}: {error}"
                ) from error
            kind = f"cannot be read: {type(error).__name__}"
            raise Unusable(f"{kind}: {error}", kind) from error

    def _columns(self) -> dict[str, Tensor] | None:
        """The tensors of a `TensorDataset` that hold the fields as they are declared; None for any other data."""
        fields = self.example.fields
        if (
            type(self.dataset) is not TensorDataset
            or self.example.is_named
            or len(self.dataset.tensors) != len(fields)
        ):
            return None
        columns = dict(zip(fields, self.dataset.tensors, strict=True))
        is_plain = all(
            type(column) is Tensor
            and column.layout == torch.strided
            and column.device.type == "cpu"
            and column.dtype == fields[name].dtype
            and column.shape[1:] == fields[name].shape
            for name, column in columns.items()
        )
        return columns if is_plain else None

    def __getitem__(self, request: Request) -> MicroBatch | ItemNotRead:
        inputs = {
            name: row.expand(self.micro_batch_size, *row.shape).clone()
            for name, row in self.example.padding().items()
        }
        is_padding_B = torch.ones(self.micro_batch_size, dtype=torch.bool)
        num_undecodable = 0
        columns = self._columns()
        if columns is not None and request:
            index_N, row_N = (
                torch.tensor([(index, row) for index, _, row in request]).view(-1, 2).unbind(1)
            )
            read = {name: column.detach()[index_N] for name, column in columns.items()}
            is_usable_N = torch.stack(
                [self.example.fields[name].allows(value) for name, value in read.items()]
            ).all(0)
            for name, value in read.items():
                inputs[name][row_N[is_usable_N]] = value[is_usable_N]
            is_padding_B[row_N[is_usable_N]] = False
            return MicroBatch(inputs, is_padding_B, int((~is_usable_N).sum()))
        with kept_random_numbers():
            for index, key, row in request:
                try:
                    tensors = self.item(index, key)
                except Unusable:
                    num_undecodable += 1
                    continue
                except ItemNotRead as error:
                    return error  # as data: torch would bury what a worker raises in a traceback
                for name, tensor in tensors.items():
                    inputs[name][row] = tensor
                is_padding_B[row] = False
        return MicroBatch(inputs, is_padding_B, num_undecodable)

    def steps(
        self, plans: Iterator[StepBatch], num_workers: int, *, pin_memory: bool = False
    ) -> Generator[tuple[StepBatch, Iterator[MicroBatch]], None, None]:
        """Pairs every plan with its micro-batches, which are to be read to their end before the next.

        Args:
            plans: pulled lazily and in order; how far ahead follows from the number of micro-batches alone.
            pin_memory: page-locked tensors; without, the copy to a GPU may wait for all that it has to do before.

        Raises:
            ItemNotRead: see `item`.
        """
        pulled, size = deque[StepBatch](), self.micro_batch_size

        def requests() -> Iterator[Request]:
            for plan in plans:
                pulled.append(plan)
                rows = plan.rows if plan.rows is not None else np.arange(len(plan.example_ids))
                made: list[Request] = [[] for _ in range(plan.num_micro_batches)]
                columns = plan.example_ids.tolist(), plan.example_keys.tolist(), rows.tolist()
                for index, key, row in zip(*columns, strict=True):
                    made[row // size].append((index, key, row % size))
                yield from made

        results: Iterator[MicroBatch | ItemNotRead] = map(self.__getitem__, requests())
        if num_workers:
            try:
                results = iter(
                    DataLoader(self, batch_size=None, sampler=requests(), num_workers=num_workers)
                )
            except OSError as error:
                raise ItemNotRead(
                    f"workers cannot start: {error.strerror or error}; they need /dev/shm and processes: mend that, or give "
                    "num_workers=0"
                ) from error

        def batches(first: MicroBatch | ItemNotRead, more: int) -> Iterator[MicroBatch]:
            for result in itertools.chain([first], itertools.islice(results, more)):
                if isinstance(result, ItemNotRead):
                    raise result
                if pin_memory:
                    inputs = {name: x.pin_memory() for name, x in result.inputs.items()}
                    result = MicroBatch(
                        inputs, result.is_padding_B.pin_memory(), result.num_undecodable
                    )
                yield result

        for first in results:
            plan = pulled.popleft()
            yield plan, batches(first, plan.num_micro_batches - 1)

    def digest(self, count: int | None = None) -> bytes:
        """SHA-256 over all items in one pass, or over some; refuses data that the run could not use.

        What is found depends on private items, so it is for the console of whoever runs the job, before any ledger is open.

        Args:
            count: of the items that are looked at, spread evenly; None is all.

        Raises:
            PrivacyConfigError: most items cannot be used, or more of them than an accident explains, unless that was said to be
                meant; or an item is not the same when it is read again.
            ItemNotRead: see `item`.
        """
        total, losses, seen = hashlib.sha256(), Losses(), dict[int, bytes]()
        indices = range(len(self.dataset)) if count is None else self._spread(count)
        again = self._spread(LOOKED_AT_TWICE)
        with kept_random_numbers():
            for index in indices:
                one = self._digest_of(index, losses)
                total.update(one)
                if index in again:
                    seen[index] = one
            for index, before in reversed(seen.items()):
                if self._digest_of(index, Losses()) != before:
                    raise PrivacyConfigError(
                        f"dataset[{index}] is not the same when it is read again after others, with Python's, numpy's and "
                        "torch's random numbers seeded alike: an item must not depend on which items were read before; draw from "
                        "the global random numbers, not from a generator that the data set keeps"
                    )
        lost = losses.reasons.total()
        if 2 * lost > len(indices):
            raise PrivacyConfigError(
                f"{losses.said(len(indices))}would count as zero: does example say what an item is?"
            )
        why = losses.more_than_an_accident(len(indices))
        if why and not self.unusable_as_zero:
            raise PrivacyConfigError(
                f"{losses.said(len(indices))}would count as zero: {why}; mend the data or example=, or give "
                "unusable_as_zero=True if that is meant"
            )
        self.unusable = f"{losses.said(len(indices))}count as zero" if lost else ""
        return total.digest()

    def _spread(self, count: int) -> list[int]:
        """Indices of so many items, spread evenly; of all where there are fewer."""
        return sorted({*np.linspace(0, len(self.dataset) - 1, count).astype(int).tolist()})

    def _digest_of(self, index: int, losses: "Losses") -> bytes:
        one = hashlib.sha256()
        try:
            tensors = self.item(index, key=index)
        except Unusable as error:
            losses.add(error)
            return one.digest()
        for name, tensor in tensors.items():
            one.update(name.encode())
            one.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
            if tensor.numel() == 1 and not tensor.is_floating_point():
                losses.used[name][int(tensor)] += 1
        return one.digest()


class Losses:
    """Items that cannot be used, by reason and by label.

    Attributes:
        reasons: kind -> how many.
        labels: field -> label -> how many.
        used: the same of items that can be used.
    """

    def __init__(self) -> None:
        self.reasons, self._examples = Counter[str](), dict[str, str]()
        self.labels, self.used = (defaultdict[str, Counter[int]](Counter) for _ in range(2))

    def add(self, error: Unusable) -> None:
        """Counts an item."""
        self.reasons[error.kind] += 1
        self._examples.setdefault(error.kind, one_line(str(error))[:200])
        for name, label in error.labels.items():
            self.labels[name][label] += 1

    def said(self, count: int) -> str:
        """How many of so many items cannot be used, and why; begins a sentence."""
        named = self.reasons.most_common(5)
        why = ", ".join(f"{number} times: {self._examples[kind]}" for kind, number in named)
        others = self.reasons.total() - sum(number for _, number in named)
        why += f", {others} times: other reasons" if others else ""
        return f"{self.reasons.total()} of {count} items cannot be used ({why}), and "

    def more_than_an_accident(self, count: int) -> str:
        """Why so many losses are no accident; empty where they may be one, as that of a single item always may.

        Labels are those of items that can be read, whatever else is wrong with them: of one that raises nobody knows its label.
        """
        total = self.reasons.total()
        if total > 1 and 100 * total > count:
            return "that is more than 1 %"
        for name, labels in self.labels.items():
            used, lost = self.used[name], labels.total()
            known = used.total() + lost
            for label, number in labels.items():
                having = used[label] + number
                likely = chance_of_label(known, having, lost, number) * len({*used, *labels})
                if number > 1 and likely < NO_ACCIDENT:
                    return f"{number} of the {having} with one value of {name} are among them, which is no chance"
        return ""


def chance_of_label(count: int, having: int, lost: int, number: int) -> float:
    """Returns an upper bound of the chance that of `lost` random ones of `count` items at least `number` have a label.

    The tail of a hypergeometric distribution; behind its mode terms fall faster than a geometric series does.

    Args:
        having: how many of all items have the label.
    """
    ratio = (
        (having - number) * (lost - number) / ((number + 1) * (count - having - lost + number + 1))
    )
    if ratio >= 1:
        return 1.0
    chosen = (
        _log_choose(having, number)
        + _log_choose(count - having, lost - number)
        - _log_choose(count, lost)
    )
    return min(1.0, math.exp(chosen) / (1 - ratio))


def _log_choose(count: int, number: int) -> float:
    return math.lgamma(count + 1) - math.lgamma(number + 1) - math.lgamma(count - number + 1)


def _is_of_the_machine(error: BaseException) -> bool:
    """Whether a file, a network or memory failed; Pillow raises plain OSErrors without a number for pictures that are broken."""
    if isinstance(error, OSError):
        is_of_a_picture = (
            type(error) is OSError or type(error).__module__.partition(".")[0] == "PIL"
        )
        return error.errno is not None or not is_of_a_picture
    if isinstance(
        error, RuntimeError
    ):  # torch has no class of its own for what a CPU's memory cannot hold
        return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
    return isinstance(error, MemoryError)
