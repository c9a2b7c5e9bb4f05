"""An exported captioner as a model of transformers. This file lies with its weights, where `AutoModel` finds it:

    model = AutoModel.from_pretrained(FOLDER, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(FOLDER, trust_remote_code=False)  # needs none, and does not ask
    pixels = AutoImageProcessor.from_pretrained(FOLDER)("picture.jpg", return_tensors="pt")
    captions = tokenizer.batch_decode(model.generate(**pixels), skip_special_tokens=True)
    texts = tokenizer(["a red circle"], return_tensors="pt", padding=True, truncation=True)
    loss_B = model(**pixels, **texts).loss

The model itself is built by the source in the folder's `models`, under the names that it has there; nothing else is needed.
"""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils.generic import ModelOutput


class ExportedCaptionerConfig(PretrainedConfig):
    """config.json as it is."""

    model_type = "exported_captioner"


@dataclass
class CaptionerOutput(ModelOutput):
    """`logits` (B, L, V) of the token after each given one; `loss` (B,), each caption's mean cross-entropy in nats."""

    logits: Tensor | None = None
    loss: Tensor | None = None


class ExportedCaptioner(PreTrainedModel):
    """Wraps the captioner; `captioner` is the model itself."""

    config_class = ExportedCaptionerConfig
    main_input_name = "pixel_values"

    def __init__(self, config: ExportedCaptionerConfig, captioner: nn.Module, search: Any) -> None:
        super().__init__(config)
        self.captioner, self._search = captioner, search

    @classmethod
    def from_pretrained(
        cls, name: Any, *_: Any, config: Any = None, **options: Any
    ) -> "ExportedCaptioner":
        """Loads a folder, or a repository of the hub; in evaluation mode, fp32.

        Args:
            options: `dtype`; `revision`, `token`, `cache_dir`, ... of the hub.
        """
        folder = Path(name)
        if not folder.is_dir():
            from huggingface_hub import snapshot_download

            hub = {
                key: options[key]
                for key in ("revision", "token", "cache_dir")
                if options.get(key) is not None
            }
            folder = Path(snapshot_download(str(name), **hub))
        with _source(folder):
            native = importlib.import_module("models.converters.native")
            search = importlib.import_module("models.generation")
            captioner = native.load_model(folder)
        model = cls(config or ExportedCaptionerConfig.from_pretrained(folder), captioner, search)
        dtype = options.get("dtype") or options.get("torch_dtype")
        if isinstance(dtype, torch.dtype):
            nn.Module.to(model, dtype=dtype)
        return model.eval()

    def forward(
        self, pixel_values: Tensor, input_ids: Tensor, attention_mask: Tensor | None = None
    ) -> CaptionerOutput:
        """Scores of captions that are given.

        Args:
            pixel_values: (B, 3, H, W), from the processor.
            input_ids: (B, L) from the start token on, as the tokenizer writes them; padding on the right has no part in the
                loss, with or without a mask.
            attention_mask: (B, L), 0 for tokens that shall have no part in the loss either.

        Raises:
            ValueError: a row does not begin with the start token.
        """
        config: Any = self.captioner.config
        if not bool((input_ids[:, 0] == config.bos_id).all()):
            raise ValueError(
                f"every row of input_ids must begin with the start token ({config.bos_id}), as the tokenizer next to these "
                "weights writes it (with its special tokens, padded on the right)"
            )
        mask = input_ids != config.pad_id
        if attention_mask is not None:
            mask = mask & attention_mask.bool()
        logits = self.captioner(pixel_values, input_ids, output="logits")
        return CaptionerOutput(logits=logits, loss=self.captioner(pixel_values, input_ids, mask))

    def generate(
        self,
        pixel_values: Tensor,
        max_new_tokens: int | None = None,
        num_beams: int = 1,
        length_penalty: float = 1.0,
    ) -> Tensor:
        """Token ids (B, L) of a caption each, without the start token, padded behind the end token.

        Args:
            max_new_tokens: as many as the model takes by default.
            num_beams: 1 is greedy; else the best of a beam search, by its log-probability / length ** length_penalty.
        """
        config: Any = self.captioner.config
        tokens: Tensor = self._search.beam_captions(
            self.captioner,
            pixel_values.to(self.dtype),
            max_tokens=max_new_tokens or config.num_tokens - 1,
            num_beams=num_beams,
            length_penalty=length_penalty if num_beams > 1 else 0.0,
        ).tokens_BL
        return tokens


@contextmanager
def _source(folder: Path) -> Iterator[None]:
    """The folder's package `models` can be imported; another program's package of that name is as it was afterwards."""

    def taken() -> dict[str, Any]:
        return {
            name: sys.modules.pop(name)
            for name in list(sys.modules)
            if name.partition(".")[0] == "models"
        }

    others = taken()
    sys.path.insert(0, str(folder.resolve()))
    try:
        yield
    finally:
        sys.path.remove(str(folder.resolve()))
        taken()
        sys.modules.update(others)
