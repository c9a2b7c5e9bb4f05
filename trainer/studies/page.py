"""The report of a study: CSV, JSON, Markdown with plots, TensorBoard hparams."""

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data.files import write_durably
from privacy.card.text import cell, rounded_up, table_of
from trainer.errors import ConfigError
from trainer.loop.metrics import write_hparams
from trainer.studies.collect import Group, Result, axis_columns, grouped
from trainer.studies.folder import StudyFolder
from trainer.studies.grid import StudyConfig
from trainer.studies.plots import Picture, draw_all
from trainer.tasks.blind import BLIND_LINE

_HPARAMS = ("expected_batch_size", "noise_multiplier", "num_steps", "num_examples", "seed", "formal_guarantee")


def write_report(folder: StudyFolder, study: StudyConfig, results: Sequence[Result], missing: Sequence[str]) -> Path:
    """Writes study_dir/report/; returns its page.

    Raises:
        ConfigError: nothing was trained yet, or the folder cannot be written.
    """
    if not results:
        raise ConfigError(f"study folder {folder.root}: no point has begun; start it with study.py run")
    groups = grouped(results)
    target = folder.report
    try:
        target.mkdir(exist_ok=True)
        _write_csv(target / "points.csv", [result.row() for result in results])
        _write_csv(target / "groups.csv", [group.row() for group in groups])
        curves = [
            {
                "point": result.name,
                **axis_columns(result.labels),
                "seed": result.seed,
                "step": step,
                "heldout_loss": loss,
            }
            for result in results
            for step, loss in sorted(result.losses.items())
        ]
        _write_csv(target / "curves.csv", curves)
        numbers = {"study": study.name, "points": [r.row() for r in results], "groups": [g.row() for g in groups]}
        write_durably(target / "study.json", json.dumps(numbers, indent=1) + "\n")
        pictures = draw_all(groups, study.report, target)
        page = target / "study.md"
        write_durably(page, _page(study, results, groups, missing, pictures))
        hparams = []
        for result in results:
            row, metrics = result.row(), {"heldout/final_loss": result.final_loss, "privacy/epsilon": result.epsilon}
            known = {name: value for name, value in metrics.items() if value is not None}
            columns = {**axis_columns(result.labels), **{name: row[name] for name in _HPARAMS}}
            hparams.append((result.name, columns, known))
        write_hparams(target / "tensorboard", hparams)
    except OSError as error:
        raise ConfigError(f"{target}: cannot write the report: {error.strerror or error}") from error
    return page


def _write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _page(
    study: StudyConfig,
    results: Sequence[Result],
    groups: Sequence[Group],
    missing: Sequence[str],
    pictures: Sequence[Picture],
) -> str:
    unfinished = [*(result.name for result in results if result.progress != "finished"), *missing]
    done = len(results) + len(missing) - len(unfinished)
    state = f"{done} are done; not done: {', '.join(unfinished)}." if unfinished else "All are done."
    columns = [
        *("B", "steps", "sigma", "sigma / B", "epsilon"),
        *("held-out loss", "least", "largest", "blind line", "below the blind line by", "seeds"),
    ]
    group_rows = [
        [
            *(cell(label) for label in group.labels.values()),
            str(row["expected_batch_size"]),
            str(row["num_steps"]),
            f"{row['noise_multiplier']:.4g}",
            f"{row['noise_over_batch']:.3g}",
            _epsilon_text(row["epsilon"], row["simulation"]),
            *(_loss(row[f"final_heldout_loss_{which}"]) for which in ("mean", "min", "max")),
            _loss(group.blind_loss),
            _below(group),
            str(row["seeds_done"]),
        ]
        for group in groups
        for row in [group.row()]
    ]
    point_rows = [
        [
            cell(result.name),
            result.progress,
            _epsilon_text(result.epsilon, result.simulation),
            str(result.charged),
            _loss(result.losses.get(0)),
            _loss(result.final_loss),
            "" if result.seconds is None else f"{result.seconds:.0f}",
        ]
        for result in results
    ]
    parts = [
        f"# {cell(study.title or study.name)}",
        f"Study `{study.name}`: {len(results) + len(missing)} points, {len(study.seeds)} seeds. {state}",
        _claims(study, results),
        "## Results",
        table_of([cell(name) for name in [*study.axis, *columns]], group_rows),
        _blind_line(groups),
        *(f"![{picture.caption}]({picture.file})\n\n{picture.caption}" for picture in pictures),
        "## Points",
        table_of(["point", "status", "epsilon", "attempts charged", "first loss", "last loss", "seconds"], point_rows),
        "Held-out losses are those of the runs' `evaluation/heldout.jsonl`, over public held-out data; epsilon is computed from "
        "each run's ledger. `points.csv`, `groups.csv` and `curves.csv` hold the same numbers in full.",
    ]
    return "\n\n".join(parts) + "\n"


def _claims(study: StudyConfig, results: Sequence[Result]) -> str:
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
    return "\n\n".join(words) or "No run claims a guarantee."


def _below(group: Group) -> str:
    """How far the mean of a group is below the blind line, and how many of its seeds are not."""
    if group.blind_loss is None or group.below_blind is None:
        return ""
    above = sum(loss >= group.blind_loss for loss in group.final_losses)
    if group.below_blind <= 0:
        return f"**above it** by {-group.below_blind:.4f}"
    return f"{group.below_blind:.4f}" + (f" ({above} of {len(group.final_losses)} seeds above it)" if above else "")


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


def _epsilon_text(value: float | None, simulation: bool) -> str:
    if value is not None:
        return rounded_up(value, 2)
    return "none (simulation, not private)" if simulation else "none (no guarantee)"


def _loss(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
