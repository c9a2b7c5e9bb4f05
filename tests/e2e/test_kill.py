"""SIGKILL at random moments, resumed by the same command: nothing is spent twice, nothing is forgotten (contract 9)."""

import hashlib
import json
import random
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from privacy.card.run_card import read_utility
from privacy.ledger.records import read_ledger
from privacy.sampling.keys import SamplingKey
from privacy.sampling.sampler import sampler_of
from privacy.verify import verify
from tests.e2e.launch import (
    PLANTED,
    alone,
    count,
    kill_group,
    ledger_lines,
    start_ranks,
    train_arguments,
)
from tests.privacy.published import read_metrics

NUM_STEPS = 20
FEW_STEPS = 6


def run_with_kills(
    run_dir: Path,
    kills: int,
    reserve: int,
    seed: int,
    *,
    steps: int = NUM_STEPS,
    first_at_intent: bool = False,
) -> int:
    """Starts the run again and again, killing all ranks `kills` times; returns the exit code of the last start.

    With `first_at_intent` the first kill waits for an intent without its `done`: that attempt is charged for nothing.
    """
    random_moments = random.Random(seed)
    arguments = train_arguments(
        run_dir,
        f"train.num_steps={steps}",
        f"privacy.reserved_attempts={reserve}",
        "heldout.num_captions=0",
    )
    log, noise = run_dir.with_suffix(".log"), str(run_dir.with_suffix(".noise"))
    for kill in range(kills):
        before = len(ledger_lines(run_dir))
        ranks = start_ranks(["nothing", *arguments], 2, log, script=PLANTED, NOISE_LOG=noise)
        wanted = before + random_moments.randint(
            1, 8
        )  # anywhere: before the session, between intent and done, later
        deadline = time.monotonic() + 120
        while len(ledger_lines(run_dir)) < wanted and all(r.poll() is None for r in ranks):
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.002)
        if kill == 0 and first_at_intent:
            while ledger_lines(run_dir)[-1]["type"] != "intent":
                assert time.monotonic() < deadline, log.read_text()[-3000:]
        else:
            time.sleep(random_moments.random() * 0.1)
        for rank in ranks:
            kill_group(rank)
    ranks = start_ranks(["nothing", *arguments], 2, log, script=PLANTED, NOISE_LOG=noise)
    codes = [rank.wait(timeout=240) for rank in ranks]
    assert codes[0] == codes[1], log.read_text()[-3000:]
    return codes[0]


def members_of(run_dir: Path) -> list[np.ndarray]:
    """The members of each attempt, from its key and the nonce of its session."""
    state, nonce, members = read_ledger(run_dir / "ledger.jsonl"), b"", []
    key = SamplingKey.load(run_dir / "private" / "sampling.key", state.opened["key_commitment"])
    for line in ledger_lines(run_dir):
        if line["type"] == "session":
            nonce = bytes.fromhex(line["nonce"])
        if line["type"] == "intent":
            members.append(
                sampler_of(state.plan).members(key.coin_key(nonce, line["attempt"]), line["step"])
            )
    return members


def check_ledger(run_dir: Path) -> None:
    """Every line carries the SHA-256 of the one before, and no two attempts have members or noise in common, beyond chance."""
    lines = (run_dir / "ledger.jsonl").read_bytes().split(b"\n")
    assert lines[-1] == b""
    previous = "0" * 64
    for line in lines[:-1]:  # independent of the ledger's own reader
        if not line.endswith(b" #torn"):
            assert json.loads(line)["previous"] == previous
        previous = hashlib.sha256(line).hexdigest()
    members = members_of(run_dir)
    assert len({m.tobytes() for m in members}) == len(members)
    overlap = [len(np.intersect1d(a, b)) for i, a in enumerate(members) for b in members[:i]]
    assert max(overlap) <= 8  # 24 of 3,000 twice: 0.2 on average
    draws = run_dir.with_suffix(".noise").read_text().split()
    assert len(set(draws)) == len(draws)


def check_finished(run_dir: Path, steps: int) -> None:
    check_ledger(run_dir)
    state = read_ledger(run_dir / "ledger.jsonl")
    assert state.closed == "finished"
    assert {line["step"] for line in ledger_lines(run_dir) if line["type"] == "done"} == set(
        range(1, steps + 1)
    )
    assert state.num_charged >= count(run_dir, "intent") >= count(run_dir, "done") >= steps


def kill_and_finish(run_dir: Path, kills: int, seed: int, steps: int = NUM_STEPS) -> None:
    code = run_with_kills(run_dir, kills, reserve=2 * kills + 2, seed=seed, steps=steps)
    assert code == 0, run_dir.with_suffix(".log").read_text()[-3000:]
    check_finished(run_dir, steps)


@pytest.mark.parametrize(
    ("kills", "steps"), [(1, FEW_STEPS), pytest.param(3, NUM_STEPS, marks=pytest.mark.full)]
)
def test_contract_9_kills(tmp_path: Path, kills: int, steps: int) -> None:
    kill_and_finish(tmp_path / "run", kills, seed=1, steps=steps)


def test_no_curve_steps_back_after_a_kill(tmp_path: Path) -> None:
    """Steps 0, 1 and 4 are undone and repeated: viewers and the card show them once, and lines say which attempt they are of.

    TensorBoard does not forget texts: of a repeated step they have a name of their own.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_dir, more = (
        tmp_path / "run",
        ("train.num_steps=6", "train.checkpoint_every=3", "heldout.every_steps=1"),
    )
    arguments = train_arguments(
        run_dir, "--engine", "local", *more, "heldout.num_captions=2", "privacy.reserved_attempts=9"
    )
    assert alone(["before_done:2", *arguments], script=PLANTED).returncode == -9
    assert alone(["before_done:5", *arguments], script=PLANTED).returncode == -9
    done = alone(["nothing", *arguments], script=PLANTED)
    assert done.returncode == 0, done.stderr[-3000:]
    for folder in (run_dir, run_dir / "private"):
        events = EventAccumulator(
            str(folder / "tensorboard"), size_guidance={"scalars": 0, "images": 0, "tensors": 0}
        )
        tags = events.Reload().Tags()
        curves = {tag: [event.step for event in events.Scalars(tag)] for tag in tags["scalars"]}
        curves |= {tag: [event.step for event in events.Images(tag)] for tag in tags["images"]}
        for tag, steps in curves.items():
            assert steps == list(range(0 if tag.startswith("heldout/") else 1, 7)), (
                folder.name,
                tag,
            )
        texts = {tag: [event.step for event in events.Tensors(tag)] for tag in tags["tensors"]}
        assert all(
            before < after for steps in texts.values() for before, after in pairwise(steps)
        ), texts
        assert folder != run_dir or {step for steps in texts.values() for step in steps} == set(
            range(7)
        )
        lines = [
            (line["step"], line["attempt"])
            for line in read_metrics(folder)
            if "heldout/loss" not in line
        ]
        assert lines == [(1, 0), (1, 1), (2, 1), (3, 0), (4, 0), (4, 1), (5, 1), (6, 0)]
    expected = [(0, 0), (1, 0), (0, 1), (1, 1), (2, 1), (3, 0), (4, 0), (4, 1), (5, 1), (6, 0)]
    for file in (run_dir / "metrics.jsonl", run_dir / "evaluation/heldout.jsonl"):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        assert [
            (line["step"], line["attempt"])
            for line in lines
            if {"loss", "heldout/loss"} & line.keys()
        ] == expected
    assert [point.step for point in read_utility(run_dir).heldout_loss] == list(range(7))
    code, found = verify(run_dir)
    assert code == 0, found


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(3, 5))
def test_contract_9_ten_kills(tmp_path: Path, seed: int) -> None:
    kill_and_finish(tmp_path / "a", kills=10, seed=seed)
    without_reserve = tmp_path / "b"
    assert run_with_kills(without_reserve, 10, reserve=0, seed=seed, first_at_intent=True) == 3
    check_ledger(without_reserve)
    assert read_ledger(without_reserve / "ledger.jsonl").num_charged == NUM_STEPS
    assert (without_reserve / "checkpoints" / "LATEST").exists()
