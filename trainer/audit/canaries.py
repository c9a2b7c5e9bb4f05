"""Input canaries: random pictures with random captions that are in the training data or not, one secret coin each.

    OUTPUT/ (0700)   canaries-000000.tar   the canaries whose coin came up "in"; add it to data.shards
                     coins.json (0600)     seed, coins and the shard's hash: keep it from whoever attacks, or trains

A canary is made again from the seed alone, so those that were kept out need no file. After training, a score says of each one how
much better the model knows it than an untrained model does. The guesses follow one rule fixed here, before any coin is looked at:
the tenth of canaries with the highest scores was in the data, the tenth with the lowest was not, about others no guess is made. A
differentially private mechanism limits how often such guesses can be right, which gives a lower bound on epsilon from one run.
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
from privacy.audit.folder import attempts_check, recorded_attempts
from privacy.audit.report import AuditReport, Check, fact, random_check, undecided
from privacy.card.report import read_snapshot
from privacy.checkpoints.read import require_recorded
from privacy.errors import refusing
from privacy.files.durable import write_new
from privacy.ledger.claim import claim_of
from privacy.step.folder import RunFolder
from trainer.config.recipe import load_config
from trainer.errors import ConfigError
from trainer.tasks import CaptioningTask
from trainer.weights.open_model import OpenedModel, open_model

COINS = "coins.json"
SHARD = "canaries-000000.tar"
GUESSED = 0.1
ALPHA = 4e-4
"""The error rate of the bound that decides; far below it the bound, with its term m delta, proves nothing."""
LARGEST_EPSILON = 100.0
POWER = (
    "A bound far below the claim is the rule: a thousand canaries in a large data set, seen through the final weights only, "
    "show a fraction of epsilon even when the attack is the best there is. This audit finds gross mistakes (no noise, no "
    "clipping, a training loop around the mechanism); `audit.py mechanism` finds small ones."
)
_BLOCKS = 8  # a picture is 8 x 8 flat squares: it survives any crop and scaling
_MAX_PIXELS = 1024
_MAX_CANARIES = 100_000
_WORDS, _BATCH = 8, 32
_SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]


@dataclass(frozen=True)
class CanaryCoins:
    """What coins.json holds: everything about the canaries, and so as secret as the coins."""

    seed: str
    present: str
    image_size: int
    shard_sha256: str
    caption_field: str | None = None

    @property
    def present_N(self) -> np.ndarray:
        return np.array([coin == "1" for coin in self.present])

    def example(self, index: int) -> RawExample:
        """Canary `index` as the reader would give it."""
        return make_canary(self.seed, index, self.image_size, self.caption_field)


def make_canary(seed: str, index: int, image_size: int, caption_field: str | None) -> RawExample:
    """A picture of random squares and a caption of made-up words, from the seed; the caption where the recipe looks for it."""
    digest = hashlib.sha256(f"{seed}:{index}".encode()).digest()
    rng = np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))
    squares = rng.integers(0, 256, (_BLOCKS, _BLOCKS, 3), dtype=np.uint8)
    picture = Image.fromarray(squares).resize((image_size, image_size), Image.Resampling.NEAREST)
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    text = " ".join("".join(rng.choice(_SYLLABLES, 2)) for _ in range(_WORDS))
    caption = (
        {"txt": text.encode()}
        if caption_field is None
        else {"json": json.dumps({caption_field: text}).encode()}
    )
    return RawExample(buffer.getvalue(), {"png": buffer.getvalue(), **caption})


def write_canaries(
    output: Path, num_canaries: int, image_size: int, caption_field: str | None = None
) -> str:
    """Writes shard and coins; returns a line that says what to do with them.

    Raises:
        ConfigError: the folder holds something, or numbers make no sense.
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
        # From the operating system's entropy: an attacker who guesses coins need not attack the model.
        seed = secrets.token_hex(32)
        present = "".join(str(secrets.randbits(1)) for _ in range(num_canaries))
        chosen = (index for index, coin in enumerate(present) if coin == "1")
        canaries = (
            (f"canary-{i:06d}", make_canary(seed, i, image_size, caption_field).fields)
            for i in chosen
        )
        # Shard first: coins without their shard would look like canaries that can be trained on.
        count = write_shard(output / SHARD, canaries, 0o600)
        digest = hashlib.sha256((output / SHARD).read_bytes()).hexdigest()
        coins = CanaryCoins(seed, present, image_size, digest, caption_field)
        write_new(output / COINS, json.dumps(asdict(coins)).encode(), 0o600)
    return f"{count} of {num_canaries} canaries are in {output / SHARD}: append it to data.shards, then train"


def read_canaries(folder: Path) -> CanaryCoins:
    """The coins; ConfigError when there are none, or when others could read them."""
    path = folder / COINS
    try:
        mode = path.stat().st_mode
        # A reader of the coins knows the answers, so a file that others can read proves nothing any more.
        coins = CanaryCoins(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        reason = "there is no such file" if isinstance(error, FileNotFoundError) else error
        way_out = "audit.py canaries writes them before training"
        raise ConfigError(f"{path}: no coins of canaries ({reason}); {way_out}") from error
    if stat.S_IMODE(mode) & 0o077 or os.stat(path).st_uid != os.geteuid():
        raise ConfigError(
            f"{path}: the coins must belong to you and be readable by nobody else (mode 0600)"
        )
    return coins


class Guesses(NamedTuple):
    """`correct` of `guesses` guesses about `canaries` canaries were right."""

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
    guessed_in, guessed_out = scores > order[-count - 1], scores < order[count]
    right = int((guessed_in & present).sum() + (guessed_out & ~present).sum())
    guesses = Guesses(scores.size, int(guessed_in.sum() + guessed_out.sum()), right)
    bound = epsilon_one_run(guesses, delta)
    sentence = (
        f"{right} of {guesses.guesses} guesses about {scores.size} canaries are right: epsilon is at least {bound:.2f} with "
        f"95 % confidence; claimed are {claimed:.2f}"
    )
    ceiling = epsilon_one_run(Guesses(scores.size, 2 * count, 2 * count), delta, 1 - ALPHA)
    p_value = one_run_p_value(guesses, claimed, delta)
    if p_value >= ALPHA and ceiling <= claimed:
        note = f"; so few canaries could not prove more than {ceiling:.2f} even if every guess were right"
        return undecided("epsilon_lower_bound", sentence + note)
    return random_check("epsilon_lower_bound", p_value, sentence, statistic=bound, alpha=ALPHA)


def one_run_p_value(observed: Guesses, epsilon: float, delta: float) -> float:
    """An upper bound on P(at least that number of correct guesses) under any (epsilon, delta)-DP mechanism.

    Steinke, Nasr and Jagielski 2023, "Privacy Auditing with One (1) Training Run" (arXiv 2305.08846), theorem 5.2:
    beta + 2 m delta max_i P(v > W >= v - i) / i, with W ~ Binomial(r, e^eps / (1 + e^eps)) and beta = P(W >= v).
    """
    v, r = observed.correct, observed.guesses
    accuracy = special.expit(epsilon)
    beta = float(stats.binom.sf(v - 1, r, accuracy))
    if v == 0 or delta == 0:
        return min(1.0, beta)
    steps = np.arange(1, v + 1)
    mass = np.cumsum(stats.binom.pmf(v - steps, r, accuracy))
    return min(1.0, beta + 2 * observed.canaries * delta * float((mass / steps).max()))


def epsilon_one_run(observed: Guesses, delta: float, confidence: float = 0.95) -> float:
    """The largest epsilon at `delta` that the guesses refute, by bisection; 0 when they refute nothing."""
    low, high = 0.0, LARGEST_EPSILON
    for _ in range(60):  # what refutes a larger epsilon refutes every smaller one
        middle = (low + high) / 2
        refuted = one_run_p_value(observed, middle, delta) < 1 - confidence
        low, high = (middle, high) if refuted else (low, middle)
    return low if low > 1e-9 else 0.0


def run_audit(run_dir: Path, canaries: Path, checkpoint: Path | None, root: Path) -> AuditReport:
    """`audit.py run`: reads coins and the private index, so it runs inside the trust boundary.

    Raises:
        ConfigError: no checkpoint, no coins, or a model that is no captioner.
        PrivacyStateRefused: a broken ledger, one behind the start that is missing, or a checkpoint that it did not record.
    """
    folder, coins = RunFolder(run_dir), read_canaries(canaries)
    if not folder.ledger.is_file() or not (run_dir / "config.toml").is_file():
        raise ConfigError(
            f"run folder {run_dir} has no ledger.jsonl or no config.toml: start the training run first"
        )
    config, opened = load_config(run_dir / "config.toml"), open_model(checkpoint or run_dir)
    if not isinstance(opened.task, CaptioningTask):
        raise ConfigError(
            f"only captioners can be audited with input canaries, not {type(opened.model).__name__}"
        )
    if config.data.caption_field != coins.caption_field:
        raise ConfigError(
            f"the run reads captions from data.caption_field {config.data.caption_field!r}, the canaries have theirs in "
            f"{coins.caption_field!r}: to the run they were examples without a caption. Write canaries with --caption_field"
        )
    # The record of attempts is read before the ledger, as a run in progress writes it first.
    before = recorded_attempts(run_dir)
    state = read_snapshot(folder.ledger).state
    require_recorded(opened.path, state)
    claim = claim_of(
        run_dir, state
    )  # a canary may have been in the private runs behind the start as well
    attempts = attempts_check(run_dir, state, before)
    # Canaries that the run never saw betray nothing, whatever its noise: that is no good news, and is said to be undecided.
    index = folder.index if config.data.index is None else root / config.data.index
    unknown = f"no index says that the shard with these canaries is in the data ({index})"
    in_data = undecided("canaries_in_data", unknown)
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        shards = json.loads((index / "manifest.json").read_text())["shards"]
        if coins.shard_sha256 in [shard["sha256"] for shard in shards]:
            in_data = fact(
                "canaries_in_data", True, "the shard with these canaries is in the data of this run"
            )
    checks = [in_data, attempts]
    if claim is None:
        sentence = "the run claims no epsilon, so there is nothing to refute"
        return AuditReport("run", [*checks, undecided("epsilon_lower_bound", sentence)])
    # From here on the coins are looked at.
    checks.append(audit_canaries(canary_scores(opened, coins), coins.present_N, *claim))
    said = {"checkpoint": opened.path.name, "canaries": len(coins.present), "note": POWER}
    return AuditReport("run", checks, {**said, "claimed": claim[0], "delta": claim[1]})


def canary_scores(opened: OpenedModel, coins: CanaryCoins) -> np.ndarray:
    """(N,) how much the loss of each canary fell; the loss of the untrained model takes out how hard a caption is."""
    make_example = opened.task.make_example(train=False)
    scores = -_losses(opened.model, make_example, coins)
    # Weights that came from elsewhere are not at hand any more; then the scores are the losses alone.
    start = opened.manifest.get("initialisation", {})
    if start.get("kind") == "random":
        untrained = opened.task.build(torch.Generator().manual_seed(start["seed"]))
        scores += _losses(untrained.eval(), make_example, coins)
    return scores


@torch.no_grad()
def _losses(model: nn.Module, make_example: MakeExample, coins: CanaryCoins) -> np.ndarray:
    """(N,) each canary's loss; canaries that were kept out are made again from the seed."""
    parts = []
    for start in range(0, len(coins.present), _BATCH):
        rows = [
            make_example(coins.example(i), 0)
            for i in range(start, min(start + _BATCH, len(coins.present)))
        ]
        images, tokens, mask = (
            torch.from_numpy(np.stack([row[name] for row in rows]))
            for name in ("images_CHW", "tokens_L", "token_mask_L")
        )
        losses_B = model(images_BCHW=images, tokens_BL=tokens, token_mask_BL=mask)
        parts.append(losses_B.double().numpy())
    return np.concatenate(parts)
