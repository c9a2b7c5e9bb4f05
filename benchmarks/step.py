"""What clipping costs: time, memory and FLOPs of one micro-batch, against non-private training and Opacus.

    python benchmarks/step.py --json

Interleaved rounds in one process for time (the ratio of a round is against the non-private step of the same round; the
median over rounds is reported), a process of its own per mode for memory (maximum resident size on CPU, allocator peak on
CUDA), torch's FlopCounterMode for FLOPs. With --json one JSON object on stdout, everything else on stderr.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode, register_flop_formula  # noqa: E402

from models.captioner import build_captioner  # noqa: E402
from models.config import VitConfig, captioner_config  # noqa: E402
from models.vit import VisionTransformer  # noqa: E402
from privacy.clipping import ClippedSum  # noqa: E402

MODES = ("bookkeeping", "two_pass", "opacus_ghost", "opacus_hooks")
Step = Callable[[], None]


class Classifier(nn.Module):
    """ViT-S/16 with a linear head on the class token."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = VisionTransformer(VitConfig(width=384, depth=12, num_heads=6))
        self.head = nn.Linear(384, 1000)

    def forward(self, images_BCHW: Tensor, labels_B: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.encoder(images_BCHW)[:, 0]).float(), labels_B, reduction="none")


@dataclass(frozen=True)
class Workload:
    """A model with made-up inputs."""

    name: str
    batch_size: int
    rounds: int
    build: Callable[[], nn.Module]

    def inputs(self, device: torch.device) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(self.batch_size, 3, 224, 224, generator=generator)
        if self.name == "vit_s_16":
            found = {"images_BCHW": images, "labels_B": torch.randint(0, 1000, (self.batch_size,), generator=generator)}
        else:
            tokens = torch.randint(0, 30522, (self.batch_size, 40), generator=generator)
            found = {
                "images_BCHW": images,
                "tokens_BL": tokens,
                "token_mask_BL": torch.ones_like(tokens, dtype=torch.bool),
            }
        return {name: value.to(device) for name, value in found.items()}


def _classifier() -> nn.Module:
    model = Classifier()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)
    return model


def _captioner(size: str) -> nn.Module:
    return build_captioner(captioner_config(size), generator=torch.Generator().manual_seed(0))


CPU_WORKLOADS = {
    w.name: w
    for w in (
        Workload("vit_s_16", 16, 5, _classifier),
        Workload("dpcap_base", 8, 3, lambda: _captioner("dpcap_base")),
    )
}
CUDA_WORKLOADS = {"dpcap_large": Workload("dpcap_large", 64, 5, lambda: _captioner("dpcap_large"))}


def make_step(mode: str, workload: Workload, device: torch.device, dtype: torch.dtype) -> Step:
    """One micro-batch in the given mode, after which the clipped sum (or the gradient) is ready."""
    torch.manual_seed(0)
    model = workload.build().to(device, dtype)
    inputs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in workload.inputs(device).items()}
    if mode == "non_private":
        return _plain(model, inputs)
    if mode in ("bookkeeping", "two_pass"):
        return _ours(model, inputs, mode)
    for name, parameter in model.named_parameters():  # raw ones, which would turn the whole model into one vmap leaf
        if "token" in name.rpartition(".")[2] or "type_embedding" in name:
            parameter.requires_grad_(False)
    for module in model.modules():  # its embedding rule views the ids
        if isinstance(module, nn.Embedding):
            module.register_forward_pre_hook(lambda _, arguments: (arguments[0].contiguous(),))
    return _opacus_ghost(model, inputs) if mode == "opacus_ghost" else _opacus_hooks(model, inputs)


def _plain(model: nn.Module, inputs: dict[str, Tensor]) -> Step:
    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(**inputs).sum().backward()

    return step


def _ours(model: nn.Module, inputs: dict[str, Tensor], mode: Any) -> Step:
    clipped = ClippedSum(model, 1.0, mode=mode)
    is_padding_B = torch.zeros(len(inputs["images_BCHW"]), dtype=torch.bool, device=inputs["images_BCHW"].device)

    def step() -> None:
        clipped.add_micro_batch(model, inputs, is_padding_B)

    return step


def _opacus_ghost(model: nn.Module, inputs: dict[str, Tensor]) -> Step:
    from opacus.grad_sample import GradSampleModuleFastGradientClipping

    wrapped = GradSampleModuleFastGradientClipping(
        model, max_grad_norm=1.0, use_ghost_clipping=True, loss_reduction="sum", batch_first=True
    )

    def step() -> None:
        wrapped.zero_grad(set_to_none=True)
        loss_B = wrapped(**inputs)
        wrapped.enable_hooks()
        loss_B.sum().backward(retain_graph=True)
        factor_B = wrapped.get_clipping_coef()
        wrapped.zero_grad(set_to_none=True)
        wrapped.disable_hooks()
        (factor_B * loss_B).sum().backward()
        wrapped.enable_hooks()

    return step


def _opacus_hooks(model: nn.Module, inputs: dict[str, Tensor]) -> Step:
    from opacus.grad_sample import GradSampleModule

    wrapped = GradSampleModule(model, loss_reduction="sum", batch_first=True)
    trainable = [p for p in wrapped.parameters() if p.requires_grad]

    def step() -> None:
        wrapped.zero_grad(set_to_none=True)
        wrapped(**inputs).sum().backward()
        samples = [p.grad_sample for p in trainable]
        norm_B = torch.stack([s.flatten(1).norm(dim=1) for s in samples], 1).norm(dim=1)
        factor_B = (1.0 / (norm_B + 1e-6)).clamp(max=1)
        for parameter, sample in zip(trainable, samples, strict=True):
            parameter.summed_grad = torch.einsum("b,b...->...", factor_B, sample)
            parameter.grad_sample = None

    return step


def time_ratios(workload: Workload, device: torch.device, dtype: torch.dtype) -> tuple[dict[str, float], float]:
    """Median over rounds of mode / non-private in the same round, and the median non-private seconds."""
    steps = {mode: make_step(mode, workload, device, dtype) for mode in ("non_private", *MODES)}
    seconds: dict[str, list[float]] = {mode: [] for mode in steps}
    for round_number in range(workload.rounds + 1):
        for mode, step in steps.items():
            elapsed = _timed(step, device)
            if round_number > 0:  # the first round warms up
                seconds[mode].append(elapsed)
        _note(f"{workload.name}: round {round_number} of {workload.rounds}")
    baseline = seconds["non_private"]
    ratios = {m: statistics.median(a / b for a, b in zip(seconds[m], baseline, strict=True)) for m in MODES}
    return ratios, statistics.median(baseline)


def _timed(step: Step, device: torch.device) -> float:
    started = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


@register_flop_formula(torch.ops.aten.addmm_)
def _addmm_flops(total_shape: Any, a_shape: Any, b_shape: Any, *_: Any, **__: Any) -> int:
    """torch counts `addmm`, but not the in-place form that the accumulators use."""
    return 2 * a_shape[0] * a_shape[1] * b_shape[1]


def flop_ratios(workload: Workload, device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """FLOPs of matrix products and attention, as torch counts them, against non-private."""
    counts = {}
    for mode in ("non_private", *MODES):
        step = make_step(mode, workload, device, dtype)
        with FlopCounterMode(display=False) as counter:
            step()
        counts[mode] = counter.get_total_flops()
    return {mode: counts[mode] / counts["non_private"] for mode in MODES}


def peak_memory_ratios(workload: Workload) -> dict[str, float]:
    """Peak of a process that does two steps, against the non-private one; includes interpreter and libraries."""
    peaks = {}
    for mode in ("non_private", *MODES):
        command = [sys.executable, __file__, "--peak_memory_of", mode, "--workload", workload.name]
        peaks[mode] = int(subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout)
        _note(f"{workload.name}: {mode} peaks at {peaks[mode] / 2**20:.0f} MiB")
    return {mode: peaks[mode] / peaks["non_private"] for mode in MODES}


def _peak_memory(mode: str, workload: Workload, device: torch.device, dtype: torch.dtype) -> int:
    step = make_step(mode, workload, device, dtype)
    for _ in range(2):
        step()
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return _high_water_mark()


def _high_water_mark() -> int:
    """Largest resident size of this process in bytes. (ru_maxrss would start at the size of the process that started it.)"""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")) * 1024


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--workload", help="only this one")
    parser.add_argument("--rounds", type=int, help="timed rounds; default 5 (ViT-S) and 3 (captioner)")
    parser.add_argument("--peak_memory_of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    workloads = CUDA_WORKLOADS if device.type == "cuda" else CPU_WORKLOADS
    if options.peak_memory_of:
        print(_peak_memory(options.peak_memory_of, workloads[options.workload], device, dtype))
        return
    chosen = [workloads[options.workload]] if options.workload else list(workloads.values())
    results = [_measure(w, device, dtype, options.rounds) for w in chosen]
    report = {"hardware": _hardware(device), "torch": torch.__version__, "dtype": str(dtype), "workloads": results}
    print(json.dumps(report) if options.json else json.dumps(report, indent=2))


def _measure(workload: Workload, device: torch.device, dtype: torch.dtype, rounds: int | None) -> dict[str, Any]:
    if rounds is not None:
        workload = Workload(workload.name, workload.batch_size, rounds, workload.build)
    flops = flop_ratios(workload, device, dtype)
    memory = peak_memory_ratios(workload)
    ratios, seconds = time_ratios(workload, device, dtype)
    return {
        "workload": workload.name,
        "batch_size": workload.batch_size,
        "rounds": workload.rounds,
        "non_private_seconds": seconds,
        "time_ratio": ratios,
        "peak_memory_ratio": memory,
        "flop_ratio": flops,
    }


def _hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


if __name__ == "__main__":
    main()
