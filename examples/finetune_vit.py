"""A ViT of transformers learns digits privately: all of it, or low-rank adapters of peft and the head.

    python examples/finetune_vit.py [RUN_DIR] [--lora]

The weights are random and tiny, so that this runs without a download; in place of the config take
`ViTForImageClassification.from_pretrained(FOLDER, num_labels=10)` with weights of public data.
"""

import sys

import torch
from auditable_dp.loop import PrivateLoop
from auditable_dp.loop.hugging_face import fields
from peft import LoraConfig, get_peft_model
from sklearn.datasets import load_digits
from transformers import ViTConfig, ViTForImageClassification

with_lora = "--lora" in sys.argv
folders = [word for word in sys.argv[1:] if not word.startswith("--")]
digits = load_digits()
pixels, labels = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, torch.tensor(digits.target)
train = [{"pixel_values": x, "labels": y} for x, y in zip(pixels[:1500], labels[:1500], strict=True)]

torch.manual_seed(0)
sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
config = ViTConfig(image_size=8, patch_size=2, num_channels=1, num_labels=10, **sizes)  # its dropout is 0
model = ViTForImageClassification(config)
if with_lora:
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["classifier"]))
trainable = [weight for weight in model.parameters() if weight.requires_grad]
with PrivateLoop(
    model, torch.optim.AdamW(trainable, lr=5e-3), train,
    example=fields(model),  # pixel values and labels; the loss per example is known of this class
    run_dir=folders[0] if folders else f"runs/finetune_vit{'_lora' * with_lora}",
    expected_batch_size=256, num_steps=40, target_epsilon=8.0, micro_batch_size=64,
) as loop:  # fmt: skip
    for step in loop:
        if step.number % 10 == 0:
            right = (model(pixels[1500:]).logits.argmax(1) == labels[1500:]).float().mean()
            print(f"step {step.number}: epsilon {step.epsilon:.2f}, {right:.1%} of the held-out digits are right")
print(f"{sum(w.numel() for w in trainable):,} weights trained; epsilon {loop.epsilon:.4f} at delta {loop.delta:.2g}")
