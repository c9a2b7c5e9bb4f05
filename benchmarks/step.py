"""The cost of clipping: time, memory and FLOPs of a micro-batch, against non-private and Opacus.

    python benchmarks/step.py --json      # everything; within 12 minutes on two CPU cores
    python benchmarks/step.py --count     # FLOPs and operations alone, of large models too

Time: interleaved rounds in one process; the ratio of a round is against the non-private step of the
same round, and the median over rounds is reported. Memory: a process of its own per mode (maximum
resident size on CPU, allocator peak on CUDA). FLOPs: torch's FlopCounterMode. `operations` are
launches by mode on a CPU, counted on the meta device; `make gpu` measures the launches of a GPU.
`time_ratio` and `peak_memory_ratio` are against a non-private step that makes fresh gradients;
`..._to_accumulating` against one that adds to those of earlier micro-batches, as our modes do and
as any large logical batch needs. With --json one JSON object on stdout, everything else on stderr.
README.md has the cost model.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from benchmarks.roofline import count_operations  # noqa: E402
from models.captioner import Captioner, build_captioner  # noqa: E402
from models.config import VitConfig, captioner_config  # noqa: E402
from models.vit import VisionTransformer  # noqa: E402
from models.vocabulary_head import VocabularyHead  # noqa: E402
from privacy.certified.certified_sum import CertifiedSum  # noqa: E402
from privacy.clipping import SUMS, ClippedSum  # noqa: E402
from privacy.noise.rounded_normal import deviation_in_units  # noqa: E402
from privacy.noise.source import SystemNoise, add_noise  # noqa: E402
from privacy.plan.lattice import Lattice  # noqa: E402
from privacy.ranks.allocator import keep_freed_memory  # noqa: E402
from privacy.ranks.engine import even_layout  # noqa: E402
from privacy.sums.reduction import gather_from_owners, reduce_to_owners  # noqa: E402
from privacy.sums.totals import real_numbers_  # noqa: E402
from trainer.planner.probe import count_flops  # noqa: E402

BASELINES = ("non_private", "accumulating")
"""Ordinary training: every micro-batch is a batch, or gradients add up over micro-batches to a
logical batch."""
OURS = ("bookkeeping", "two_pass", "certified")
OPACUS = ("opacus_ghost", "opacus_hooks")
MODES = (*OURS, *OPACUS)


Step = Callable[..., None]
"""Runs a micro-batch; with `ends=True`, as at the end of a logical batch, also sets the noised sum
as the optimizer's gradients."""


class Classifier(nn.Module):
    """A ViT-S/16 with a linear head on the class token."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = VisionTransformer(VitConfig(width=384, depth=12, num_heads=6))
        self.head = nn.Linear(384, 1000)

    def forward(self, images_BCHW: Tensor, labels_B: Tensor) -> Tensor:
        """Returns the loss of each image."""
        logits_BK = self.head(self.encoder(images_BCHW)[:, 0])
        return F.cross_entropy(logits_BK.float(), labels_B, reduction="none")


@dataclass(frozen=True)
class Workload:
    """A model with made-up inputs.

    Attributes:
        rounds: number of timed rounds.
        size: of the captioner; None for the classifier.
    """

    name: str
    batch_size: int
    rounds: int
    size: str | None = None

    def model(self, device: torch.device) -> nn.Module:
        """Returns the model with weights drawn from seed 0; on the meta device without values."""
        if device.type == "meta":
            with device:
                return Classifier() if self.size is None else Captioner(captioner_config(self.size))
        if self.size is not None:
            generator = torch.Generator().manual_seed(0)
            return build_captioner(captioner_config(self.size), generator=generator)
        torch.manual_seed(0)
        model = Classifier()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
        return model

    def inputs(self, device: torch.device) -> dict[str, Tensor]:
        """Returns random images with labels or captions."""
        generator = torch.Generator().manual_seed(0)
        inputs = {"images_BCHW": torch.randn(self.batch_size, 3, 224, 224, generator=generator)}
        if self.size is None:
            inputs["labels_B"] = torch.randint(0, 1000, (self.batch_size,), generator=generator)
        else:
            tokens = torch.randint(0, 30522, (self.batch_size, 40), generator=generator)
            inputs |= {
                "tokens_BL": tokens,
                "token_mask_BL": torch.ones_like(tokens, dtype=torch.bool),
            }
        return {name: tensor.to(device) for name, tensor in inputs.items()}


CPU_WORKLOADS = {
    "vit_s_16": Workload("vit_s_16", 16, 7),
    "dpcap_base": Workload("dpcap_base", 8, 4, "dpcap_base"),
}
CUDA_WORKLOADS = {"dpcap_large": Workload("dpcap_large", 64, 5, "dpcap_large")}


def make_step(mode: str, workload: Workload, device: torch.device, dtype: torch.dtype) -> Step:
    """Returns a step in the given mode, after which the clipped sum (or the gradient) is ready."""
    model = workload.model(device).to(device, dtype)
    inputs = {}
    for name, tensor in workload.inputs(device).items():
        inputs[name] = tensor.to(dtype) if tensor.is_floating_point() else tensor
    if mode in BASELINES:

        def baseline(*, ends: bool = False) -> None:
            if mode == "non_private":
                model.zero_grad(set_to_none=True)
            model(**inputs).sum().backward()

        return baseline
    if mode in OURS:
        # C = 1; the lattice and the number of rows are those of the DP-Cap point, on 128 ranks.
        clipped: ClippedSum
        if mode == "certified":
            clipped = CertifiedSum(model, Lattice.of(1.0, 1_319_879, 0.728))
        else:
            clipped = SUMS[mode](model, 1.0, cap=1_319_879, rows=10_400)
        is_padding_B = torch.zeros(workload.batch_size, dtype=torch.bool, device=device)

        def clipped_step(*, ends: bool = False) -> None:
            clipped.add_micro_batch(model, inputs, is_padding_B)
            if ends:
                end_of_step(model, clipped)

        return clipped_step
    from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping

    # Raw parameters would turn the whole model into one vmap leaf.
    for name, parameter in model.named_parameters():
        if "token" in name.rpartition(".")[2] or "type_embedding" in name:
            parameter.requires_grad_(False)
    # Opacus' rule of an embedding views the ids.
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.register_forward_pre_hook(lambda _, arguments: (arguments[0].contiguous(),))
    # Opacus looks rules up by exact type, and would send a subclass of Linear through functorch.
    fast = GradSampleModuleFastGradientClipping
    for table in (GradSampleModule.GRAD_SAMPLERS, fast.GRAD_SAMPLERS, fast.NORM_SAMPLERS):
        table[VocabularyHead] = table[nn.Linear]
    step = _opacus_ghost(model, inputs) if mode == "opacus_ghost" else _opacus_hooks(model, inputs)

    def opacus_step(*, ends: bool = False) -> None:
        step()
        if not ends:
            return
        # As DPOptimizer.add_noise.
        for parameter in model.parameters():
            total = parameter.__dict__.pop("summed_grad", parameter.grad)
            if total is not None:
                parameter.grad = total + torch.normal(0.0, 1.0, total.shape, device=device)

    return opacus_step


def end_of_step(model: nn.Module, clipped: ClippedSum) -> None:
    """Does the work of privacy/step/step.py after the last micro-batch, on one rank."""
    parameters = dict(model.named_parameters())
    shapes = {name: p.shape for name, p in parameters.items() if p.requires_grad}
    layout = even_layout(shapes, 1)
    shards = reduce_to_owners(clipped.accumulator, clipped.exponent, layout)
    exponent = clipped.exponent
    assert exponent is not None, "there is noise"
    deviation = deviation_in_units(0.728 * clipped.sensitivity, exponent)
    for number in range(len(shards)):
        add_noise(shards[number].values, deviation, SystemNoise())
        shards[number] = shards[number]._replace(
            values=real_numbers_(shards[number].values, exponent)
        )
    first = next(iter(parameters.values()))
    gradients = gather_from_owners(shards, layout, shapes, first.dtype, first.device)
    for name, gradient in gradients.items():
        parameters[name].grad = gradient


def _opacus_ghost(model: nn.Module, inputs: dict[str, Tensor]) -> Callable[[], None]:
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


def _opacus_hooks(model: nn.Module, inputs: dict[str, Tensor]) -> Callable[[], None]:
    from opacus.grad_sample import GradSampleModule

    wrapped = GradSampleModule(model, loss_reduction="sum", batch_first=True)
    trainable = [p for p in wrapped.parameters() if p.requires_grad]

    def step() -> None:
        wrapped.zero_grad(set_to_none=True)
        wrapped(**inputs).sum().backward()
        samples = [p.grad_sample for p in trainable]
        norms = [sample.flatten(1).norm(dim=1) for sample in samples]
        norm_B = torch.stack(norms, 1).norm(dim=1)
        factor_B = (1.0 / (norm_B + 1e-6)).clamp(max=1)
        for parameter, sample in zip(trainable, samples, strict=True):
            parameter.summed_grad = torch.einsum("b,b...->...", factor_B, sample)
            parameter.grad_sample = None

    return step


OPACUS_ROUNDS = 2
"""Opacus is slow, and a factor of two or three needs no third digit."""
COUNTED = (*BASELINES, "bookkeeping", "two_pass")
"""Modes whose operations are counted."""

Ratios = dict[str, float]


def time_ratios(
    workload: Workload, device: torch.device, dtype: torch.dtype
) -> tuple[Ratios, Ratios, float]:
    """Returns the ratios to both baselines, and the median non-private seconds.

    A ratio is the median over rounds of mode / baseline in the same round.
    """
    steps = {mode: make_step(mode, workload, device, dtype) for mode in (*BASELINES, *MODES)}
    seconds: dict[str, list[float]] = {mode: [] for mode in steps}
    for round_number in range(workload.rounds + 1):
        for mode, step in steps.items():
            if mode in OPACUS and not 0 < round_number <= OPACUS_ROUNDS:
                continue
            elapsed = _timed(step, device)
            # The first round warms up.
            if round_number > 0:
                seconds[mode].append(elapsed)
        _note(f"{workload.name}: round {round_number} of {workload.rounds}")
    ratios: dict[str, Ratios] = {baseline: {} for baseline in BASELINES}
    for baseline in BASELINES:
        for mode in MODES:
            # Opacus has fewer rounds.
            rounds = zip(seconds[mode], seconds[baseline], strict=False)
            ratios[baseline][mode] = statistics.median(a / b for a, b in rounds)
    plain_seconds = statistics.median(seconds["non_private"])
    return ratios["non_private"], ratios["accumulating"], plain_seconds


def _timed(step: Callable[[], object], device: torch.device) -> float:
    start = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def flop_ratios(
    workload: Workload, device: torch.device, dtype: torch.dtype, modes: Sequence[str]
) -> dict[str, float]:
    """Returns the FLOPs of matrix products and attention by mode, divided by the non-private ones.

    On CUDA our modes are counted on the meta device.
    """
    meta = torch.device("meta")
    ratios = {}
    plain_flops: dict[torch.device, int] = {}
    for mode in modes:
        place = meta if device.type == "cuda" and mode in OURS else device
        if place not in plain_flops:
            plain_flops[place] = count_flops(make_step("non_private", workload, place, dtype))
        ratios[mode] = count_flops(make_step(mode, workload, place, dtype)) / plain_flops[place]
    return ratios


def peak_memory_ratios(workload: Workload) -> tuple[Ratios, Ratios]:
    """Returns the peaks of processes, with interpreter and libraries, against both baselines.

    Each process takes two micro-batches and the end of a step.
    """
    peaks = {}
    for mode in (*BASELINES, *MODES):
        command = [sys.executable, __file__, "--peak_memory_of", mode, "--workload", workload.name]
        process = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
        peaks[mode] = int(process.stdout)
        _note(f"{workload.name}: {mode} peaks at {peaks[mode] / 2**20:.0f} MiB")
    fresh, accumulating = (
        {mode: peaks[mode] / peaks[baseline] for mode in MODES} for baseline in BASELINES
    )
    return fresh, accumulating


def peak_memory(mode: str, workload: Workload, device: torch.device, dtype: torch.dtype) -> int:
    """Returns the bytes of this process after two micro-batches and the end of a step.

    The process must have done nothing else.
    """
    step = make_step(mode, workload, device, dtype)
    step()
    step(ends=True)
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    # The largest resident size; ru_maxrss would start at the size of the process that started this
    # one.
    status = Path("/proc/self/status").read_text().splitlines()
    line = next(line for line in status if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def largest_micro_batch(
    workload: Workload, mode: str, device: torch.device, dtype: torch.dtype
) -> int:
    """Returns the largest multiple of 32 that fits a CUDA device, and 0 if 32 does not."""
    fits = 0
    fails = 64 * 32
    while fails - fits > 32:
        size = (fits + fails) // 64 * 32
        try:
            make_step(mode, replace(workload, batch_size=size), device, dtype)()
            fits = size
        except torch.cuda.OutOfMemoryError:
            fails = size
        torch.cuda.empty_cache()
    return fits


def matrix_peak(dtype: torch.dtype) -> float:
    """Returns the FLOP/s of a plain product of large square matrices on CUDA: the best of ten."""
    size = 8192
    x = torch.randn(size, size, device="cuda", dtype=dtype)
    y = torch.randn(size, size, device="cuda", dtype=dtype)
    device = torch.device("cuda")
    best = min(_timed(lambda: torch.mm(x, y), device) for _ in range(10))
    return float(2 * size**3 / best)


def operations(workload: Workload) -> dict[str, int]:
    """Returns the launches of a micro-batch by mode, as a CPU makes them in fp32."""
    meta = torch.device("meta")
    steps = {mode: make_step(mode, workload, meta, torch.float32) for mode in COUNTED}
    return {mode: count_operations(step).total("launches") for mode, step in steps.items()}


def count(workload: Workload, *_: object) -> dict[str, Any]:
    """Returns FLOP ratios of our modes and launches, counted on the meta device in fp32."""
    return {
        "workload": workload.name,
        "batch_size": workload.batch_size,
        "flop_ratio": flop_ratios(workload, torch.device("meta"), torch.float32, OURS),
        "operations": operations(workload),
    }


def compare(workload: Workload, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Returns FLOPs, memory and time of all modes.

    On CUDA also throughput, and its share of the rate of a plain matrix product.
    """
    measured: dict[str, Any] = {
        "workload": workload.name,
        "batch_size": workload.batch_size,
        "rounds": workload.rounds,
        "flop_ratio": flop_ratios(workload, device, dtype, MODES),
        "operations": operations(workload),
    }
    fresh, accumulating = peak_memory_ratios(workload)
    measured["peak_memory_ratio"] = fresh
    measured["peak_memory_ratio_to_accumulating"] = accumulating
    time_ratio, time_ratio_to_accumulating, seconds = time_ratios(workload, device, dtype)
    measured["time_ratio"] = time_ratio
    measured["time_ratio_to_accumulating"] = time_ratio_to_accumulating
    measured["non_private_seconds"] = seconds
    measured["largest_micro_batch"] = None
    if device.type == "cuda":
        meta = torch.device("meta")
        useful_flops = count_flops(make_step("non_private", workload, meta, dtype))
        peak = matrix_peak(dtype)
        throughput = {}
        shares = {}
        for mode, ratio in {"non_private": 1.0, **time_ratio}.items():
            throughput[mode] = workload.batch_size / (seconds * ratio)
            shares[mode] = useful_flops / (seconds * ratio) / peak
        largest = {}
        for mode in ("non_private", *OURS):
            largest[mode] = largest_micro_batch(workload, mode, device, dtype)
        measured |= {
            "examples_per_second": throughput,
            "matrix_peak": peak,
            "share_of_matrix_peak": shares,
            "largest_micro_batch": largest,
        }
    return measured


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    """Prints the measurements of the chosen workloads as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--json", action="store_true", help="one JSON object on stdout, on one line"
    )
    parser.add_argument(
        "--count", action="store_true", help="FLOP ratios of our modes, dpcap_large included"
    )
    parser.add_argument("--workload", choices=CPU_WORKLOADS | CUDA_WORKLOADS, help="this one alone")
    parser.add_argument(
        "--rounds", type=int, help="timed rounds; default 7 (ViT-S) and 4 (captioner)"
    )
    parser.add_argument("--peak_memory_of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if device.type == "cpu":
        # As train.py does, for every mode.
        keep_freed_memory()
    all_workloads = CPU_WORKLOADS | CUDA_WORKLOADS
    if options.peak_memory_of:
        workload = all_workloads[options.workload]
        print(peak_memory(options.peak_memory_of, workload, device, dtype))
        return
    if options.workload:
        chosen = [all_workloads[options.workload]]
    elif options.count:
        chosen = list(all_workloads.values())
    else:
        chosen = list((CUDA_WORKLOADS if device.type == "cuda" else CPU_WORKLOADS).values())
    if options.rounds is not None:
        chosen = [replace(workload, rounds=options.rounds) for workload in chosen]
    measure = count if options.count else compare
    measurements = [measure(workload, device, dtype) for workload in chosen]
    on_cpu = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else on_cpu
    report = {
        "hardware": hardware,
        "torch": torch.__version__,
        "dtype": str(dtype),
        "workloads": measurements,
    }
    print(json.dumps(report) if options.json else json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
