"""The plan as tables for the console."""

from collections.abc import Callable
from typing import Any

from rich.table import Table
from rich.text import Text

from privacy.card.text import rounded_down, rounded_up
from privacy.errors import printable
from privacy.plan import PrivacyPlan


class _Table(Table):
    """A table that shows cells as they are, since a recipe's own words are among them."""

    def add_row(self, *cells: Any, **how: Any) -> None:
        super().add_row(*(Text(printable(cell)) for cell in cells), **how)


def _empty_table(title: str) -> Table:
    """Columns for a label, its value and a note."""
    table = _Table(title=title or None, show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim")
    return table


def size_table(plan: PrivacyPlan) -> Table:
    """What is known before any epsilon is computed, which takes seconds."""
    table = _empty_table("Privacy plan")
    row, bands = table.add_row, plan.bands
    cap = "no cap" if plan.cap is None else f"batches cut at {plan.cap:,}"
    row("examples", f"{plan.num_examples:,}", "one example is the unit of privacy")
    sampling = "Poisson" if bands == 1 else f"Poisson in one of {bands} groups, which take turns"
    row("expected batch", f"{plan.expected_batch_size:,}", f"{sampling}, {cap}")
    row("sample rate", f"{plan.sample_rate:.6g}", "")
    row("steps", f"{plan.num_steps:,}", f"{plan.num_steps * plan.sample_rate / bands:.1f} epochs")
    return table


def privacy_table(result: dict[str, Any]) -> Table:
    """What the plan claims, and what it does not."""

    def text(name: str, rounded: Callable[[float], str] = rounded_up) -> str:
        return "none" if result[name] is None else rounded(result[name])

    table = _empty_table("")
    row, bands = table.add_row, result["bands"]
    row("noise multiplier", f"{result['noise_multiplier']:.4f}", "")
    row("delta", f"{result['delta']:.4g}", "")
    if bands > 1:
        independent = f"independent noise has {result['independent_noise_multiplier']:.4f} at this epsilon"
        row("bands", str(bands), f"correlated noise; {independent}")
        row("error ratio", f"{result['error_ratio']:.3f}", "noise in running sums over that of independent noise")
        if result["optimised_error_ratio"] is not None:
            row("of this schedule", f"{result['workload_error_ratio']:.3f}", "in the weights, square-root coefficients")
            row("", f"{result['optimised_error_ratio']:.3f}", "optimised coefficients")
        row("past noise", f"{result['history_bytes_per_coordinate']} B", "a coordinate, on the rank that owns it")
    if result["lattice_exponent"] is not None:
        row("arithmetic", result["arithmetic"], f"multiples of 2^{-result['lattice_exponent']}; no slack for rounding")
    table.add_section()
    row("epsilon (PLD)", text("epsilon_pld"), "the claim; zero-out adjacency")
    reserve = f"with {result['reserved_attempts']} reserved"
    row(reserve, text("epsilon_with_reserve"), "the most that the run can spend")
    row("PRV bracket", f"[{text('epsilon_prv_lower', rounded_down)}, {text('epsilon_prv_upper')}]", "without the cap")
    row("epsilon (RDP)", text("epsilon_rdp"), "upper bound, without the cap")
    table.add_section()
    neighbours = ("one example exchanged for another", "two copies or two examples of one person, without the cap", "")
    for name, note in zip(("replace_one", "group_2", "group_5"), neighbours, strict=True):
        if "attack_risk" in result:  # one of the extras, as these are
            note = note if result[name] is not None else "no finite epsilon at this delta"
            row(name.replace("_", "-" if name == "replace_one" else " of "), text(name), note)
    if "epsilon_owner" in result:
        note = f"all of at most {result['max_examples_per_owner']} examples of one owner, without the cap"
        row("owner", text("epsilon_owner"), note)
    row("total amount of noise", text("tan", rounded_down), "TAN = sigma / (q sqrt(T / 2))")
    if result.get("noise_to_signal") is not None:
        _add_signal(table, result["noise_to_signal"])
    if result.get("choice") is not None:
        chosen = result["choice"]
        table.add_section()
        row("chosen batch", f"{chosen['expected_batch_size']:,}", f"privacy.expected_batch_size; {chosen['reason']}")
        row("chosen steps", f"{chosen['num_steps']:,}", "train.num_steps; the learning rate has to follow")
        note = f"for epsilon {rounded_up(chosen['epsilon_with_reserve'], 3)} with the reserve"
        row("its noise multiplier", f"{chosen['noise_multiplier']:.4f}", note)
        _add_signal(table, chosen["noise_to_signal"])
    if result.get("attack_risk") is not None:
        table.add_section()
        row("attack advantage", f"{result['attack_risk']['advantage']:.3f}", "most that true exceed false positives")
        for rate, bound in result["attack_risk"]["true_positive_rates"]:
            row(f"true positives at {rate:g}", f"{bound:.2%}", "bound for any membership attack")
    return table


def _add_signal(table: Table, signal: dict[str, Any]) -> None:
    """Noise against signal; see `trainer.planner.signal`."""
    table.add_section()
    note = f"sigma sqrt(P) / B per step, P = {signal['parameters']:,}"
    table.add_row("noise-to-signal", f"{signal['per_step']:.2g}", note)
    table.add_row("accumulated", f"{signal['accumulated']:.2g}", f"over all steps: {signal['sentence']}")


def bands_table(rows: list[dict[str, Any]], best: int) -> Table:
    """Numbers of bands at equal epsilon; see `trainer.planner.bands`."""
    table = _empty_table("Correlated noise at equal epsilon: noise multiplier, and noise in running sums")
    for row in rows:
        note = f"error ratio {row['error_ratio']:.3f}{', the best' if row['bands'] == best else ''}; without the cap"
        table.add_row(f"{row['bands']} bands", f"{row['noise_multiplier']:.4f}", note)
    return table


def scaling_table(rule: dict[str, Any], noise_multiplier: float) -> Table:
    """The scaling rule at this plan; see `trainer.planner.privacy`."""
    table = _empty_table("Scaling rule (TAN): equal sigma / B and steps, other batch sizes")
    row = table.add_row
    row("total amount of noise", f"{rule['tan']:.3f}", "TAN = sigma / (q sqrt(T / 2)), the same in every row")
    row("epsilon by the rule", rounded_up(rule["epsilon_formula"]), "eta^2 + 2 eta sqrt(log(1 / delta)), eta = 1 / TAN")
    for other in rule["by_sigma"]:
        row(
            f"sigma {other['noise_multiplier']:g}",
            rounded_up(other["epsilon_rdp"]),
            f"RDP, B = {other['expected_batch_size']:,}",
        )
    smallest = rule["smallest_batch_size"]
    if rule["holds"]:
        note = f"epsilon of the rule holds down to B = {smallest:,}"
    elif smallest is None:
        note = "broken here, and no batch of these data is large enough"
    else:
        note = f"broken here: its epsilon needs B of at least {smallest:,}"
    row("breaks below sigma 2", f"{noise_multiplier:.3f}", note)
    row("simulation", "not private", "any smaller batch shows the training curve; what it trains has no guarantee")
    return table


def resource_table(plan: dict[str, Any]) -> Table:
    """Memory, time, traffic and reads; see `trainer.planner.resources`."""
    where = f", {plan['gpu']}" if plan["gpu"] else ""
    sharding = f"ZeRO-{plan['zero_stage']}" if plan["engine"] == "deepspeed" else plan["engine"]
    table = _empty_table(f"Memory and time: {plan['world_size']} ranks, {sharding}, {plan['dtype']}{where}")
    row = table.add_row
    batch, memory, compute, reading = (plan[key] for key in ("batch", "memory", "compute", "reading"))
    frozen = f"and {plan['frozen_parameters']:,} frozen" if plan["frozen_parameters"] else ""
    row("trainable parameters", f"{plan['parameters']:,}", frozen)
    note = f"of {batch['micro_batch_size']}; {batch['useful_share']:.1%} of the rows are not padding"
    row("micro-batches per rank", f"{batch['micro_batches_per_step']:,.5g}", note)
    table.add_section()
    for key, note in _MEMORY_ROWS.items():
        if memory[key]:
            row(key.replace("_", " "), _size(memory[key]), note)
    modes = ", ".join(f"{mode} {_size(count)}" for mode, count in memory["activations_by_mode"].items())
    row("activations", _size(memory["activations"]), f"of a micro-batch in mode {plan['clipping_mode']} ({modes})")
    row("peak per rank", _size(memory["peak"]), "the larger of a micro-batch and the end of a step")
    if "fits" in memory:
        fits = "fits" if memory["fits"] else "DOES NOT FIT"
        row(
            "device",
            _size(memory["device"]),
            f"{fits}: {_size(memory['for_activations'])} for activations, margin 20 %",
        )
        row("largest micro-batch", f"{memory['largest_micro_batch']:,}", "1,024 at most")
    table.add_section()
    ratio = f"clipping {compute['clipping_ratio']:.3f} of a non-private step"
    row("FLOP per example", f"{compute['flop_per_example']:.4g}", ratio)
    row("FLOP per step", f"{compute['flop_per_step']:.4g}", "all ranks, matrix products and attention")
    row(
        "read per step",
        _size(reading["bytes_per_step"]),
        f"{reading['bytes_per_example']:,.0f} bytes an example ({reading['source']})",
    )
    staging = reading["staging"]
    if "staged" in staging:
        staged, note = (
            staging["staged"],
            f"at {staging['store_gbits']:g} Gb/s: {staging['staged']['seconds'] / 60:,.3g} minutes",
        )
        row("staged per node", _size(staged["bytes_per_node"]), f"{note}; {staging['nodes']} nodes (data.staging)")
        row(
            "requests, staged",
            f"{staged['requests']:,}",
            f"whole shards, for the whole run: {staged['price']:,.2f} dollars",
        )
    one_by_one = staging["one_by_one"]
    note = (
        f"one by one, for the whole run: {one_by_one['price']:,.2f} dollars at {staging['request_price']:g} for 1,000"
    )
    row("requests, examples", f"{one_by_one['requests']:,}", note)
    if "time" in plan:
        time = plan["time"]
        given = time["assumptions"]
        note = f"assumed: {given['efficiency']:.0%} of {given['peak_flop_per_second'] / 1e12:g} TFLOP/s"
        row("compute per step", f"{time['compute_seconds_per_step']:.4g} s", note)
        sent = f"{_size(time['sent_bytes_per_step'])} sent by each rank"
        if time["lattice_seconds_per_step"]:
            note = f"{_size(plan['certified']['lattice_bytes_per_example'])} of memory traffic an example, to round and to check"
            row("whole numbers per step", f"{time['lattice_seconds_per_step']:.4g} s", note)
        row("exposed communication", f"{time['exposed_communication_seconds_per_step']:.4g} s", sent)
        row("step", f"{time['seconds_per_step']:.4g} s", f"{time['examples_per_second']:,.0f} examples/s")
        row("whole run", f"{time['hours']:,.1f} h", f"left out: {given['left_out']}")
        row("GPU-hours", f"{time['gpu_hours']:,.0f}", "ranks times hours")
        decoded = f"each rank decodes {time['reads_per_second_and_rank']:,.1f} examples/s"
        note = f"{_size(time['read_bytes_per_second'])}/s; {decoded}"
        row("random reads", f"{time['reads_per_second']:,.0f} /s", note)
        note = f"to decode, at {given['decoded_per_second_and_core']:,.0f} examples/s a core; Slurm: --cpus-per-task"
        row("cores per rank", f"{time['decoding_cores_per_rank']:,.2f}", note)
    for note in plan["notes"]:
        row("note", "", note)
    return table


_MEMORY_ROWS = {
    "weights": "compute dtype, kept between uses",
    "masters": "fp32 master weights",
    "gradient_buffer": "the engine's",
    "moments": "optimizer states",
    "average": "moving average of the weights",
    "noise_history": "past noise of correlated noise, fp64",
    "sums": "clipped sums, fp64 or int64",
    "bucket": "of sharded accumulation",
    "gathered": "weights while a micro-batch runs",
    "step": "at the end of a step: reduction, noise, optimizer",
    "host": "offloaded to main memory",
}


def _size(count: float) -> str:
    """Binary units, as the trainer prints them."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"
