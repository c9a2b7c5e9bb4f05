"""Input canaries: random pictures with random captions, each in the training data by a secret coin.

    OUTPUT/ (0700)   canaries-000000.tar   the canaries whose coin is "in"; add it to data.shards
                     coins.json (0600)     seed, coins and the shard's hash: keep it from attackers
                                           and from the people who train

The seed makes every canary again, so canaries outside the data need no file. After training, the
score of a canary is the fall of its loss against an untrained model. The rule of the guesses is
fixed here, before any coin is read: the tenth of canaries with the highest scores is in the data,
the tenth with the lowest is not. A differentially private mechanism limits how often such guesses
are right, which gives a lower bound on epsilon from one run.
"""

import contextlib
import hashlib
import io
import json
import os
import secrets
import stat
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from scipy import special, stats
from torch import nn

from data.examples.examples import MakeExample
from data.index.tar_writer import write_shard
from data.reading.reader import RawExample
from privacy.audit.audit_report import AuditReport, Check, fact, random_check, undecided
from privacy.audit.run_audit import attempts_check, recorded_attempts
from privacy.card.ledger_card import read_snapshot
from privacy.checkpoints.read import require_recorded
from privacy.errors import refusing
from privacy.files.durable import write_new
from privacy.ledger.claim import claim_of
from privacy.step.run_folder import RunFolder
from trainer.config.recipe import load_config
from trainer.errors import ConfigError
from trainer.tasks import CaptioningTask
from trainer.weights.open_model import OpenedModel, open_model

COINS = "coins.json"
SHARD = "canaries-000000.tar"
GUESSED = 0.1
"""The share of canaries that are guessed to be in the data, and again not to be in the data."""
ALPHA = 4e-4
"""The error rate of the bound that decides; far below it the bound, with its term m delta, proves
nothing."""
LARGEST_EPSILON = 100.0
POWER = (
    "A bound far below the claim is the rule: a thousand canaries in a large data set, seen "
    "through the final weights only, show a fraction of epsilon even when the attack is the best "
    "there is. This audit finds gross mistakes (no noise, no clipping, a training loop around the "
    "mechanism); `audit.py mechanism` finds small ones."
)
_BLOCKS = 8
"""Flat squares along each side of a picture; such a picture survives any crop and scaling."""
_MAX_PIXELS = 1024
_MAX_CANARIES = 100_000
_WORDS = 8
_BATCH = 32
_SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]


@dataclass(frozen=True)
class CanaryCoins:
    """The content of coins.json, from which all canaries follow, and so as secret as the coins."""

    seed: str
    present: str
    image_size: int
    shard_sha256: str
    caption_field: str | None = None

    @property
    def present_N(self) -> np.ndarray:
        """Returns whether each canary is in the data."""
        return np.array([coin == "1" for coin in self.present])

    def example(self, index: int) -> RawExample:
        """Returns canary `index` in the form that the reader gives."""
        return make_canary(self.seed, index, self.image_size, self.caption_field)


def make_canary(seed: str, index: int, image_size: int, caption_field: str | None) -> RawExample:
    """Returns a picture of random squares and a caption of made-up words, both from the seed.

    Args:
        caption_field: the recipe's data.caption_field, or None for a caption of its own file.
    """
    digest = hashlib.sha256(f"{seed}:{index}".encode()).digest()
    rng = np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))
    squares = rng.integers(0, 256, (_BLOCKS, _BLOCKS, 3), dtype=np.uint8)
    picture = Image.fromarray(squares).resize((image_size, image_size), Image.Resampling.NEAREST)
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    text = " ".join("".join(rng.choice(_SYLLABLES, 2)) for _ in range(_WORDS))
    fields = {"png": buffer.getvalue()}
    if caption_field is None:
        fields["txt"] = text.encode()
    else:
        fields["json"] = json.dumps({caption_field: text}).encode()
    return RawExample(buffer.getvalue(), fields)


def write_canaries(
    output: Path, num_canaries: int, image_size: int, caption_field: str | None = None
) -> str:
    """Writes shard and coins, and returns a line of advice about them.

    Raises:
        ConfigError: the folder is not empty, or a number is out of its range.
    """
    if not (20 <= num_canaries <= _MAX_CANARIES and _BLOCKS <= image_size <= _MAX_PIXELS):
        raise ConfigError(
            f"20 to {_MAX_CANARIES:,} canaries of {_BLOCKS} to {_MAX_PIXELS:,} pixels are needed"
        )
    with refusing(f"{output}: cannot write the canaries", ConfigError):
        output.mkdir(parents=True, exist_ok=True, mode=0o700)
        if any(output.iterdir()):
            raise ConfigError(f"{output} is not empty: canaries and coins are never overwritten")
        output.chmod(0o700)
        # Seed and coins come from the operating system's entropy: an attacker who can guess the
        # coins need not attack the model.
        seed = secrets.token_hex(32)
        present = "".join(str(secrets.randbits(1)) for _ in range(num_canaries))
        canaries = (
            (f"canary-{index:06d}", make_canary(seed, index, image_size, caption_field).fields)
            for index, coin in enumerate(present)
            if coin == "1"
        )
        # The shard comes first: coins without their shard would look like canaries to train on.
        count = write_shard(output / SHARD, canaries, 0o600)
        digest = hashlib.sha256((output / SHARD).read_bytes()).hexdigest()
        coins = CanaryCoins(seed, present, image_size, digest, caption_field)
        write_new(output / COINS, json.dumps(asdict(coins)).encode(), 0o600)
    canaries_line = f"{count} of {num_canaries} canaries are in {output / SHARD}"
    return f"{canaries_line}: append it to data.shards, then train"


def read_canaries(folder: Path) -> CanaryCoins:
    """Returns the coins in a folder.

    Raises:
        ConfigError: there are no coins, or other users can read them.
    """
    path = folder / COINS
    try:
        mode = path.stat().st_mode
        coins = CanaryCoins(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        reason = "there is no such file" if isinstance(error, FileNotFoundError) else error
        way_out = "audit.py canaries writes them before training"
        raise ConfigError(f"{path}: no coins of canaries ({reason}); {way_out}") from error
    # A reader of the coins knows the answers, so an audit with a file that others can read proves
    # nothing.
    if stat.S_IMODE(mode) & 0o077 or os.stat(path).st_uid != os.geteuid():
        raise ConfigError(
            f"{path}: the coins must belong to you and be readable by nobody else (mode 0600)"
        )
    return coins


class Guesses(NamedTuple):
    """The number of canaries, of guesses about them, and of correct guesses."""

    canaries: int
    guesses: int
    correct: int


def audit_canaries(
    scores: NDArray[np.float64], present: NDArray[np.bool_], claimed: float, delta: float
) -> Check:
    """Compares a lower bound on epsilon with the claim.

    Args:
        scores: higher means likelier in the data.
        claimed: epsilon at `delta` that the run claims.
    """
    count = max(1, round(GUESSED * scores.size))
    order = np.sort(scores)
    guessed_in = scores > order[-count - 1]
    guessed_out = scores < order[count]
    num_guesses = int(guessed_in.sum() + guessed_out.sum())
    num_right = int((guessed_in & present).sum() + (guessed_out & ~present).sum())
    guesses = Guesses(scores.size, num_guesses, num_right)
    bound = epsilon_one_run(guesses, delta)
    guesses_line = f"{num_right} of {num_guesses} guesses about {scores.size} canaries are right"
    sentence = (
        f"{guesses_line}: epsilon is at least {bound:.2f} with 95 % confidence; "
        f"claimed are {claimed:.2f}"
    )
    perfect_guesses = Guesses(scores.size, 2 * count, 2 * count)
    ceiling = epsilon_one_run(perfect_guesses, delta, 1 - ALPHA)
    p_value = one_run_p_value(guesses, claimed, delta)
    if p_value >= ALPHA and ceiling <= claimed:
        sentence += f"; so few canaries could not prove more than {ceiling:.2f}"
        return undecided("epsilon_lower_bound", f"{sentence} even if every guess were right")
    return random_check("epsilon_lower_bound", p_value, sentence, statistic=bound, alpha=ALPHA)


def one_run_p_value(observed: Guesses, epsilon: float, delta: float) -> float:
    """Bounds P(at least so many correct guesses) under any (epsilon, delta)-DP mechanism from
    above.

    Steinke, Nasr and Jagielski 2023, "Privacy Auditing with One (1) Training Run" (arXiv
    2305.08846), theorem 5.2: beta + 2 m delta max_i P(v > W >= v - i) / i, with W ~ Binomial(r,
    e^eps / (1 + e^eps)) and beta = P(W >= v).
    """
    v = observed.correct
    r = observed.guesses
    accuracy = special.expit(epsilon)
    beta = float(stats.binom.sf(v - 1, r, accuracy))
    if v == 0 or delta == 0:
        return min(1.0, beta)
    steps = np.arange(1, v + 1)
    mass = np.cumsum(stats.binom.pmf(v - steps, r, accuracy))
    largest_mass = float((mass / steps).max())
    return min(1.0, beta + 2 * observed.canaries * delta * largest_mass)


def epsilon_one_run(observed: Guesses, delta: float, confidence: float = 0.95) -> float:
    """Returns the largest epsilon at `delta` that the guesses refute, or 0 if they refute none."""
    low = 0.0
    high = LARGEST_EPSILON
    # Bisection: guesses that refute an epsilon refute every smaller one.
    for _ in range(60):
        middle = (low + high) / 2
        if one_run_p_value(observed, middle, delta) < 1 - confidence:
            low = middle
        else:
            high = middle
    return low if low > 1e-9 else 0.0


def run_audit(run_dir: Path, canaries: Path, checkpoint: Path | None, root: Path) -> AuditReport:
    """Returns the report of `audit.py run`, which stays inside the trust boundary.

    Reads the coins and the private index.

    Raises:
        ConfigError: no checkpoint, no coins, or a model that is not a captioner.
        PrivacyStateRefused: a broken ledger, a missing ledger behind the start, or a checkpoint
            that the ledger did not record.
    """
    folder = RunFolder(run_dir)
    coins = read_canaries(canaries)
    if not folder.ledger.is_file() or not (run_dir / "config.toml").is_file():
        raise ConfigError(
            f"run folder {run_dir} has no ledger.jsonl or no config.toml: "
            "start the training run first"
        )
    config = load_config(run_dir / "config.toml")
    model = open_model(checkpoint or run_dir)
    if not isinstance(model.task, CaptioningTask):
        raise ConfigError(
            f"only captioners can be audited with input canaries, not {type(model.model).__name__}"
        )
    caption_field = config.data.caption_field
    if caption_field != coins.caption_field:
        raise ConfigError(
            f"the run reads captions from data.caption_field {caption_field!r}, the canaries have "
            f"theirs in {coins.caption_field!r}: to the run they were examples without a caption. "
            "Write canaries with --caption_field"
        )
    # A run in progress writes the record of attempts first, so it is read before the ledger.
    attempts = recorded_attempts(run_dir)
    state = read_snapshot(folder.ledger).state
    require_recorded(model.path, state)
    # The claim includes the private runs behind the start, since they may have seen a canary, too.
    claim = claim_of(run_dir, state)
    attempts_outcome = attempts_check(run_dir, state, attempts)
    # Canaries that the run never saw reveal nothing, whatever its noise, so the check is then
    # undecided.
    index = folder.index if config.data.index is None else root / config.data.index
    in_data = undecided(
        "canaries_in_data",
        f"no index says that the shard with these canaries is in the data ({index})",
    )
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        shards = json.loads((index / "manifest.json").read_text())["shards"]
        if coins.shard_sha256 in [shard["sha256"] for shard in shards]:
            in_data = fact(
                "canaries_in_data", True, "the shard with these canaries is in the data of this run"
            )
    checks = [in_data, attempts_outcome]
    if claim is None:
        sentence = "the run claims no epsilon, so there is nothing to refute"
        return AuditReport("run", [*checks, undecided("epsilon_lower_bound", sentence)])
    # No line above has read the coins of the canaries.
    scores = canary_scores(model, coins)
    checks.append(audit_canaries(scores, coins.present_N, *claim))
    facts = {
        "checkpoint": model.path.name,
        "canaries": len(coins.present),
        "note": POWER,
        "claimed": claim[0],
        "delta": claim[1],
    }
    return AuditReport("run", checks, facts)


def canary_scores(opened: OpenedModel, coins: CanaryCoins) -> np.ndarray:
    """Returns how much the loss of each canary fell, (N,).

    The loss of the untrained model accounts for the difficulty of a caption.
    """
    make_example = opened.task.make_example(train=False)
    scores = -_losses(opened.model, make_example, coins)
    # Imported initial weights are not at hand any more; then the scores are the losses alone.
    start = opened.manifest.get("initialisation", {})
    if start.get("kind") == "random":
        untrained = opened.task.build(torch.Generator().manual_seed(start["seed"]))
        scores += _losses(untrained.eval(), make_example, coins)
    return scores


@torch.no_grad()
def _losses(model: nn.Module, make_example: MakeExample, coins: CanaryCoins) -> np.ndarray:
    """Returns the loss of each canary, (N,); the seed makes the canaries again."""
    num_canaries = len(coins.present)
    losses = []
    for start in range(0, num_canaries, _BATCH):
        end = min(start + _BATCH, num_canaries)
        rows = [make_example(coins.example(index), 0) for index in range(start, end)]
        inputs = {}
        for name in ("images_CHW", "tokens_L", "token_mask_L"):
            inputs[name] = torch.from_numpy(np.stack([row[name] for row in rows]))
        losses_B = model(
            images_BCHW=inputs["images_CHW"],
            tokens_BL=inputs["tokens_L"],
            token_mask_BL=inputs["token_mask_L"],
        )
        losses.append(losses_B.double().numpy())
    return np.concatenate(losses)
