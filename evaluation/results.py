"""What an evaluation found, and how much of it may be said: a table, one JSON record, TensorBoard.

Accuracies, scores and losses are computed from the evaluation data without noise, so no number here has a formal guarantee.
They count as public only where the user declares the data public; otherwise record and TensorBoard go to `private/` (contract
12). Weights that a command did train with differential privacy are listed apart, each with the ledger that proves its epsilon.
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
from privacy.step.folder import environment
from trainer.loop.metrics import PrivateMetrics, PublicMetrics
from trainer.weights.provenance import proof_of

WITHOUT_NOISE = "the numbers are computed from the evaluation data without noise"


@dataclass(frozen=True)
class DataUse:
    """A data set that was looked at.

    Attributes:
        role: what for: "train", "test", "images", ...
        name: where it is, for people.
        num_examples: how many of it were used.
        num_undecodable: how many were left out because their bytes are no image.
    """

    role: str
    name: str
    num_examples: int
    num_undecodable: int = 0


@dataclass(frozen=True)
class ModelFacts:
    """The evaluated model, and what is proven of the privacy of its own training data.

    Attributes:
        path: of the checkpoint.
        step: of training.
        formal_guarantee: True only where a whole ledger in the checkpoint's run folder proves it; what a manifest says is no
            proof.
        attested: whether there is such a ledger, whatever it says.
        epsilon, delta: that its weights carry as far as its run's ledger goes, the private runs that it started from included;
            None without a guarantee.
        reasons: why there is none.
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
        """The facts of an opened model (`trainer.weights.open_model`).

        Raises:
            PrivacyStateRefused, PrivacyConfigError: the ledger in its run folder, or one behind it, is broken or contradicts it.
        """
        proof, step = proof_of(path, manifest), int(manifest.get("step") or 0)
        if proof.state is None:
            reasons = (f"not attested: {proof.reason}", *(manifest.get("reasons") or ()))
            return cls(str(path), step, reasons=reasons)
        plan = proof.state.plan
        if not plan.formal_guarantee:
            return cls(str(path), step, attested=True, reasons=plan.reasons)
        claim = claim_of(path.resolve().parent.parent, proof.state)
        assert claim is not None  # the plan makes one
        return cls(
            str(path), step, True, True, claim[0] if math.isfinite(claim[0]) else None, claim[1]
        )

    def statement(self) -> str:
        """One line for people."""
        if not self.formal_guarantee:
            return f"the evaluated model has no formal guarantee: {'; '.join(self.reasons)}"
        epsilon = (
            "no finite epsilon" if self.epsilon is None else f"epsilon {rounded_up(self.epsilon)}"
        )
        return f"the evaluated model, for its own training data: {epsilon} at delta {self.delta:.3g}, from its ledger"


@dataclass(frozen=True)
class PrivateRelease:
    """Something that a command released with differential privacy.

    Attributes:
        what: e.g. "weights of a dp-ls head".
        ledger: the file from which epsilon comes.
        epsilon, delta: of this release alone.
        covers: which examples are protected; others (the encoder's training data) are not.
    """

    what: str
    ledger: str
    epsilon: float
    delta: float
    covers: str


@dataclass(frozen=True)
class Results:
    """What a command of `evaluation.options` returns.

    Attributes:
        name: of the command.
        scalars: the numbers that matter; names like "accuracy_last". They go to TensorBoard too.
        data: every data set that they were computed from.
        model: the evaluated model, if it came from a checkpoint.
        table: rows for people, one dictionary of column -> value each; the scalars if there are none.
        details: further JSON values.
        released: what was trained with differential privacy.
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
    """Writes the record where it belongs, and prints it: one JSON object, or a table.

    Numbers that are not finite become None. OUTPUT/evaluation, or OUTPUT/private/evaluation for data that nobody declared
    public, gets NAME-STEP-ARGUMENTS.json, metrics.jsonl and TensorBoard; the same
    command again replaces its own file.

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
        **(
            {} if data_is_public else {"arguments": list(arguments)}
        ),  # the file of public results is public
        **{name: facts[name] for name in ("commit", "modified", "packages")},
        "date_utc": datetime.now(UTC)
        .date()
        .isoformat(),  # a finer clock would tell how long training took before
    }
    path = None
    if output is not None:
        private, step = output / "private", results.model.step if results.model else 0
        if not data_is_public:
            private.mkdir(mode=0o700, parents=True, exist_ok=True)
            private.chmod(0o700)
        folder = (output if data_is_public else private) / "evaluation"
        folder.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256(json.dumps(list(arguments)).encode()).hexdigest()[:8]
        path = folder / f"{results.name}-step-{step:08d}-{digest}.json"
        text = json.dumps(record, indent=1, allow_nan=False) + "\n"
        write_durably(path, without_folders(text) if data_is_public else text)
        scalars = {
            f"{results.name}/{name}": value
            for name, value in record["scalars"].items()
            if value is not None
        }
        if data_is_public:
            public = PublicMetrics(folder)
            public.scalars(
                step, {name: Public(value, Reason.DECLARED) for name, value in scalars.items()}
            )
            public.close()
        else:
            own = PrivateMetrics(folder)
            own.scalars(step, {name: Private(value) for name, value in scalars.items()})
            own.close()
    if as_json:
        say(json.dumps(record, allow_nan=False))
    else:
        _print_table(results)
    used = ", ".join(f"{use.num_examples} {use.role}" for use in results.data)
    declared = "declared public" if data_is_public else "not declared public (--data_is_public)"
    lines = [f"note: {note}" for note in results.notes]
    lines.append(f"not private: {WITHOUT_NOISE} ({used}), {declared}")
    for release in results.released:
        lines.append(
            f"private: {release.what}, epsilon {rounded_up(release.epsilon)} at delta {release.delta:.3g} for "
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

    rows = results.table or [{"": name, "value": value} for name, value in results.scalars.items()]
    table = Table(title=results.name)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    for name in columns:
        table.add_column(
            Text(printable(name)),
            justify="right" if any(isinstance(row.get(name), float) for row in rows) else "left",
        )
    for row in rows:
        cells = []
        for value in map(row.get, columns):
            is_empty = value is None or (isinstance(value, float) and math.isnan(value))
            cells.append(
                "" if is_empty else f"{value:.4f}" if isinstance(value, float) else str(value)
            )
        table.add_row(*(Text(printable(cell)) for cell in cells))
    Console().print(table)
