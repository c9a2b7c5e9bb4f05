"""What the trainer prints before its first step and after its last."""

import shlex
from pathlib import Path

from privacy.accounting.rounding import rounded_up, useless_delta
from privacy.errors import BUDGET_SPENT, DONE, STOPPED_EARLY, say
from privacy.run.run import Run
from trainer.config.machine import MachineSettings
from trainer.loop.reporting import Training
from trainer.noise_to_signal import NoiseToSignal
from trainer.run.clipping_mode import ModeChoice
from trainer.weights.provenance import initialisation_statement


def announce(
    training: Training, engine_name: str, machine: MachineSettings, choice: ModeChoice | None
) -> None:
    """Prints what will be trained, from what, and what it claims; on the main rank, before the first step."""
    run, plan, config = training.run, training.run.plan, training.config
    count = sum(shape.numel() for shape in run.engine.shapes.values())
    sharding = f"ZeRO-{machine.stage}" if engine_name == "deepspeed" else engine_name
    lines = [
        f"{config.name}: {f'{count / 1e6:.1f}M' if count >= 1e6 else f'{count:,}'} trained parameters, {sharding}",
        f"logical batch {plan.expected_batch_size} of {plan.num_examples} (q {plan.sample_rate:.4g}), C {plan.max_grad_norm:g}, "
        f"sigma {plan.noise_multiplier:.4f}, {plan.num_steps} steps ({plan.reserved_attempts} in reserve)",
    ]
    signal = NoiseToSignal.of(plan, count, config.model.kind)
    if signal is not None:
        lines.append(signal.line)
    if plan.lattice is not None:
        lines.append(
            f"certified arithmetic: sums are multiples of 2^{-plan.lattice.exponent}, one example adds at most C; made-up "
            "examples gave the same whole numbers in every row, among all neighbours that were tried and on every rank"
        )
    lines += [f"warning: {warning}" for warning in plan.warnings]
    warmup = config.schedule.warmup_steps
    if warmup > plan.num_steps:
        lines.append(
            f"warning: the warm-up takes {warmup} steps and the run {plan.num_steps}: the learning rate never reaches its peak "
            "(schedule.warmup_steps)"
        )
    planned, whole = run.ledger.claim(plan.num_steps), run.ledger.claim(plan.max_intents)
    if planned is not None and whole is not None:
        own = run.ledger.epsilon(plan.max_intents)
        behind = (
            ""
            if own == whole[0]
            else f"; of it, this run alone spends at most {rounded_up(own or 0.0)}"
        )
        lines.append(
            f"epsilon planned {rounded_up(planned[0])}, with the whole reserve {rounded_up(whole[0])}, at delta {whole[1]:.3g}"
            f"{behind}"
        )
    else:
        lines.append(f"formal_guarantee: false ({'; '.join(plan.reasons)}); no epsilon is claimed")
    if training.model_facts["initialisation"].get("kind") != "random":
        lines.append(initialisation_statement(training.model_facts))
    if run.first_step > 1:
        lines.append(
            f"resuming after step {run.first_step - 1}; {run.ledger.num_charged} attempts are charged"
        )
    elif run.ledger.num_charged:
        lines.append(
            f"starting again at step 1, without a checkpoint; {run.ledger.num_charged} attempts stay charged"
        )
    if choice is not None:
        lines.append(choice.sentence)
    if run.folder.is_asked_to_stop():
        lines.append(f"{run.folder.stop} is there already: the run stops before its next step")
    say(*lines, folds=True)


def conclude(run: Run, outcome: int) -> None:
    """Prints how the run ended, what recognises its ledger, its folder and what comes next; on the main rank."""
    claim, own, words = run.ledger.claim(), run.ledger.epsilon(), "no formal guarantee"
    if claim is not None and own is not None:
        words = f"epsilon {rounded_up(claim[0])} at delta {claim[1]:g}"
        if useless := useless_delta(claim[1], run.plan.num_examples):
            words += f" ({useless})"
        if claim != (own, run.plan.target_delta):
            alone = (
                f"epsilon {rounded_up(own)} at delta {run.plan.target_delta:g} for this run alone"
            )
            words += f" with what the initial weights had spent ({alone})"
    ending = {
        DONE: f"done: {run.plan.num_steps} steps, {words}",
        BUDGET_SPENT: f"stopped: the budget of {run.plan.max_intents} attempts is spent and steps remain; {words}",
        STOPPED_EARLY: f"stopped on request{' (the file STOP)' * run.folder.stop.exists()}; the same command resumes; {words}",
    }
    here, folder = Path.cwd(), run.folder.root
    folder = folder.relative_to(here) if folder.is_relative_to(here) else folder
    head = run.ledger.position()["hash"]
    say(
        ending[outcome],
        f"last line of the ledger, to be kept elsewhere (verify.py --head): {head}",
        folds=True,
    )
    print(f"run folder: {folder}", flush=True)
    if outcome != STOPPED_EARLY:
        print(
            f"next: python launch_scripts/report.py --run_dir {shlex.quote(str(folder))}",
            flush=True,
        )
