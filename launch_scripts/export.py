"""Exports weights to other projects and imports theirs; docs/models.md says which are exact.

    # transformers: ViTModel, and the complete model
    python launch_scripts/export.py --checkpoint runs/vip --format hf OUT
    # the project's own names
    python launch_scripts/export.py --checkpoint runs/vip --format safetensors OUT
    # an encoder for code in the style of ViTDet
    python launch_scripts/export.py --checkpoint runs/vip --format timm OUT
    # adapters, and their base in OUT/base
    python launch_scripts/export.py --checkpoint runs/lora --format peft OUT
    # a checkpoint of this project, to start from and to evaluate
    python launch_scripts/export.py --import vip FILE OUT --size vip_base
    python launch_scripts/export.py --import dpcap FILE OUT --size dpcap_base --tokenizer JSON
    # a ViTModel or ViTMAE that transformers saved
    python launch_scripts/export.py --import hf DIR OUT

FILE may also be a folder: of DeepSpeed's zero_to_fp32.py, or of weights in parts with an index.

Exit codes: 0 done, 2 bad input.
"""

import json
import sys
from pathlib import Path
from typing import Annotated, Any, Self, get_args

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trainer.config.environment import require_packages

require_packages()

from pydantic import ConfigDict, Field, model_validator

from models.config import Foreign
from privacy.accounting.rounding import rounded_up
from privacy.errors import say
from privacy.files.toml_text import toml_value
from trainer.config.cli import run_command
from trainer.config.options import Options, Shown, options_of, require_folders
from trainer.progress import working
from trainer.weights import Format, Provenance


class ExportPart(Options):
    """Options of an export alone."""

    GROUP = "export"

    format: Format | None = None
    """what to write"""
    use_average: bool = False
    """the moving average of the weights (train.ema_decay)"""


class ImportPart(Options):
    """Options of an import alone."""

    GROUP = "import"

    provenance: Provenance | None = None
    """the data behind the weights, with respect to the private data of later runs, by your word;
    default: private, from which no private run starts"""
    claim: str | None = None
    """what its authors claim of its privacy, in words; never attested"""
    size: str | None = None
    """vip, dpcap: the size of the file's model, as in recipes: vip_base, dpcap_base, ...; no tensor
    tells it"""
    override: Annotated[tuple[str, ...], Shown("FIELD=VALUE", is_repeated=True)] = ()
    """vip, dpcap: a field of the size that differs, as model.overrides of recipes:
    decoder_num_heads=16; may be repeated"""


class ExchangeOptions(ExportPart, ImportPart):
    """The options of an export or an import."""

    model_config = ConfigDict(populate_by_name=True)
    ONE_OF = ("checkpoint", "source")

    checkpoint: Annotated[Path | None, Shown("DIR")] = None
    """run folder (its newest) or checkpoint to export"""
    source: Foreign | None = Field(None, alias="import")
    """what FILE is"""
    paths: Annotated[tuple[Path, ...] | None, Shown("[FILE] OUT", is_positional=True)] = None
    """OUT is a new folder"""
    as_json: bool = Field(False, alias="json")
    """print one JSON object on stdout"""
    tokenizer: Path | None = None
    """a captioner's tokenizer.json, where it is not found by itself"""

    @model_validator(mode="after")
    def _goes_one_way(self) -> Self:
        is_export = self.checkpoint is not None
        if is_export and self.format is None:
            raise ValueError(f"--checkpoint needs --format, one of {', '.join(get_args(Format))}")
        path_names = ("OUT",) if is_export else ("FILE", "OUT")
        num_paths = len(self.paths or ())
        if num_paths != len(path_names):
            raise ValueError(f"{' and '.join(path_names)} expected, got {num_paths} paths")
        opposite = ImportPart if is_export else ExportPart
        for name in opposite.model_fields:
            if name in self.model_fields_set:
                raise ValueError(f"--{name} is for {'--import' if is_export else '--checkpoint'}")
        return self


def parse_args(arguments: list[str] | None = None) -> ExchangeOptions:
    """Returns the arguments of the command line; a bad argument is a ConfigError (exit 2)."""
    return options_of(__doc__, ExchangeOptions, arguments)


def main() -> int:
    """Exports or imports weights, and prints the guarantee that is known of them."""
    options = parse_args()
    require_folders(options)
    with working("reading and writing weights"):
        facts = exported(options) if options.checkpoint is not None else imported(options)
    say(json.dumps(facts, allow_nan=False) if options.as_json else facts["summary"])
    return 0


def exported(options: ExchangeOptions) -> dict[str, Any]:
    """Exports a checkpoint, and returns the output's facts and the claim that the ledger proves."""
    from trainer.weights.export import export, facts_of
    from trainer.weights.open_model import open_model

    assert options.checkpoint is not None and options.format is not None and options.paths
    (out,) = options.paths
    model = open_model(
        options.checkpoint, use_average=options.use_average, tokenizer=options.tokenizer
    )
    card, reason = export(model, options.format, out)
    if card is None:
        claim = f"not attested ({reason}): no epsilon is stated"
    elif not card.formal_guarantee:
        claim = f"formal_guarantee: false ({'; '.join(card.reasons)}); no epsilon is claimed"
    elif card.epsilon is None:
        claim = f"no finite epsilon at delta {card.delta:g}, from its ledger"
    else:
        claim = f"epsilon {rounded_up(card.epsilon)} at delta {card.delta:g}, from its ledger"
    facts = {"out": str(out), "format": options.format, "checkpoint": str(model.path)}
    facts |= facts_of(card, reason)
    facts["summary"] = f"{model.path} -> {out} ({options.format}); {claim}"
    return facts


def imported(options: ExchangeOptions) -> dict[str, Any]:
    """Imports weights, and returns facts of the checkpoint that it wrote."""
    from trainer.weights.import_weights import import_weights

    assert options.source is not None and options.paths
    source, out = options.paths
    overrides = {}
    for override in options.override:
        field, _, text = override.partition("=")
        overrides[field] = toml_value(text)
    manifest = import_weights(
        options.source,
        source,
        out,
        tokenizer=options.tokenizer,
        provenance=options.provenance,
        claim=options.claim,
        size=options.size,
        overrides=overrides,
    )
    model = manifest["model"]
    reasons = manifest["reasons"]
    provenance = manifest["training_data"]["provenance"]
    if provenance == "private":
        starts = "no private run starts from it"
    else:
        starts = "private runs may start from it"
    summary = (
        f"{source} -> {out}: {model['kind']} ({model['size']}); "
        f"formal_guarantee: false ({reasons[0]}); data declared {provenance}: {starts}"
    )
    return {
        "out": str(out),
        "model": model,
        "training_data": manifest["training_data"],
        "formal_guarantee": False,
        "reasons": reasons,
        "summary": summary,
    }


if __name__ == "__main__":
    run_command(main)
