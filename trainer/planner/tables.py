"""Draws a plan as tables for the console."""

from collections.abc import Callable
from typing import Any

from rich.table import Table
from rich.text import Text

from privacy.accounting.rounding import rounded_down, rounded_up
from privacy.errors import printable
from privacy.plan.numbers import PrivacyPlan


class _Table(Table):
    """A table that reads no markup in its cells, since a recipe's own words are among them."""

    def add_row(self, *cells: Any, **options: Any) -> None:
        """Adds a row of plain text."""
        super().add_row(*(Text(printable(cell)) for cell in cells), **options)


def _empty_table(title: str) -> Table:
    """Returns a table with columns for a label, its value and a note."""
    table = _Table(title=title or None, show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim")
    return table


def size_table(plan: PrivacyPlan) -> Table:
    """Returns a table of sizes, which are known before epsilon is computed for seconds.

    The cap depends on epsilon, so it comes later.
    """
    table = _empty_table("Privacy plan")
    row = table.add_row
    row("examples", f"{plan.num_examples:,}", "one example is the unit of privacy")
    row("expected batch", f"{plan.expected_batch_size:,}", "Poisson")
    row("sample rate", f"{plan.sample_rate:.6g}", "")
    row("steps", f"{plan.num_steps:,}", f"{plan.num_steps * plan.sample_rate:.1f} epochs")
    return table


def privacy_table(result: dict[str, Any]) -> Table:
    """Returns a table of the plan's claim and of further epsilons."""

    def text(name: str, rounded: Callable[[float], str] = rounded_up) -> str:
        return "none" if result[name] is None else rounded(result[name])

    table = _empty_table("")
    row = table.add_row
    row("noise multiplier", f"{result['noise_multiplier']:.4f}", "")
    row("delta", f"{result['delta']:.4g}", "")
    if result["cap"] is not None:
        row(
            "cap",
            f"{result['cap']:,}",
            "larger batches are cut down to it; the claim pays for that",
        )
    for option, setting in result["options"]:
        row(option, "", setting)
    table.add_section()
    row("epsilon (PLD)", text("epsilon_pld"), "the claim; zero-out adjacency")
    reserve = f"with {result['reserved_attempts']} reserved"
    row(reserve, text("epsilon_with_reserve"), "the most that the run can spend")
    row(
        "PRV bracket",
        f"[{text('epsilon_prv_lower', rounded_down)}, {text('epsilon_prv_upper')}]",
        "without the cap",
    )
    row("epsilon (RDP)", text("epsilon_rdp"), "upper bound, without the cap")
    table.add_section()
    neighbours = (
        ("replace_one", "replace-one", "one example exchanged for another"),
        ("group_2", "group of 2", "two copies or two examples of one person, without the cap"),
        ("group_5", "group of 5", ""),
    )
    # `summarise` computes these epsilons with its extras alone, and the risk of attacks too.
    if "attack_risk" in result:
        for name, label, note in neighbours:
            if result[name] is None:
                note = "no finite epsilon at this delta"
            row(label, text(name), note)
    if "epsilon_owner" in result:
        limit = result["max_examples_per_owner"]
        note = f"all of at most {limit} examples of one owner, without the cap"
        row("owner", text("epsilon_owner"), note)
    note = "TAN = sigma / (q sqrt(T / 2)); equal TAN is equal epsilon while sigma is above about 2"
    row("total amount of noise", text("tan", rounded_down), note)
    if result.get("noise_to_signal") is not None:
        _add_signal(table, result["noise_to_signal"])
    if result.get("choice") is not None:
        choice = result["choice"]
        table.add_section()
        note = f"privacy.expected_batch_size; {choice['reason']}"
        row("chosen batch", f"{choice['expected_batch_size']:,}", note)
        note = "train.num_steps; the learning rate has to follow"
        row("chosen steps", f"{choice['num_steps']:,}", note)
        note = f"for epsilon {rounded_up(choice['epsilon_with_reserve'])} with the reserve"
        row("its noise multiplier", f"{choice['noise_multiplier']:.4f}", note)
        _add_signal(table, choice["noise_to_signal"])
    if result.get("attack_risk") is not None:
        risk = result["attack_risk"]
        table.add_section()
        note = "most that true exceed false positives"
        row("attack advantage", f"{risk['advantage']:.3f}", note)
        for rate, bound in risk["true_positive_rates"]:
            row(f"true positives at {rate:g}", f"{bound:.2%}", "bound for any membership attack")
    return table


def _add_signal(table: Table, signal: dict[str, Any]) -> None:
    """Adds rows of noise against signal; see `trainer.noise_to_signal`."""
    table.add_section()
    note = f"sigma sqrt(P) / B per step, P = {signal['parameters']:,}"
    table.add_row("noise-to-signal", f"{signal['per_step']:.2g}", note)
    note = f"over all steps: {signal['sentence']}"
    table.add_row("accumulated", f"{signal['accumulated']:.2g}", note)


def resource_table(plan: dict[str, Any]) -> Table:
    """Returns the entry `resources` of `plan.py --json` as a table.

    See `trainer.planner.resources`.
    """
    gpu = f", {plan['gpu']}" if plan["gpu"] else ""
    sharding = f"ZeRO-{plan['zero_stage']}" if plan["engine"] == "deepspeed" else plan["engine"]
    table = _empty_table(
        f"Memory and time: {plan['world_size']} ranks, {sharding}, {plan['dtype']}{gpu}"
    )
    frozen = f"and {plan['frozen_parameters']:,} frozen" if plan["frozen_parameters"] else ""
    table.add_row("trainable parameters", f"{plan['parameters']:,}", frozen)
    table.add_row("clipping mode", plan["clipping_mode"], f"{plan['accumulation']} accumulation")
    for section in ("memory", "time", "allocation", "batch", "compute", "reading", "assumptions"):
        table.add_section()
        for key, quantity in plan.get(section, {}).items():
            if quantity is not None and (quantity or key == "fits"):
                is_size = "bytes" in key or (section == "memory" and key != "largest_micro_batch")
                text = _shown(key, quantity, is_size)
                table.add_row(key.replace("_", " "), text, _NOTES.get(key, ""))
    for note in plan["notes"]:
        table.add_row("note", "", note)
    return table


_NOTES = {
    "micro_batches_per_step": "of each rank",
    "weights": "compute dtype, kept between uses",
    "masters": "fp32 master weights",
    "gradient_buffer": "the engine's",
    "moments": "optimizer states",
    "average": "moving average of the weights",
    "sums": "clipped sums",
    "bucket": "of sharded accumulation",
    "gathered": "weights while a micro-batch runs",
    "activations": "of a micro-batch",
    "step": "at the end of a step: reduction, noise, optimizer",
    "host": "offloaded to main memory",
    "peak": "per rank: the larger of a micro-batch and the end of a step",
    "for_activations": "with a margin of 20 %",
    "largest_micro_batch": "1,024 at most",
    "clipping_flop_ratio": "of a non-private step",
    "flop_per_step": "all ranks, matrix products and attention",
    "staged_bytes_per_node": "with data.staging",
    "lattice_seconds_per_step": "to round and to check whole numbers",
    "examples_per_second": "random reads that storage must deliver",
    "gpu_hours": "ranks times hours",
    "job_mtbf_hours": "until one of the ranks fails, by --gpu_mtbf_hours",
    "checkpoint_every": "steps",
    "best_checkpoint_every": "steps, by Young and Daly: least time lost",
    "hours_with_failures": "and with checkpoints and restarts: ask for this",
    "price": "by --gpu_price",
    "repeated_steps": "after failures; each is charged again, out of the reserve",
    "decoding_cores_per_rank": "Slurm: --cpus-per-task",
    "efficiency": "share of the peak that is reached",
    "left_out": "and not planned",
}


def _shown(key: str, quantity: Any, is_size: bool) -> str:
    """Returns the text of a quantity.

    Sizes have binary units, as the trainer prints them, and seconds their unit; other numbers have
    commas or four digits.
    """
    if isinstance(quantity, bool):
        return "yes" if quantity else "NO"
    if isinstance(quantity, str):
        return quantity
    if is_size:
        for unit in ("B", "KiB", "MiB", "GiB"):
            if abs(quantity) < 1024:
                return f"{quantity:.4g} {unit}"
            quantity /= 1024
        return f"{quantity:.4g} TiB"
    if isinstance(quantity, int) and quantity < 10**12:
        return f"{quantity:,}"
    return f"{quantity:,.4g}{' s' if 'seconds' in key else ''}"
