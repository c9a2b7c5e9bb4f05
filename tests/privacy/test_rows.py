"""Contract 4 for an example that is not drawn: where all others stand, and so how they round, does not depend on it."""

import itertools
from collections import Counter
from unittest import mock

import numpy as np
import pytest
from scipy import stats

from privacy.errors import PrivacyConfigError
from privacy.sampling import rows
from privacy.sampling.rows import deal, rows_of_members

KEY = bytes(range(32))


@pytest.mark.parametrize(("count", "num_rows"), [(0, 1), (0, 5), (1, 1), (7, 7), (300, 301), (1000, 4000)])
def test_rows_are_distinct_and_the_same_again(count: int, num_rows: int) -> None:
    found = rows_of_members(KEY, 3, count, num_rows)
    assert len(found) == len(set(found.tolist())) == count and all(0 <= row < num_rows for row in found)
    assert np.array_equal(found, rows_of_members(KEY, 3, count, num_rows))


@pytest.mark.parametrize("x", range(3))
def test_contract_4_the_rows_of_the_others_do_not_depend_on_whether_one_was_drawn(x: int) -> None:
    """All 20 places of two members in 5 rows: equally likely when there are two, and when they are two of three."""
    draws, places = 8000, list(itertools.permutations(range(5), 2))
    without = Counter(tuple(rows_of_members(KEY, step, 2, 5).tolist()) for step in range(draws))
    there = Counter(tuple(np.delete(rows_of_members(KEY, step, 3, 5), x).tolist()) for step in range(draws))
    for found in (without, there):
        assert set(found) == set(places)
        assert stats.chisquare([found[place] for place in places]).pvalue > 1e-4


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_members_are_dealt_in_whole_and_in_rising_order(world_size: int) -> None:
    members = np.arange(0, 300, 3)
    dealt = deal(KEY, 1, members, 120 // world_size, world_size)
    whole = rows_of_members(KEY, 1, 100, 120)
    assert sorted(np.concatenate([ids for ids, _ in dealt])) == members.tolist()
    for rank, (ids, places) in enumerate(dealt):
        assert np.all(np.diff(ids) > 0) or len(ids) < 2
        assert np.array_equal(whole[np.isin(members, ids)], places + rank * (120 // world_size))


def test_equal_numbers_are_passed_over_together() -> None:
    """Whoever decided between equal numbers by their place would prefer some rows."""
    numbers = np.array([5, 1, 5, 2, 9, 3, 8, 4], dtype=np.uint64)

    def given(key: bytes, step: int, start: int, stop: int):  # type: ignore[no-untyped-def]
        yield start, numbers[start:stop]

    with mock.patch.object(rows, "coins", given):
        assert rows_of_members(KEY, 0, 4, 4).tolist() == [1, 3, 2, 0]


def test_more_members_than_rows_are_refused() -> None:
    with pytest.raises(PrivacyConfigError, match="8 members do not fit 7 rows"):
        rows_of_members(KEY, 0, 8, 7)
