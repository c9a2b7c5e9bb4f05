"""An item is what its fields say, or it is unusable; a mistake in the fields themselves is one line."""

import random
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from privacy.errors import PrivacyConfigError
from privacy.loop import floats, integers, mask
from privacy.loop.fields import Example, Field, Unusable
from privacy.loop.reading import MicroBatch, Reader

LABEL = integers(3, also=[-100])


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        (floats(2), [1.0], "shape"),
        (floats(2), ["a", "b"], "not a tensor"),
        (floats(2), np.array([1j, 2j]), "complex"),
        (floats(2), torch.ones(2).to_sparse(), "not a dense tensor"),
        (LABEL, 3, "other than 0 to 2"),
        (LABEL, -1, "other than 0 to 2"),
        (LABEL, 1.0, "integers are expected"),
        (
            LABEL,
            np.uint64(2**64 - 100),
            "not allowed",
        ),  # -100, if its bits were read as a signed number
    ],
)
def test_a_value_that_its_field_does_not_allow_is_unusable(
    field: Field, value: Any, why: str
) -> None:
    with pytest.raises(Unusable, match=why):
        field.read(value)


def test_what_is_read_is_a_copy_of_the_field_s_own_kind_and_made_up_items_are_usable() -> None:
    given = torch.ones(2, dtype=torch.float64)
    read = floats(2).read(given)
    given.zero_()
    assert read.dtype == torch.float32 and read.tolist() == [1, 1]
    assert LABEL.read(-100).item() == -100 and LABEL.read(np.uint64(2)).dtype == torch.int64
    example = Example({"x": floats(2, 3), "attention": mask(5), "y": LABEL})
    batch = example.made_up(8)
    for row in range(8):
        item = {name: values[row] for name, values in batch.items()}
        assert all(torch.equal(example.read(item)[name], item[name]) for name in item)
    kept = batch["attention"]
    assert (
        torch.equal(kept, kept.sort(dim=1, descending=True).values) and kept[:, 0].all()
    )  # ones, then zeros
    assert all(not x.any() for x in example.padding().values())


@pytest.mark.parametrize(
    "item", [(torch.ones(2), 1), {"x": torch.ones(2)}, {"x": torch.ones(2), "y": 7}]
)
def test_an_item_without_its_fields_is_unusable(item: Any) -> None:
    for fields in ({"x": floats(2), "y": LABEL}, [floats(2), floats(2)]):
        with pytest.raises(Unusable):
            Example(fields).read(item)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: floats(2, dtype=torch.int64), "not a floating-point dtype"),
        (lambda: floats(0), "sizes of 1 or more"),
        (lambda: integers(0), "below must be 1 or more"),
        (lambda: mask(), "give its shape"),
        (lambda: Example([]), "example says what one item is"),
        (lambda: Example([floats(2), 10]), "example says what one item is"),  # type: ignore[list-item]
        (
            lambda: Example([floats(2), LABEL]).named([torch.ones(2, 2)]),
            "one tensor for each field",
        ),
        (
            lambda: Example({"x": floats(2)}).named({"z": torch.ones(2, 2)}),
            "one tensor for each field of example: x",
        ),
    ],
)
def test_fields_that_cannot_be_are_refused_in_one_line(make: Any, said: str) -> None:
    with pytest.raises(PrivacyConfigError, match=re.escape(said)) as refused:
        make()
    assert "\n" not in str(refused.value)


def test_items_of_tensors_are_read_together_as_they_are_one_by_one() -> None:
    """NaN, integers that are not allowed, empty requests, any rows; no random number is drawn or seeded."""
    generator = torch.Generator().manual_seed(1)
    x, y = (
        torch.randn(30, 2, 3, generator=generator),
        torch.randint(-2, 4, (30,), generator=generator),
    )
    x[3, 1, 1], y[5], y[6] = torch.nan, -100, 2**62
    fields = Example((floats(2, 3), LABEL))
    together = Reader(TensorDataset(x.requires_grad_(), y), fields, 8)
    one_by_one = Reader([(a.detach(), b) for a, b in zip(x, y, strict=True)], fields, 8)
    for trial in range(40):
        count = trial % 9
        ids = torch.randint(30, (count,), generator=generator).tolist()
        request = [
            (i, 1, row)
            for i, row in zip(ids, torch.randperm(8, generator=generator).tolist(), strict=False)
        ]
        state = torch.get_rng_state()
        found, expected = together[request], one_by_one[request]
        assert (
            torch.equal(state, torch.get_rng_state())
            and found.num_undecodable == expected.num_undecodable
        )
        assert torch.equal(found.is_padding_B, expected.is_padding_B)
        assert all(
            torch.equal(found.inputs[n].nan_to_num(9), expected.inputs[n].nan_to_num(9))
            for n in found.inputs
        )


@pytest.mark.parametrize("kind", [list, lambda items: TensorDataset(torch.stack(items))])
def test_contract_13_what_a_model_draws_does_not_follow_from_the_keys_of_items(kind: Any) -> None:
    """Python's, numpy's and torch's random numbers go on as if nobody had read, also where an item cannot be used."""
    reader = Reader(kind([torch.tensor(1), torch.tensor(7)]), Example([LABEL]), 4)

    def draws() -> tuple[float, ...]:
        return (
            random.random(),
            float(np.random.random()),  # noqa: NPY002  (what an old library draws from)
            float(torch.rand(())),
        )

    def seeded() -> None:
        random.seed(5)
        np.random.seed(5)  # noqa: NPY002
        torch.manual_seed(5)

    seeded()
    expected = draws()
    for request in ([], [(0, 1, 3)], [(0, 2**63 + 9, 0), (1, 7, 2)]):
        seeded()
        assert reader[request].is_padding_B.sum() == 4 - min(1, len(request))
        assert draws() == expected
    seeded()
    reader.digest()
    assert draws() == expected


def test_only_plain_tensors_in_the_fields_own_dtypes_are_read_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Augmented(TensorDataset):
        """Its items draw random numbers."""

    x, y = torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64)
    plain = TensorDataset(x, y)
    others = [
        Augmented(x, y),
        TensorDataset(x.double(), y),
        TensorDataset(x, y.int()),
        TensorDataset(x, y, y),
    ]
    others += [TensorDataset(x.to_sparse(), y), TensorDataset(torch.zeros(4, 3), y), list(plain)]
    for data, is_together in ((plain, True), *((other, False) for other in others)):
        monkeypatch.setattr(
            Reader,
            "item",
            lambda *_: pytest.fail("read one by one") if is_together else {},  # noqa: B023
        )
        assert isinstance(
            Reader(data, Example((floats(2), integers(3))), 4)[[(0, 1, 0), (3, 2, 1)]], MicroBatch
        )
