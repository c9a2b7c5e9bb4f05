"""To and from other projects' weights; docs/exchange.md says what is exact and what is not.

    python launch_scripts/export.py --checkpoint runs/vip --format hf OUT      transformers: ViTModel, and the whole model
    python launch_scripts/export.py --checkpoint runs/vip --format safetensors OUT      our own names
    python launch_scripts/export.py --checkpoint runs/vip --format timm OUT      encoder for ViTDet-style codes
    python launch_scripts/export.py --import vip FILE OUT      a checkpoint of ours, for [init] checkpoint and evaluation
    python launch_scripts/export.py --import dpcap FILE OUT --tokenizer data/tokenizer/bert-base-uncased.json
    python launch_scripts/export.py --import hf DIR OUT      a ViTModel or ViTMAE that transformers saved

Exit codes: 0 done, 2 bad input.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any, get_args

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from models.config import Activation  # noqa: E402
from models.converters import FOREIGN, Unstated  # noqa: E402
from privacy.card.text import rounded_up  # noqa: E402
from trainer.config.cli import Parser, run_command  # noqa: E402
from trainer.errors import ConfigError  # noqa: E402
from trainer.weights.attestation import Attestation  # noqa: E402
from trainer.weights.export import FORMATS, export  # noqa: E402
from trainer.weights.import_weights import PROVENANCES, Declared, import_weights  # noqa: E402
from trainer.weights.open_model import open_model  # noqa: E402

_FOR_EXPORT = ("format", "use_average", "parts")
_UNSTATED = ("num_heads", "decoder_heads", "decoder_activation", "norm_eps", "normalise_pixels")
_FOR_IMPORT = ("provenance", "claim", *_UNSTATED)


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """Command-line arguments; a bad one is a ConfigError (exit 2)."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    direction = parser.add_mutually_exclusive_group(required=True)
    direction.add_argument(
        "--checkpoint", type=Path, metavar="DIR", help="run folder (its newest) or checkpoint to export"
    )
    direction.add_argument("--import", dest="source", choices=FOREIGN, help="what FILE is")
    parser.add_argument("paths", nargs="*", type=Path, metavar="[FILE] OUT", help="OUT is a new folder")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    parser.add_argument("--tokenizer", type=Path, help="a captioner's tokenizer.json, where it is not found by itself")
    out = parser.add_argument_group("export")
    out.add_argument("--format", choices=FORMATS, help="what to write")
    out.add_argument(
        "--use_average", action="store_true", default=None, help="the moving average of the weights (train.ema_decay)"
    )
    out.add_argument("--parts", choices=("all", "encoder"), help="encoder leaves the rest out; for --format hf")
    into = parser.add_argument_group("import")
    into.add_argument(
        "--provenance", choices=PROVENANCES,
        help="the data behind the weights, with respect to the private data of later runs; your word. Default: private, from "
        "which no private run starts",
    )  # fmt: skip
    into.add_argument("--claim", help="what its authors claim of its privacy, in words; never attested")
    told = parser.add_argument_group(
        "import of vip and dpcap: what no tensor tells, where the shapes are of no published model"
    )
    told.add_argument("--num_heads", type=int, help="attention heads of the encoder")
    told.add_argument("--decoder_heads", type=int, help="attention heads of the decoder")
    told.add_argument(
        "--decoder_activation", choices=get_args(Activation), help="dpcap: of the decoder's MLP; the release's: gelu without "
        "biases, relu with them"
    )  # fmt: skip
    told.add_argument(
        "--norm_eps", type=float, help="epsilon of the encoder's norms (vip: of all); the releases': 1e-6"
    )
    told.add_argument(
        "--normalise_pixels",
        action=argparse.BooleanOptionalAction,
        help="vip: whether it predicts normalised pixels, or (--no-normalise_pixels) plain ones",
    )
    options = parser.parse_args(arguments)
    _check(options)
    return options


def _check(options: argparse.Namespace) -> None:
    exporting = options.checkpoint is not None
    if exporting and options.format is None:
        raise ConfigError(f"--checkpoint needs --format, one of {', '.join(FORMATS)}")
    wanted = ("OUT",) if exporting else ("FILE", "OUT")
    if len(options.paths) != len(wanted):
        raise ConfigError(f"{' and '.join(wanted)} expected, got {len(options.paths)} paths")
    for name in _FOR_IMPORT if exporting else _FOR_EXPORT:
        if getattr(options, name) is not None:
            raise ConfigError(f"--{name} is for {'--import' if exporting else '--checkpoint'}")
    if options.parts and options.format != "hf":
        raise ConfigError("--parts is for --format hf")
    for name in ("num_heads", "decoder_heads"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name} must be positive, got {value}")


def main() -> int:
    """Exports or imports, and says what is known of the guarantee."""
    options = parse_args()
    said = _export(options) if options.checkpoint is not None else _import(options)
    if options.json:
        print(json.dumps(said, allow_nan=False))
    else:
        print(said["summary"])
    return 0


def _export(options: argparse.Namespace) -> dict[str, Any]:
    (out,) = options.paths
    opened = open_model(options.checkpoint, use_average=bool(options.use_average), tokenizer=options.tokenizer)
    attestation = export(opened, options.format, out, encoder_only=options.parts == "encoder")
    return {
        "out": str(out),
        "format": options.format,
        "checkpoint": str(opened.path),
        **attestation.facts(),
        "summary": f"{opened.path} -> {out} ({options.format}); {_claim(attestation)}",
    }


def _claim(attestation: Attestation) -> str:
    if attestation.card is None:
        return f"not attested ({attestation.reason}): no epsilon is stated"
    if not attestation.formal_guarantee:
        return f"formal_guarantee: false ({'; '.join(attestation.card['reasons'])}); no epsilon is claimed"
    epsilon = attestation.epsilon
    shown = "no finite epsilon" if epsilon is None else f"epsilon {rounded_up(epsilon, 4)}"
    return f"{shown} at delta {attestation.card['delta']:g}, from its ledger"


def _import(options: argparse.Namespace) -> dict[str, Any]:
    source, out = options.paths
    manifest = import_weights(
        options.source,
        source,
        out,
        tokenizer=options.tokenizer,
        declared=Declared(options.provenance, options.claim),
        unstated=Unstated(**{name: getattr(options, name) for name in _UNSTATED}),
    )
    model, provenance = manifest["model"], manifest["training_data"]["provenance"]
    starts = "no private run starts from it" if provenance == "private" else "private runs may start from it"
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
