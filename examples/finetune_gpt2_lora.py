"""Has adapters of a GPT-2 learn numpy's documentation, by private steps of transformers' Trainer.

    python examples/finetune_gpt2_lora.py [RUN_DIR]

The weights are random and tiny, so that this runs without a download; in place of the config take
`GPT2LMHeadModel.from_pretrained(FOLDER)` with weights of public data, and its tokenizer.
"""

import sys

import numpy
import torch
from auditable_dp.loop.hugging_face import fields
from auditable_dp.loop.trainer import PrivateTrainer
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

LENGTH, PADDING = 48, 0
run_dir = sys.argv[1] if len(sys.argv) > 1 else "runs/finetune_gpt2_lora"
texts = [value.__doc__ or "" for value in vars(numpy).values()]
lines = sorted({line.strip() for text in texts for line in text.splitlines()[:8] if len(line) > 20})
tokens = [list(line.encode())[:LENGTH] for line in lines]
train = [
    {
        "input_ids": torch.tensor(text + [PADDING] * (LENGTH - len(text))),
        "attention_mask": torch.tensor([1] * len(text) + [0] * (LENGTH - len(text))),
        "labels": torch.tensor(text + [-100] * (LENGTH - len(text))),
    }
    for text in tokens
]

torch.manual_seed(0)
sizes = {"vocab_size": 256, "n_positions": LENGTH, "n_embd": 64, "n_layer": 2, "n_head": 4}
model = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
lora = LoraConfig(
    r=8, target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True, task_type="CAUSAL_LM"
)
model = get_peft_model(model, lora)
model.print_trainable_parameters()
trainer = PrivateTrainer(
    model,
    TrainingArguments(
        f"{run_dir}-output",
        max_steps=20,
        learning_rate=1e-2,
        per_device_train_batch_size=32,
        logging_steps=5,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    ),
    train_dataset=train,
    example=fields(model, length=LENGTH),  # the loss of each text is known of this class
    run_dir=run_dir,
    starts_from="public",
    expected_batch_size=64,
    target_epsilon=8.0,
)
trainer.train()
print(f"{len(train)} lines; {trainer.loop.claim}")
model.save_pretrained(f"{run_dir}-adapters")  # what peft reads; the weights carry the epsilon
