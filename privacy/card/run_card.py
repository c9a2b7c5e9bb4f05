"""The privacy card of a run folder: the attested part from the ledger, and facts of public files.

Nothing under `private/` is opened: privacy/files/public.py reads other files and follows no link. A
fact that does not come from the ledger names its file, and whether the ledger attests it.
"""

import contextlib
import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import JsonValue, TypeAdapter, ValidationError
from pydantic_core import from_json

from .. import verify
from ..errors import ConfigError, PrivacyConfigError, PrivacyStateRefused, refusing
from ..files.durable import replace_file
from ..files.public import PUBLIC_FILES, read_public, require_ledger, survey
from ..files.toml_text import parse_toml
from ..ledger.shared import SharedLedger
from .ledger_card import LedgerSnapshot, make_card, read_snapshot
from .model import (
    STATEMENTS,
    AuditResult,
    Declared,
    HeldoutLoss,
    PrivacyCard,
    PublicData,
    Stated,
    Utility,
)
from .render import to_html, to_markdown

_FACTS = TypeAdapter(dict[str, JsonValue])


def build_card(
    run_dir: Path, start: Callable[[Mapping[str, Any]], str] | None = None
) -> PrivacyCard:
    """Returns the card of `run_dir`.

    Args:
        start: describes the initial weights of a manifest in words; the trainer knows the words of
            its manifests.

    Raises:
        ConfigError: no run folder, or no ledger in it (exit 2).
        PrivacyStateRefused: the ledger is broken, or states another plan than config.toml (exit 4).
    """
    ledger = require_ledger(run_dir)
    if ledger.is_symlink():
        raise ConfigError(
            f"{ledger}: is a symbolic link, and none is followed: put the ledger itself there"
        )
    recipe = read_recipe(run_dir)
    snapshot = read_snapshot(ledger)
    if recipe and "head" not in snapshot.state.opened:
        require_plan_of_recipe(run_dir, recipe)
    card = make_card(snapshot, str(ledger))
    data_section = recipe.get("data", {})
    texts = {name: data_section.get(f"dataset_{name}") for name in Declared.model_fields}
    texts["deduplication"] = data_section.get("deduplication")
    texts["tuning"] = recipe.get("privacy", {}).get("tuning")
    declarations = {}
    for name, declaration in card.declared:
        # A text of the ledger comes before that of the recipe.
        declarations[name] = declaration if declaration.text else _stated(texts[name])
    warnings = list(card.warnings)
    manifest_matches: bool | None = None
    public_data = PublicData()
    if card.last_checkpoint is not None:
        manifest_matches, public_data, manifest_warnings = _read_manifest(
            run_dir, card.last_checkpoint, start
        )
        warnings += manifest_warnings
    if public_data.file is None:
        public_data = initial_weights_of_loop(recipe)
    shared_ledger, shared_warnings = _read_shared_ledger(recipe, snapshot)
    warnings += shared_warnings
    audits = read_audits(run_dir)
    for audit in audits:
        if audit.verdict != "consistent":
            warnings.append(f"The audit {audit.file} says {audit.verdict}.")
    for name, reason in survey(run_dir).left_out.items():
        if PUBLIC_FILES.fullmatch(name):
            warnings.append(f"The card does not read {name}: {reason}.")
    return card.updated(
        run_name=_as_json(run_dir.resolve().name),
        warnings=warnings,
        declared=Declared(**declarations),
        manifest_matches=manifest_matches,
        public_data=public_data,
        audits=audits,
        utility=read_utility(run_dir),
        shared_ledger=shared_ledger,
    )


def _as_json(name: str) -> str:
    """Returns a file's name without bytes that are not UTF-8, which cannot stand in JSON."""
    return name.encode(errors="replace").decode()


def require_plan_of_recipe(run_dir: Path, recipe: dict[str, Any]) -> None:
    """Refuses a config.toml that asks for another plan than the ledger states.

    The ledger may have been written anew. verify.py compares the two; a comparison that it cannot
    make refuses nothing.

    Raises:
        PrivacyStateRefused: the two differ.
    """
    try:
        with contextlib.suppress(verify.Undecided):
            verify.compare_plan(verify.read_ledger(run_dir / "ledger.jsonl"), recipe)
    except (verify.Violated, verify.BadInput, *verify.FIELD_ERRORS) as error:
        raise PrivacyStateRefused(
            f"{run_dir}: {error}: one of the two was changed; restore it"
        ) from error


def _stated(text: object) -> Stated:
    """Returns a declaration of config.toml."""
    return Stated(text=str(text), file="config.toml") if text else Stated()


def write_card(run_dir: Path, card: PrivacyCard) -> tuple[Path, Path, Path]:
    """Writes report/privacy_card.json, .md and .html, each whole or not at all; returns the paths.

    Raises:
        ConfigError: the folder cannot be written, or is a symbolic link.
    """
    folder = run_dir / "report"
    json_path = folder / "privacy_card.json"
    markdown_path = folder / "privacy_card.md"
    html_path = folder / "privacy_card.html"
    with refusing(f"{folder}: cannot write the privacy card", ConfigError):
        folder.mkdir(exist_ok=True)
        if folder.is_symlink():
            raise ConfigError(
                f"{folder} is a symbolic link, and none is followed: give the run folder one of "
                "its own"
            )
        texts = {
            json_path: card.to_json(indent=1) + "\n",
            markdown_path: to_markdown(card),
            html_path: to_html(card),
        }
        for path, text in texts.items():
            replace_file(path, text.encode())
    return json_path, markdown_path, html_path


def initial_weights_of_loop(recipe: Mapping[str, Any]) -> PublicData:
    """Returns the declaration of a loop of one's own about its initial weights.

    It comes from `PrivateLoop(starts_from=...)`.
    """
    # A private head has no recipe; the manifests of a run of the trainer describe its weights.
    if not recipe or "model" in recipe:
        return PublicData()
    starts_from = recipe.get("init", {}).get("starts_from", "unsaid")
    # Any other text is a list of runs.
    kind = starts_from if starts_from in ("public", "unsaid") else "runs"
    return PublicData(statement=STATEMENTS[f"starts_from_{kind}"])


def read_recipe(run_dir: Path) -> dict[str, Any]:
    """Returns config.toml, or nothing where it does not exist: a ledger alone makes a card.

    Raises:
        PrivacyStateRefused: it is not the configuration of a run.
    """
    try:
        recipe = parse_toml(read_public(run_dir, "config.toml").decode())
    except OSError:
        return {}
    except (ValueError, RecursionError):
        # Fails the test below.
        recipe = {"data": "none"}
    sections = [recipe.get(name, {}) for name in ("data", "privacy", "train", "optimizer")]
    if all(isinstance(section, dict) for section in sections):
        return recipe
    raise PrivacyStateRefused(
        f"{run_dir / 'config.toml'}: is not the configuration of a run: the file was changed; "
        "restore it"
    )


def read_audits(run_dir: Path) -> tuple[AuditResult, ...]:
    """Returns the audits of report/audit*.json; an unreadable one has the verdict `unreadable`."""
    ledger_hash = hashlib.sha256((run_dir / "ledger.jsonl").read_bytes()).hexdigest()
    audits = []
    for path in sorted((run_dir / "report").glob("audit*.json")):
        file = f"report/{path.name}"
        try:
            report = from_json(read_public(run_dir, file))
            audit = AuditResult(
                file=file,
                kind=report["audit"],
                verdict=report["verdict"],
                date_utc=report.get("date_utc"),
                of_this_ledger=report.get("ledger_sha256") == ledger_hash,
                violated_checks=report.get("violated_checks", []),
            )
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            audit = AuditResult(file=_as_json(file), kind="unknown", verdict="unreadable")
        audits.append(audit)
    return tuple(audits)


def read_utility(run_dir: Path) -> Utility:
    """Returns the held-out losses of the run's public files.

    A line torn by a crash, or without an integer `step`, is left out, and the others count. Where
    steps were repeated, the last attempt counts: a line replaces those before it of the same step
    and of later ones.
    """
    file = "evaluation/heldout.jsonl"
    lines = list[bytes]()
    losses = list[HeldoutLoss]()
    with contextlib.suppress(OSError):
        lines = read_public(run_dir, file).splitlines()
    for line in lines:
        try:
            entry = from_json(line)
        except ValueError:
            continue
        if not isinstance(entry, dict):
            continue
        step = entry.get("step")
        if type(step) is not int or not 0 <= step < 1 << 53:
            continue
        numbers: dict[str, float | None] = {}
        for name in ("loss", "blind_loss", "shuffled_loss"):
            # NaN, Infinity, or anything else may be there.
            number: Any = entry.get(name)
            is_number = type(number) in (int, float) and abs(number) < 1e300
            numbers[name] = number if is_number else None
        losses = [point for point in losses if point.step < step]
        losses.append(HeldoutLoss(step=step, **numbers))
    return Utility(heldout_file=file if losses else None, heldout_loss=tuple(losses))


def _read_manifest(
    run_dir: Path, last: Mapping[str, Any], start: Callable[[Mapping[str, Any]], str] | None
) -> tuple[bool | None, PublicData, list[str]]:
    """Returns the facts of the last checkpoint's manifest.

    Args:
        last: the newest `checkpoint` record.

    Returns:
        (whether the manifest has the hash in the ledger, the description of the initial weights,
        warnings); (None, empty, none) without a manifest.
    """
    # The name alone: a ledger must not lead the reader out of the checkpoints.
    name = last["path"]
    file = f"checkpoints/{Path(name).name}/manifest.json"
    try:
        content = read_public(run_dir, file)
    except (OSError, ValueError):
        # Deleted or moved elsewhere, as anybody may do; a ValueError where no file has the name.
        return None, PublicData(), []
    matches = hashlib.sha256(content).hexdigest() == last["digest"]
    warnings = []
    if not matches:
        warnings.append(
            f"The manifest of checkpoint {name} is not the one that the ledger recorded."
        )
    facts: dict[str, Any] = {}
    with contextlib.suppress(ValidationError):
        for key, fact in _FACTS.validate_json(content).items():
            if key in ("run", "initialisation", "training_data", "tokenizer_sha256"):
                facts[key] = fact
    if "initialisation" not in facts or start is None:
        return matches, PublicData(), warnings
    try:
        statement = start(facts)
    except (TypeError, ValueError, KeyError, AttributeError):
        warnings.append(
            f"The manifest of checkpoint {name} does not say what the model started from."
        )
        return matches, PublicData(), warnings
    if "tokenizer_sha256" in facts:
        statement += " The tokenizer counts as public: no private caption may have shaped it."
    public_data = PublicData(statement=statement, file=file, attested=matches, facts=facts)
    return matches, public_data, warnings


def _read_shared_ledger(
    recipe: dict[str, Any], snapshot: LedgerSnapshot
) -> tuple[dict[str, Any] | None, list[str]]:
    """Returns (budget and sibling runs of the data owner's ledger, warnings).

    None where it is not the ledger that the run's own ledger names.
    """
    identity = snapshot.state.opened.get("shared_ledger")
    path = recipe.get("privacy", {}).get("shared_ledger")
    if identity is None or not isinstance(path, str) or not path:
        return None, []
    try:
        # A stranger's recipe may name a device without an end.
        if not Path(path).is_file():
            raise OSError("it is not a regular file")
        shared = SharedLedger(path)
        summary = shared.summary(snapshot.state.opened["key_commitment"])
        if summary["identity"] != identity:
            return None, [
                "The shared ledger that config.toml names is not the one in the run's ledger."
            ]
        shared.require_remembered(snapshot.state, shared.read_unlocked())
    except (PrivacyStateRefused, PrivacyConfigError, ValueError, OSError):
        return None, ["The shared ledger that the run belongs to cannot be read, or is broken."]
    return summary, []
