"""A training loop of one's own: a small network learns digits at epsilon 3.

python examples/own_loop.py [RUN_DIR]        # the same command again resumes an unfinished run
"""

import sys

import torch
import torch.nn.functional as F
from auditable_dp.loop import PrivateLoop, floats, integers
from sklearn.datasets import load_digits

digits = load_digits()
images, labels = (
    torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16,
    torch.tensor(digits.target),
)
train = torch.utils.data.TensorDataset(
    images[:1500], labels[:1500]
)  # the last 297 are held out, and public here

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
with PrivateLoop(
    model,
    optimizer,
    train,
    loss=lambda x, y: F.cross_entropy(model(x), y, reduction="none"),  # one per example
    example=(floats(64), integers(10)),
    run_dir=sys.argv[1] if len(sys.argv) > 1 else "runs/own_loop",
    starts_from="public",  # no private run has trained these weights
    expected_batch_size=256,
    num_steps=60,
    target_epsilon=3.0,
) as loop:
    for step in loop:
        if step.number % 20 == 0:
            right = (model(images[1500:]).argmax(1) == labels[1500:]).float().mean()
            print(
                f"step {step.number}: epsilon {step.epsilon:.2f}, "
                f"{right:.1%} of the held-out digits are right"
            )
print(f"{loop.claim}; card: {loop.write_card()}")
