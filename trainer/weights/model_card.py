"""README.md of an exported model: its content, its privacy, its origin, and how to load it."""

import re

from privacy.accounting.rounding import rounded_up
from privacy.card.model import PrivacyCard
from privacy.card.render import bullets, cell, to_markdown
from trainer.weights.open_model import OpenedModel
from trainer.weights.provenance import initialisation_statement

_VIT = """\
```python
from transformers import AutoImageProcessor, ViTModel

model = ViTModel.from_pretrained("{folder}", add_pooling_layer=False)
pixels = AutoImageProcessor.from_pretrained("{folder}")("picture.jpg", return_tensors="pt")
tokens = model(**pixels).last_hidden_state  # class token, then patches in row order
```
The tokens are normalised by the encoder's last LayerNorm. ViTModel's pooler was never trained:
leave it out."""

_COMPLETE = """\
The folder `models` holds the source that builds the model; it needs only torch and safetensors.
```python
import sys
from pathlib import Path

sys.path.insert(0, "{folder}")
from models.converters.native import load_model

model = load_model(Path("{folder}"))
{use}
```"""

_USES = {
    "captioner": """# mean cross-entropy of each caption, in nats
loss_B = model(images_BCHW, tokens_BL, token_mask_BL)
# scores of the token after each of tokens_BL, from bos on
logits_BLV = model(images_BCHW, tokens_BL, output="logits")""",
    "masked_autoencoder": """# mask_BP: True where hidden
predicted_BPQ = model(images_BCHW, mask_BP, output="patches")""",
    "classifier": 'logits_BK = model(images_BCHW, output="logits")',
    "encoder": "tokens_BTD = model(images_BCHW)",
}

_PEFT = """\
```python
from peft import PeftModel
from transformers import ViTModel

base = ViTModel.from_pretrained("{folder}/base", add_pooling_layer=False)
model = PeftModel.from_pretrained(base, "{folder}")
```
The adapters are low-rank corrections of the frozen weights in `base`; `model.merge_and_unload()`
adds them in."""

_MAE = """\
```python
from transformers import ViTMAEForPreTraining

model = ViTMAEForPreTraining.from_pretrained("{folder}/masked_autoencoder")
```"""

_TIMM = """\
The names are those of timm and of the masked autoencoder's release, which ViTDet-style codes read;
the positions are a tensor. `model.pth` holds the same tensors under the key `model`.
```python
import json
from functools import partial

import timm.models.vision_transformer as vit
import torch
from safetensors.torch import load_file

config = json.load(open("{folder}/config.json"))
norm_layer = partial(torch.nn.LayerNorm, eps=config["norm_eps"])
model = vit.VisionTransformer(**config["model_args"], norm_layer=norm_layer)
model.load_state_dict(load_file("{folder}/model.safetensors"))
```"""

_AUTO = """\
From a picture to its caption in transformers, by the code that comes with the weights
(`modeling_captioner.py`, which the first `from_pretrained` agrees to run; the others need no code):
```python
from transformers import AutoImageProcessor, AutoModel, AutoTokenizer

model = AutoModel.from_pretrained("{folder}", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("{folder}", trust_remote_code=False)
pixels = AutoImageProcessor.from_pretrained("{folder}")("picture.jpg", return_tensors="pt")
captions = model.generate(**pixels)  # num_beams=4 for a beam search
print(tokenizer.batch_decode(captions, skip_special_tokens=True))
```
The loss of captions that are given, one mean over the tokens of each, in nats:
```python
texts = tokenizer(["a picture"], return_tensors="pt", padding=True, truncation=True)
print(model(**pixels, **texts).loss)
```
A captioner is not a VisionEncoderDecoderModel: transformers has no decoder with its post-norm
blocks, whose memory is a projection of the image tokens with positions and a type embedding."""

_IMAGES = (
    "`preprocessor_config.json` states the preprocessing of evaluation: the largest centred "
    "square, resized to the image size (bicubic), ImageNet's mean and standard deviation. With "
    "Pillow it gives the project's pixels; with torchvision installed, transformers resizes by "
    'that instead, and pixels differ by rounding (`backend="pil"` avoids it). A picture that is '
    "named by its path is turned by its EXIF orientation, as in the project. Put transparent "
    "pictures on white first, as the project does, and bring pictures of 16 bits a channel to 8."
)


def model_card(opened: OpenedModel, form: str, card: PrivacyCard | None, reason: str) -> str:
    """Returns the text of the page.

    Args:
        form: as in `trainer.weights.export`.
        card: the privacy card of the run, or None where no ledger attests one.
        reason: the reason for None.
    """
    manifest = opened.manifest
    kind = opened.task.kind
    run_name = cell(manifest.get("run", "model"))
    kind_name = kind.replace("_", " ")
    titles = {"safetensors": kind_name, "peft": f"adapters of the encoder of a {kind_name}"}
    title = titles.get(form, f"encoder of a {kind_name}")
    formal = "true" if card is not None and card.formal_guarantee else "false"
    if card is None:
        privacy = (
            f"**Not attested** (formal_guarantee: false): {cell(reason)}. No ledger proves a "
            "guarantee, so no epsilon is stated; treat the weights as if they were trained "
            "without privacy."
        )
    elif not card.formal_guarantee:
        reasons = bullets(cell(card_reason) for card_reason in card.reasons)
        privacy = f"**formal_guarantee: false. No epsilon is claimed.** Reasons:\n\n{reasons}"
    else:
        if card.epsilon is None:
            epsilon = "no finite epsilon"
        else:
            epsilon = f"epsilon {rounded_up(card.epsilon)}"
        composition = ""
        if card.composition is not None:
            composition = ", composed with the spending of the private runs behind its weights"
        privacy = (
            f"**formal_guarantee: true, {epsilon} at delta {card.delta:.6g}**, of all attempts in "
            f"the run's ledger (so at least that of this checkpoint){composition}. The card below "
            "says what that means and how to recheck it; `privacy_card.json` has the same facts "
            "for programs."
        )
    provenance = manifest.get("training_data", {}).get("provenance", "unknown")
    origin = [
        f"training data: declared {cell(provenance)}",
        f"before training: {cell(initialisation_statement(manifest))}",
        f"tokenizer: SHA-256 {cell(manifest.get('tokenizer_sha256', 'none'))}",
    ]
    pages = {"timm": _TIMM, "peft": _PEFT, "hf": f"The encoder:\n\n{_VIT}", "safetensors": ""}
    loading = [pages[form].format(folder=".")]
    is_safetensors = form == "safetensors"
    if is_safetensors or (form == "hf" and kind != "encoder"):
        folder = "." if is_safetensors else f"./{kind}"
        page = _MAE if form == "hf" and kind == "masked_autoencoder" else _COMPLETE
        loading += [f"The whole {kind_name}:", page.format(folder=folder, use=_USES[kind])]
        if kind == "captioner":
            loading.append(_AUTO.format(folder=folder))
    libraries = {"hf": "transformers", "timm": "timm", "peft": "peft"}
    library = libraries.get(form, "safetensors")
    writes_captions = kind == "captioner" and is_safetensors
    pipeline = "image-to-text" if writes_captions else "image-feature-extraction"
    tags = "vision, differential-privacy" if formal == "true" else "vision"
    attested = "false" if card is None else "true"
    metadata = (
        f"---\nlibrary_name: {library}\npipeline_tag: {pipeline}\ntags: [{tags}]\n"
        f"formal_guarantee: {formal}\nguarantee_attested: {attested}\n---"
    )
    step = f"step {manifest['step']:,}"
    size = cell(manifest["model"]["size"])
    parts = [
        metadata,
        f"# {run_name}, {step}",
        f"The {title} ({size}) after {step} of run {run_name}.",
        f"## Privacy\n\n{privacy}",
        f"## Where the weights come from\n\n{bullets(origin)}",
        "## Loading\n\n" + "\n\n".join(filter(None, loading)),
        f"## Images\n\n{_IMAGES}",
    ]
    if card is not None:
        parts.append(re.sub(r"^#", "##", to_markdown(card), flags=re.MULTILINE))
    return "\n\n".join(parts).rstrip() + "\n"
