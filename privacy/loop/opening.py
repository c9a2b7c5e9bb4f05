"""What a loop of one's own says when its run folder is opened: plan, data and configuration."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..checkpoints.read import has_checkpoints
from ..clipping.sharded import full
from ..errors import ConfigError, PrivacyConfigError
from ..files.toml_text import written
from ..ledger.durable import require_apart
from ..ledger.ledger import Ledger
from ..ledger.records import read_ledger
from ..ledger.run_state import open_run_state
from ..plan import PrivacyPlan, make_plan
from ..plan_request import PlanRequest
from ..sampling.keys import SamplingKey
from ..step import collectives
from ..step.folder import RunFolder, environment
from ..step.run_ledger import RunLedger
from .fingerprint import fixed_tensors
from .reading import ItemNotRead, Reader


def require_place(folder: RunFolder, mirror: Path | None) -> None:
    """The mirror lies outside of the run folder; on one rank, before anything is written."""
    require_apart({} if mirror is None else {"ledger_mirror": mirror}, folder.root)


def data_manifest(reader: Reader, data_version: str | None) -> bytes:
    """What identifies the data; enters the ledger as HMAC under the sampling key only. On one rank.

    Raises:
        PrivacyConfigError: most items cannot be used, or an item depends on those before it.
    """
    if data_version is None:
        named = reader.digest().hex()
    else:
        reader.digest(whole=False)
        named = f"version {data_version}"
    if reader.unusable:
        print(reader.unusable, flush=True)
    fields = {name: repr(field) for name, field in reader.example.fields.items()}
    return json.dumps({"items": len(reader.dataset), "data": named, "fields": fields}, sort_keys=True).encode()


def few_items(reader: Reader) -> str:
    """What a few items of this rank's data set are, or why they cannot be used; for comparison with the other ranks alone."""
    if collectives.is_alone():
        return ""
    try:
        return reader.digest(whole=False).hex()
    except (PrivacyConfigError, ItemNotRead) as error:
        return str(error)


def open_ledger(
    folder: RunFolder, request: PlanRequest, manifest: bytes, *, unit: str, mirror: Path | None
) -> RunLedger:
    """Opens ledger and key of a run folder without writing to them (`RunLedger.mend` does), or creates them. Collective.

    Raises (on every rank):
        PrivacyConfigError: the privacy parameters are wrong, or differ from the frozen ones.
        PrivacyStateRefused: ledger, key, mirror, checkpoints and record of attempts do not fit together.
    """

    def open_on_main() -> tuple[Ledger, SamplingKey, PrivacyPlan]:
        recorded = read_ledger(folder.ledger).opened if folder.ledger.exists() else None
        plan = make_plan(request, resume=None if recorded is None else recorded["plan"])
        if not plan.formal_guarantee:
            raise PrivacyConfigError(f"a private loop makes a formal claim, and here {plan.reasons[0]}")
        ledger, key = open_run_state(
            folder.ledger,
            folder.key,
            plan,
            data_manifest=manifest,
            open_fields={"commit": environment()["commit"], "unit": unit},
            mirror=mirror,
            has_checkpoint=has_checkpoints(folder.checkpoints),
            members=folder.members,
            mended=False,
        )
        return ledger, key, plan

    return RunLedger.open(open_on_main, folder.key, members=folder.members)


def config_toml(name: str, request: PlanRequest, *, micro_batch_size: int, optimizer: str, mirror: str | None) -> str:
    """The run's configuration in the trainer's words, which the card, the audit and verify.py compare with the ledger."""
    asked = {
        "expected_batch_size": request.expected_batch_size,
        "noise_multiplier": request.noise_multiplier,
        "target_epsilon": request.target_epsilon,
        "target_delta": request.target_delta,
        "max_grad_norm": request.max_grad_norm,
        "ledger_mirror": mirror,
    }
    sections: dict[str, dict[str, Any]] = {
        "data": {"num_examples": request.num_examples},
        "privacy": asked,
        "optimizer": {"name": optimizer},
        "train": {"num_steps": request.num_steps, "micro_batch_size": micro_batch_size},
    }
    lines = [f"name = {written(name)}"]
    for title, section in sections.items():
        lines += [
            "",
            f"[{title}]",
            *(f"{key} = {written(value)}" for key, value in section.items() if value is not None),
        ]
    return "\n".join(lines) + "\n"


def fixed_digest(model: nn.Module) -> str:
    """SHA-256 of frozen parameters and buffers: checkpoints do not hold them, and a resume needs the same. Collective."""
    digest = hashlib.sha256()
    for name, tensor in fixed_tensors(model).items():
        digest.update(name.encode())
        digest.update(full(tensor).cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def require_same_model(manifest: dict[str, Any], facts: dict[str, Any]) -> None:
    """A checkpoint goes on with the model that it was written with."""
    for name, value in facts.items():
        if manifest.get("model", {}).get(name) != value:
            raise ConfigError(
                f"the checkpoint of step {manifest.get('step')} was written with another model ({name} differs; its frozen "
                "weights and buffers are not in the checkpoint): give the same one, or start another run folder"
            )
