"""Scores input canaries on a checkpoint: how much better does the model know those that were in its data?"""

import json
from pathlib import Path

import numpy as np
import torch
from torch import nn

from data.examples.examples import MakeExample
from privacy.audit.canaries import POWER, audit_canaries
from privacy.audit.folder import attempts_check, recorded_attempts
from privacy.audit.report import AuditReport, fact, undecided
from privacy.card.report import read_snapshot
from privacy.checkpoints.recorded import require_recorded
from privacy.ledger.claim import claim_of
from privacy.step.folder import RunFolder
from trainer.audit.canaries import CanaryCoins, read_canaries
from trainer.config.recipe import load_config
from trainer.errors import ConfigError
from trainer.tasks.captioning import CaptioningTask
from trainer.weights.open_model import OpenedModel, open_model

_BATCH = 32


def run_audit(run_dir: Path, canaries: Path, checkpoint: Path | None, root: Path) -> AuditReport:
    """`audit.py run`: reads coins and the private index, so it runs inside the trust boundary.

    Raises:
        ConfigError: no checkpoint, no coins, or a model that is no captioner.
        PrivacyStateRefused: a broken ledger, one behind the start that is missing, or a checkpoint that it did not record.
    """
    folder, coins = RunFolder(run_dir), read_canaries(canaries)
    if not folder.ledger.is_file() or not (run_dir / "config.toml").is_file():
        raise ConfigError(f"run folder {run_dir} holds no finished start of a training run")
    config, opened = load_config(run_dir / "config.toml"), open_model(checkpoint or run_dir)
    if not isinstance(opened.task, CaptioningTask):
        raise ConfigError(f"only captioners can be audited with input canaries, not {type(opened.model).__name__}")
    if config.data.caption_field != coins.caption_field:
        raise ConfigError(
            f"the run reads captions from data.caption_field {config.data.caption_field!r}, the canaries have theirs in "
            f"{coins.caption_field!r}: to the run they were examples without a caption. Write canaries with --caption_field"
        )
    # The record of attempts is read before the ledger, as a run in progress writes it first.
    before = recorded_attempts(run_dir)
    state = read_snapshot(folder.ledger).state
    require_recorded(opened.path, state)
    claim = claim_of(run_dir, state)  # a canary may have been in the private runs behind the start as well
    attempts = attempts_check(run_dir, state, before)
    # Canaries that the run never saw betray nothing, whatever its noise: that is no good news, and is said to be undecided.
    index = folder.index if config.data.index is None else root / config.data.index
    try:
        shards = json.loads((index / "manifest.json").read_text())["shards"]
        if any(shard["sha256"] == coins.shard_sha256 for shard in shards):
            in_data = fact("canaries_in_data", True, "the shard with these canaries is in the data of this run")
        else:
            in_data = undecided("canaries_in_data", "the shard with these canaries is not in the data of this run")
    except (OSError, ValueError, KeyError, TypeError) as error:
        in_data = undecided("canaries_in_data", f"the index of the run's data cannot be read ({error})")
    checks = [in_data, attempts]
    if claim is None:
        sentence = "the run claims no epsilon, so there is nothing to refute"
        return AuditReport.of("run", [*checks, undecided("epsilon_lower_bound", sentence)])
    # From here on the coins are looked at; the rule of the guesses was fixed before (privacy/audit/canaries.py).
    scores = canary_scores(opened, coins)
    checks += audit_canaries(scores, coins.present_N, *claim)
    return AuditReport.of("run", checks, checkpoint=opened.path.name, canaries=len(coins.present), note=POWER)


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
        rows = [make_example(coins.example(i), 0) for i in range(start, min(start + _BATCH, len(coins.present)))]
        images, tokens, mask = (
            torch.from_numpy(np.stack([row[name] for row in rows]))
            for name in ("images_CHW", "tokens_L", "token_mask_L")
        )
        losses_B = model(images_BCHW=images, tokens_BL=tokens, token_mask_BL=mask)
        parts.append(losses_B.double().numpy())
    return np.concatenate(parts)
