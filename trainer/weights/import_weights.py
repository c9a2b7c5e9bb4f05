"""Imports weights of other projects as a checkpoint, for `[init] checkpoint` and evaluation.

Such a checkpoint is marked: no ledger attests what its authors claim, so it has no formal
guarantee, and a private run starts from it only if the importing user declared the data behind it
public or synthetic.
"""

import contextlib
import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from safetensors.torch import save_file

from data.examples.tokenizer import CaptionTokenizer
from models.config import CaptionerConfig, Foreign
from models.converters import read_foreign
from models.converters.native import CONFIG, model_facts, parameter_shapes, size_name
from models.converters.weights import WeightsError
from privacy.checkpoints.read import FORMAT, MANIFEST, file_digest, with_seal
from trainer.errors import ConfigError
from trainer.weights import Provenance, new_folder
from trainer.weights.open_model import TOKENIZER
from trainer.weights.provenance import IMPORTED, Initialisation

UNATTESTED = "imported: what its authors claim of its privacy is not attested by a ledger"

_WEIGHTS = "rank-00000-of-00001.safetensors"


def import_weights(
    kind: Foreign,
    source: Path,
    out: Path,
    *,
    tokenizer: Path | None = None,
    provenance: Provenance | None = None,
    claim: str | None = None,
    size: str | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Writes the checkpoint folder `out` completely, or not at all; returns its manifest.

    Args:
        kind, source, size, overrides: as for `models.converters.read_foreign`.
        tokenizer: the tokenizer.json that a captioner was trained with; an exported folder has it.
        provenance: the user's declaration of the data behind the weights, with respect to the
            private data of later runs. It cannot be checked. None takes the declaration of an
            exported folder, or else "private".
        claim: the authors' claim on the privacy of the weights, in words.

    Raises:
        WeightsError, ModelConfigError, DataError: another kind of file, or an unexpected structure.
        ConfigError: `out` exists, no tokenizer or one of another size, or a declaration that
            contradicts an exported folder's.
    """
    config, parameters = read_foreign(kind, source, size, overrides)
    # An exported folder's statement of its origin: a claim, but it must not get lost.
    exported: dict[str, Any] = {}
    folder = source if source.is_dir() else source.parent
    with contextlib.suppress(OSError, ValueError):
        content = json.loads((folder / CONFIG).read_text())
        about = content.get("about") if isinstance(content, dict) else None
        exported = about if isinstance(about, dict) else {}
    facts: dict[str, Any] = {}
    if isinstance(config, CaptionerConfig):
        path = tokenizer or source / TOKENIZER
        if not path.is_file():
            if tokenizer is not None:
                raise ConfigError(f"--tokenizer {tokenizer} does not exist")
            raise ConfigError(
                f"{source} holds a captioner of {config.vocab_size:,} tokens: give its "
                "tokenizer.json with --tokenizer (DP-Cap's is "
                "data/tokenizer/bert-base-uncased.json)"
            )
        tokenizer = path
        tokenizer_sha256 = file_digest(tokenizer)
        exported_sha256 = exported.get("tokenizer_sha256")
        if exported_sha256 is not None and tokenizer_sha256 != exported_sha256:
            raise ConfigError(
                f"{tokenizer} is not the tokenizer that {source} was trained with: its SHA-256 "
                "differs"
            )
        tokens = CaptionTokenizer.from_file(tokenizer)
        if tokens.vocab_size != config.vocab_size:
            raise ConfigError(
                f"{tokenizer} has {tokens.vocab_size:,} tokens, but the weights "
                f"{config.vocab_size:,}: give the tokenizer that they were trained with"
            )
        config = replace(config, pad_id=tokens.pad_id, bos_id=tokens.bos_id, eos_id=tokens.eos_id)
        facts["tokenizer_sha256"] = tokenizer_sha256
    elif tokenizer is not None:
        raise ConfigError(
            "--tokenizer is for captioners, and these weights are not a captioner's: leave it out"
        )
    if source.is_file():
        digest = file_digest(source)
    else:
        # Over the names and digests of a folder's weight files.
        files = sorted(
            path
            for path in source.iterdir()
            if path.is_file() and path.suffix in (".safetensors", ".bin")
        )
        if not files:
            raise WeightsError(f"{source} has no weight file")
        lines = [f"{path.name} {file_digest(path)}\n" for path in files]
        digest = hashlib.sha256("".join(lines).encode()).hexdigest()
    shapes = parameter_shapes(config)
    initialisation: dict[str, Any] = {
        "kind": IMPORTED,
        "format": kind,
        "file": source.resolve().name,
        "sha256": digest,
        "claim": claim,
    }
    if exported:
        initialisation["exported"] = exported
    manifest = {
        "format": FORMAT,
        "step": 0,
        "run": f"imported-{kind}",
        "formal_guarantee": False,
        "reasons": [UNATTESTED],
        "charged_attempts": 0,
        "model": model_facts(config, size_name(config)),
        **facts,
        "initialisation": initialisation,
        "training_data": _training_data(provenance, exported, source),
        "parameters": {name: list(shape) for name, shape in shapes.items()},
    }
    assert parameters.keys() == shapes.keys()
    with new_folder(out) as folder:
        if isinstance(config, CaptionerConfig) and tokenizer is not None:
            shutil.copy(tokenizer, folder / TOKENIZER)
        # One file as of a single rank; see privacy/checkpoints/read.py.
        tensors = {f"param|{name}|0": tensor.reshape(-1) for name, tensor in parameters.items()}
        save_file(tensors, folder / _WEIGHTS)
        manifest = with_seal({**manifest, "files": {_WEIGHTS: file_digest(folder / _WEIGHTS)}})
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True))
    return manifest


def _training_data(
    provenance: Provenance | None, exported: Mapping[str, Any], source: Path
) -> dict[str, Any]:
    """Returns the manifest's statement on the data.

    Hashes of public shards are carried over, so that a later run recognises its own data.
    """
    if not exported:
        return {"provenance": provenance or "private"}
    exported_data = exported.get("training_data")
    exported_data = exported_data if isinstance(exported_data, dict) else {}
    # An import loses the proof of a guarantee that a run behind it had, so its private data make
    # all of it private.
    starts = Initialisation.of(exported).chain()
    declared = exported_data.get("provenance")
    is_known = declared in get_args(Provenance)
    if not is_known or any(start.training_data == "private" for start in starts):
        declared = "private"
    if provenance not in (None, "private", declared):
        raise ConfigError(
            f"{source} was exported from a run on {declared} data, so --provenance {provenance} "
            "contradicts it"
        )
    if "private" in (declared, provenance):
        return {"provenance": "private"}
    return dict(exported_data)
