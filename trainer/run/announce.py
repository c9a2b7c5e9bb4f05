"""What the trainer prints before its first step and after its last."""

import os
import sys

from privacy.accounting.rounding import rounded_up, useless_delta
from privacy.errors import BUDGET_SPENT, DONE, STOPPED_EARLY, say
from privacy.run.run import Run
from trainer.config.machine import MachineSettings
from trainer.loop.reporting import Training
from trainer.planner.signal import NoiseToSignal
from trainer.ranks import distributed
from trainer.run.clipping_mode import ModeChoice
from trainer.weights.provenance import initialisation_statement


def announce(training: Training, engine_name: str, machine: MachineSettings, choice: ModeChoice | None) -> None:
    """Prints what will be trained, from what, and what it claims; on the main rank, before the first step."""
    run, plan, config = training.run, training.run.plan, training.config
    count = sum(shape.numel() for shape in run.parts.engine.shapes.values())
    sharding = f"ZeRO-{machine.stage}" if engine_name == "deepspeed" else engine_name
    print(f"{config.name}: {count / 1e6:.1f}M parameters, {sharding}")
    print(
        f"logical batch {plan.expected_batch_size} of {plan.num_examples} (q = {plan.sample_rate:.4g}), "
        f"C = {plan.max_grad_norm:g}, sigma = {plan.noise_multiplier:.4f}, "
        f"{plan.num_steps} steps and {plan.reserved_attempts} reserved attempts"
    )
    if plan.bands > 1:
        print(
            f"correlated noise of {plan.bands} bands ({plan.strategy}): {plan.bands} groups of up to {plan.group_size} examples "
            "take turns; past noise stays in memory, and every start begins without it"
        )
    signal = NoiseToSignal.of(plan, count, config.model.kind)
    if signal is not None:
        print(signal.line)
    if plan.lattice is not None:
        print(
            f"certified arithmetic: sums are multiples of 2^{-plan.lattice.exponent}, one example adds at most C; made-up "
            "examples gave the same whole numbers in every row, among all neighbours that were tried and on every rank"
        )
    for warning in plan.warnings:
        say(f"warning: {warning}")
    warmup = config.schedule.warmup_steps
    if warmup > plan.num_steps:
        print(
            f"warning: the warm-up takes {warmup} steps and the run {plan.num_steps}: the learning rate never reaches its peak "
            "(schedule.warmup_steps)"
        )
    planned, whole = run.ledger.claim(plan.num_steps), run.ledger.claim(plan.max_intents)
    if planned is not None and whole is not None:
        own = run.ledger.epsilon(plan.max_intents)
        behind = "" if own == whole[0] else f"; of it, this run alone spends at most {rounded_up(own or 0.0)}"
        print(
            f"epsilon planned {rounded_up(planned[0])}, with the whole reserve {rounded_up(whole[0])}, at delta {whole[1]:.3g}"
            f"{behind}"
        )
    else:
        print(f"formal_guarantee: false ({'; '.join(plan.reasons)}); no epsilon is claimed")
    if training.model_facts["initialisation"].get("kind") != "random":
        say(initialisation_statement(training.model_facts))
    if run.first_step > 1:
        print(f"resuming after step {run.first_step - 1}; {run.ledger.num_charged} attempts are charged")
    elif run.ledger.num_charged:
        print(f"starting again at step 1, without a checkpoint; {run.ledger.num_charged} attempts stay charged")
    if choice is not None:
        print(choice.sentence)
    sys.stdout.flush()


def warn_of_few_cpus(num_workers: int) -> None:
    """Warns on rank 0 where a rank may use fewer CPUs than it has data workers. Collective."""
    # Launchers and schedulers set this process's affinity; some systems know no such thing.
    mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    every = distributed.gather_objects((mine, distributed.host_name()))
    rank = min(range(len(every)), key=lambda number: every[number][0])
    count, host = every[rank]
    if count < num_workers and distributed.rank() == 0:
        print(
            f"warning: rank {rank} on {host} may use {count} CPU{'s' if count > 1 else ''} for its {num_workers} data workers: "
            f"give each rank {num_workers} CPUs (Slurm: --cpus-per-task={num_workers}), or lower data.num_workers",
            flush=True,
        )


def _claim(run: Run) -> str:
    """What the weights carry for everything charged, rounded up."""
    claim, own = run.ledger.claim(), run.ledger.epsilon()
    if claim is None or own is None:
        return "no formal guarantee"
    delta, words = run.plan.target_delta, f"epsilon {rounded_up(claim[0], 4)} at delta {claim[1]:g}"
    if useless := useless_delta(claim[1], run.plan.num_examples):
        words += f" ({useless})"
    if claim == (own, delta):
        return words
    alone = f"epsilon {rounded_up(own, 4)} at delta {delta:g} for this run alone"
    return f"{words} with what the initial weights had spent ({alone})"


def conclude(run: Run, outcome: int) -> None:
    """Prints how the run ended, and what recognises its ledger; on the main rank."""
    claim = _claim(run)
    ending = {
        DONE: f"done: {run.plan.num_steps} steps, {claim}",
        BUDGET_SPENT: f"stopped: the budget of {run.plan.max_intents} attempts is spent and steps remain; {claim}",
        STOPPED_EARLY: f"stopped on request; the same command resumes; {claim}",
    }
    line = run.ledger.position()["hash"]
    print(
        f"the ledger's last line is {line}: keep it elsewhere, and `verify.py --head` notices a ledger that was cut or replaced"
    )
    print(f"{ending[outcome]}; run folder {run.folder.root}", flush=True)
