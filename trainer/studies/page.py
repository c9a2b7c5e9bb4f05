"""The report of a study: CSV, and Markdown with plots."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data.files import write_durably
from privacy.accounting.rounding import rounded_up
from privacy.card.text import cell, table_of
from trainer.errors import ConfigError
from trainer.studies.collect import Group, Result, axis_columns, grouped
from trainer.studies.folder import StudyFolder
from trainer.studies.grid import StudyConfig
from trainer.studies.plots import draw_all
from trainer.tasks.blind import BLIND_LINE

_COLUMNS = (
    *("B", "steps", "sigma", "sigma / B", "epsilon"),
    *("held-out loss", "least", "largest", "blind line", "below the blind line by", "seeds"),
)


def write_report(folder: StudyFolder, study: StudyConfig, results: Sequence[Result], missing: Sequence[str]) -> Path:
    """Writes study_dir/report/; returns its page.

    Raises:
        ConfigError: nothing was trained yet, or the folder cannot be written.
    """
    if not results:
        raise ConfigError(f"study folder {folder.root}: no point has begun; start it with study.py run")
    groups, target = grouped(results), folder.report
    curves = [
        {"point": result.name, **axis_columns(result.labels), "seed": result.seed, "step": step, "heldout_loss": loss}
        for result in results
        for step, loss in sorted(result.losses.items())
    ]
    try:
        target.mkdir(exist_ok=True)
        tables: dict[str, list[dict[str, Any]]] = {
            "points": [result.row() for result in results],
            "groups": [group.row() for group in groups],
            "curves": curves,
        }
        for name, rows in tables.items():
            with (target / f"{name}.csv").open("w", newline="") as file:
                writer = csv.DictWriter(file, list(rows[0]) if rows else [], lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows)
        pictures = draw_all(groups, study.report, target)
        write_durably(target / "study.md", _page(study, results, groups, missing, pictures))
    except OSError as error:
        raise ConfigError(f"{target}: cannot write the report: {error.strerror or error}") from error
    return target / "study.md"


def _page(
    study: StudyConfig,
    results: Sequence[Result],
    groups: Sequence[Group],
    missing: Sequence[str],
    pictures: Mapping[str, str],
) -> str:
    unfinished = [*(result.name for result in results if result.progress != "finished"), *missing]
    done = len(results) + len(missing) - len(unfinished)
    state = f"{done} are done; not done: {', '.join(unfinished)}." if unfinished else "All are done."
    group_rows = []
    for group in groups:
        row, below = group.row(), ""
        epsilon = "none (simulation, not private)" if group.is_simulated else "none (no guarantee)"
        if group.blind_loss is not None and group.below_blind is not None:
            above = sum(loss >= group.blind_loss for loss in group.final_losses)
            seeds = f" ({above} of {len(group.final_losses)} seeds above it)" if above else ""
            is_below = group.below_blind > 0
            below = f"{group.below_blind:.4f}{seeds}" if is_below else f"**above it** by {-group.below_blind:.4f}"
        group_rows.append(
            [
                *(cell(label) for label in group.labels.values()),
                str(row["expected_batch_size"]),
                str(row["num_steps"]),
                f"{row['noise_multiplier']:.4g}",
                f"{row['noise_over_batch']:.3g}",
                epsilon if row["epsilon"] is None else rounded_up(row["epsilon"], 2),
                *(_loss(row[f"final_heldout_loss_{which}"]) for which in ("mean", "min", "max")),
                _loss(group.blind_loss),
                below,
                str(row["seeds_done"]),
            ]
        )
    parts = [
        f"# {cell(study.title or study.name)}",
        f"Study `{study.name}`: {len(results) + len(missing)} points, {len(study.seeds)} seeds. {state}",
        *_claims(study, results),
        "## Results",
        table_of([cell(name) for name in (*study.axis, *_COLUMNS)], group_rows),
        _blind_line(groups),
        *(f"![{caption}]({file})\n\n{caption}" for file, caption in pictures.items()),
        "Held-out losses are those of the runs' `evaluation/heldout.jsonl`, over public held-out data; epsilon is computed from "
        "each run's ledger. `points.csv`, `groups.csv` and `curves.csv` hold the numbers of every point.",
    ]
    return "\n\n".join(parts) + "\n"


def _claims(study: StudyConfig, results: Sequence[Result]) -> list[str]:
    simulated = sum(result.simulation for result in results)
    formal = sum(result.plan.formal_guarantee for result in results)
    words = []
    if simulated:
        words.append(
            f"**{simulated} of these runs are TAN simulations: they are not private.** Their noise over batch size is that of "
            "the reference batch, which predicts its curve and protects nobody; no epsilon is claimed for them."
        )
    if formal:
        words.append(
            f"{formal} runs claim an epsilon each, composed with the private runs behind their initial weights, but not with "
            "each other. Runs on the same data compose: whoever sees several of them learns more than one epsilon says, and "
            "choosing the best one is not free either."
        )
    if study.budget is not None:
        words.append("The runs on private data reserve their budgets in `shared_ledger.jsonl` before they begin.")
    return words or ["No run claims a guarantee."]


def _blind_line(groups: Sequence[Group]) -> str:
    """What the blind line is, and which groups say nothing about learning because they are not below it."""
    lines = sorted({round(group.blind_loss, 4) for group in groups if group.blind_loss is not None})
    if not lines:
        return "No blind line is known: the held-out data are not public, or the runs evaluated none."
    kinds = dict.fromkeys(BLIND_LINE[group.results[0].kind] for group in groups)
    text = (
        f"The blind line, {' or '.join(map(_loss, lines))}, is the loss that one gets on the same held-out data without "
        f"looking at them: {'; '.join(kinds)}. A model above it is no better than one that does not look."
    )
    known = [group for group in groups if group.below_blind is not None]
    above = [group for group in known if group.below_blind is not None and group.below_blind <= 0]
    if above:
        names = "; ".join(", ".join(f"{axis} {label}" for axis, label in group.labels.items()) for group in above)
        return f"{text} **{len(above)} of {len(known)} groups lie above it: {cell(names)}.**"
    return f"{text} All {len(known)} groups that are done lie below it."


def _loss(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
