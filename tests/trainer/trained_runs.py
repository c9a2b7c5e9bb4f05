"""Run folders as training leaves them, without the training: a ledger, a checkpoint that knows it, and a private part."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from privacy.checkpoints.read import FORMAT, checkpoint_name, file_digest, with_seal
from privacy.ledger.ledger import Ledger
from privacy.plan.numbers import PrivacyPlan
from tests.privacy.ledger_files import PLAN, break_ledger, foreign_ledger, roll_back, take_step
from trainer.config.recipe import RunConfig, load_config, to_toml
from trainer.tasks import make_task

ROOT = Path(__file__).resolve().parents[2]
SECRET = "4242424242"
SHAPE = (
    "encoder_depth = 1, encoder_width = 32, decoder_depth = 1, decoder_width = 32, patch_size = 4"
)


def recipe(kind: str = "captioner", overrides: str = SHAPE) -> RunConfig:
    return load_config(
        ROOT / "tests/trainer/clip_art.toml",
        [
            f"model.kind={kind}",
            f"model.overrides={{ {overrides} }}",
            "data.image_size=16",
            "data.num_tokens=8",
        ],
    )


def trained(
    run: Path, config: RunConfig, *, steps: int = 3, plan: PrivacyPlan = PLAN, **facts: Any
) -> Path:
    """A run folder with a ledger of `steps` steps and a checkpoint, as training leaves it; returns the checkpoint."""
    for folder in ("private", "checkpoints"):
        (run / folder).mkdir(parents=True)
    (run / "private" / "metrics.jsonl").write_text(SECRET)
    # The recipe asks for this plan, as far as a recipe can.
    names = (
        "enabled",
        "expected_batch_size",
        "target_delta",
        "max_grad_norm",
        "reserved_attempts",
        "sampling",
    )
    asked = {name: getattr(plan, name) for name in names}
    asked |= {
        "noise_multiplier": plan.noise_multiplier if plan.enabled else None,
        "target_epsilon": None,
    }
    sections = {"privacy": asked, "train": {"num_steps": plan.num_steps}}
    stated = {
        name: getattr(config, name).model_copy(update=fields) for name, fields in sections.items()
    }
    (run / "config.toml").write_text(to_toml(config.model_copy(update=stated)))
    ledger = Ledger.create(
        run / "ledger.jsonl", {"plan": plan.frozen_fields(), "key_commitment": "ab" * 32}
    )
    ledger.start_session({"commit": "abc"})
    for step in range(1, steps + 1):
        take_step(ledger, step)
    seq, line_hash = ledger.position()
    task = make_task(config, ROOT)
    path = run / "checkpoints" / checkpoint_name(steps)
    path.mkdir()
    parameters = dict(task.build(torch.Generator().manual_seed(1)).named_parameters())
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.add_(
                0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2))
            )
    file = path / "rank-00000-of-00001.safetensors"
    tensors = {f"param|{name}|0": p.detach().reshape(-1).clone() for name, p in parameters.items()}
    tensors |= {f"average|{name}|0": p.detach().reshape(-1) + 1 for name, p in parameters.items()}
    save_file(tensors, file)
    manifest = {
        "format": FORMAT,
        "step": steps,
        "run": config.name,
        "formal_guarantee": plan.formal_guarantee,
        "reasons": list(plan.reasons),
        "ledger": {"seq": seq, "hash": line_hash},
        "initialisation": {"kind": "random", "seed": 0},
        "training_data": {"provenance": "private"},
        **task.facts(),
        **facts,
        "parameters": {name: list(p.shape) for name, p in parameters.items()},
        "files": {file.name: file_digest(file)},
    }
    (path / "manifest.json").write_text(json.dumps(with_seal(manifest)))
    (run / "checkpoints" / "LATEST").write_text(path.name + "\n")
    ledger.release()
    return path


def deny(run: Path, **changes: Any) -> None:
    """The manifest says something else, and is sealed again: the seal has no key."""
    (path,) = (run / "checkpoints").glob("step-*")
    content = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(with_seal(content | changes)))


CONTRADICTED = [
    (break_ledger, "line 3"),
    (roll_back, "not the one that the ledger recorded"),
    (foreign_ledger, "not the one that the ledger recorded"),
    (
        lambda run: deny(run, formal_guarantee=False),
        "contradict each other about the formal guarantee",
    ),
    (lambda run: deny(run, ledger={}), "not the one that the ledger recorded"),
]
"""What befell a run's ledger, or the manifest of its checkpoint; and why whoever opens the checkpoint is refused."""
