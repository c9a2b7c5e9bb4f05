"""Exports to and imports from other projects' weights; docs/models.md says what is exact and what is not.

    python launch_scripts/export.py --checkpoint runs/vip --format hf OUT      transformers: ViTModel, and the whole model
    python launch_scripts/export.py --checkpoint runs/vip --format safetensors OUT      our own names
    python launch_scripts/export.py --checkpoint runs/vip --format timm OUT      encoder for ViTDet-style codes
    python launch_scripts/export.py --checkpoint runs/lora --format peft OUT      adapters, and their base in OUT/base
    python launch_scripts/export.py --import vip FILE OUT --size vip_base      a checkpoint of ours, to start from and to evaluate
    python launch_scripts/export.py --import dpcap FILE OUT --size dpcap_base --tokenizer data/tokenizer/bert-base-uncased.json
    python launch_scripts/export.py --import hf DIR OUT      a ViTModel or ViTMAE that transformers saved

FILE may be a folder, too: of DeepSpeed's zero_to_fp32.py, or weights in parts with an index.

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
    """the data behind the weights, with respect to the private data of later runs; your word. Default: private, from which no
    private run starts"""
    claim: str | None = None
    """what its authors claim of its privacy, in words; never attested"""
    size: str | None = None
    """vip, dpcap: the size that the file has, as in recipes: vip_base, dpcap_base, ...; it states what no tensor tells"""
    override: Annotated[tuple[str, ...], Shown("FIELD=VALUE", is_repeated=True)] = ()
    """vip, dpcap: a field of the size that differs, as model.overrides of recipes: decoder_num_heads=16; may be repeated"""


class ExchangeOptions(ExportPart, ImportPart):
    """What is exported or imported, and where it goes."""

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
        names, count = ("OUT",) if is_export else ("FILE", "OUT"), len(self.paths or ())
        if count != len(names):
            raise ValueError(f"{' and '.join(names)} expected, got {count} paths")
        for name in ImportPart.model_fields if is_export else ExportPart.model_fields:
            if name in self.model_fields_set:
                raise ValueError(f"--{name} is for {'--import' if is_export else '--checkpoint'}")
        return self


def parse_args(arguments: list[str] | None = None) -> ExchangeOptions:
    """The command line; a bad argument is a ConfigError (exit 2)."""
    return options_of(__doc__, ExchangeOptions, arguments)


def main() -> int:
    """Exports or imports, and says what is known of the guarantee."""
    options = parse_args()
    require_folders(options)
    with working("reading and writing weights"):
        facts = exported(options) if options.checkpoint is not None else imported(options)
    say(json.dumps(facts, allow_nan=False) if options.as_json else facts["summary"])
    return 0


def exported(options: ExchangeOptions) -> dict[str, Any]:
    """Exports; what was written, and what the ledger proves."""
    from trainer.weights.export import export, facts_of
    from trainer.weights.open_model import open_model

    assert options.checkpoint is not None and options.format is not None and options.paths
    (out,) = options.paths
    opened = open_model(
        options.checkpoint, use_average=options.use_average, tokenizer=options.tokenizer
    )
    card, reason = export(opened, options.format, out)
    if card is None:
        claim = f"not attested ({reason}): no epsilon is stated"
    elif not card.formal_guarantee:
        claim = f"formal_guarantee: false ({'; '.join(card.reasons)}); no epsilon is claimed"
    else:
        shown = (
            "no finite epsilon" if card.epsilon is None else f"epsilon {rounded_up(card.epsilon)}"
        )
        claim = f"{shown} at delta {card.delta:g}, from its ledger"
    return {
        "out": str(out),
        "format": options.format,
        "checkpoint": str(opened.path),
        **facts_of(card, reason),
        "summary": f"{opened.path} -> {out} ({options.format}); {claim}",
    }


def imported(options: ExchangeOptions) -> dict[str, Any]:
    """Imports; what was made, and whether a private run may start from it."""
    from trainer.weights.import_weights import import_weights

    assert options.source is not None and options.paths
    source, out = options.paths
    manifest = import_weights(
        options.source,
        source,
        out,
        tokenizer=options.tokenizer,
        provenance=options.provenance,
        claim=options.claim,
        size=options.size,
        overrides={
            field: toml_value(value)
            for field, _, value in (one.partition("=") for one in options.override)
        },
    )
    model, provenance = manifest["model"], manifest["training_data"]["provenance"]
    starts = (
        "no private run starts from it"
        if provenance == "private"
        else "private runs may start from it"
    )
    return {
        "out": str(out),
        "model": model,
        "training_data": manifest["training_data"],
        "formal_guarantee": False,
        "reasons": manifest["reasons"],
        "summary": f"{source} -> {out}: {model['kind']} ({model['size']}); formal_guarantee: false ({manifest['reasons'][0]}); "
        f"data declared {provenance}: {starts}",
    }


if __name__ == "__main__":
    run_command(main)
