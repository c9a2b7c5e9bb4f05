"""The same loop on several ranks, with `accelerate`.

    torchrun --standalone --nproc_per_node 2 examples/with_accelerate.py [RUN_DIR]  # two CPU ranks
    accelerate launch --num_processes 2 examples/with_accelerate.py [RUN_DIR]       # two GPUs

The loop reduces clipped sums by itself, once per logical batch, so nothing is given to `prepare()`:
a wrapped model would reduce gradients that are not clipped yet.
"""

import os
import sys

import torch
import torch.nn.functional as F
from accelerate import Accelerator, InitProcessGroupKwargs
from auditable_dp.loop import PrivateLoop, floats, integers
from sklearn.datasets import load_digits

# Ranks agree about their data and the ledger through CPU tensors, which NCCL alone does not carry.
on_gpus = torch.cuda.is_available() and int(os.environ.get("WORLD_SIZE", "1")) > 1
groups = [InitProcessGroupKwargs(backend="cpu:gloo,cuda:nccl")] if on_gpus else []
accelerator = Accelerator(
    cpu=not torch.cuda.is_available(), kwargs_handlers=groups
)  # the process group, the device
digits = load_digits()
images, labels = (
    torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16,
    torch.tensor(digits.target),
)
train = torch.utils.data.TensorDataset(images[:1500], labels[:1500])

torch.manual_seed(0)  # equal weights on all ranks
model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)).to(
    accelerator.device
)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
with PrivateLoop(
    model,
    optimizer,
    train,
    loss=lambda x, y: F.cross_entropy(model(x), y, reduction="none"),
    example=(floats(64), integers(10)),
    run_dir=sys.argv[1] if len(sys.argv) > 1 else "runs/with_accelerate",
    starts_from="public",  # no private run has trained these weights
    expected_batch_size=256,
    num_steps=60,
    target_epsilon=3.0,
) as loop:
    for step in loop:
        if step.number % 20 == 0:
            accelerator.print(
                f"step {step.number} on {accelerator.num_processes} ranks: "
                f"epsilon {step.epsilon:.2f}"
            )
right = (
    (model(images[1500:].to(accelerator.device)).argmax(1).cpu() == labels[1500:]).float().mean()
)
accelerator.print(f"{loop.claim}; {right:.1%} of the held-out digits are right")
accelerator.end_training()
