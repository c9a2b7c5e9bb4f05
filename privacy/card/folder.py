"""The whole privacy card of a run folder: the attested part from the ledger, and what other public files add to it.

Nothing under `private/` is opened: other files are read by privacy/files/public.py, which follows no link. What does not come
from the ledger names its file, and what attests it, if anything.
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
from .report import LedgerSnapshot, make_card, read_snapshot

_FACTS = TypeAdapter(dict[str, JsonValue])


def build_card(
    run_dir: Path, start: Callable[[Mapping[str, Any]], str] | None = None
) -> PrivacyCard:
    """The card of `run_dir`.

    Args:
        start: says in words what a manifest's weights started from; the trainer knows the words of its manifests.

    Raises:
        ConfigError: no run folder, or no ledger in it (exit 2).
        PrivacyStateRefused: the ledger is broken, or states another plan than config.toml (exit 4).
    """
    ledger = require_ledger(run_dir)
    if ledger.is_symlink():
        raise ConfigError(
            f"{ledger}: is no regular file, and no link is followed: put the ledger itself there"
        )
    recipe, snapshot = read_recipe(run_dir), read_snapshot(ledger)
    if recipe and "head" not in snapshot.state.opened:
        require_as_asked(run_dir, recipe)
    card = make_card(snapshot, str(ledger))
    data = recipe.get("data", {})
    words = {name: data.get(f"dataset_{name}") for name in Declared.model_fields}
    words |= {"deduplication": data.get("deduplication")}
    words |= {"tuning": recipe.get("privacy", {}).get("tuning")}
    # Where the ledger states something itself, its words count.
    declared = {
        name: stated if stated.text else _stated(words[name]) for name, stated in card.declared
    }
    warnings, matches, public = list(card.warnings), None, PublicData()
    if card.last_checkpoint is not None:
        matches, public, warning = _read_manifest(run_dir, card.last_checkpoint, start)
        warnings += warning
    if public.file is None:
        public = start_of_a_loop(recipe)
    summary, warning = _read_shared_ledger(recipe, snapshot)
    audits = read_audits(run_dir)
    warnings += [
        *warning,
        *(f"The audit {a.file} says {a.verdict}." for a in audits if a.verdict != "consistent"),
    ]
    left_out = [one for one in survey(run_dir).left_out.items() if PUBLIC_FILES.fullmatch(one[0])]
    warnings += [f"The card does not read {name}: {reason}." for name, reason in left_out]
    return card.updated(
        run_name=_as_json(run_dir.resolve().name),
        warnings=warnings,
        declared=Declared(**declared),
        manifest_matches=matches,
        public_data=public,
        audits=audits,
        utility=read_utility(run_dir),
        shared_ledger=summary,
    )


def _as_json(name: str) -> str:
    """A file's name without bytes that are no UTF-8, which cannot stand in JSON."""
    return name.encode(errors="replace").decode()


def require_as_asked(run_dir: Path, recipe: dict[str, Any]) -> None:
    """PrivacyStateRefused where config.toml asks for another plan than the ledger states, which may have been written anew.

    verify.py judges that. What it cannot find out speaks against nothing.
    """
    try:
        with contextlib.suppress(verify.Undecided):
            verify.compare_plan(verify.read_ledger(run_dir / "ledger.jsonl"), recipe)
    except (verify.Violated, verify.BadInput, *verify.FIELD_ERRORS) as error:
        raise PrivacyStateRefused(
            f"{run_dir}: {error}: one of the two was changed; restore it"
        ) from error


def _stated(text: object) -> Stated:
    """Words that config.toml holds."""
    return Stated(text=str(text), file="config.toml") if text else Stated()


def write_card(run_dir: Path, card: PrivacyCard) -> tuple[Path, Path, Path]:
    """Writes report/privacy_card.json, .md and .html, each whole or not at all; returns their paths."""
    folder = run_dir / "report"
    paths = folder / "privacy_card.json", folder / "privacy_card.md", folder / "privacy_card.html"
    with refusing(f"{folder}: cannot write the privacy card", ConfigError):
        folder.mkdir(exist_ok=True)
        if folder.is_symlink():
            raise ConfigError(
                f"{folder} is a symbolic link, and none is followed: give the run folder one of its own"
            )
        for path, text in zip(
            paths, (card.to_json(indent=1) + "\n", to_markdown(card), to_html(card)), strict=True
        ):
            replace_file(path, text.encode())
    return paths


def start_of_a_loop(recipe: Mapping[str, Any]) -> PublicData:
    """What a loop of one's own says of its initial weights (`PrivateLoop(starts_from=...)`)."""
    if (
        not recipe or "model" in recipe
    ):  # a private head, or a run of the trainer, whose manifests say it
        return PublicData()
    said = recipe.get("init", {}).get("starts_from", "unsaid")
    return PublicData(
        statement=STATEMENTS[f"starts_from_{said if said in ('public', 'unsaid') else 'runs'}"]
    )


def read_recipe(run_dir: Path) -> dict[str, Any]:
    """config.toml, or nothing where there is none: a card can be made of a ledger alone.

    Raises:
        PrivacyStateRefused: it is no run's configuration.
    """
    try:
        recipe = parse_toml(read_public(run_dir, "config.toml").decode())
    except OSError:
        return {}
    except (ValueError, RecursionError):
        recipe = {"data": "none"}
    if all(
        isinstance(recipe.get(section, {}), dict)
        for section in ("data", "privacy", "train", "optimizer")
    ):
        return recipe
    raise PrivacyStateRefused(
        f"{run_dir / 'config.toml'}: is no TOML of a run: the file was changed; restore it"
    )


def read_audits(run_dir: Path) -> tuple[AuditResult, ...]:
    """What every report/audit*.json says; one that cannot be read has the verdict `unreadable`."""
    ledger = hashlib.sha256((run_dir / "ledger.jsonl").read_bytes()).hexdigest()
    results = []
    for path in sorted((run_dir / "report").glob("audit*.json")):
        file = f"report/{path.name}"
        try:
            stated = from_json(read_public(run_dir, file))
            result = AuditResult(
                file=file,
                kind=stated["audit"],
                verdict=stated["verdict"],
                date_utc=stated.get("date_utc"),
                of_this_ledger=stated.get("ledger_sha256") == ledger,
                violated_checks=stated.get("violated_checks", []),
            )
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            result = AuditResult(file=_as_json(file), kind="unknown", verdict="unreadable")
        results.append(result)
    return tuple(results)


def read_utility(run_dir: Path) -> Utility:
    """Held-out losses, as far as the run's public files hold them.

    A line torn by a crash, or without a whole `step`, is left out: it is no reason to withhold the rest. Where steps were
    repeated, the last attempt counts: a line replaces those before it of the same step and of later ones.
    """
    file, lines, losses = "evaluation/heldout.jsonl", list[bytes](), list[HeldoutLoss]()
    with contextlib.suppress(OSError):
        lines = read_public(run_dir, file).splitlines()
    for line in lines:
        try:
            value = from_json(line)
        except ValueError:
            continue
        if (
            isinstance(value, dict)
            and type(step := value.get("step")) is int
            and 0 <= step < 1 << 53
        ):
            # NaN, Infinity, or anything else may be there.
            found: list[Any] = [value.get(name) for name in ("loss", "blind_loss", "shuffled_loss")]
            good = [x if type(x) in (int, float) and abs(x) < 1e300 else None for x in found]
            losses = [earlier for earlier in losses if earlier.step < step]
            losses.append(
                HeldoutLoss(step=step, loss=good[0], blind_loss=good[1], shuffled_loss=good[2])
            )
    return Utility(heldout_file=file if losses else None, heldout_loss=tuple(losses))


def _read_manifest(
    run_dir: Path, last: Mapping[str, Any], start: Callable[[Mapping[str, Any]], str] | None
) -> tuple[bool | None, PublicData, list[str]]:
    """(whether the last checkpoint's manifest has the hash in the ledger, what the model started from, warnings)."""
    # The name alone: a ledger must not lead us out of the checkpoints.
    name, public = last["path"], PublicData()
    file = f"checkpoints/{Path(name).name}/manifest.json"
    try:
        content = read_public(run_dir, file)
    except (OSError, ValueError):  # ValueError: no name of a file
        return None, public, []  # deleted or moved elsewhere, which is anybody's right
    matches = hashlib.sha256(content).hexdigest() == last["digest"]
    found = (
        []
        if matches
        else [f"The manifest of checkpoint {name} is not the one that the ledger recorded."]
    )
    known, facts = ("run", "initialisation", "training_data", "tokenizer_sha256"), {}
    with contextlib.suppress(ValidationError):
        facts = {key: value for key, value in _FACTS.validate_json(content).items() if key in known}
    if "initialisation" not in facts or start is None:
        return matches, public, found
    try:
        statement = start(facts)
    except (TypeError, ValueError, KeyError, AttributeError):
        found.append(f"The manifest of checkpoint {name} does not say what the model started from.")
        return matches, public, found
    if "tokenizer_sha256" in facts:
        statement += " The tokenizer counts as public: no private caption may have shaped it."
    return matches, PublicData(statement=statement, file=file, attested=matches, facts=facts), found


def _read_shared_ledger(
    recipe: dict[str, Any], snapshot: LedgerSnapshot
) -> tuple[dict[str, Any] | None, list[str]]:
    """(budget and sibling runs of the data owner's ledger, if it is the one that the run's own ledger names; warnings)."""
    identity, path = (
        snapshot.state.opened.get("shared_ledger"),
        recipe.get("privacy", {}).get("shared_ledger"),
    )
    if identity is None or not isinstance(path, str) or not path:
        return None, []
    try:
        if not Path(path).is_file():  # what is said to be one may be a device without an end
            raise OSError("it is no file")
        summary = SharedLedger(path).summary(snapshot.state.opened["key_commitment"])
        if summary["identity"] != identity:
            return None, [
                "The shared ledger that config.toml names is not the one in the run's ledger."
            ]
        SharedLedger(path).require_remembered(snapshot.state, SharedLedger(path).look())
    except (PrivacyStateRefused, PrivacyConfigError, ValueError, OSError):
        return None, ["The shared ledger that the run belongs to cannot be read, or is broken."]
    return summary, []
