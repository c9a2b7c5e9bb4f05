"""Weights of other projects as a checkpoint of ours: `[init] checkpoint` and evaluation open it like any other.

Such a checkpoint is marked: no ledger attests what its authors claim, so it has no formal guarantee, and a private run starts
from it only where whoever imported it declared the data behind it public or synthetic.
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
from trainer.weights.provenance import IMPORTED, Start

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
    """Writes the checkpoint folder `out`, whole or not at all; returns its manifest.

    Args:
        kind, source, size, overrides: as for `models.converters.read_foreign`.
        tokenizer: the tokenizer.json that a captioner was trained with; an exported folder has it.
        provenance: what whoever imports says that the data behind the weights are to the private data of later runs; None takes
            what an exported folder states, or else "private". Nobody can check it.
        claim: what their authors claim of their privacy, in words.

    Raises:
        WeightsError, ModelConfigError, DataError: not such a file, or not of the expected structure.
        ConfigError: `out` is there, no tokenizer or one of another size, or a declaration against an exported folder's own.
    """
    config, parameters = read_foreign(kind, source, size, overrides)
    exported: dict[
        str, Any
    ] = {}  # what an exported folder says of its origin: a claim, but not to be lost on the way
    with contextlib.suppress(OSError, ValueError):
        content = json.loads(((source if source.is_dir() else source.parent) / CONFIG).read_text())
        about = content.get("about") if isinstance(content, dict) else None
        exported = about if isinstance(about, dict) else {}
    facts: dict[str, Any] = {}
    if isinstance(config, CaptionerConfig):
        given, tokenizer = tokenizer, tokenizer or source / TOKENIZER
        if not tokenizer.is_file():
            raise ConfigError(
                f"--tokenizer {given} does not exist"
                if given is not None
                else f"{source} holds a captioner of {config.vocab_size:,} tokens: give its tokenizer.json with --tokenizer "
                "(DP-Cap's is data/tokenizer/bert-base-uncased.json)"
            )
        stated = exported.get("tokenizer_sha256")
        if stated is not None and file_digest(tokenizer) != stated:
            raise ConfigError(
                f"{tokenizer} is not the tokenizer that {source} was trained with: its SHA-256 differs"
            )
        tokens = CaptionTokenizer.from_file(tokenizer)
        if tokens.vocab_size != config.vocab_size:
            raise ConfigError(
                f"{tokenizer} has {tokens.vocab_size:,} tokens, but the weights {config.vocab_size:,}: give the tokenizer that "
                "they were trained with"
            )
        config = replace(config, pad_id=tokens.pad_id, bos_id=tokens.bos_id, eos_id=tokens.eos_id)
        facts["tokenizer_sha256"] = file_digest(tokenizer)
    elif tokenizer is not None:
        raise ConfigError(
            "--tokenizer is for captioners, and these weights are not a captioner's: leave it out"
        )
    if source.is_file():
        digest = file_digest(source)
    else:  # over the names and digests of a folder's weight files
        files = sorted(
            p for p in source.iterdir() if p.is_file() and p.suffix in (".safetensors", ".bin")
        )
        if not files:
            raise WeightsError(f"{source} holds no weight file")
        digest = hashlib.sha256(
            "".join(f"{p.name} {file_digest(p)}\n" for p in files).encode()
        ).hexdigest()
    manifest = {
        "format": FORMAT,
        "step": 0,
        "run": f"imported-{kind}",
        "formal_guarantee": False,
        "reasons": [UNATTESTED],
        "charged_attempts": 0,
        "model": model_facts(config, size_name(config)),
        **facts,
        "initialisation": {
            "kind": IMPORTED,
            "format": kind,
            "file": source.resolve().name,
            "sha256": digest,
            "claim": claim,
            **({"exported": exported} if exported else {}),
        },
        "training_data": _training_data(provenance, exported, source),
        "parameters": {name: list(shape) for name, shape in parameter_shapes(config).items()},
    }
    assert parameters.keys() == parameter_shapes(config).keys()
    with new_folder(out) as folder:
        if isinstance(config, CaptionerConfig) and tokenizer is not None:
            shutil.copy(tokenizer, folder / TOKENIZER)
        # One file as of a single rank; see privacy/checkpoints/read.py.
        save_file(
            {f"param|{name}|0": value.reshape(-1) for name, value in parameters.items()},
            folder / _WEIGHTS,
        )
        manifest = with_seal({**manifest, "files": {_WEIGHTS: file_digest(folder / _WEIGHTS)}})
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True))
    return manifest


def _training_data(
    provenance: Provenance | None, exported: Mapping[str, Any], source: Path
) -> dict[str, Any]:
    """What the manifest says of the data. Hashes of public shards survive, so that a later run recognises its own data."""
    if not exported:
        return {"provenance": provenance or "private"}
    stated = exported.get("training_data")
    stated = stated if isinstance(stated, dict) else {}
    # A guarantee, if a run behind it had one, is attested no more.
    starts_private = any(link.training_data == "private" for link in Start.of(exported).chain())
    known = stated.get("provenance") if not starts_private else "private"
    known = known if known in get_args(Provenance) else "private"
    if provenance not in (None, "private", known):
        raise ConfigError(
            f"{source} was exported from a run on {known} data, so --provenance {provenance} contradicts it"
        )
    return {"provenance": "private"} if "private" in (known, provenance) else dict(stated)
