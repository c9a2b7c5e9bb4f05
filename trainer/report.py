"""The whole privacy card of a run folder: the attested part from the ledger, and what other public files add to it.

Nothing under `private/` is opened. What does not come from the ledger names its file, and what attests it, if anything.
"""

import hashlib
import json
import math
import re
import tomllib
from pathlib import Path
from typing import Any

from data.files import write_durably
from privacy.card.html import Picture, to_html
from privacy.card.markdown import to_markdown
from privacy.card.report import privacy_card
from privacy.configured_plan import contradiction
from privacy.errors import PrivacyConfigError, PrivacyStateRefused
from privacy.ledger.records import read_ledger
from privacy.ledger.shared import SharedLedger
from trainer.errors import ConfigError
from trainer.weights.provenance import initialisation_statement

_SAMPLES = re.compile(r"samples-\d{8}\.png")
_TOKENIZER = " The tokenizer counts as public: no private caption may have shaped it."
_MANIFEST_FACTS = ("run", "initialisation", "training_data", "tokenizer_sha256")


def build_card(run_dir: Path) -> dict[str, Any]:
    """The card of `run_dir`, as plain data for JSON.

    Raises:
        ConfigError: no run folder, or no ledger in it (exit 2).
        PrivacyStateRefused: the ledger is broken, or states another plan than config.toml (exit 4).
    """
    if not run_dir.is_dir():
        raise ConfigError(f"run folder {run_dir} does not exist")
    ledger = run_dir / "ledger.jsonl"
    if not ledger.exists():
        raise ConfigError(f"run folder {run_dir} has no ledger.jsonl: nothing was trained here")
    recipe = read_recipe(run_dir)
    found = contradiction(recipe, read_ledger(ledger).plan)
    if found is not None:
        raise PrivacyStateRefused(f"{run_dir}: {found}: one of the two was changed; restore it")
    card = {"run_dir": str(run_dir), "run_name": run_dir.resolve().name, **privacy_card(ledger)}
    _add_manifest(card, run_dir)
    _add_statements(card, recipe)
    card["released"]["post_processing"] = _post_processing(recipe)
    _add_shared_ledger(card, recipe)
    card["audits"] = read_audits(run_dir)
    card["warnings"] += [
        f"the audit {a['file']} says {a['verdict']}" for a in card["audits"] if a["verdict"] != "consistent"
    ]
    card["utility"] = read_utility(run_dir)
    return card


def write_card(run_dir: Path, card: dict[str, Any]) -> tuple[Path, Path, Path]:
    """Writes report/privacy_card.json, .md and .html, each whole or not at all; returns their paths.

    The page holds the picture of samples itself, so that it stays one file.
    """
    folder = run_dir / "report"
    paths = folder / "privacy_card.json", folder / "privacy_card.md", folder / "privacy_card.html"
    try:
        folder.mkdir(exist_ok=True)
        write_durably(paths[0], json.dumps(card, indent=1, allow_nan=False) + "\n")
        write_durably(paths[1], to_markdown(card))
        write_durably(paths[2], to_html(card, _pictures(run_dir, card)))
    except OSError as error:
        raise ConfigError(f"{folder}: cannot write the privacy card: {error.strerror or error}") from error
    return paths


def _pictures(run_dir: Path, card: dict[str, Any]) -> list[Picture]:
    samples = card["utility"]["samples"]
    if samples is None:
        return []
    caption = (
        f"What the model makes of held-out examples after step {samples['step']:,} ({samples['file']}). Not attested."
    )
    return [Picture("heldout-samples", "Samples", caption, (run_dir / samples["file"]).read_bytes())]


def read_audits(run_dir: Path) -> list[dict[str, Any]]:
    """Kind, verdict and stated day of every report/audit*.json; one that cannot be read has the verdict `unreadable`."""
    ledger = hashlib.sha256((run_dir / "ledger.jsonl").read_bytes()).hexdigest()
    return [_audit(path, ledger) for path in sorted((run_dir / "report").glob("audit*.json"))]


def _audit(path: Path, ledger: str) -> dict[str, Any]:
    try:
        held = json.loads(path.read_bytes())
        kind, verdict = str(held["audit"]), str(held["verdict"])
        stated, violated = held.get("date_utc"), [str(name) for name in held.get("violated_checks", [])]
        audited = held.get("ledger_sha256")
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        kind, verdict, stated, violated, audited = "unknown", "unreadable", None, [], None
    return {
        "file": f"report/{path.name}",
        "attested": False,
        "kind": kind,
        "verdict": verdict,
        "date_utc": None if stated is None else str(stated),
        "of_this_ledger": audited == ledger,
        "violated_checks": violated,
    }


def _add_statements(card: dict[str, Any], recipe: dict[str, Any]) -> None:
    """What the resolved recipe says about duplicates and tuning, where the ledger says nothing."""
    for section, name, place in (
        ("data", "deduplication", card["unit_of_privacy"]["deduplication"]),
        ("privacy", "tuning", card["tuning"]["stated"]),
    ):
        text = recipe.get(section, {}).get(name)
        if text and place["text"] is None:
            place |= {"text": str(text), "file": "config.toml", "attested": False}


def _post_processing(recipe: dict[str, Any]) -> list[dict[str, Any]]:
    """What the recipe does with noised gradients beyond stepping an optimizer; it needs no budget."""
    optimizer, train = recipe.get("optimizer", {}), recipe.get("train", {})
    said = []
    if optimizer.get("noise_bias_correction"):
        said.append(
            "The optimizer subtracts the known variance of the noise from its second moment (DP-AdamBC, Tang et al. 2023); "
            "that variance follows from the public parameters."
        )
    if train.get("ema_decay"):
        said.append(
            f"Checkpoints also hold an exponential moving average of the weights (decay at most {train['ema_decay']}): "
            "a function of the weights after every step, which the guarantee covers."
        )
    return [{"statement": text, "file": "config.toml", "attested": False} for text in said]


def _add_shared_ledger(card: dict[str, Any], recipe: dict[str, Any]) -> None:
    """Budget and sibling runs of the data owner's ledger, if it is the one that the run's own ledger names."""
    shared = card["tuning"]["shared_ledger"]
    path = recipe.get("privacy", {}).get("shared_ledger")
    if shared["identity"] is None or not path:
        return
    try:
        summary = SharedLedger(path).summary(card["sampling"]["key_commitment_sha256"])
        if summary["identity"] == shared["identity"]:
            SharedLedger(path).require_remembered(read_ledger(Path(card["run_dir"]) / "ledger.jsonl"))
    except (PrivacyStateRefused, PrivacyConfigError, OSError):
        card["warnings"].append("the shared ledger that the run belongs to cannot be read, or is broken")
        return
    if summary["identity"] != shared["identity"]:
        card["warnings"].append("the shared ledger that config.toml names is not the one in the run's ledger")
        return
    shared["summary"] = summary | {"epsilon_reserved": _finite(summary["epsilon_reserved"])}


def read_recipe(run_dir: Path) -> dict[str, Any]:
    """config.toml, or nothing: a card can be made of a ledger alone."""
    try:
        return tomllib.loads((run_dir / "config.toml").read_text())
    except (OSError, ValueError):
        return {}


def read_utility(run_dir: Path) -> dict[str, Any]:
    """Held-out loss and samples, as far as the run's public files hold them."""
    heldout_file = "evaluation/heldout.jsonl"
    losses = [{"step": line["step"], "loss": _finite(line.get("loss"))} for line in _json_lines(run_dir / heldout_file)]
    return {
        "attested": False,
        "statement": "These numbers come from the files named here, which nothing protects against changes.",
        "heldout_file": heldout_file if losses else None,
        "heldout_loss": losses,
        "samples": _samples(run_dir),
    }


def _samples(run_dir: Path) -> dict[str, Any] | None:
    """The newest picture of held-out examples; in this folder they are public."""
    found = [path.name for path in (run_dir / "evaluation").glob("samples-*.png") if _SAMPLES.fullmatch(path.name)]
    if not found:
        return None
    newest = max(found)
    return {"file": f"evaluation/{newest}", "step": int(newest.removeprefix("samples-").removesuffix(".png"))}


def _add_manifest(card: dict[str, Any], run_dir: Path) -> None:
    """Ties the last checkpoint to the ledger by its hash, and takes from its manifest what the model started from."""
    last = card["released"]["last_checkpoint"]
    if last is None or not isinstance(last["name"], str):
        return
    # The name alone: a ledger must not lead us out of the checkpoints.
    path = run_dir / "checkpoints" / Path(last["name"]).name / "manifest.json"
    try:
        content = path.read_bytes()
    except OSError:
        return  # deleted or moved elsewhere, which is anybody's right
    last["manifest_matches"] = hashlib.sha256(content).hexdigest() == last["manifest_sha256"]
    if not last["manifest_matches"]:
        card["warnings"].append(f"the manifest of checkpoint {last['name']} is not the one that the ledger recorded")
    card["public_data"] |= _initialisation(content, path.relative_to(run_dir), last["manifest_matches"])


def _initialisation(content: bytes, file: Path, attested: bool) -> dict[str, Any]:
    try:
        manifest = json.loads(content)
        facts = {name: manifest[name] for name in _MANIFEST_FACTS if name in manifest}
    except (ValueError, TypeError):
        return {}
    if "initialisation" not in facts:
        return {}
    return {
        "file": file.as_posix(),
        "attested": attested,
        "facts": facts,
        "statement": initialisation_statement(facts) + (_TOKENIZER if "tokenizer_sha256" in facts else ""),
    }


def _json_lines(path: Path) -> list[dict[str, Any]]:
    """Lines that are objects with a whole `step`; a line torn by a crash is no reason to withhold the rest."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict) and type(value.get("step")) is int:
            found.append(value)
    return found


def _finite(value: object) -> float | None:
    return float(value) if type(value) in (int, float) and math.isfinite(value) else None  # type: ignore[arg-type]
