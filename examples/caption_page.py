"""Serves a page that captions pictures and states the privacy of its weights.

    pip install gradio 'transformers>=5'
    python launch_scripts/export.py --checkpoint runs/latest --format safetensors runs/captioner
    python examples/caption_page.py runs/captioner

The model's code comes with the weights, and this program runs it: open only weights that you have
exported, or whose exporter you trust.
"""

import json
import math
import sys
from pathlib import Path

import gradio
from PIL import Image
from transformers import AutoImageProcessor, AutoModel, AutoTokenizer

folder = Path(sys.argv[1])
model = AutoModel.from_pretrained(folder, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(folder)
processor = AutoImageProcessor.from_pretrained(folder)
about = json.loads((folder / "config.json").read_text())["about"]
privacy = "These weights have no formal guarantee of privacy."
if about["formal_guarantee"]:  # rounded up, as the card does
    epsilon = math.ceil(1000 * about["epsilon"]) / 1000
    privacy = (
        f"Trained with epsilon {epsilon:g} at delta {about['delta']:g}; "
        "privacy_card.json says of what."
    )


def caption(picture: Image.Image) -> str:
    """The best of a beam search."""
    pixels = processor(picture.convert("RGB"), return_tensors="pt")
    return str(
        tokenizer.batch_decode(model.generate(**pixels, num_beams=4), skip_special_tokens=True)[0]
    )


gradio.Interface(
    caption, gradio.Image(type="pil"), gradio.Text(), title=about["run"], description=privacy
).launch()
