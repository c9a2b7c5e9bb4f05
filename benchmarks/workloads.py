"""The models and training steps that are compared: non-private, ours, Opacus."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.captioner import Captioner, build_captioner
from models.config import VitConfig, captioner_config
from models.vit import VisionTransformer
from models.vocabulary_head import VocabularyHead
from privacy.clipping import ClippedSum
from privacy.clipping.accumulators import real
from privacy.clipping.certified_sum import CertifiedSum
from privacy.lattice import Lattice
from privacy.noise import SystemNoise, add_noise, add_rounded_noise
from privacy.step.engine import even_layout
from privacy.step.reduction import gather_from_owners, reduce_to_owners

BASELINES = ("non_private", "accumulating")
"""Ordinary training: every micro-batch a batch of its own, or gradients added up over micro-batches to a logical batch."""
OURS = ("bookkeeping", "two_pass", "certified")
OPACUS = ("opacus_ghost", "opacus_hooks")
MODES = (*OURS, *OPACUS)


Step = Callable[..., None]
"""One micro-batch; with `ends=True`, as at the end of a logical batch, also the noised sum as the gradients of an optimizer."""


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
    """A model with made-up inputs.

    Attributes:
        rounds: timed ones.
        size: of the captioner; None for the classifier.
    """

    name: str
    batch_size: int
    rounds: int
    size: str | None = None

    def meta_model(self) -> nn.Module:
        """Shapes without values, for counting."""
        with torch.device("meta"):
            return Classifier() if self.size is None else Captioner(captioner_config(self.size))

    def model(self) -> nn.Module:
        """The model with weights drawn from seed 0."""
        if self.size is not None:
            return build_captioner(captioner_config(self.size), generator=torch.Generator().manual_seed(0))
        torch.manual_seed(0)
        model = Classifier()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
        return model

    def inputs(self, device: torch.device) -> dict[str, Tensor]:
        """Random images with labels or captions."""
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(self.batch_size, 3, 224, 224, generator=generator)
        if self.size is None:
            inputs = {
                "images_BCHW": images,
                "labels_B": torch.randint(0, 1000, (self.batch_size,), generator=generator),
            }
        else:
            tokens = torch.randint(0, 30522, (self.batch_size, 40), generator=generator)
            inputs = {
                "images_BCHW": images,
                "tokens_BL": tokens,
                "token_mask_BL": torch.ones_like(tokens, dtype=torch.bool),
            }
        return {name: value.to(device) for name, value in inputs.items()}


CPU_WORKLOADS = {w.name: w for w in (Workload("vit_s_16", 16, 7), Workload("dpcap_base", 8, 4, "dpcap_base"))}
CUDA_WORKLOADS = {"dpcap_large": Workload("dpcap_large", 64, 5, "dpcap_large")}


def make_step(mode: str, workload: Workload, device: torch.device, dtype: torch.dtype) -> Step:
    """One micro-batch in the given mode, after which the clipped sum (or the gradient) is ready."""
    on_meta = device.type == "meta"
    model = (workload.meta_model() if on_meta else workload.model()).to(device, dtype)
    inputs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in workload.inputs(device).items()}
    if mode in BASELINES:

        def baseline(*, ends: bool = False) -> None:
            if mode == "non_private":
                model.zero_grad(set_to_none=True)
            model(**inputs).sum().backward()

        return baseline
    if mode in OURS:
        # C = 1; the lattice and the number of rows are those of the DP-Cap point, on 128 ranks.
        clipped = (
            CertifiedSum(model, Lattice.of(1.0, 1_319_879, 0.728), self_check=False)
            if mode == "certified"
            else ClippedSum(model, 1.0, mode=mode, cap=1_319_879, rows=10_400, self_check=False)  # type: ignore[arg-type]
        )
        is_padding_B = torch.zeros(workload.batch_size, dtype=torch.bool, device=device)

        def clipped_step(*, ends: bool = False) -> None:
            clipped.add_micro_batch(model, inputs, is_padding_B)
            if ends:
                end_of_step(model, clipped)

        return clipped_step
    from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping

    for name, parameter in model.named_parameters():  # raw ones, which would turn the whole model into one vmap leaf
        if "token" in name.rpartition(".")[2] or "type_embedding" in name:
            parameter.requires_grad_(False)
    for module in model.modules():  # its embedding rule views the ids
        if isinstance(module, nn.Embedding):
            module.register_forward_pre_hook(lambda _, arguments: (arguments[0].contiguous(),))
    # Opacus looks rules up by exact type, and would send a subclass of Linear through functorch.
    fast = GradSampleModuleFastGradientClipping
    for table in (GradSampleModule.GRAD_SAMPLERS, fast.GRAD_SAMPLERS, fast.NORM_SAMPLERS):
        table[VocabularyHead] = table[nn.Linear]
    step = _opacus_ghost(model, inputs) if mode == "opacus_ghost" else _opacus_hooks(model, inputs)

    def opacus_step(*, ends: bool = False) -> None:
        step()
        for parameter in model.parameters() if ends else ():  # as DPOptimizer.add_noise
            total = parameter.__dict__.pop("summed_grad", parameter.grad)
            if total is not None:
                parameter.grad = total + torch.normal(0.0, 1.0, total.shape, device=device)

    return opacus_step


def end_of_step(model: nn.Module, clipped: ClippedSum) -> None:
    """What privacy/step/step.py does between the last micro-batch and the optimizer, on one rank."""
    shapes = {name: p.shape for name, p in model.named_parameters() if p.requires_grad}
    layout = even_layout(shapes, 1)
    shards = reduce_to_owners(clipped, layout)
    for number in range(len(shards)):
        if isinstance(clipped, CertifiedSum):
            add_rounded_noise(shards[number].values, clipped.lattice.noise_deviation(0.728), SystemNoise())
            values = real(shards[number].values, clipped.lattice.exponent)
            shards[number] = shards[number]._replace(values=values)
        else:
            add_noise(shards[number].values, 0.728 * clipped.sensitivity, SystemNoise())
    parameters = dict(model.named_parameters())
    first = next(iter(parameters.values()))
    for name, gradient in gather_from_owners(shards, layout, shapes, first.dtype, first.device).items():
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
        norm_B = torch.stack([s.flatten(1).norm(dim=1) for s in samples], 1).norm(dim=1)
        factor_B = (1.0 / (norm_B + 1e-6)).clamp(max=1)
        for parameter, sample in zip(trainable, samples, strict=True):
            parameter.summed_grad = torch.einsum("b,b...->...", factor_B, sample)
            parameter.grad_sample = None

    return step
