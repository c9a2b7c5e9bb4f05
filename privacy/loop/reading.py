# The global random numbers are those that data sets draw.
# ruff: noqa: NPY002
"""Items of a map-style data set -> micro-batches of fixed shape, in the rows of the sampler.

An item is read as a function of itself and of its own secret key, which seeds the random numbers of
Python, numpy and torch before `dataset[i]`: a random augmentation of one item never depends on the
others (contract 13). An item that cannot be read, or contradicts its fields, stays in the batch and
counts as zero (contract 2). A fault of the machine (a file that cannot be opened, a network,
memory) ends the run instead, since it is not a property of the item.
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

REPEATED_SAMPLE = 16
"""Items that are read twice and compared."""
SAMPLE = 512
"""Items that are read where no hash of all is needed.

That takes some seconds, and sees a loss of 2 % of all items with a probability of 93 %.
"""
NO_ACCIDENT = 1e-6
"""Losses of one label that chance gives with a smaller probability are no accident."""


class Items(Protocol):
    """A map-style data set of torch or Hugging Face, or a list."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class ItemNotRead(RuntimeError):
    """A file, a network or memory failed while an item was read; the step is not taken."""

    exit_code = 1


class MicroBatch(NamedTuple):
    """A micro-batch of items, see `privacy.step.step.MicroBatch`."""

    inputs: dict[str, Tensor]
    is_padding_B: Tensor
    num_undecodable: int


Request = list[tuple[int, int, int]]
"""The items of one micro-batch: index, key and row of each."""


@contextmanager
def restored_random_state() -> Iterator[None]:
    """Restores the global random state afterwards: dropout must not depend on items' draws."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    torch_state = torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.default_generator.set_state(torch_state)


class Reader(Dataset["MicroBatch | ItemNotRead"]):
    """Reads the micro-batch of a request, in a worker or in this process.

    Attributes:
        unusable_summary: number of items that count as zero, by the last `digest`, and the
            reasons; a line for the console.

    Raises:
        PrivacyConfigError: batches cannot be drawn from the data set by coins; the message names
            the replacement.
    """

    unusable_summary = ""

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
                "give the data set, not a DataLoader: its batches are shuffled or in order, and "
                "the guarantee is for batches that secret coins draw (Poisson sampling); the loop "
                "makes its own, with num_workers and micro_batch_size"
            )
        is_map_style = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
        if isinstance(dataset, IterableDataset) or not is_map_style:
            raise PrivacyConfigError(
                f"{type(dataset).__name__} cannot be read item by item: Poisson sampling needs "
                "len(dataset) and dataset[i]; take a map-style data set, in Hugging Face's "
                "datasets one that is loaded without streaming=True"
            )
        if len(dataset) < 1:
            raise PrivacyConfigError("the data set is empty")
        self.dataset = dataset
        self.example = example
        self.micro_batch_size = micro_batch_size
        self.unusable_as_zero = unusable_as_zero

    def item(self, index: int, key: int) -> dict[str, Tensor]:
        """Returns the tensors of one item, read with random numbers of its own.

        The caller restores the global random state.

        Raises:
            Unusable: it counts as zero.
            ItemNotRead: the machine failed.
        """
        random.seed(key)
        np.random.seed([key & 0xFFFFFFFF, key >> 32])
        torch.default_generator.manual_seed(key & (2**63 - 1))
        try:
            return self.example.read(self.dataset[index])
        # The last two end the program on a user's request.
        except (Unusable, KeyboardInterrupt, SystemExit):
            raise
        # A panic of a decoder in Rust is a BaseException, not an Exception.
        except BaseException as error:
            if _is_of_the_machine(error):
                raise ItemNotRead(
                    f"item {index} could not be read: {type(error).__name__}: {error}"
                ) from error
            kind = f"cannot be read: {type(error).__name__}"
            raise Unusable(f"{kind}: {error}", kind) from error

    def _columns(self) -> dict[str, Tensor] | None:
        """Returns the tensors of a `TensorDataset` that has the fields as they are declared.

        Returns None for any other data.
        """
        fields = self.example.fields
        if type(self.dataset) is not TensorDataset or self.example.is_named:
            return None
        if len(self.dataset.tensors) != len(fields):
            return None
        columns = dict(zip(fields, self.dataset.tensors, strict=True))
        for name, column in columns.items():
            if type(column) is not Tensor or column.layout != torch.strided:
                return None
            if column.device.type != "cpu" or column.dtype != fields[name].dtype:
                return None
            if column.shape[1:] != fields[name].shape:
                return None
        return columns

    def __getitem__(self, request: Request) -> MicroBatch | ItemNotRead:
        inputs = {}
        for name, row_padding in self.example.padding().items():
            padding_B = row_padding.expand(self.micro_batch_size, *row_padding.shape)
            inputs[name] = padding_B.clone()
        is_padding_B = torch.ones(self.micro_batch_size, dtype=torch.bool)
        num_undecodable = 0
        columns = self._columns()
        # Items of tensors draw no random numbers, so they are read together, and checked alike.
        if columns is not None and request:
            index_N = torch.tensor([index for index, _, _ in request])
            row_N = torch.tensor([row for _, _, row in request])
            items = {name: column.detach()[index_N] for name, column in columns.items()}
            is_usable_N = torch.ones(len(request), dtype=torch.bool)
            for name, values in items.items():
                is_usable_N &= self.example.fields[name].allows(values)
            for name, values in items.items():
                inputs[name][row_N[is_usable_N]] = values[is_usable_N]
            is_padding_B[row_N[is_usable_N]] = False
            return MicroBatch(inputs, is_padding_B, int((~is_usable_N).sum()))
        with restored_random_state():
            for index, key, row in request:
                try:
                    tensors = self.item(index, key)
                except Unusable:
                    num_undecodable += 1
                    continue
                # Returned, since torch buries the error of a worker in a traceback.
                except ItemNotRead as error:
                    return error
                for name, tensor in tensors.items():
                    inputs[name][row] = tensor
                is_padding_B[row] = False
        return MicroBatch(inputs, is_padding_B, num_undecodable)

    def steps(
        self, plans: Iterator[StepBatch], num_workers: int, *, pin_memory: bool = False
    ) -> Generator[tuple[StepBatch, Iterator[MicroBatch]], None, None]:
        """Yields every batch with its micro-batches, which are to be read before the next batch.

        Args:
            plans: batches, pulled lazily and in order; how far ahead follows from the number of
                micro-batches alone.
            pin_memory: page-locked tensors; without them, a copy to a GPU may wait for all work
                that is queued there.

        Raises:
            ItemNotRead: see `item`.
        """
        pulled_batches: deque[StepBatch] = deque()
        size = self.micro_batch_size

        def requests() -> Iterator[Request]:
            for batch in plans:
                pulled_batches.append(batch)
                rows = batch.rows if batch.rows is not None else np.arange(len(batch.example_ids))
                batch_requests: list[Request] = [[] for _ in range(batch.num_micro_batches)]
                columns = batch.example_ids.tolist(), batch.example_keys.tolist(), rows.tolist()
                for index, key, row in zip(*columns, strict=True):
                    batch_requests[row // size].append((index, key, row % size))
                yield from batch_requests

        answers: Iterator[MicroBatch | ItemNotRead] = map(self.__getitem__, requests())
        if num_workers:
            try:
                loader = DataLoader(
                    self, batch_size=None, sampler=requests(), num_workers=num_workers
                )
                answers = iter(loader)
            except OSError as error:
                raise ItemNotRead(
                    f"workers cannot start: {error.strerror or error}; they need /dev/shm and "
                    "processes: mend that, or give num_workers=0"
                ) from error

        def micro_batches(
            first_answer: MicroBatch | ItemNotRead, num_further: int
        ) -> Iterator[MicroBatch]:
            further_answers = itertools.islice(answers, num_further)
            for answer in itertools.chain([first_answer], further_answers):
                if isinstance(answer, ItemNotRead):
                    raise answer
                if not pin_memory:
                    yield answer
                    continue
                inputs = {name: x.pin_memory() for name, x in answer.inputs.items()}
                is_padding_B = answer.is_padding_B.pin_memory()
                yield MicroBatch(inputs, is_padding_B, answer.num_undecodable)

        # A batch is pulled before its first micro-batch arrives, perhaps several ahead by workers.
        for first_answer in answers:
            batch = pulled_batches.popleft()
            yield batch, micro_batches(first_answer, batch.num_micro_batches - 1)

    def digest(self, count: int | None = None) -> bytes:
        """Returns SHA-256 over all items in one pass, or over some; refuses unusable data.

        Messages depend on private items, so they are for the console of the job's owner, before any
        ledger is open.

        Args:
            count: of the items that are read, spread evenly; None is all.

        Raises:
            PrivacyConfigError: most items are unusable, or more of them than an accident explains
                and `unusable_as_zero` is not set; or an item changes when it is read again.
            ItemNotRead: see `item`.
        """
        total_hash = hashlib.sha256()
        losses = Losses()
        repeated_digests: dict[int, bytes] = {}
        indices = range(len(self.dataset)) if count is None else self._spread(count)
        repeated_indices = self._spread(REPEATED_SAMPLE)
        with restored_random_state():
            for index in indices:
                item_digest = self._digest_of(index, losses)
                total_hash.update(item_digest)
                if index in repeated_indices:
                    repeated_digests[index] = item_digest
            # Backwards, so that an item comes after others than in the first pass.
            for index, item_digest in reversed(repeated_digests.items()):
                if self._digest_of(index, Losses()) != item_digest:
                    raise PrivacyConfigError(
                        f"dataset[{index}] is not the same when it is read again after others, "
                        "with Python's, numpy's and torch's random numbers seeded alike: an item "
                        "must not depend on which items were read before; draw from the global "
                        "random numbers, not from a generator that the data set keeps"
                    )
        num_items = len(indices)
        num_lost = losses.reasons.total()
        summary = losses.summary(num_items)
        if 2 * num_lost > num_items:
            raise PrivacyConfigError(
                f"{summary}would count as zero: does example say what an item is?"
            )
        reason = losses.more_than_an_accident(num_items)
        if reason and not self.unusable_as_zero:
            raise PrivacyConfigError(
                f"{summary}would count as zero: {reason}; mend the data or example=, or give "
                "unusable_as_zero=True if that is meant"
            )
        self.unusable_summary = f"{summary}count as zero" if num_lost else ""
        return total_hash.digest()

    def _spread(self, count: int) -> list[int]:
        """Returns indices of so many items, spread evenly; of all items if there are fewer."""
        indices = np.linspace(0, len(self.dataset) - 1, count).astype(int)
        return sorted({*indices.tolist()})

    def _digest_of(self, index: int, losses: "Losses") -> bytes:
        """Returns SHA-256 of an item, of no bytes if it is unusable, and counts it in `losses`."""
        item_hash = hashlib.sha256()
        try:
            tensors = self.item(index, key=index)
        except Unusable as error:
            losses.add(error)
            return item_hash.digest()
        for name, tensor in tensors.items():
            item_hash.update(name.encode())
            item_hash.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
            if tensor.numel() == 1 and not tensor.is_floating_point():
                losses.used[name][int(tensor)] += 1
        return item_hash.digest()


class Losses:
    """Counts unusable items by reason and by label.

    Attributes:
        reasons: kind of fault -> unusable items.
        labels: field -> label -> unusable items.
        used: field -> label -> usable items.
    """

    def __init__(self) -> None:
        self.reasons: Counter[str] = Counter()
        self._examples: dict[str, str] = {}
        self.labels: defaultdict[str, Counter[int]] = defaultdict(Counter)
        self.used: defaultdict[str, Counter[int]] = defaultdict(Counter)

    def add(self, error: Unusable) -> None:
        """Counts an item."""
        self.reasons[error.kind] += 1
        self._examples.setdefault(error.kind, one_line(str(error))[:200])
        for name, label in error.labels.items():
            self.labels[name][label] += 1

    def summary(self, count: int) -> str:
        """Returns the beginning of a sentence: how many of `count` items are unusable, and why."""
        num_lost = self.reasons.total()
        main_reasons = self.reasons.most_common(5)
        reasons = [f"{number} times: {self._examples[kind]}" for kind, number in main_reasons]
        num_others = num_lost - sum(number for _, number in main_reasons)
        if num_others:
            reasons.append(f"{num_others} times: other reasons")
        return f"{num_lost} of {count} items cannot be used ({', '.join(reasons)}), and "

    def more_than_an_accident(self, count: int) -> str:
        """Returns why so many losses are no accident, or "" if they may be one.

        The loss of a single item always may be one. An item that can be read counts under its
        labels, whatever else is wrong with it; an item that raises has no label.
        """
        num_lost = self.reasons.total()
        if num_lost > 1 and 100 * num_lost > count:
            return "that is more than 1 %"
        for name, labels in self.labels.items():
            used = self.used[name]
            num_labelled_losses = labels.total()
            num_labelled = used.total() + num_labelled_losses
            num_labels = len({*used, *labels})
            for label, number in labels.items():
                having = used[label] + number
                chance = chance_of_label(num_labelled, having, num_labelled_losses, number)
                # Any of the labels could have been the one with many losses.
                if number > 1 and chance * num_labels < NO_ACCIDENT:
                    return (
                        f"{number} of the {having} with one value of {name} are among them, which "
                        "chance does not explain"
                    )
        return ""


def chance_of_label(count: int, having: int, lost: int, number: int) -> float:
    """Returns an upper bound of the chance that `number` or more of the lost items have a label.

    `lost` random ones of `count` items are lost: the tail of a hypergeometric distribution. Behind
    its mode terms fall faster than those of a geometric series.

    Args:
        having: how many of all items have the label.
    """
    # Of the term after the first one to the first.
    numerator = (having - number) * (lost - number)
    ratio = numerator / ((number + 1) * (count - having - lost + number + 1))
    if ratio >= 1:
        return 1.0
    log_with_label = _log_choose(having, number)
    log_without_label = _log_choose(count - having, lost - number)
    log_first_term = log_with_label + log_without_label - _log_choose(count, lost)
    return min(1.0, math.exp(log_first_term) / (1 - ratio))


def _log_choose(count: int, number: int) -> float:
    return math.lgamma(count + 1) - math.lgamma(number + 1) - math.lgamma(count - number + 1)


def _is_of_the_machine(error: BaseException) -> bool:
    """Returns whether a file, a network or memory failed.

    Pillow raises plain OSErrors without a number for broken pictures.
    """
    if isinstance(error, OSError):
        is_of_pillow = type(error).__module__.partition(".")[0] == "PIL"
        may_be_of_a_picture = type(error) is OSError or is_of_pillow
        return error.errno is not None or not may_be_of_a_picture
    # Torch has no class of its own for the memory of a CPU.
    if isinstance(error, RuntimeError):
        return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
    return isinstance(error, MemoryError)
