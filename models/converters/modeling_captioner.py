"""An exported captioner as a model of transformers.

`AutoModel` finds this file beside the weights:

    model = AutoModel.from_pretrained(FOLDER, trust_remote_code=True)
    # The tokenizer contains no code, and this does not ask.
    tokenizer = AutoTokenizer.from_pretrained(FOLDER, trust_remote_code=False)
    pixels = AutoImageProcessor.from_pretrained(FOLDER)("picture.jpg", return_tensors="pt")
    captions = tokenizer.batch_decode(model.generate(**pixels), skip_special_tokens=True)
    texts = tokenizer(["a red circle"], return_tensors="pt", padding=True, truncation=True)
    loss_B = model(**pixels, **texts).loss

The source in the folder's `models` builds the model itself, under the names that it has there.
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
    """The entries of config.json, unchanged."""

    model_type = "exported_captioner"


@dataclass
class CaptionerOutput(ModelOutput):
    """The output of `forward`.

    Attributes:
        logits: (B, L, V), scores of the token after each given one.
        loss: (B,), each caption's mean cross-entropy in nats.
    """

    logits: Tensor | None = None
    loss: Tensor | None = None


class ExportedCaptioner(PreTrainedModel):
    """A wrapper around the captioner, which is its attribute `captioner`."""

    config_class = ExportedCaptionerConfig
    main_input_name = "pixel_values"

    def __init__(self, config: ExportedCaptionerConfig, captioner: nn.Module, search: Any) -> None:
        super().__init__(config)
        self.captioner = captioner
        self._search = search

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

            # The options that name a version of a repository, or how to reach it.
            hub_options = {}
            for key in ("revision", "token", "cache_dir"):
                if options.get(key) is not None:
                    hub_options[key] = options[key]
            folder = Path(snapshot_download(str(name), **hub_options))
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
        """Returns the scores of captions that are given, and their losses.

        Args:
            pixel_values: (B, 3, H, W), from the processor.
            input_ids: (B, L) from the start token on, as the tokenizer writes them; padding on the
                right does not count in the loss, with or without a mask.
            attention_mask: (B, L), 0 for further tokens that must not count in the loss.

        Raises:
            ValueError: a row does not begin with the start token.
        """
        config: Any = self.captioner.config
        if not bool((input_ids[:, 0] == config.bos_id).all()):
            raise ValueError(
                f"every row of input_ids must begin with the start token ({config.bos_id}), as the "
                "tokenizer next to these weights writes it (with its special tokens, padded on "
                "the right)"
            )
        mask = input_ids != config.pad_id
        if attention_mask is not None:
            mask = mask & attention_mask.bool()
        logits = self.captioner(pixel_values, input_ids, output="logits")
        loss = self.captioner(pixel_values, input_ids, mask)
        return CaptionerOutput(logits=logits, loss=loss)

    def generate(
        self,
        pixel_values: Tensor,
        max_new_tokens: int | None = None,
        num_beams: int = 1,
        length_penalty: float = 1.0,
    ) -> Tensor:
        """Returns token ids (B, L) of one caption per image, without the start token.

        Captions are padded behind the end token.

        Args:
            max_new_tokens: longest caption; by default the longest that the model takes.
            num_beams: 1 is greedy; else the best of a beam search, by its log-probability / length
                ** length_penalty.
        """
        config: Any = self.captioner.config
        captions = self._search.beam_captions(
            self.captioner,
            pixel_values.to(self.dtype),
            max_tokens=max_new_tokens or config.num_tokens - 1,
            num_beams=num_beams,
            length_penalty=length_penalty if num_beams > 1 else 0.0,
        )
        tokens_BL: Tensor = captions.tokens_BL
        return tokens_BL


@contextmanager
def _source(folder: Path) -> Iterator[None]:
    """Puts the folder's package `models` in the place of any other while the block runs."""

    def pop_modules() -> dict[str, Any]:
        names = [name for name in sys.modules if name.partition(".")[0] == "models"]
        return {name: sys.modules.pop(name) for name in names}

    other_modules = pop_modules()
    sys.path.insert(0, str(folder.resolve()))
    try:
        yield
    finally:
        sys.path.remove(str(folder.resolve()))
        pop_modules()
        sys.modules.update(other_modules)
