"""Prints the lines of the trainer before the first step of a run and after its last."""

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
    """Prints model, batch, noise, initial weights and planned epsilon of a run.

    Only the main rank calls it, before the first step.
    """
    run = training.run
    plan = run.plan
    config = training.config
    num_parameters = sum(shape.numel() for shape in run.engine.shapes.values())
    parameters = f"{num_parameters:,}"
    if num_parameters >= 1e6:
        parameters = f"{num_parameters / 1e6:.1f}M"
    sharding = f"ZeRO-{machine.stage}" if engine_name == "deepspeed" else engine_name
    lines = [
        f"{config.name}: {parameters} trained parameters, {sharding}",
        f"logical batch {plan.expected_batch_size} of {plan.num_examples} "
        f"(q {plan.sample_rate:.4g}), C {plan.max_grad_norm:g}, "
        f"sigma {plan.noise_multiplier:.4f}, "
        f"{plan.num_steps} steps ({plan.reserved_attempts} in reserve)",
    ]
    signal = NoiseToSignal.of(plan, num_parameters, config.model.kind)
    if signal is not None:
        lines.append(signal.line)
    if plan.lattice is not None:
        lines.append(
            f"certified arithmetic: sums are multiples of 2^{-plan.lattice.exponent}, one example "
            "adds at most C; made-up examples gave the same whole numbers in every row, among all "
            "neighbours that were tried and on every rank"
        )
    lines += [f"warning: {warning}" for warning in plan.warnings]
    warmup = config.schedule.warmup_steps
    if warmup > plan.num_steps:
        lines.append(
            f"warning: the warm-up takes {warmup} steps and the run {plan.num_steps}: the learning "
            "rate never reaches its peak (schedule.warmup_steps)"
        )
    planned = run.ledger.claim(plan.num_steps)
    with_reserve = run.ledger.claim(plan.max_intents)
    if planned is not None and with_reserve is not None:
        epsilon, delta = with_reserve
        line = (
            f"epsilon planned {rounded_up(planned[0])}, with the whole reserve "
            f"{rounded_up(epsilon)}, at delta {delta:.3g}"
        )
        # The claim includes the spending of the private runs behind the initial weights.
        epsilon_alone = run.ledger.epsilon(plan.max_intents)
        if epsilon_alone != epsilon:
            line += f"; of it, this run alone spends at most {rounded_up(epsilon_alone or 0.0)}"
        lines.append(line)
    else:
        lines.append(f"formal_guarantee: false ({'; '.join(plan.reasons)}); no epsilon is claimed")
    if training.model_facts["initialisation"].get("kind") != "random":
        lines.append(initialisation_statement(training.model_facts))
    num_charged = run.ledger.num_charged
    if run.first_step > 1:
        lines.append(
            f"resuming after step {run.first_step - 1}; {num_charged} attempts are charged"
        )
    elif num_charged:
        lines.append(
            f"starting again at step 1, without a checkpoint; {num_charged} attempts stay charged"
        )
    if choice is not None:
        lines.append(choice.sentence)
    if run.folder.is_asked_to_stop():
        lines.append(f"{run.folder.stop} is there already: the run stops before its next step")
    say(*lines, folds=True)


def conclude(run: Run, outcome: int) -> None:
    """Prints how the run ended, its ledger's last hash, its folder and the next command.

    Only the main rank calls it.
    """
    claim = run.ledger.claim()
    epsilon_alone = run.ledger.epsilon()
    guarantee = "no formal guarantee"
    if claim is not None and epsilon_alone is not None:
        epsilon, delta = claim
        guarantee = f"epsilon {rounded_up(epsilon)} at delta {delta:g}"
        remark = useless_delta(delta, run.plan.num_examples)
        if remark:
            guarantee += f" ({remark})"
        if claim != (epsilon_alone, run.plan.target_delta):
            guarantee += (
                f" with what the initial weights had spent (epsilon {rounded_up(epsilon_alone)} "
                f"at delta {run.plan.target_delta:g} for this run alone)"
            )
    cause = " (the file STOP)" if run.folder.stop.exists() else ""
    endings = {
        DONE: f"done: {run.plan.num_steps} steps, {guarantee}",
        BUDGET_SPENT: f"stopped: the budget of {run.plan.max_intents} attempts is spent and steps "
        f"remain; {guarantee}",
        STOPPED_EARLY: f"stopped on request{cause}; the same command resumes; {guarantee}",
    }
    folder = run.folder.root
    if folder.is_relative_to(Path.cwd()):
        folder = folder.relative_to(Path.cwd())
    head = run.ledger.position()["hash"]
    say(
        endings[outcome],
        f"last line of the ledger, to be kept elsewhere (verify.py --head): {head}",
        folds=True,
    )
    print(f"run folder: {folder}", flush=True)
    if outcome != STOPPED_EARLY:
        print(
            f"next: python launch_scripts/report.py --run_dir {shlex.quote(str(folder))}",
            flush=True,
        )
