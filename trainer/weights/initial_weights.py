"""Initial weights from another run's checkpoint, and the privacy of the data behind them.

Both papers start from a model that was trained without privacy on synthetic images. The cost in
privacy depends on the data behind that model, so a checkpoint's manifest carries the origin of its
own data, and a private run refuses a start that would make its claim untrue. The ledgers of private
runs behind the weights are gathered at the first start and copied into the run folder: their
charges are part of what the new weights reveal (privacy/ledger/claim.py).
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
from privacy.step.run_folder import RunFolder
from trainer.config.recipe import InitSection, RunConfig
from trainer.errors import ConfigError
from trainer.weights.provenance import IMPORTED, Initialisation, proof_of

_HASH_DIGITS = 16


def training_data_facts(
    config: RunConfig, table: ExampleTable, resumed: Checkpoint | None = None
) -> dict[str, Any]:
    """Returns a manifest's statement on the data, without hashes of private shards.

    Such a hash would describe private data.

    Raises:
        ConfigError: data that were private before a resume are declared otherwise.
    """
    provenance = config.data.provenance
    if provenance == "private":
        return {"provenance": provenance}
    if resumed is not None:
        resumed_data = resumed.manifest.get("training_data", {})
        if resumed_data.get("provenance") == "private":
            raise ConfigError(
                f"data.provenance is {provenance}, but {resumed.path} was trained on the same data "
                "as private: set it back, or start another run folder"
            )
    shards = sorted(entry.sha256[:_HASH_DIGITS] for entry in table.entries)
    return {"provenance": provenance, "shards": shards}


def find_checkpoint(config: InitSection, root: Path) -> Checkpoint:
    """Returns the checkpoint of `init.checkpoint`: a checkpoint's folder, or a run's newest.

    Raises:
        ConfigError: no checkpoint, or a damaged one.
    """
    path = root / config.checkpoint
    if (path / MANIFEST).is_file():
        return Checkpoint(path)
    names = usable_names(path / "checkpoints")
    if not names:
        recipe = root / "recipes" / f"{path.name}.toml"
        hint = ""
        if recipe.is_file():
            # Recipes begin with their command.
            command = recipe.read_text().partition("\n")[0].removeprefix("# ")
            hint = f"; make it first: {command} (init.parts=none starts at random instead)"
        if any(path.glob("*.safetensors")) or any(path.glob("*.bin")):
            hint = (
                ": it holds weights of another form; export.py --import makes a checkpoint of them"
            )
        raise ConfigError(
            f"init.checkpoint {path} is neither a checkpoint nor a run folder with one{hint}"
        )
    # An older checkpoint has to be named.
    return Checkpoint(path / "checkpoints" / names[0])


def initialisation_facts(
    config: RunConfig, checkpoint: Checkpoint, table: ExampleTable
) -> dict[str, Any]:
    """Returns this run's statement on its start, for its manifests.

    Raises:
        ConfigError: a private run would start from weights that saw private data without noise, or
            its own data.
        PrivacyStateRefused: the ledger around the checkpoint is broken, or recorded another
            checkpoint.
    """
    manifest = checkpoint.manifest
    # The ledger is checked even if the manifest declares the data public.
    state = proof_of(checkpoint.path, manifest).state
    training_data = manifest.get("training_data", {"provenance": "private"})
    facts = {
        "kind": "checkpoint",
        "run": manifest.get("run"),
        "step": checkpoint.step,
        "training_data": training_data["provenance"],
        "before_that": manifest.get("initialisation"),
    }
    if training_data["provenance"] == "private":
        epsilon = state.epsilon() if state is not None else None
        delta = state.plan.target_delta if state is not None else None
        facts["guarantee"] = None if epsilon is None else {"epsilon": epsilon, "delta": delta}
    else:
        # A run that starts from this one must recognise its data too.
        facts["shards"] = training_data.get("shards", [])
    if config.privacy.enabled:
        # Every link of the chain of starts is checked: private data count only with a guarantee
        # that a ledger proves.
        first = Initialisation()
        for link in Initialisation.of({"initialisation": facts}).chain():
            first = link
            if link.kind != "checkpoint":
                break
            if link.training_data == "private" and not link.guarantee:
                parent = link.before_that
                if parent is not None and parent.kind == IMPORTED:
                    raise ConfigError(
                        f"init.checkpoint {checkpoint.path} goes back to weights imported from "
                        f"{parent.file}, and no ledger here proves the privacy of their data; a "
                        "private run cannot start from it. If those are public or synthetic with "
                        "respect to this run's data, import it again with --provenance"
                    )
                raise ConfigError(
                    f"init.checkpoint {checkpoint.path}: run {link.run} trained on private data, "
                    "and no ledger in its run folder proves a guarantee; a private run cannot "
                    "start from it. If its data are public or synthetic, train it with "
                    'data.provenance = "public" or "synthetic"'
                )
        if first.kind not in ("random", IMPORTED):
            raise ConfigError(
                f"init.checkpoint {checkpoint.path} does not say what its weights started from; a "
                "private run cannot start from it"
            )
        # Shards are known by their bytes, whatever their names.
        shards = {entry.sha256[:_HASH_DIGITS] for entry in table.entries}
        if not shards.isdisjoint(_stated_shards(facts)):
            raise ConfigError(
                f"init.checkpoint {checkpoint.path}, or a run behind it, was trained on shards of "
                "this run's private data, which it declares public or synthetic; a private run "
                "cannot start from it"
            )
    return facts


def _stated_shards(tree: Any) -> Iterator[str]:
    """Yields all hashes of shards in a checkpoint's origin, across exports and imports too."""
    if isinstance(tree, Mapping):
        for name, entry in tree.items():
            if name == "shards" and isinstance(entry, list):
                yield from (digest for digest in entry if isinstance(digest, str))
            else:
                yield from _stated_shards(entry)


def load_start(
    checkpoint: Checkpoint,
    config: InitSection,
    model: nn.Module,
    tokenizer_sha256: str | None = None,
) -> list[str]:
    """Sets weights of a fresh model; returns the names of parameters that keep their random start.

    Args:
        config: `parts = "encoder"` sets the encoder alone, e.g. for another decoder or another kind
            of model.
        tokenizer_sha256: hash of the tokenizer whose words the model will read; None for a model
            without text.

    Adapters that the checkpoint lacks keep their start. Learned positions of another image size are
    interpolated.

    Raises:
        ConfigError: a parameter is missing or has another shape. Or a weight would mean something
            else in a way that no shape shows: another number of heads, another norm placement,
            another vocabulary of the same size.
    """
    # An encoder that loses a parameter computes another function.
    names = {name for name, _ in model.named_parameters()}
    for name in sorted(checkpoint.shapes):
        if name.startswith("encoder.") and name not in names:
            raise ConfigError(
                f"{checkpoint.path} has {name}, for which the model has no place: its encoder is "
                "of another kind (model.size, model.overrides)"
            )
    model_config: Any = model.config
    ours = asdict(model_config)
    theirs = checkpoint.manifest.get("model", {})
    # (part, the checkpoint's options, the model's options, another way out)
    compared = [("the encoder's ", theirs.get("encoder", {}), ours["encoder"], "")]
    if config.parts == "all":
        compared.append(("", theirs, ours, ', or init.parts = "encoder"'))
    for part, their_options, our_options, way_out in compared:
        difference = _first_difference(their_options, our_options)
        if difference is not None:
            name, their_value, our_value = difference
            raise ConfigError(
                f"{checkpoint.path}: {part}{name} is {their_value!r}, the model's is "
                f"{our_value!r}; set model.size and model.overrides to the checkpoint's{way_out}"
            )
    tokenizer = checkpoint.manifest.get("tokenizer_sha256") if config.parts == "all" else None
    if tokenizer_sha256 is not None and tokenizer not in (None, tokenizer_sha256):
        raise ConfigError(
            f"{checkpoint.path} was trained with another tokenizer (SHA-256 {tokenizer[:16]}...) "
            "than data.tokenizer: its words would be scrambled; set data.tokenizer to that one, "
            'or init.parts = "encoder"'
        )
    random_names = []
    for name, parameter in model.named_parameters():
        is_new_adapter = is_adapter(name) and name not in checkpoint.shapes
        if is_new_adapter or (config.parts == "encoder" and not name.startswith("encoder.")):
            random_names.append(name)
            continue
        if name not in checkpoint.shapes:
            raise ConfigError(
                f'{checkpoint.path} has no {name}; init.parts = "encoder" starts the rest at random'
            )
        tensor = checkpoint.full("param", name)
        if tensor.shape != parameter.shape:
            # Learned image positions for another grid of patches.
            old_side = _grid_side(tensor.shape)
            new_side = _grid_side(parameter.shape)
            is_table = name.endswith("position.table") and old_side and new_side
            if not is_table or tensor.shape[-1] != parameter.shape[-1]:
                raise ConfigError(
                    f"{checkpoint.path}: {name} has shape {tuple(tensor.shape)}, but the model's "
                    f"is {tuple(parameter.shape)}"
                )
            tensor = resized_positions(tensor, (old_side, old_side), (new_side, new_side))
        with torch.no_grad():
            parameter.copy_(tensor)
    return random_names


def _grid_side(shape: torch.Size) -> int:
    """Returns the side of the patch grid of a position table (1, 1 + side^2, D), or 0."""
    if len(shape) != 3 or shape[1] < 1:
        return 0
    side = math.isqrt(shape[1] - 1)
    return side if side**2 == shape[1] - 1 else 0


_MAY_DIFFER = {
    # Resized, or checked by shape.
    "image_size",
    "num_tokens",
    # Choices of the training task.
    "mask_ratio",
    "parallel_share",
    # For initial values, and for memory.
    "embedding_std",
    "max_logits",
}


def _first_difference(
    theirs: Mapping[str, Any], ours: Mapping[str, Any]
) -> tuple[str, Any, Any] | None:
    """Returns the first option that changes what equal weights compute, and its two values.

    Only options that both sides state are compared.
    """
    for name, our_value in ours.items():
        their_value = theirs.get(name, our_value)
        if isinstance(our_value, Mapping) and isinstance(their_value, Mapping):
            difference = _first_difference(their_value, our_value)
            if difference is not None:
                inner_name, their_inner, our_inner = difference
                return f"{name}.{inner_name}", their_inner, our_inner
        elif name not in _MAY_DIFFER and their_value != our_value:
            return name, their_value, our_value
    return None


def ledgers_behind(
    checkpoint: Checkpoint, start: Initialisation, *, is_private: bool
) -> list[ParentLedger]:
    """Returns the ledgers of all private runs that made a checkpoint's weights, newest first.

    Every attempt in them is charged.

    Args:
        start: the chain of starts that begins with this checkpoint.
        is_private: whether the starting run makes a claim, which then needs all of these ledgers.

    Raises:
        ConfigError: a private run starts, and a ledger of an earlier private run is not in the
            checkpoint's run folder.
        PrivacyStateRefused: a ledger is broken.
    """
    ledgers = ledgers_of(checkpoint.path, checkpoint.manifest)
    private_runs = [link.run for link in start.chain() if link.training_data == "private"]
    if is_private and len(ledgers) < len(private_runs):
        run_dir = checkpoint.path.resolve().parent.parent
        missing = private_runs[len(ledgers)]
        raise ConfigError(
            f"init.checkpoint {checkpoint.path}: run {missing} behind its weights trained on "
            f"private data, and its ledger is not in {run_dir}: its spending cannot be composed "
            "with this run; start from the checkpoint in its own run folder"
        )
    return ledgers


def ledgers_of(checkpoint: Path, manifest: Mapping[str, Any]) -> list[ParentLedger]:
    """Returns the ledgers of private runs behind a checkpoint that its run folder has.

    The newest comes first.

    Raises:
        PrivacyStateRefused: a ledger is broken.
    """
    run_dir = checkpoint.resolve().parent.parent
    state = proof_of(checkpoint, manifest).state
    if state is None:
        return []
    is_private = (manifest.get("training_data") or {}).get("provenance", "private") == "private"
    if is_private and state.plan.formal_guarantee:
        num_lines = int(manifest["ledger"]["seq"]) + 1
        return ledgers_of_run(run_dir, str(manifest.get("run")), num_lines)
    ledgers = []
    for run, content in read_copies(run_dir, state.opened):
        ledgers.append(ParentLedger(run, content, content.count(b"\n")))
    return ledgers


def require_disjoint(checkpoint: Checkpoint, table: ExampleTable) -> None:
    """Refuses data that a recipe declares disjoint and that share bytes with an earlier run.

    The comparison stays inside the trust boundary: nothing of it is published.

    Raises:
        ConfigError: a shard of this run, or some of its examples, are also in the checkpoint's run.
    """
    path = RunFolder(checkpoint.path.resolve().parent.parent).index / INDEX
    if not path.is_file():
        say(
            f"init.disjoint_data is declared, and no shard was compared, because {path} is "
            "missing. Nothing checks the declaration"
        )
        return
    earlier_table = ExampleTable.open(path.parent, "", check_shards=False)
    earlier_shards = {entry.sha256 for entry in earlier_table.entries}
    for entry in table.entries:
        if entry.sha256 in earlier_shards:
            raise ConfigError(
                f"init.disjoint_data is declared, and shard {entry.name} is also one of the run "
                f"behind {checkpoint.path}: remove the declaration, and the charges of both runs "
                "compose"
            )
    num_shared, by_chance = table.count_shared_with(earlier_table)
    if num_shared > by_chance + 8 * math.sqrt(by_chance):
        raise ConfigError(
            f"init.disjoint_data is declared, and {num_shared:,} examples or more are also, byte "
            f"for byte, in the run behind {checkpoint.path}, in other shards: remove the "
            "declaration, and the charges of both runs compose"
        )
    say(
        "init.disjoint_data is declared, and no shard and no example is in both runs byte for "
        "byte; the recipe alone declares that none is in both in another form"
    )
