"""The models of tests are so small that all their gradients would be written out: most tests are about products instead."""

import pytest

from privacy.clipping import clipped_sum

BOTH = ("test_oracle", "test_sensitivity", "test_rounding", "test_shared_uses")
ONCE = (
    "test_contract_4_adversarial_pairs",
    "test_contract_4_sharded_accumulation_rounds_no_worse",
    "test_contract_4_neighbours_drawn_at_random",
    "test_contract_4_neighbours_of_products_that_are_added_up_as_on_cuda",
    "test_contract_4_tokens_that_cancel_do_not_carry_partial_sums_away",
    "test_contract_4_norms_neither_underflow_nor_overflow",
    "test_a_pair_that_is_printed_can_be_typed_again",
    "test_contract_4_one_example_does_not_change_how_others_round",
    "test_contract_4_products_of_one_row_are_not_added_up_token_by_token",
    "test_contract_4_what_stands_in_a_row_without_an_example_changes_no_bit",
    "test_contract_4_sums_of_many_uses_do_not_round_with_those_of_other_examples",
)
"""In `make test` without."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """What holds for every way of clipping is tried with small parameters written out, too."""
    if metafunc.module.__name__.rpartition(".")[2] in BOTH:
        marks = [pytest.mark.full] if metafunc.function.__name__ in ONCE else []
        both = [pytest.param(False, id=""), pytest.param(True, id="written", marks=marks)]
        metafunc.parametrize("writes_out", both, indirect=True)


@pytest.fixture(autouse=True)
def writes_out(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether gradients of small parameters are written out, as outside of tests."""
    chosen: bool = getattr(request, "param", False)
    if not chosen:
        monkeypatch.setattr(clipped_sum, "WRITTEN_ENTRIES", 0)
    return chosen
