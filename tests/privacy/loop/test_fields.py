"""An item is what its fields say, or it is unusable; a mistake in the fields themselves is one line."""

import re
from typing import Any

import numpy as np
import pytest
import torch

from privacy.errors import PrivacyConfigError
from privacy.loop import floats, integers, mask
from privacy.loop.fields import Example, Field, Unusable

LABEL = integers(3, also=[-100])


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        (floats(2), [1.0], "shape"),
        (floats(2), ["a", "b"], "no tensor"),
        (floats(2), np.array([1j, 2j]), "complex"),
        (floats(2), torch.ones(2).to_sparse(), "no dense tensor"),
        (LABEL, 3, "other than 0 to 2"),
        (LABEL, -1, "other than 0 to 2"),
        (LABEL, 1.0, "integers are expected"),
        (LABEL, np.uint64(2**64 - 100), "not allowed"),  # -100, if its bits were read as a signed number
    ],
)
def test_a_value_that_its_field_does_not_allow_is_unusable(field: Field, value: Any, why: str) -> None:
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
    assert torch.equal(kept, kept.sort(dim=1, descending=True).values) and kept[:, 0].all()  # ones, then zeros
    assert all(not x.any() for x in example.padding().values())


@pytest.mark.parametrize("item", [(torch.ones(2), 1), {"x": torch.ones(2)}, {"x": torch.ones(2), "y": 7}])
def test_an_item_without_its_fields_is_unusable(item: Any) -> None:
    with pytest.raises(Unusable):
        Example({"x": floats(2), "y": LABEL}).read(item)
    with pytest.raises(Unusable):
        Example([floats(2), floats(2)]).read(item)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: floats(2, dtype=torch.int64), "no floating-point numbers"),
        (lambda: floats(0), "sizes of 1 or more"),
        (lambda: integers(0), "below must be 1 or more"),
        (lambda: mask(), "give its shape"),
        (lambda: Example([]), "example says what one item is"),
        (lambda: Example([floats(2), 10]), "example says what one item is"),  # type: ignore[list-item]
        (lambda: Example([floats(2), LABEL]).named([torch.ones(2, 2)]), "one tensor for each field"),
        (lambda: Example({"x": floats(2)}).named({"z": torch.ones(2, 2)}), "one tensor for each field of example: x"),
    ],
)
def test_fields_that_cannot_be_are_refused_in_one_line(make: Any, said: str) -> None:
    with pytest.raises(PrivacyConfigError, match=re.escape(said)) as refused:
        make()
    assert "\n" not in str(refused.value)
