"""A published run folder as training and report leave it, without the training; and what a forger does to one."""

import contextlib
import hashlib
import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from privacy.card.run_card import write_card
from privacy.checkpoints.read import with_seal
from privacy.ledger.chain import hash_line
from privacy.ledger.claim import claim_of, keep_copies, ledgers_of_run
from privacy.ledger.ledger import Ledger
from privacy.ledger.records import read_ledger
from privacy.plan.numbers import PrivacyPlan, make_plan
from privacy.plan.releases import release_of_step
from privacy.plan.request import PlanRequest
from privacy.sums.grid import Grid
from privacy.verify import __file__ as VERIFIER
from tests.privacy.ledger_files import NUMBERS, rechained
from trainer.card_of_run import build_card

Records = list[dict[str, Any]]
Judge = Callable[..., tuple[int, dict[str, Any]]]
"""verify.py of a folder and options: exit code, and what --json prints."""
ASKED: dict[str, Any] = NUMBERS | {"num_steps": 4}
PLAN = make_plan(PlanRequest(**ASKED))


def sentences(found: dict[str, Any], outcome: str = "violated") -> str:
    """What the checks with this outcome say, a line each."""
    return "\n".join(
        f"{one['name']}: {one['sentence']}" for one in found["checks"] if one["outcome"] == outcome
    )


def config_of(
    plan: PrivacyPlan, owner: int | None = None, init: Mapping[str, Any] | None = None
) -> str:
    """The recipe that asks for a plan, as far as the verifier reads it: that of a loop, or of the trainer, which has a model.

    Args:
        owner: the most examples of one owner.
        init: the section of that name, where there is one; the trainer's names a checkpoint.
    """
    names = [
        "expected_batch_size",
        "target_delta",
        "max_grad_norm",
        "reserved_attempts",
        "sampling",
        "arithmetic",
        "clipping_function",
        "noise_multiplier" if plan.target_epsilon is None else "target_epsilon",
    ]
    asked: dict[str, Any] = {name: getattr(plan, name) for name in names}
    asked |= {} if owner is None else {"max_examples_per_owner": owner}
    lines = [f"{name} = {json.dumps(value)}" for name, value in asked.items()]
    lines += ["[train]", f"num_steps = {plan.num_steps}"]
    lines += ["[data]", 'provenance = "private"', f"num_examples = {plan.num_examples}"]
    lines += ["[model]", 'size = "tiny"'] if "checkpoint" in (init or {}) else []
    lines += (
        ["[init]", *(f"{key} = {json.dumps(value)}" for key, value in init.items())] if init else []
    )
    return "\n".join(["[privacy]", *lines])


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The whole lines of `metrics.jsonl`, without those that a kill tore, the last one or any before it."""
    path, lines = folder / "metrics.jsonl", []
    for line in path.read_text().split("\n")[:-1] if path.exists() else ():
        with contextlib.suppress(ValueError):
            lines.append(json.loads(line))
    return [line for line in lines if isinstance(line, dict)]


COORDINATES = 20_000


def noised(plan: PrivacyPlan, std: float, step: int, part: float = 1.0) -> dict[str, float]:
    """What `done` states where the sum is nothing and the noise is exactly as long as it is in the mean, or a part of that."""
    if std == 0:
        return {}
    scale = std / plan.expected_batch_size
    return {"noised_norm": float(f"{part * scale * math.sqrt(COORDINATES):.9g}")}


def exponent_of(plan: PrivacyPlan, coordinates: int) -> int | None:
    """f of the sums of a float32 model; None for a run without noise."""
    if plan.noise_multiplier == 0 or plan.noise_kind is None:
        return None
    if plan.lattice is not None:
        return plan.lattice.exponent
    sigma, cap = plan.noise_multiplier, plan.max_batch_size
    unit = Grid.of(coordinates, torch.float32, cap, noise_multiplier=sigma).unit(plan.max_grad_norm)
    return None if unit is None else unit.exponent


def publish(
    folder: Path,
    plan: PrivacyPlan = PLAN,
    *,
    steps: int | None = None,
    behind: Sequence[Path] = (),
    by_trainer: bool = False,
    with_card: bool = True,
    **opened: Any,
) -> Path:
    """Writes a folder with a retry of step 2 in a second session, a checkpoint and, after the last step, the end.

    Args:
        behind: folders of private runs that the weights started from; the trainer's runs have one.
        by_trainer: what config.toml and manifest say of the start is in the words of the trainer, and not of a loop.
        opened: further fields of the `open` record.
    """
    folder.mkdir(parents=True)
    shutil.copy(VERIFIER, folder / "verify.py")
    init, start = dict[str, Any](), {"kind": "random"}
    if behind:
        # Those of a common start stand once, behind all that started from it.
        copies = {
            one.copy: one for run in reversed(behind) for one in reversed(ledgers_of_run(run))
        }
        opened["behind"] = keep_copies(folder, [*reversed(copies.values())])
        init = {"starts_from": [run.name for run in behind]}
    if behind and by_trainer:
        (run,) = behind
        before = read_ledger(run / "ledger.jsonl")
        (manifest,) = (
            json.loads(path.read_text()) for path in run.glob("checkpoints/step-*/manifest.json")
        )
        spent = {"epsilon": before.epsilon(), "delta": before.plan.target_delta}
        start = {
            "kind": "checkpoint",
            "run": run.name,
            "step": manifest["step"],
            "training_data": "private",
        }
        start |= {"guarantee": spent, "before_that": manifest["initialisation"]}
        init = {"checkpoint": run.name}
    (folder / "config.toml").write_text(config_of(plan, opened.get("max_examples_per_owner"), init))
    steps = plan.num_steps if steps is None else steps
    fields = {
        "plan": plan.frozen_fields(),
        "key_commitment": "ab" * 32,
        "commit": "c0ffee",
        **opened,
    }
    fields |= {"noised_coordinates": COORDINATES, "sum_exponent": exponent_of(plan, COORDINATES)}
    release = release_of_step(plan.noise_multiplier, plan.max_grad_norm)
    place = folder / "checkpoints" / f"step-{steps:08d}"
    place.mkdir(parents=True)
    (place / "weights.safetensors").write_bytes(b"weights")
    with Ledger.create(folder / "ledger.jsonl", fields) as ledger:
        ledger.start_session({"commit": "c0ffee"})
        for step in range(1, steps + 1):
            stated = noised(plan, release["std"], step)
            if step == 2:
                ledger.intent(step, 0, [release])
                ledger.start_session({"commit": "c0ffee"})
            attempt = ledger.state.attempts[step]
            ledger.intent(step, attempt, [release])
            ledger.done(step, attempt, **stated)
        seq, line_hash = ledger.position()
        manifest = {
            "step": steps,
            "formal_guarantee": plan.formal_guarantee,
            "charged_attempts": steps + 1,
            "ledger": {"seq": seq, "hash": line_hash},
            "training_data": {"provenance": "private"},
            **({"initialisation": start} if by_trainer or not behind else {}),
            "files": {"weights.safetensors": hashlib.sha256(b"weights").hexdigest()},
        }
        (place / "manifest.json").write_text(json.dumps(with_seal(manifest)))
        ledger.checkpoint(
            steps, place.name, hashlib.sha256((place / "manifest.json").read_bytes()).hexdigest()
        )
        if steps == plan.num_steps:
            ledger.close("finished")
    claim = claim_of(folder, read_ledger(folder / "ledger.jsonl"))
    last = {
        "step": steps,
        "privacy/charged_attempts": steps + 1,
        "privacy/epsilon": claim and claim[0],
    }
    (folder / "metrics.jsonl").write_text(json.dumps(last) + "\n")
    if with_card:
        write_card(folder, build_card(folder))
    return folder


def rewrite(folder: Path, edit: Callable[[Records], object]) -> None:
    """A forger's work: an edited ledger whose numbers and hashes fit again, as do the manifests and the card."""
    path = folder / "ledger.jsonl"
    records = [json.loads(line) for line in path.read_bytes().splitlines()]
    edit(records)
    for number, record in enumerate(records):
        record["time_utc"] = records[0]["time_utc"]
        manifest = folder / "checkpoints" / str(record.get("path")) / "manifest.json"
        if record["type"] == "checkpoint" and manifest.exists():
            last = hash_line(rechained(records[:number]).splitlines()[-1])
            content = json.loads(manifest.read_text()) | {
                "ledger": {"seq": number - 1, "hash": last}
            }
            manifest.write_text(json.dumps(with_seal(content)))
            record["digest"] = hashlib.sha256(manifest.read_bytes()).hexdigest()
    path.write_bytes(rechained(records))
    lines = path.read_bytes().splitlines()
    card = folder / "report" / "privacy_card.json"
    if card.exists():
        content = json.loads(card.read_text())
        content["ledger"] |= {
            "lines": len(lines),
            "last_line_sha256": hash_line(lines[-1]),
        }
        kinds = [record["type"] for record in records]
        content["sessions"] = content["sessions"][: kinds.count("session")]
        content["checkpoints_recorded"] = kinds.count("checkpoint")
        if manifests := sorted((folder / "checkpoints").glob("step-*/manifest.json")):
            digest = hashlib.sha256(manifests[-1].read_bytes()).hexdigest()
            content["last_checkpoint"]["digest"] = digest
        card.write_text(json.dumps(content))
        for page in card.parent.glob("privacy_card.[mh]*"):  # which the forger would make anew
            page.unlink()
