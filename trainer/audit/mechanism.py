"""Starts a sandbox run on real ranks, puts the ranks' tapes together, and audits the mechanism."""

import json
import math
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from privacy.audit.mechanism import NO_CANARY, SandboxEvents, SandboxRecord, audit_mechanism
from privacy.audit.report import AuditReport
from privacy.clipping.clipped_sum import Mode
from privacy.clipping.functions import FUNCTIONS
from privacy.ledger.records import read_ledger
from privacy.plan import PrivacyPlan
from trainer.audit.sandbox import KEY, LEDGER, MICRO_BATCH_SIZE, SAMPLE_RATE, SandboxSettings
from trainer.audit.task import AMPLITUDE, PARTIAL, make_canaries
from trainer.config.recipe import EngineName, load_config
from trainer.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ("-m", "trainer.audit.sandbox")


class SandboxFailed(RuntimeError):
    """The sandbox did not end well; nothing is known about the mechanism."""

    exit_code = 1


def mechanism_audit(
    run_dir: Path, *, engine: EngineName, ds_config: Path | None, ranks: int = 2, timeout: float = 600
) -> AuditReport:
    """Audits the mechanism with the privacy parameters of a run's ledger (about half a minute).

    Raises:
        ConfigError: no run there, or one without noise.
        SandboxFailed: a rank died.
    """
    plan = read_plan(run_dir)
    recipe, recorded, chosen = (run_dir / name for name in ("config.toml", "ds_config.json", "private/chosen.json"))
    machine = ds_config or (recorded if recorded.exists() else ROOT / "ds_configs" / "zero3.json")
    # The mode of the run's recipe, or what `auto` chose at the latest start; bookkeeping where the folder does not say.
    mode = load_config(recipe).privacy.clipping_mode if recipe.exists() else "bookkeeping"
    if mode == "auto" and chosen.exists():
        mode = json.loads(chosen.read_text()).get("clipping_mode", {}).get("mode", "bookkeeping")
    record = sandbox_record(
        plan,
        engine=engine,
        ds_config=machine.resolve(),
        ranks=ranks,
        clipping_mode="certified"
        if plan.arithmetic == "certified"
        else "two_pass"
        if mode == "two_pass"
        else "bookkeeping",
        timeout=timeout,
    )
    return audit_mechanism(record)


def read_plan(run_dir: Path) -> PrivacyPlan:
    """The frozen plan of a run whose noise can be audited."""
    if not (run_dir / "ledger.jsonl").exists():
        raise ConfigError(f"run folder {run_dir} has no ledger.jsonl: nothing was trained here")
    plan = read_ledger(run_dir / "ledger.jsonl").plan
    if not plan.enabled or plan.noise_multiplier == 0:
        raise ConfigError(f"run folder {run_dir}: trained without noise, so there is no mechanism to audit")
    return plan


def sandbox_record(
    plan: PrivacyPlan,
    *,
    engine: EngineName = "local",
    ds_config: Path = ROOT / "ds_configs" / "zero3.json",
    ranks: int = 2,
    num_single: int = 1024,
    silent_steps: int = 8,
    noisy_steps: int = 50,
    clipping_mode: Mode = "bookkeeping",
    timeout: float = 600,
    program: Sequence[str] = PROGRAM,
) -> SandboxRecord:
    """Runs the sandbox in a folder of its own, which is deleted. Tests start another `program`."""
    settings = make_settings(plan, engine, ds_config, num_single, silent_steps, noisy_steps, clipping_mode)
    with tempfile.TemporaryDirectory(prefix="audit-") as folder:
        (Path(folder) / "settings.json").write_text(settings.to_json())
        _run_ranks([sys.executable, *program, folder], ranks, timeout)
        return read_record(settings, Path(folder), ranks)


def make_settings(
    plan: PrivacyPlan,
    engine: EngineName,
    ds_config: Path,
    num_single: int,
    silent_steps: int,
    noisy_steps: int,
    clipping_mode: Mode = "bookkeeping",
) -> SandboxSettings:
    """Settings with fresh secret coins."""
    coins = [bool(secrets.randbits(1)) for _ in range(len(make_canaries(num_single, plan.max_grad_norm)))]
    return SandboxSettings(
        plan.frozen_fields(), num_single, silent_steps, noisy_steps, engine, str(ds_config), clipping_mode, coins
    )


def read_record(settings: SandboxSettings, folder: Path, ranks: int) -> SandboxRecord:
    """The record of the sandbox whose ranks wrote to `folder`: every rank's part of the coordinates, in the parameters' order."""
    tapes: list[dict[str, Any]] = []
    for rank in range(ranks):
        with np.load(folder / f"rank-{rank}.npz") as tape:
            tapes.append(dict(tape))
    shapes = json.loads(str(tapes[0]["shapes"]))
    sizes = {name: int(np.prod(shape)) for name, shape in shapes.items()}
    starts = dict(zip(sizes, np.cumsum([0, *sizes.values()])[:-1].tolist(), strict=True))
    total, attempts = sum(sizes.values()), len(tapes[0]["num_draws"])
    weights = np.full((attempts + 1, total), np.nan)
    draws, handed = (np.full((attempts, total), np.nan) for _ in range(2))
    for tape in tapes:
        places = [
            np.arange(starts[name] + offset, starts[name] + offset + length)
            for name, offset, length in json.loads(str(tape["pieces"]))
        ]
        at = np.concatenate(places) if places else np.zeros(0, dtype=int)
        weights[:, at], draws[:, at], handed[:, at] = tape["weights"], tape["draws"], tape["handed"]
    canaries, plan, run = settings.canaries(), settings.plan(), settings.run_plan
    canary_D = np.full(total, NO_CANARY)
    for example, name, index in canaries.coordinates:
        canary_D[starts[name] + index] = example
    # What reached the model on each rank, attempt by attempt.
    seen, keys = (
        tuple(zip(*(np.split(tape[name], np.cumsum(tape["counts"])[:-1]) for tape in tapes), strict=True))
        for name in ("ids", "keys")
    )
    events = SandboxEvents(
        ledger=(folder / LEDGER).read_bytes(),
        secret=(folder / KEY).read_bytes(),
        steps=tuple(tapes[0]["steps"].tolist()),
        first_release=np.min([tape["released_at"] for tape in tapes], axis=0),
        ledger_durable=np.concatenate([tape["ledger_durable"] for tape in tapes]),
        folder_durable=np.concatenate([tape["folder_durable"] for tape in tapes])[:, 0],
        least_entropy=np.min([tape["least_entropy"] for tape in tapes], axis=0),
    )
    # The least that any canary contributes after clipping.
    function = FUNCTIONS[run.clipping_function](list(sizes), run.max_grad_norm)
    bound = min(function.bounds)
    norms = torch.tensor([AMPLITUDE * run.max_grad_norm, 2 * PARTIAL * run.max_grad_norm], dtype=torch.float64)
    norms = torch.minimum(function.weight(norms, bound) * norms, torch.tensor(bound))
    # The noise is judged by what the audited run states, never by what the sandbox says that it used.
    sigma, adaptive = run.noise_multiplier, run.adaptive_clipping
    counts: tuple[float, np.ndarray, np.ndarray] | None = None
    if adaptive is not None:
        sigma = adaptive.gradient_noise_multiplier(sigma)
        released, drawn = tapes[0]["counts_of_unclipped"].T
        counts = (adaptive.unclipped_num_std, released, drawn)
    steps = f"{settings.silent_steps} silent and {settings.noisy_steps} noisy steps"
    clipping = f"{run.clipping_function} clipping ({settings.clipping_mode})"
    return SandboxRecord(
        plan=plan,
        noise_std=sigma * run.max_grad_norm,
        smallest_norm=float(norms.min()),
        rows_per_rank=MICRO_BATCH_SIZE * math.ceil(plan.max_batch_size / ranks / MICRO_BATCH_SIZE),
        world_size=ranks,
        parameters=tuple((name, starts[name], starts[name] + size) for name, size in sizes.items()),
        canary_D=canary_D,
        weights=weights,
        draws=draws,
        num_draws=np.sum([tape["num_draws"] for tape in tapes], axis=0),
        seen=seen,
        keys=tuple(tuple(part.view(np.uint64) for part in attempt) for attempt in keys),
        handed=handed,
        neighbours=max(float(tape["neighbours"]) for tape in tapes),
        events=events,
        present_N=np.array(settings.present),
        hostile_N=canaries.hostile_N,
        silent_steps=settings.silent_steps + 1,  # the killed step has two attempts
        session_starts=settings.session_starts,
        facts={"sandbox": f"{ranks} ranks, engine {settings.engine}, {steps}, q = {SAMPLE_RATE}, {clipping}"},
        counts=counts,
    )


def _run_ranks(command: Sequence[str], ranks: int, timeout: float) -> None:
    """Runs all ranks on this machine's CPU; SandboxFailed with the last line that a failed one printed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks)}
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC", "OMPI_"))}
    processes = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env={**inherited, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        outputs = [process.communicate(timeout=timeout)[0] for process in processes]
    except subprocess.TimeoutExpired as error:
        raise SandboxFailed(f"the sandbox did not end within {timeout:.0f} s") from error
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for rank, process in enumerate(processes):
        if process.returncode != 0:
            lines = [line for line in outputs[rank].splitlines() if line.strip()]
            raise SandboxFailed(f"sandbox rank {rank} ended with {process.returncode}: {lines[-1] if lines else ''}")
