"""Members, keys and micro-batch counts of every rank, against the sampler asked as a whole."""

import math

import numpy as np
import pytest

from privacy.plan.numbers import usual_cap
from privacy.ranks import collectives
from privacy.sampling.keys import SamplingKey
from privacy.sampling.poisson import PoissonSampler, example_keys
from privacy.step.batches import LogicalBatches, StepBatch

NUM_EXAMPLES = 503
NONCE = bytes(range(16))
KEY = SamplingKey(bytes(32))


def logical_batches(
    expected: int,
    cap: int | None,
    attempts: dict[int, int] | None = None,
    *,
    pads_to_cap: bool = True,
    nodes: tuple[int, ...] = (),
) -> LogicalBatches:
    sampler = PoissonSampler.with_expected_batch(NUM_EXAMPLES, expected, cap)
    return LogicalBatches(sampler, KEY, NONCE, attempts or {}, 4, pads_to_cap, nodes, expected)


def plans_of_all(
    made: LogicalBatches, world_size: int, step: int, monkeypatch: pytest.MonkeyPatch
) -> list[StepBatch]:
    """Every rank's plan of one step, without other processes: each rank's decisions are handed to the others."""
    coin_key = made.key.coin_key(made.nonce, made.attempts.get(step, 0))
    bounds = [
        (NUM_EXAMPLES * r // world_size, NUM_EXAMPLES * (r + 1) // world_size)
        for r in range(world_size)
    ]
    decided = [made.sampler.decide(coin_key, step, *b) for b in bounds]
    found = []
    with monkeypatch.context() as patch:
        patch.setattr(collectives, "world_size", lambda: world_size)
        for rank in range(world_size):
            patch.setattr(collectives, "rank", lambda rank=rank: rank)

            def gather(mine, rank=rank):  # type: ignore[no-untyped-def]
                assert np.array_equal(mine.ids, decided[rank].ids), "a rank decides its own slice"
                return decided

            patch.setattr(collectives, "gather_objects", gather)
            (plan,) = made.plans(step, step)
            found.append(plan)
    return found


WORLDS = [
    (1, ()),
    (2, ()),
    (3, ()),
    (7, ()),
    (1, (0,)),
    (2, (0, 1)),
    (3, (0, 0, 1)),
    (5, (0, 1, 1, 0, 2)),
]
"""Ranks, and the node of each where every node has a store of its own."""


@pytest.mark.parametrize(("world_size", "nodes"), WORLDS)
@pytest.mark.parametrize(
    ("expected", "cap"), [(40, None), (40, usual_cap(40)), (40, 35), (1, 9), (503, 503)]
)
@pytest.mark.parametrize("pads_to_cap", [True, False])
def test_members_do_not_depend_on_the_world(
    world_size: int,
    nodes: tuple[int, ...],
    expected: int,
    cap: int | None,
    pads_to_cap: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor on who stores what: a node with a store gets its share of the same members."""
    made = logical_batches(expected, cap, pads_to_cap=pads_to_cap, nodes=nodes)
    counts = set()
    for step in (1, 2, 3):
        found = plans_of_all(made, world_size, step, monkeypatch)
        members = made.sampler.members(KEY.coin_key(NONCE, 0), step)
        assert sorted(np.concatenate([plan.example_ids for plan in found])) == members.tolist()
        (count,) = {plan.num_micro_batches for plan in found}
        counts.add(count)
        for rank, plan in enumerate(found):
            keys = example_keys(KEY.example_key(NONCE, 0), step, plan.example_ids)
            assert np.array_equal(plan.example_keys, keys) and np.all(np.diff(plan.example_ids) > 0)
            assert len(set(plan.rows.tolist())) == len(plan.rows) == len(plan.example_ids)
            assert all(0 <= row < 4 * count for row in plan.rows)
            if nodes:
                share = [
                    sum(node < one for node in nodes) for one in (nodes[rank], nodes[rank] + 1)
                ]
                first, stop = (NUM_EXAMPLES * ranks // world_size for ranks in share)
                assert all(first <= i < stop for i in plan.example_ids)
        if not pads_to_cap and not nodes:
            assert count == max(1, math.ceil(math.ceil(len(members) / world_size) / 4))
        assert {plan.step for plan in found} == {step}
    assert len(counts) == 1 or not pads_to_cap


def test_a_retry_takes_new_coins_and_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    first = plans_of_all(logical_batches(40, None), 2, 5, monkeypatch)
    again = plans_of_all(logical_batches(40, None, {5: 1}), 2, 5, monkeypatch)
    other = plans_of_all(logical_batches(40, None, {4: 1}), 2, 5, monkeypatch)
    assert not np.array_equal(first[0].example_ids, again[0].example_ids)
    assert not set(first[0].example_keys.tolist()) & set(again[0].example_keys.tolist())
    assert np.array_equal(first[0].example_ids, other[0].example_ids), (
        "another step's attempts do not matter"
    )


@pytest.mark.parametrize("cap", [105, usual_cap(100)])
def test_contracts_4_and_12_every_step_runs_the_micro_batches_of_the_cap(
    cap: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch size varies; the number of micro-batches is that of the cap."""
    made = logical_batches(100, cap)
    found = [plan for step in range(1, 13) for plan in plans_of_all(made, 2, step, monkeypatch)]
    assert len({len(plan.example_ids) for plan in found}) > 2
    assert {plan.num_micro_batches for plan in found} == {math.ceil(math.ceil(cap / 2) / 4)}


def test_contract_4_rows_are_those_of_all_ranks_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps never place their members alike, nor do two attempts or sessions; any rank may have any member."""
    made = logical_batches(40, usual_cap(40))
    found = [plans_of_all(made, 2, step, monkeypatch) for step in range(1, 60)]
    assert len({plan.rows[:8].tobytes() for plans in found for plan in plans}) == 2 * len(found)
    again = plans_of_all(logical_batches(40, usual_cap(40), {5: 1}), 2, 5, monkeypatch)
    assert not np.array_equal(again[0].rows[:8], found[4][0].rows[:8])
    ranks = [{int(i) for plans in found for i in plans[rank].example_ids} for rank in range(2)]
    assert len(ranks[0] & ranks[1]) > 0.8 * NUM_EXAMPLES


def test_an_empty_batch_is_one_micro_batch_of_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    made = logical_batches(1, 9)
    empty = [s for s in range(1, 40) if len(made.sampler.members(KEY.coin_key(NONCE, 0), s)) == 0]
    assert empty, "with B = 1 a third of the batches are empty"
    for plan in plans_of_all(made, 3, empty[0], monkeypatch):
        assert plan.num_micro_batches == 1 and len(plan.example_ids) == len(plan.rows) == 0
