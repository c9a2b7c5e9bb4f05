"""README.md of an exported model: what it is, what may be said of its privacy, where it comes from, how to load it."""

import re

from privacy.accounting.rounding import rounded_up
from privacy.card.model import PrivacyCard
from privacy.card.render import bullets, cell, to_markdown
from trainer.weights.open_model import OpenedModel
from trainer.weights.provenance import initialisation_statement

_VIT = """\
```python
from transformers import AutoImageProcessor, ViTModel

model = ViTModel.from_pretrained("{here}", add_pooling_layer=False)
pixels = AutoImageProcessor.from_pretrained("{here}")("picture.jpg", return_tensors="pt")
tokens = model(**pixels).last_hidden_state  # class token, then patches in row order
```
The tokens are normalised by the encoder's last LayerNorm. ViTModel's pooler was never trained: leave it out."""

_OWN = """\
The folder `models` holds the source that builds the model; it needs torch and safetensors, and nothing else of the project.
```python
import sys
from pathlib import Path

sys.path.insert(0, "{here}")
from models.converters.native import load_model

model = load_model(Path("{here}"))
{use}
```"""

_USES = {
    "captioner": """loss_B = model(images_BCHW, tokens_BL, token_mask_BL)  # mean cross-entropy of each caption, in nats
logits_BLV = model(images_BCHW, tokens_BL, output="logits")  # of the token after each of tokens_BL, from bos on""",
    "masked_autoencoder": 'predicted_BPQ = model(images_BCHW, mask_BP, output="patches")  # mask_BP: True where hidden',
    "classifier": 'logits_BK = model(images_BCHW, output="logits")',
    "encoder": "tokens_BTD = model(images_BCHW)",
}

_PEFT = """\
```python
from peft import PeftModel
from transformers import ViTModel

base = ViTModel.from_pretrained("{here}/base", add_pooling_layer=False)
model = PeftModel.from_pretrained(base, "{here}")
```
The adapters are low-rank corrections of the frozen weights in `base`; `model.merge_and_unload()` adds them in."""

_MAE = """\
```python
from transformers import ViTMAEForPreTraining

model = ViTMAEForPreTraining.from_pretrained("{here}/masked_autoencoder")
```"""

_TIMM = """\
The names are those of timm and of the masked autoencoder's release, which ViTDet-style codes read; the positions are a tensor.
`model.pth` holds the same tensors under the key `model`.
```python
import json
from functools import partial

import timm.models.vision_transformer as vit
import torch
from safetensors.torch import load_file

config = json.load(open("{here}/config.json"))
norm_layer = partial(torch.nn.LayerNorm, eps=config["norm_eps"])
model = vit.VisionTransformer(**config["model_args"], norm_layer=norm_layer)
model.load_state_dict(load_file("{here}/model.safetensors"))
```"""

_AUTO = """\
From a picture to its caption in transformers, by the code that comes with the weights (`modeling_captioner.py`, which the first
`from_pretrained` agrees to run; the others need no code):
```python
from transformers import AutoImageProcessor, AutoModel, AutoTokenizer

model = AutoModel.from_pretrained("{here}", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("{here}", trust_remote_code=False)
pixels = AutoImageProcessor.from_pretrained("{here}")("picture.jpg", return_tensors="pt")
print(tokenizer.batch_decode(model.generate(**pixels), skip_special_tokens=True))  # num_beams=4 for a beam search
```
The loss of captions that are given, one mean over the tokens of each, in nats:
```python
texts = tokenizer(["a picture"], return_tensors="pt", padding=True, truncation=True)
print(model(**pixels, **texts).loss)
```
A captioner is no VisionEncoderDecoderModel: no decoder of transformers has its post-norm blocks, whose memory is a projection of
the image tokens with positions and a type embedding of its own."""

_IMAGES = (
    "`preprocessor_config.json` states the preprocessing of evaluation: the largest centred square, resized to the image size "
    "(bicubic), ImageNet's mean and standard deviation. With Pillow it gives the project's pixels; with torchvision installed, "
    'transformers resizes by that instead, and pixels differ by rounding (`backend="pil"` avoids it). A picture that is named '
    "by its path is turned by its EXIF orientation, as in the project. Put transparent pictures on white first, as the project "
    "does, and bring pictures of 16 bits a channel to 8."
)


def model_card(opened: OpenedModel, form: str, card: PrivacyCard | None, reason: str) -> str:
    """The page.

    Args:
        form: as in `trainer.weights.export`.
        card: the privacy card of the run, or None where nothing attests one.
        reason: then why not.
    """
    manifest, kind = opened.manifest, opened.task.kind
    name, shown = cell(manifest.get("run", "model")), kind.replace("_", " ")
    what = {"safetensors": shown, "peft": f"adapters of the encoder of a {shown}"}.get(
        form, f"encoder of a {shown}"
    )
    formal = "true" if card is not None and card.formal_guarantee else "false"
    if card is None:
        privacy = (
            f"**Not attested** (formal_guarantee: false): {cell(reason)}. Nothing here proves a guarantee, so no epsilon is "
            "stated; treat the weights as if they were trained without privacy."
        )
    elif not card.formal_guarantee:
        reasons = bullets(cell(why) for why in card.reasons)
        privacy = f"**formal_guarantee: false. No epsilon is claimed.** Reasons:\n\n{reasons}"
    else:
        epsilon = (
            "no finite epsilon" if card.epsilon is None else f"epsilon {rounded_up(card.epsilon)}"
        )
        behind = (
            ""
            if card.composition is None
            else ", composed with what the private runs behind its weights had spent"
        )
        privacy = (
            f"**formal_guarantee: true, {epsilon} at delta {card.delta:.6g}**, of every attempt that the run's ledger holds (so "
            f"at least that of this checkpoint){behind}. The card below says what that means and how to recheck it; "
            "`privacy_card.json` holds it for programs."
        )
    origin = [
        f"training data: declared {cell(manifest.get('training_data', {}).get('provenance', 'unknown'))}",
        f"before training: {cell(initialisation_statement(manifest))}",
        f"tokenizer: SHA-256 {cell(manifest.get('tokenizer_sha256', 'none'))}",
    ]
    loading = [
        {"timm": _TIMM, "peft": _PEFT, "hf": f"The encoder:\n\n{_VIT}", "safetensors": ""}[
            form
        ].format(here=".")
    ]
    own = form == "safetensors"
    whole = own or (form == "hf" and kind != "encoder")
    if whole:
        here = "." if own else f"./{kind}"
        page = _MAE if form == "hf" and kind == "masked_autoencoder" else _OWN
        loading += [f"The whole {shown}:", page.format(here=here, use=_USES[kind])]
        loading += [_AUTO.format(here=here)] if kind == "captioner" else []
    parts = [
        f"---\nlibrary_name: {({'hf': 'transformers', 'timm': 'timm', 'peft': 'peft'}).get(form, 'safetensors')}\n"
        f"pipeline_tag: {'image-to-text' if kind == 'captioner' and own else 'image-feature-extraction'}\n"
        f"tags: [vision{', differential-privacy' if formal == 'true' else ''}]\n"
        f"formal_guarantee: {formal}\nguarantee_attested: {'false' if card is None else 'true'}\n---",
        f"# {name}, step {manifest['step']:,}",
        f"The {what} ({cell(manifest['model']['size'])}) after step {manifest['step']:,} of run {name}.",
        f"## Privacy\n\n{privacy}",
        f"## Where the weights come from\n\n{bullets(origin)}",
        "## Loading\n\n" + "\n\n".join(filter(None, loading)),
        f"## Images\n\n{_IMAGES}",
    ]
    if card is not None:
        parts.append(re.sub(r"^#", "##", to_markdown(card), flags=re.MULTILINE))
    return "\n\n".join(parts).rstrip() + "\n"
