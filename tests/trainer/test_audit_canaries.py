"""Input canaries: written with secret coins, made again from the seed, scored on checkpoints that remember or do not.

The lower bounds on epsilon that follow: a closed form, the paper's own formula, validity in simulation, and verdicts.
"""

import json
import math
import tarfile
from pathlib import Path

import dp_accounting
import numpy as np
import pytest
import torch
from dp_accounting.pld import PLDAccountant
from scipy import stats

from data.examples.examples import CaptionExample
from data.index.build import build_index
from data.reading.reader import TarReader
from models.captioner import build_captioner
from models.config import captioner_config
from tests.distributed.ranks import ROOT
from trainer.audit.canaries import (
    COINS,
    SHARD,
    CanaryCoins,
    Guesses,
    _losses,
    audit_canaries,
    epsilon_one_run,
    one_run_p_value,
    read_canaries,
    write_canaries,
)
from trainer.errors import ConfigError

TOKENIZER = ROOT / "data" / "tokenizer" / "tokenizer.json"


def test_the_shard_holds_the_canaries_whose_coin_said_so(tmp_path: Path) -> None:
    write_canaries(tmp_path / "out", 40, 32)
    coins = read_canaries(tmp_path / "out")
    table = build_index([tmp_path / "out" / SHARD], tmp_path / "index")
    assert len(table) == coins.present_N.sum() and len(coins.present_N) == 40
    reader = TarReader(table)
    for row, index in enumerate(np.flatnonzero(coins.present_N)):
        stored, again = reader.read(row), coins.example(int(index))
        assert stored.caption == again.caption and stored.image == again.image
    assert table.entries[0].sha256 == coins.shard_sha256
    captions = {coins.example(i).caption for i in range(40)}
    assert len(captions) == 40


def test_coins_are_private_and_never_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_canaries(out, 40, 32)
    assert out.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in out.iterdir())
    with tarfile.open(out / SHARD) as tar:  # nothing in the shard tells the seed
        assert (
            json.loads((out / COINS).read_text())["seed"].encode() not in (out / SHARD).read_bytes()
        )
        assert all(member.mtime == 0 for member in tar)
    with pytest.raises(ConfigError, match="never overwritten"):
        write_canaries(out, 40, 32)
    (out / COINS).chmod(0o640)
    with pytest.raises(ConfigError, match="nobody else"):
        read_canaries(out)


@pytest.mark.parametrize("caption_field", [None, "caption"])
def test_canaries_have_their_caption_where_the_recipe_looks(
    tmp_path: Path, caption_field: str | None
) -> None:
    """In the shard as in the scores; with another field they would be examples without a caption, and prove nothing."""
    write_canaries(tmp_path / "canaries", 40, 32, caption_field)
    coins = read_canaries(tmp_path / "canaries")
    captions = {" ".join(coins.example(i).captions(caption_field)) for i in range(40)}
    assert len(captions) == 40 and all(len(caption.split()) > 3 for caption in captions)
    assert not coins.example(0).captions("another" if caption_field else "caption")
    with tarfile.open(tmp_path / "canaries" / SHARD) as tar:
        kinds = {name.rpartition(".")[2] for name in tar.getnames()}
    assert kinds == {"png", "txt" if caption_field is None else "json"}


@pytest.mark.full
def test_a_model_that_learned_canaries_by_heart_is_found() -> None:
    """No privacy at all: a tiny captioner fits the canaries of its data, and the audit refutes any small claim."""
    rng = np.random.default_rng(5)
    coins = CanaryCoins("5" * 64, "".join(rng.choice(["0", "1"], 90)), 32, "")
    make_example = CaptionExample(32, 24, TOKENIZER, train=False)
    config = captioner_config(
        "pico",
        image_size=32,
        vocab_size=make_example.tokenizer.vocab_size,
        num_tokens=24,
        encoder_width=32,
        encoder_depth=1,
        encoder_num_heads=2,
        decoder_width=64,
        decoder_depth=1,
        decoder_num_heads=2,
        pad_id=make_example.tokenizer.pad_id,
        bos_id=make_example.tokenizer.bos_id,
        eos_id=make_example.tokenizer.eos_id,
    )
    model = build_captioner(config, generator=torch.Generator().manual_seed(0))
    before = _losses(model.eval(), make_example, coins)
    rows = [make_example(coins.example(int(i)), 0) for i in np.flatnonzero(coins.present_N)]
    inputs = {
        "images_BCHW": torch.from_numpy(np.stack([row["images_CHW"] for row in rows])),
        "tokens_BL": torch.from_numpy(np.stack([row["tokens_L"] for row in rows])),
        "token_mask_BL": torch.from_numpy(np.stack([row["token_mask_L"] for row in rows])),
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    model.train()
    for _ in range(45):
        optimizer.zero_grad()
        model(**inputs).mean().backward()
        optimizer.step()
    scores = before - _losses(model.eval(), make_example, coins)
    check = audit_canaries(scores, coins.present_N, claimed=0.5, delta=1e-7)
    assert check.outcome == "violated", check.sentence
    assert audit_canaries(before, coins.present_N, claimed=0.5, delta=1e-7).outcome == "ok"


def test_all_right_without_delta_has_a_closed_form() -> None:
    # accuracy^r = 0.05 with accuracy = e^eps / (1 + e^eps)
    accuracy = 0.05 ** (1 / 100)
    expected = math.log(accuracy / (1 - accuracy))
    assert epsilon_one_run(Guesses(100, 100, 100), 0.0) == pytest.approx(expected, abs=1e-6)
    assert epsilon_one_run(Guesses(1000, 1000, 505), 1e-6) == 0, "coin tosses prove nothing"


def test_p_value_is_the_sum_of_theorem_5_2() -> None:
    m, r, v, epsilon, delta = 50, 30, 24, 0.7, 1e-3
    accuracy = 1 / (1 + math.exp(-epsilon))
    tail = [stats.binom.sf(v - i - 1, r, accuracy) for i in range(v + 1)]  # P(W >= v - i)
    worst = max((tail[i] - tail[0]) / i for i in range(1, v + 1))
    expected = tail[0] + 2 * m * delta * worst
    assert one_run_p_value(Guesses(m, r, v), epsilon, delta) == pytest.approx(expected)


def canaries(mu: float, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Independent canaries of a mu-Gaussian-DP mechanism: scores and coins."""
    rng = np.random.default_rng(seed)
    present = rng.random(count) < 0.5
    return rng.standard_normal(count) + mu * present, present


@pytest.mark.parametrize("mu", [1.0, 2.5])
def test_bounds_stay_below_the_truth_and_are_not_empty(mu: float) -> None:
    accountant = PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    accountant.compose(dp_accounting.GaussianDpEvent(1 / mu))
    true = accountant.get_epsilon(1e-5)
    checks = [
        audit_canaries(*canaries(mu, 1000, seed), claimed=0.01, delta=1e-5) for seed in range(8)
    ]
    found = np.array([check.statistic for check in checks])
    assert (found < true).all() and (found > 0.1 * true).all()


def test_canaries_that_leak_refute_a_small_claim_and_others_do_not() -> None:
    scores, present = canaries(4.0, 1000, 1)
    assert audit_canaries(scores, present, 0.5, 1e-7).outcome == "violated"
    assert (
        audit_canaries(scores, present, 8.0, 1e-7).outcome == "inconclusive"
    )  # could not prove so much
    assert audit_canaries(canaries(0.0, 1000, 2)[0], present, 0.5, 1e-7).outcome == "ok"
