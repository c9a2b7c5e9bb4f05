"""Has a ViT learn digits by private steps of transformers' Trainer: all of it, or adapters of peft.

    python examples/finetune_vit.py [RUN_DIR] [--lora]

The weights are random and tiny, so that this runs without a download; adapters over random weights
learn little. In place of the config take
`ViTForImageClassification.from_pretrained(FOLDER, num_labels=10)`, with weights of public data.
"""

import sys

import torch
from auditable_dp.loop.hugging_face import fields
from auditable_dp.loop.trainer import PrivateTrainer
from peft import LoraConfig, get_peft_model
from sklearn.datasets import load_digits
from transformers import TrainingArguments, ViTConfig, ViTForImageClassification

with_lora = "--lora" in sys.argv
folders = [word for word in sys.argv[1:] if not word.startswith("--")]
run_dir = folders[0] if folders else f"runs/finetune_vit{'_lora' * with_lora}"
digits = load_digits()
pixels, labels = (
    torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1,
    torch.tensor(digits.target),
)
items = [{"pixel_values": x, "labels": y} for x, y in zip(pixels, labels, strict=True)]

torch.manual_seed(0)
sizes = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
config = ViTConfig(
    image_size=8, patch_size=4, num_channels=1, num_labels=10, initializer_range=0.1, **sizes
)
model = ViTForImageClassification(config)  # its dropout is 0
if with_lora:
    model = get_peft_model(
        model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["classifier"])
    )
print(f"{sum(w.numel() for w in model.parameters() if w.requires_grad):,} weights are trained")
trainer = PrivateTrainer(
    model,
    TrainingArguments(
        f"{run_dir}-output",
        max_steps=40,
        learning_rate=1e-2,
        per_device_train_batch_size=64,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    ),
    train_dataset=items[:1500],
    eval_dataset=items[1500:],
    eval_is_public=True,  # the held-out digits are public here
    compute_metrics=lambda found: {
        "accuracy": float((found.predictions.argmax(1) == found.label_ids).mean())
    },
    example=fields(model),
    run_dir=run_dir,
    starts_from="public",
    expected_batch_size=512,
    target_epsilon=8.0,
)
trainer.train()
print(f"{trainer.evaluate()['eval_accuracy']:.1%} of the held-out digits are right")
print(f"{trainer.loop.claim}; {trainer.loop.run_dir}/verify.py rechecks it")
