"""Scores input canaries on a checkpoint: how much better does the model know those that were in its data?"""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data.examples.examples import CaptionExample
from models.captioner import Captioner, build_captioner
from models.config import CaptionerConfig, DecoderConfig, VitConfig
from privacy.audit.canaries import POWER, audit_canaries
from privacy.audit.folder import attempts_check, recorded_attempts
from privacy.audit.report import AuditReport, fact, undecided
from privacy.card.report import read_snapshot
from privacy.checkpoints.read import Checkpoint, newest_checkpoint
from privacy.checkpoints.recorded import require_recorded
from privacy.ledger.claim import claim_of
from privacy.step.folder import RunFolder
from trainer.audit.canaries import CanaryCoins, read_canaries
from trainer.config.recipe import RunConfig, load_config
from trainer.errors import ConfigError

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
    path = checkpoint or newest_checkpoint(folder.checkpoints)
    if path is None:
        raise ConfigError(f"run folder {run_dir} has no checkpoint yet")
    config, loaded = load_config(run_dir / "config.toml"), Checkpoint(path)
    if config.data.caption_field != coins.caption_field:
        raise ConfigError(
            f"the run reads captions from data.caption_field {config.data.caption_field!r}, the canaries have theirs in "
            f"{coins.caption_field!r}: to the run they were examples without a caption. Write canaries with --caption_field"
        )
    before = recorded_attempts(run_dir)
    state = read_snapshot(folder.ledger).state
    require_recorded(path, state)
    claim = claim_of(run_dir, state)  # a canary may have been in the private runs behind the start as well
    attempts = attempts_check(run_dir, state, before)
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
    scores = canary_scores(loaded, config, root, coins)
    checks += audit_canaries(scores, coins.present_N, *claim)
    return AuditReport.of("run", checks, checkpoint=loaded.path.name, canaries=len(coins.present), note=POWER)


def canary_scores(checkpoint: Checkpoint, config: RunConfig, root: Path, coins: CanaryCoins) -> np.ndarray:
    """(N,) how much the loss of each canary fell; the loss of the untrained model takes out how hard a caption is."""
    facts = checkpoint.manifest.get("model", {})
    make_example = CaptionExample(
        config.data.image_size, config.data.num_tokens, root / config.data.tokenizer, train=False
    )
    trained = _captioner(facts, seed=0)
    checkpoint.load_weights(trained)
    scores = -_losses(trained, make_example, coins)
    start = checkpoint.manifest.get("initialisation", {})
    if start.get("kind") == "random":
        scores += _losses(_captioner(facts, start["seed"]), make_example, coins)
    return scores


def _captioner(facts: dict[str, Any], seed: int) -> Captioner:
    """The model that a manifest describes."""
    if facts.get("kind") != "captioner":
        raise ConfigError(f"only captioners can be audited with input canaries, not {facts.get('kind')!r}")
    values = {field.name: facts[field.name] for field in fields(CaptionerConfig)}
    config = CaptionerConfig(
        **values | {"encoder": VitConfig(**facts["encoder"]), "decoder": DecoderConfig(**facts["decoder"])}
    )
    return build_captioner(config, generator=torch.Generator().manual_seed(seed)).eval()


@torch.no_grad()
def _losses(model: Captioner, make_example: CaptionExample, coins: CanaryCoins) -> np.ndarray:
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
