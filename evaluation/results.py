"""Results of an evaluation, as a table, one JSON record and TensorBoard.

Accuracies, scores and losses are computed from the evaluation data without noise, so no number here
has a formal guarantee. They are public only where the user declares the data public; otherwise
record and TensorBoard go to `private/` (contract 12). Weights that a command trained with
differential privacy are listed apart, each with the ledger that proves its epsilon.
"""

import hashlib
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from data.files import write_durably
from privacy.accounting.rounding import rounded_up
from privacy.boundary import Private, Public, Reason
from privacy.errors import printable, say
from privacy.files.public import without_folders
from privacy.ledger.claim import claim_of
from privacy.plan.limits import json_value
from privacy.step.run_folder import environment
from trainer.loop.metrics import PrivateMetrics, PublicMetrics
from trainer.weights.provenance import proof_of

WITHOUT_NOISE = "the numbers are computed from the evaluation data without noise"


@dataclass(frozen=True)
class DataUse:
    """A data set that an evaluation read.

    Attributes:
        role: "train", "test", "images", ...
        name: its place, for people.
        num_examples: the number of used examples.
        num_undecodable: the number of examples that were left out because their bytes are no image.
    """

    role: str
    name: str
    num_examples: int
    num_undecodable: int = 0


@dataclass(frozen=True)
class ModelFacts:
    """The evaluated model, and the proven facts about the privacy of its training data.

    Attributes:
        path: of the checkpoint.
        step: of training.
        formal_guarantee: True only where a whole ledger in the checkpoint's run folder proves it; a
            manifest proves nothing.
        attested: True where there is such a ledger, with or without a guarantee.
        epsilon, delta: of all charges in its run's ledger and of the private runs that it started
            from; None without a guarantee.
        reasons: why it has no guarantee.
    """

    path: str
    step: int = 0
    formal_guarantee: bool = False
    attested: bool = False
    epsilon: float | None = None
    delta: float | None = None
    reasons: Sequence[str] = ()

    @classmethod
    def of(cls, path: Path, manifest: Mapping[str, Any]) -> "ModelFacts":
        """Returns the facts about an opened model (`trainer.weights.open_model`).

        Raises:
            PrivacyStateRefused, PrivacyConfigError: the ledger in its run folder, or a parent
                ledger, is broken or contradicts the checkpoint.
        """
        proof = proof_of(path, manifest)
        step = int(manifest.get("step") or 0)
        if proof.state is None:
            reasons = (f"not attested: {proof.reason}", *(manifest.get("reasons") or ()))
            return cls(str(path), step, reasons=reasons)
        plan = proof.state.plan
        if not plan.formal_guarantee:
            return cls(str(path), step, attested=True, reasons=plan.reasons)
        claim = claim_of(path.resolve().parent.parent, proof.state)
        assert claim is not None, "a plan with a guarantee makes a claim"
        epsilon, delta = claim
        return cls(
            str(path),
            step,
            formal_guarantee=True,
            attested=True,
            epsilon=epsilon if math.isfinite(epsilon) else None,
            delta=delta,
        )

    def statement(self) -> str:
        """Returns one line for people."""
        if not self.formal_guarantee:
            return f"the evaluated model has no formal guarantee: {'; '.join(self.reasons)}"
        epsilon = (
            "no finite epsilon" if self.epsilon is None else f"epsilon {rounded_up(self.epsilon)}"
        )
        return (
            f"the evaluated model, for its own training data: {epsilon} at delta {self.delta:.3g}, "
            "from its ledger"
        )


@dataclass(frozen=True)
class PrivateRelease:
    """A release that a command made with differential privacy.

    Attributes:
        what: e.g. "weights of a dp-ls head"; a field of the record.
        ledger: the file from which epsilon comes.
        epsilon, delta: of this release alone.
        covers: the protected examples; others (the encoder's training data) are not protected.
    """

    what: str
    ledger: str
    epsilon: float
    delta: float
    covers: str


@dataclass(frozen=True)
class Results:
    """The results that a command of `evaluation.command_options` returns.

    Attributes:
        name: of the command.
        scalars: the main numbers, with names like "accuracy_last"; TensorBoard shows them too.
        data: every data set behind the scalars.
        model: the evaluated model, if it came from a checkpoint.
        table: rows for people, a dictionary of column -> value each; empty for the scalars.
        details: further JSON values.
        released: releases with differential privacy.
        notes: sentences that belong to the numbers; printed under the table.
    """

    name: str
    scalars: Mapping[str, float]
    data: Sequence[DataUse]
    model: ModelFacts | None = None
    table: Sequence[Mapping[str, Any]] = ()
    details: Mapping[str, Any] = field(default_factory=dict)
    released: Sequence[PrivateRelease] = ()
    notes: Sequence[str] = ()


def publish(
    results: Results,
    *,
    output: Path | None,
    data_is_public: bool,
    as_json: bool,
    arguments: Sequence[str],
) -> None:
    """Writes the record into its folder, and prints it as one JSON object or a table.

    Numbers that are not finite become None. The folder OUTPUT/evaluation, or
    OUTPUT/private/evaluation for data that were not declared public, gets
    NAME-STEP-ARGUMENTS.json, metrics.jsonl and TensorBoard. The same command again replaces its
    file.

    Args:
        output: the run folder, or any other; None writes nothing.
        arguments: of the command line, for a private record.
    """
    facts = environment()
    record: dict[str, Any] = {
        "evaluation": results.name,
        "scalars": json_value(dict(results.scalars)),
        "table": json_value([dict(row) for row in results.table]),
        "details": json_value(dict(results.details)),
        "notes": list(results.notes),
        "formal_guarantee": False,
        "reasons": [WITHOUT_NOISE],
        "data_is_public": data_is_public,
        "data": [asdict(use) for use in results.data],
        "model": None if results.model is None else asdict(results.model),
        "released_with_differential_privacy": [asdict(release) for release in results.released],
    }
    # Arguments may name private files, and the file of public results is public.
    if not data_is_public:
        record["arguments"] = list(arguments)
    for name in ("commit", "modified", "packages"):
        record[name] = facts[name]
    # A finer clock would reveal how long the training before it took.
    record["date_utc"] = datetime.now(UTC).date().isoformat()
    path = None
    if output is not None:
        private = output / "private"
        step = results.model.step if results.model else 0
        if not data_is_public:
            private.mkdir(mode=0o700, parents=True, exist_ok=True)
            private.chmod(0o700)
        folder = (output if data_is_public else private) / "evaluation"
        folder.mkdir(parents=True, exist_ok=True)
        command_line = json.dumps(list(arguments))
        digest = hashlib.sha256(command_line.encode()).hexdigest()[:8]
        path = folder / f"{results.name}-step-{step:08d}-{digest}.json"
        text = json.dumps(record, indent=1, allow_nan=False) + "\n"
        write_durably(path, without_folders(text) if data_is_public else text)
        scalars: dict[str, float] = {}
        for name, scalar in record["scalars"].items():
            if scalar is not None:
                scalars[f"{results.name}/{name}"] = scalar
        if data_is_public:
            public_metrics = PublicMetrics(folder)
            public_metrics.scalars(
                step, {name: Public(scalar, Reason.DECLARED) for name, scalar in scalars.items()}
            )
            public_metrics.close()
        else:
            private_metrics = PrivateMetrics(folder)
            private_metrics.scalars(
                step, {name: Private(scalar) for name, scalar in scalars.items()}
            )
            private_metrics.close()
    if as_json:
        say(json.dumps(record, allow_nan=False))
    else:
        _print_table(results)
    counts = ", ".join(f"{use.num_examples} {use.role}" for use in results.data)
    declaration = "declared public" if data_is_public else "not declared public (--data_is_public)"
    lines = [f"note: {note}" for note in results.notes]
    lines.append(f"not private: {WITHOUT_NOISE} ({counts}), {declaration}")
    for release in results.released:
        epsilon = rounded_up(release.epsilon)
        lines.append(
            f"private: {release.what}, epsilon {epsilon} at delta {release.delta:.3g} for "
            f"{release.covers} ({release.ledger})"
        )
    if results.model is not None:
        lines.append(results.model.statement())
    lines.append("nothing was written: give --output" if path is None else f"results: {path}")
    say(*lines, file=sys.stderr if as_json else sys.stdout)


def _print_table(results: Results) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    rows = results.table
    if not rows:
        rows = [{"": name, "value": scalar} for name, scalar in results.scalars.items()]
    table = Table(title=results.name)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    for name in columns:
        has_numbers = any(isinstance(row.get(name), float) for row in rows)
        table.add_column(Text(printable(name)), justify="right" if has_numbers else "left")
    for row in rows:
        cells = []
        for cell in map(row.get, columns):
            text = "" if cell is None else str(cell)
            if isinstance(cell, float):
                text = "" if math.isnan(cell) else f"{cell:.4f}"
            cells.append(Text(printable(text)))
        table.add_row(*cells)
    Console().print(table)
