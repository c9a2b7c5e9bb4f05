"""Memory of a training with 302M parameters in one process, from the first micro-batch to the end of the second step.

    python benchmarks/loop_memory.py --json     # about 5 minutes; needs 12 GiB

18 linear layers of width 4,096 under plain SGD, so that nothing but the weights (4 bytes a parameter) stands beside gradients
and sums. `bytes_per_parameter` is what the process holds at its peak above what it held when model, data and optimizer were
ready. Opacus runs as its tutorials do, with its
BatchMemoryManager, in micro-batches of the same size.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

WIDTH, DEPTH, NUM_EXAMPLES, BATCH, MICRO_BATCH = 4096, 18, 64, 16, 8
NUM_STEPS = 2


def model() -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)])


def non_private(net: nn.Sequential, optimizer: torch.optim.SGD, data: TensorDataset) -> None:
    """Gradients added up over two micro-batches."""
    x, y = data.tensors
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        for rows in torch.arange(BATCH).split(MICRO_BATCH):
            F.cross_entropy(net(x[rows]), y[rows]).backward()
        optimizer.step()


def private_loop(net: nn.Sequential, optimizer: torch.optim.SGD, data: TensorDataset) -> None:
    from privacy.loop import PrivateLoop, floats, integers

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(net(x), y, reduction="none")

    with (
        tempfile.TemporaryDirectory() as folder,
        PrivateLoop(
            net, optimizer, data, example=(floats(WIDTH), integers(WIDTH)), loss=loss, run_dir=Path(folder) / "run",
            expected_batch_size=BATCH, num_steps=NUM_STEPS + 1, noise_multiplier=1.0, target_delta=1e-3, max_grad_norm=1.0,
            micro_batch_size=MICRO_BATCH, save_every=10 * NUM_STEPS,
        ) as loop,
    ):  # fmt: skip
        forget_peak()
        for _ in range(NUM_STEPS):
            loop.step()
        note_peak()


def opacus(mode: str) -> Callable[[nn.Sequential, torch.optim.SGD, TensorDataset], None]:
    def train(net: nn.Sequential, optimizer: torch.optim.SGD, data: TensorDataset) -> None:
        from opacus import PrivacyEngine
        from opacus.utils.batch_memory_manager import BatchMemoryManager

        engine = PrivacyEngine()
        made = engine.make_private(
            module=net, optimizer=optimizer, data_loader=DataLoader(data, batch_size=BATCH), noise_multiplier=1.0,
            max_grad_norm=1.0, grad_sample_mode=mode, criterion=nn.CrossEntropyLoss(),
        )  # fmt: skip
        wrapped, private = made[0], made[1]
        criterion = made[2] if mode == "ghost" else nn.CrossEntropyLoss()
        with BatchMemoryManager(
            data_loader=made[-1], max_physical_batch_size=MICRO_BATCH, optimizer=private
        ) as batches:
            for x, y in batches:
                private.zero_grad()
                criterion(wrapped(x), y).backward()
                private.step()
                if engine.accountant.history and engine.accountant.history[-1][2] == NUM_STEPS:
                    return

    return train


SYSTEMS = {
    "non_private": non_private,
    "private_loop": private_loop,
    "opacus_hooks": opacus("hooks"),
    "opacus_ghost": opacus("ghost"),
}
peak = 0


def resident(field: str) -> int:
    """Bytes, from the kernel: VmRSS now, or VmHWM, the most so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


def forget_peak() -> None:
    """The start is not what is compared here; its peak is said."""
    print(f"at the start {resident('VmHWM') / 2**30:.2f} GiB", file=sys.stderr, flush=True)
    Path("/proc/self/clear_refs").write_text("5")


def note_peak() -> None:
    """Before the checkpoint at the end."""
    global peak
    peak = resident("VmHWM")


def measure(system: str) -> float:
    """Runs in a process of its own."""
    torch.manual_seed(0)
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(NUM_EXAMPLES, WIDTH), torch.arange(NUM_EXAMPLES))
    start = resident("VmRSS")
    SYSTEMS[system](net, optimizer, data)
    return ((peak or resident("VmHWM")) - start) / sum(p.numel() for p in net.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, on one line")
    parser.add_argument("--system", choices=list(SYSTEMS), help="only this one, in this process")
    options = parser.parse_args()
    if options.system:
        print(measure(options.system))
        return
    found = {}
    for system in SYSTEMS:
        print(system, file=sys.stderr, flush=True)
        command = [sys.executable, __file__, "--system", system]
        found[system] = round(float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout), 2)
    report = {"parameters": DEPTH * WIDTH**2, "micro_batch": MICRO_BATCH, "bytes_per_parameter": found}
    print(json.dumps(report) if options.json else json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
