"""Contract 4 for an example that is not drawn: where all others stand, and so how they round, does not depend on it."""

import itertools
import math
from collections import Counter
from unittest import mock

import numpy as np
import pytest
from scipy import stats

from privacy.errors import PrivacyConfigError, PrivacyStateRefused
from privacy.sampling import rows
from privacy.sampling.poisson import CHUNK
from privacy.sampling.rows import deal, rows_of_members, share_bound, shares_of_nodes

KEY = bytes(range(32))


@pytest.mark.parametrize("x", range(3))
def test_contract_4_the_rows_of_the_others_do_not_depend_on_whether_one_was_drawn(x: int) -> None:
    """All 20 places of two members in 5 rows: equally likely when there are two, and when they are two of three."""
    draws, places = 2000, list(itertools.permutations(range(5), 2))
    without = Counter(tuple(rows_of_members(KEY, step, 2, 5).tolist()) for step in range(draws))
    there = Counter(
        tuple(np.delete(rows_of_members(KEY, step, 3, 5), x).tolist()) for step in range(draws)
    )
    for found in (without, there):
        assert set(found) == set(places)
        assert stats.chisquare([found[place] for place in places]).pvalue > 1e-4


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_members_are_dealt_in_whole_and_in_rising_order(world_size: int) -> None:
    members = np.arange(0, 300, 3)
    dealt = [
        deal(KEY, 1, members, 120 // world_size, world_size, rank) for rank in range(world_size)
    ]
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


def test_numbers_that_are_never_all_different_end_in_an_error() -> None:
    """A broken cipher must not be drawn from for ever: beyond one chunk of coins that had become the rule."""

    def equal(key: bytes, step: int, start: int, stop: int):  # type: ignore[no-untyped-def]
        yield start, np.zeros(stop - start, np.uint64)

    with (
        mock.patch.object(rows, "coins", equal),
        pytest.raises(PrivacyStateRefused, match=r"step 7: 5 random numbers .* in 4 tries"),
    ):
        rows_of_members(KEY, 7, 4, 5)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("num_rows", [CHUNK + 2, 1_310_720 + 9_160])
def test_a_logical_batch_of_a_million_is_dealt_to_distinct_rows(num_rows: int) -> None:
    """More rows than one chunk of coins, as every DP-Cap recipe has."""
    dealt = rows_of_members(KEY, 1, num_rows, num_rows)
    assert np.array_equal(np.sort(dealt), np.arange(num_rows))


def test_more_members_than_rows_are_refused() -> None:
    with pytest.raises(PrivacyConfigError, match="8 members do not fit 7 rows"):
        rows_of_members(KEY, 0, 8, 7)


@pytest.mark.parametrize("x", [0, 5])
def test_contract_4_with_shares_the_rows_of_the_others_do_not_depend_on_one(x: int) -> None:
    """Two nodes of one rank and four rows each; examples 0 to 3 are of the first, 4 to 7 of the second."""
    shares, draws = shares_of_nodes((0, 1), 8), 1000
    others = np.array([2, 3, 6])

    def places(step: int, members: np.ndarray) -> tuple[int, ...]:
        dealt = [deal(KEY, step, members, 4, 2, rank, shares) for rank in range(2)]
        found = {
            int(i): int(row) + 4 * rank
            for rank, (ids, rows) in enumerate(dealt)
            for i, row in zip(ids, rows, strict=True)
        }
        return tuple(found[int(i)] for i in others)

    without = Counter(places(step, others) for step in range(draws))
    there = Counter(places(step, np.sort(np.append(others, x))) for step in range(draws))
    possible = {(*pair, one) for pair in itertools.permutations(range(4), 2) for one in range(4, 8)}
    for found in (without, there):
        assert set(found) == possible
        assert stats.chisquare([found[place] for place in possible]).pvalue > 1e-4


@pytest.mark.parametrize("nodes", [(0,), (0, 1), (0, 0, 1, 1), (0, 1, 0, 2, 2, 2)])
@pytest.mark.parametrize("num_examples", [3, 100, 1001])
def test_every_example_is_of_one_node_and_its_members_come_there(
    nodes: tuple[int, ...], num_examples: int
) -> None:
    shares = shares_of_nodes(nodes, num_examples)
    assert [share.start for share in shares] == [0, *[share.stop for share in shares[:-1]]]
    assert shares[-1].stop == num_examples and sorted(r for s in shares for r in s.ranks) == list(
        range(len(nodes))
    )
    for share in shares:
        assert abs((share.stop - share.start) - num_examples * len(share.ranks) / len(nodes)) <= 1
    members = np.arange(0, num_examples, 2)
    dealt = [
        deal(KEY, 1, members, num_examples, len(nodes), rank, shares) for rank in range(len(nodes))
    ]
    assert sorted(np.concatenate([ids for ids, _ in dealt])) == members.tolist()
    for rank, (ids, places) in enumerate(dealt):
        share = shares[nodes[rank]]
        assert all(share.start <= i < share.stop for i in ids) and len(set(places.tolist())) == len(
            places
        )


def test_a_share_that_does_not_fit_is_dealt_over_all_rows() -> None:
    shares = shares_of_nodes((0, 1), 100)
    members = np.arange(50)  # all of the first node
    dealt = [deal(KEY, 1, members, 30, 2, rank, shares) for rank in range(2)]
    assert sorted(np.concatenate([ids for ids, _ in dealt])) == members.tolist()
    np.testing.assert_array_equal(dealt[0][0], deal(KEY, 1, members, 30, 2, 0)[0])


@pytest.mark.parametrize(("size", "rate"), [(10, 0.5), (300, 0.1), (100_000, 0.001), (10**8, 1e-3)])
def test_a_share_has_rows_for_all_but_2_to_the_minus_100(size: int, rate: float) -> None:
    most = share_bound(size * rate)
    assert stats.binom.logsf(most, size, rate) <= -100 * math.log(2)
    assert most <= size * rate + 12 * math.sqrt(size * rate) + 50
