"""Exports a checkpoint: a folder with the model, its model card, and a statement on its privacy.

Reads the checkpoint, the ledger and public files of the run folder, and opens nothing under
`private/`. An epsilon is stated only where a whole ledger in the checkpoint's own run folder proves
it.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, processors
from torch import Tensor

from data.examples.transforms import IMAGENET_MEAN, IMAGENET_STD
from models.classifier import without_adapters
from models.converters import peft
from models.converters.huggingface import (
    CONFIG,
    PROCESSOR,
    WEIGHTS,
    image_processor,
    to_vit_mae,
    to_vit_model,
)
from models.converters.names import TIMM
from models.converters.native import encoder_tensors, save_model
from models.converters.weights import write_weights
from models.masked_autoencoder import MaskedAutoencoder
from models.vit import VisionTransformer
from privacy.card.model import PrivacyCard
from privacy.checkpoints.read import file_digest
from trainer.card_of_run import build_card
from trainer.errors import ConfigError
from trainer.tasks import CaptioningTask
from trainer.weights import Format, new_folder
from trainer.weights.model_card import model_card
from trainer.weights.open_model import ROOT, TOKENIZER, OpenedModel
from trainer.weights.provenance import proof_of

CARD = "privacy_card.json"
README = "README.md"
_MODELLING = "modeling_captioner.py"
_AUTOMATIC = {
    "model_type": "exported_captioner",
    "architectures": ["ExportedCaptioner"],
    "auto_map": {
        "AutoConfig": "modeling_captioner.ExportedCaptionerConfig",
        "AutoModel": "modeling_captioner.ExportedCaptioner",
    },
}
"""Entries by which transformers' `AutoModel` finds the code that comes with the weights."""

_ABOUT = ("run", "step", "reasons", "initialisation", "training_data", "tokenizer_sha256")


def export(opened: OpenedModel, form: Format, out: Path) -> tuple[PrivacyCard | None, str]:
    """Writes the folder `out` completely, or not at all.

    Args:
        form: "hf" writes the encoder as ViTModel in `out`, the whole model in a folder of its kind
            inside; "peft" the encoder's adapters, and the ViTModel under them in `base`;
            "safetensors" our own names; "timm" the encoder under timm's names.

    Returns:
        The privacy card of the checkpoint's run, or None where no ledger attests anything, and the
        reason for None. The card's epsilon is that of all attempts in the run's ledger, so at least
        that of the checkpoint.

    Raises:
        ConfigError: `out` exists and is not empty.
        WeightsError: the model cannot be represented exactly.
        PrivacyStateRefused, PrivacyConfigError: the ledger in its run folder is broken, or
            contradicts it.
    """
    encoder = getattr(opened.model, "encoder", None)
    if not isinstance(encoder, VisionTransformer):
        raise ConfigError(
            f"{opened.path}: its model has no vision transformer as encoder, so nothing can be "
            "exported"
        )
    proof = proof_of(opened.path, opened.manifest)
    card = None if proof.state is None else build_card(opened.path.resolve().parent.parent)
    about = {name: opened.manifest[name] for name in _ABOUT if name in opened.manifest}
    about |= facts_of(card, proof.reason)
    with new_folder(out) as folder:
        if form == "safetensors":
            _write_complete(folder, opened, encoder, about)
        elif form == "peft":
            _write(folder, *peft.to_peft(encoder), names=(peft.CONFIG, peft.WEIGHTS))
            config, tensors = to_vit_model(without_adapters(encoder, merged=False))
            _write(folder / peft.BASE, {**config, "about": about}, tensors, encoder)
        elif form == "timm":
            tensors = encoder_tensors(TIMM, without_adapters(encoder))
            shape = encoder.config
            arguments = {
                "img_size": shape.image_size,
                "patch_size": shape.patch_size,
                "in_chans": shape.num_channels,
                "num_classes": 0,
                "embed_dim": shape.width,
                "depth": shape.depth,
                "num_heads": shape.num_heads,
                "mlp_ratio": shape.mlp_ratio,
                "qkv_bias": shape.qkv_bias,
                "global_pool": "token",
            }
            config = {"model_args": arguments, "norm_eps": shape.norm_eps, "about": about}
            _write(folder, config, tensors, encoder)
            # Programs for detection and segmentation read this form.
            torch.save({"model": tensors}, folder / "model.pth")
        else:
            config, tensors = to_vit_model(without_adapters(encoder))
            _write(folder, {**config, "about": about}, tensors, encoder)
            inner = folder / opened.task.kind
            if isinstance(opened.model, MaskedAutoencoder):
                config, tensors = to_vit_mae(opened.model)
                _write(inner, {**config, "about": about}, tensors, encoder)
            elif opened.task.kind != "encoder":
                _write_complete(inner, opened, encoder, about)
        (folder / README).write_text(model_card(opened, form, card, proof.reason))
        if card is not None:
            (folder / CARD).write_text(card.to_json(indent=1) + "\n")
    return card, proof.reason


def facts_of(card: PrivacyCard | None, reason: str) -> dict[str, Any]:
    """Returns the facts for config.json and the console; epsilon only with a guarantee."""
    if card is None:
        return {"formal_guarantee": False, "attested": False, "not_attested_because": reason}
    facts: dict[str, Any] = {"formal_guarantee": card.formal_guarantee, "attested": True}
    if card.formal_guarantee:
        return facts | {"epsilon": card.epsilon, "delta": card.delta}
    return facts | {"reasons": list(card.reasons)}


def _write(
    folder: Path,
    config: Mapping[str, Any],
    tensors: dict[str, Tensor],
    encoder: VisionTransformer | None = None,
    names: tuple[str, str] = (CONFIG, WEIGHTS),
) -> None:
    """Writes configuration and weights, and for an encoder the configuration of its images."""
    folder.mkdir(exist_ok=True)
    _write_json(folder / names[0], config)
    write_weights(folder / names[1], tensors)
    if encoder is not None:
        processor = image_processor(encoder.config.image_size, IMAGENET_MEAN, IMAGENET_STD)
        _write_json(folder / PROCESSOR, processor)


def _write_complete(
    folder: Path, opened: OpenedModel, encoder: VisionTransformer, about: dict[str, Any]
) -> None:
    """Writes the complete model under our names, with the source that builds it.

    For a captioner also the files by which transformers writes texts and captions as evaluation
    does.
    """
    folder.mkdir(exist_ok=True)
    automatic: dict[str, Any] = {}
    if isinstance(opened.task, CaptioningTask):
        path = opened.task.tokenizer_path
        config = opened.task.model_config
        tokenizer = Tokenizer.from_file(str(path))
        special = {
            "bos_token": config.bos_id,
            "eos_token": config.eos_id,
            "pad_token": config.pad_id,
        }
        names = {name: str(tokenizer.id_to_token(token)) for name, token in special.items()}
        original = tokenizer.to_str()
        tokenizer.no_truncation()
        tokenizer.no_padding()
        if tokenizer.encode("").ids != [config.bos_id, config.eos_id]:
            # Other programs then write a text as `CaptionTokenizer.encode` does: start token,
            # words, end token.
            start = names["bos_token"]
            end = names["eos_token"]
            ids = [(start, config.bos_id), (end, config.eos_id)]
            tokenizer.post_processor = processors.TemplateProcessing(
                f"{start} $A {end}", f"{start} $A {end} $B {end}", ids
            )
        # A file that leaves out start and end, or cuts and pads by itself, is changed in that
        # alone; any other is copied.
        if tokenizer.to_str() == original:
            shutil.copy(path, folder / TOKENIZER)
        else:
            tokenizer.save(str(folder / TOKENIZER))
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": config.num_tokens,
            "model_input_names": ["input_ids", "attention_mask"],
            "padding_side": "right",
            "truncation_side": "right",
            "clean_up_tokenization_spaces": False,
        }
        _write_json(folder / "tokenizer_config.json", settings | names)
        shutil.copy(ROOT / "models" / "converters" / _MODELLING, folder / _MODELLING)
        automatic = _AUTOMATIC
        about = about | {"tokenizer_sha256": file_digest(folder / TOKENIZER)}
    save_model(folder, opened.model, opened.manifest["model"], about, automatic)
    processor = image_processor(encoder.config.image_size, IMAGENET_MEAN, IMAGENET_STD)
    _write_json(folder / PROCESSOR, processor)
    shutil.copytree(
        ROOT / "models", folder / "models", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copy(ROOT / "LICENSE", folder / "LICENSE")


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
