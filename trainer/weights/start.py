"""Initial weights from another run's checkpoint, and what is known of the data behind them.

Both papers start from a model that was trained without privacy on synthetic images. Whether that costs privacy depends on
the data behind it, so a checkpoint's manifest carries where its own data came from, and a private run refuses a start that
would make its claim untrue. The ledgers of private runs behind the weights are gathered at the first start and copied into the
run folder: what they charged is part of what the new weights carry (privacy/ledger/claim.py).
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from data.index.tar_index import MANIFEST as INDEX
from data.index.tar_index import ExampleTable
from models.classifier import is_adapter
from models.layers import resized_positions
from privacy.checkpoints.read import MANIFEST, Checkpoint, usable_names
from privacy.ledger.claim import ParentLedger, ledgers_of_run, read_copies
from privacy.ranks.collectives import say
from privacy.step.folder import RunFolder
from trainer.config.recipe import InitSection, RunConfig
from trainer.errors import ConfigError
from trainer.weights.provenance import IMPORTED, Start, proof_of

_HASH_DIGITS = 16


def training_data_facts(
    config: RunConfig, table: ExampleTable, resumed: Checkpoint | None = None
) -> dict[str, Any]:
    """What a manifest says about the data. Hashes of private shards would describe private data, so there are none.

    Raises:
        ConfigError: data that were private before a resume are private no more.
    """
    provenance = config.data.provenance
    if provenance == "private":
        return {"provenance": provenance}
    if (
        resumed is not None
        and resumed.manifest.get("training_data", {}).get("provenance") == "private"
    ):
        raise ConfigError(
            f"data.provenance is {provenance}, but {resumed.path} was trained on the same data as private: set it back, or "
            "start another run folder"
        )
    return {
        "provenance": provenance,
        "shards": sorted(entry.sha256[:_HASH_DIGITS] for entry in table.entries),
    }


def find_checkpoint(config: InitSection, root: Path) -> Checkpoint:
    """The checkpoint that `init.checkpoint` names: its folder, or a run folder, of which the newest is taken.

    Raises:
        ConfigError: nothing there, or damaged.
    """
    path = root / config.checkpoint
    if (path / MANIFEST).is_file():
        return Checkpoint(path)
    names = usable_names(path / "checkpoints")
    if not names:
        recipe, hint = root / "recipes" / f"{path.name}.toml", ""
        if recipe.is_file():  # recipes begin with their command
            command = recipe.read_text().partition("\n")[0].removeprefix("# ")
            hint = f"; make it first: {command} (init.parts=none starts at random instead)"
        if any(path.glob("*.safetensors")) or any(path.glob("*.bin")):
            hint = ": it holds weights, and no checkpoint of this project; export.py --import makes one of them"
        raise ConfigError(
            f"init.checkpoint {path} is neither a checkpoint nor a run folder with one{hint}"
        )
    return Checkpoint(path / "checkpoints" / names[0])  # an older one would have to be named


def initialisation_facts(
    config: RunConfig, checkpoint: Checkpoint, table: ExampleTable
) -> dict[str, Any]:
    """What this run's manifests say about its start.

    Raises:
        ConfigError: a private run would start from weights that saw private data without noise, or its own data.
        PrivacyStateRefused: the ledger around the checkpoint is broken, or recorded another one.
    """
    manifest = checkpoint.manifest
    state = proof_of(
        checkpoint.path, manifest
    ).state  # also of data that the manifest declares public
    behind = manifest.get("training_data", {"provenance": "private"})
    facts = {
        "kind": "checkpoint",
        "run": manifest.get("run"),
        "step": checkpoint.step,
        "training_data": behind["provenance"],
        "before_that": manifest.get("initialisation"),
    }
    if behind["provenance"] == "private":
        epsilon = state.epsilon() if state is not None else None
        delta = state.plan.target_delta if state is not None else None
        facts["guarantee"] = None if epsilon is None else {"epsilon": epsilon, "delta": delta}
    else:
        facts["shards"] = behind.get(
            "shards", []
        )  # a run that starts from this one must recognise its data too
    if config.privacy.enabled:
        # Every link of the chain of starts is looked at: private data count only with a guarantee that a ledger proves.
        first = Start()
        for link in Start.of({"initialisation": facts}).chain():
            first = link
            if link.kind != "checkpoint":
                break
            if link.training_data == "private" and not link.guarantee:
                before = link.before_that
                if before is not None and before.kind == IMPORTED:
                    raise ConfigError(
                        f"init.checkpoint {checkpoint.path} goes back to weights imported from {before.file}, and no "
                        "ledger here proves what was done with their data; a private run cannot start from it. If those are "
                        "public or synthetic with respect to this run's data, import it again with --provenance"
                    )
                raise ConfigError(
                    f"init.checkpoint {checkpoint.path}: run {link.run} trained on private data, and no ledger in its run "
                    "folder proves a guarantee; a private run cannot start from it. If its data are public or synthetic, "
                    'train it with data.provenance = "public" or "synthetic"'
                )
        if first.kind not in ("random", IMPORTED):
            raise ConfigError(
                f"init.checkpoint {checkpoint.path} does not say what its weights started from; a private run cannot start from "
                "it"
            )
        # Shards are known by their bytes, whatever their names; every link of the chain of starts is looked at.
        if not {entry.sha256[:_HASH_DIGITS] for entry in table.entries}.isdisjoint(
            _stated_shards(facts)
        ):
            raise ConfigError(
                f"init.checkpoint {checkpoint.path}, or a run behind it, was trained on shards of this run's private data, "
                "which it declares public or synthetic; a private run cannot start from it"
            )
    return facts


def _stated_shards(tree: Any) -> Iterator[str]:
    """All hashes of shards that a checkpoint's origin names, also where it went through an export and an import."""
    if isinstance(tree, Mapping):
        for name, value in tree.items():
            if name == "shards" and isinstance(value, list):
                yield from (digest for digest in value if isinstance(digest, str))
            else:
                yield from _stated_shards(value)


def load_start(
    checkpoint: Checkpoint,
    config: InitSection,
    model: nn.Module,
    tokenizer_sha256: str | None = None,
) -> list[str]:
    """Sets weights of a fresh model; returns the names of the parameters that keep their random start.

    Args:
        config: `parts = "encoder"` leaves the rest as it is, e.g. for another decoder or another kind of model.
        tokenizer_sha256: hash of the tokenizer whose words the model will read; None where it reads no text.

    Adapters that the checkpoint does not have start as the model made them.

    Raises:
        ConfigError: a parameter is missing or has another shape; learned positions of another image size are interpolated.
            Or what is taken would mean something else in a way that no shape shows: another number of heads, another norm
            placement, another vocabulary of the same size.
    """
    # The weights that are taken mean what they meant: nothing of the encoder is left out, and only sizes may differ.
    names = {name for name, _ in model.named_parameters()}
    left_out = sorted(
        name for name in checkpoint.shapes if name.startswith("encoder.") and name not in names
    )
    if left_out:
        raise ConfigError(
            f"{checkpoint.path} has {left_out[0]}, for which the model has no place: its encoder is of another kind "
            "(model.size, model.overrides)"
        )
    own_config: Any = model.config
    ours, theirs = asdict(own_config), checkpoint.manifest.get("model", {})
    compared = [("the encoder's ", theirs.get("encoder", {}), ours["encoder"], "")]
    compared += [("", theirs, ours, ', or init.parts = "encoder"')] if config.parts == "all" else []
    for of, stated, own, way_out in compared:
        if (difference := _first_difference(stated, own)) is not None:
            name, before, now = difference
            raise ConfigError(
                f"{checkpoint.path}: {of}{name} is {before!r}, the model's is {now!r}; set model.size and model.overrides to the "
                f"checkpoint's{way_out}"
            )
    tokenizer = checkpoint.manifest.get("tokenizer_sha256") if config.parts == "all" else None
    if tokenizer_sha256 is not None and tokenizer not in (None, tokenizer_sha256):
        raise ConfigError(
            f"{checkpoint.path} was trained with another tokenizer (SHA-256 {tokenizer[:16]}...) than data.tokenizer: its "
            'words would be scrambled; set data.tokenizer to that one, or init.parts = "encoder"'
        )
    fresh = []
    for name, parameter in model.named_parameters():
        is_new_adapter = is_adapter(name) and name not in checkpoint.shapes
        if is_new_adapter or (config.parts == "encoder" and not name.startswith("encoder.")):
            fresh.append(name)
            continue
        if name not in checkpoint.shapes:
            raise ConfigError(
                f'{checkpoint.path} has no {name}; init.parts = "encoder" starts the rest at random'
            )
        value = checkpoint.full("param", name)
        if value.shape != parameter.shape:
            # Learned image positions for another grid: the class token's is kept, the others are interpolated (bicubic).
            before, now = value.shape, parameter.shape
            old, new = (
                math.isqrt(max(shape[1] - 1, 0)) if len(shape) == 3 else 0
                for shape in (before, now)
            )
            is_grid = len(before) == len(now) == 3 and (old**2, new**2) == (
                before[1] - 1,
                now[1] - 1,
            )
            if not (is_grid and name.endswith("position.table") and before[-1] == now[-1]):
                raise ConfigError(
                    f"{checkpoint.path}: {name} has shape {tuple(before)}, but the model's is {tuple(now)}"
                )
            value = resized_positions(value, (old, old), (new, new))
        with torch.no_grad():
            parameter.copy_(value)
    return fresh


_MAY_DIFFER = {
    "image_size",
    "num_tokens",  # resized, or checked by shape
    "mask_ratio",
    "parallel_share",  # of the training task
    "embedding_std",
    "max_logits",  # of initial values and of memory
}


def _first_difference(
    theirs: Mapping[str, Any], ours: Mapping[str, Any]
) -> tuple[str, Any, Any] | None:
    """Name and both values of the first option that both state and that changes what equal weights compute."""
    for name, value in ours.items():
        other = theirs.get(name, value)
        if isinstance(value, Mapping) and isinstance(other, Mapping):
            inner = _first_difference(other, value)
            if inner is not None:
                return f"{name}.{inner[0]}", inner[1], inner[2]
        elif name not in _MAY_DIFFER and other != value:
            return name, other, value
    return None


def ledgers_behind(checkpoint: Checkpoint, start: Start, *, is_private: bool) -> list[ParentLedger]:
    """The ledgers of all private runs that made a checkpoint's weights, the newest first; every attempt in them is charged.

    Args:
        start: the chain of starts that begins with this checkpoint.
        is_private: whether the run that starts makes a claim, which then needs all of them.

    Raises:
        ConfigError: a private run is behind the weights of a private one, and its ledger is not in the checkpoint's run folder.
        PrivacyStateRefused: a ledger is broken.
    """
    found = ledgers_of(checkpoint.path, checkpoint.manifest)
    private = [link.run for link in start.chain() if link.training_data == "private"]
    if is_private and len(found) < len(private):
        run_dir = checkpoint.path.resolve().parent.parent
        raise ConfigError(
            f"init.checkpoint {checkpoint.path}: run {private[len(found)]} behind its weights trained on private data, and its "
            f"ledger is not in {run_dir}: what it spent cannot be composed with this run; start from the checkpoint in its own "
            "run folder"
        )
    return found


def ledgers_of(checkpoint: Path, manifest: Mapping[str, Any]) -> list[ParentLedger]:
    """The ledgers of the private runs that made a checkpoint's weights, as far as its run folder has them, the newest first.

    Raises:
        PrivacyStateRefused: a ledger is broken.
    """
    run_dir = checkpoint.resolve().parent.parent
    state = proof_of(checkpoint, manifest).state
    if state is None:
        return []
    is_private = (manifest.get("training_data") or {}).get("provenance", "private") == "private"
    if is_private and state.plan.formal_guarantee:
        return ledgers_of_run(run_dir, str(manifest.get("run")), int(manifest["ledger"]["seq"]) + 1)
    return [
        ParentLedger(run, data, data.count(b"\n"))
        for run, data in read_copies(run_dir, state.opened)
    ]


def require_disjoint(checkpoint: Checkpoint, table: ExampleTable) -> None:
    """Compares the shards and examples behind a declaration that data are disjoint, inside the trust boundary: nothing of it is
    published.

    Raises:
        ConfigError: a shard of this run, or some of its examples, are those of the run that the checkpoint is of.
    """
    path = RunFolder(checkpoint.path.resolve().parent.parent).index / INDEX
    if not path.is_file():
        say(
            f"init.disjoint_data is declared, and no shard was compared: {path} is not there. The declaration stands alone"
        )
        return
    other = ExampleTable.open(path.parent, "", check_shards=False)
    theirs = {entry.sha256 for entry in other.entries}
    for entry in table.entries:
        if entry.sha256 in theirs:
            raise ConfigError(
                f"init.disjoint_data is declared, and shard {entry.name} is also one of the run behind {checkpoint.path}: remove "
                "the declaration, and the charges of both runs compose"
            )
    found, by_chance = table.count_shared_with(other)
    if found > by_chance + 8 * math.sqrt(by_chance):
        raise ConfigError(
            f"init.disjoint_data is declared, and {found:,} examples or more are also, byte for byte, in the run behind "
            f"{checkpoint.path}, in other shards: remove the declaration, and the charges of both runs compose"
        )
    say(
        "init.disjoint_data is declared, and no shard and no example is in both runs byte for byte; that none is in another form "
        "is for the recipe to know"
    )
