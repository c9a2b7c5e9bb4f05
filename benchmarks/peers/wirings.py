"""What torch systems make of small models that are easy to get wrong: exact, wrong by how much, or refused.

The truth is autograd in float64, one example after the other. Every sum is clipped at C = 1, so an error is in units of what one
example may contribute.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Sum = list[Tensor]
TOLERANCE = 1e-3
"""In units of C: above it a sum is called wrong."""
LABELS = torch.tensor([0, 1, 2, 0])


class Classified(nn.Module):
    """A model whose output is scores, with one cross-entropy per example."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor, labels_B: Tensor) -> Tensor:
        return F.cross_entropy(self.layers(x), labels_B, reduction="none")


class TiedWords(nn.Module):
    """The embedding's weights are the output's too, as in most language models."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(7, 6), nn.Linear(6, 7, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, x: Tensor, labels_B: Tensor) -> Tensor:
        scores = self.out(torch.tanh(self.embedding(x))).mean(1)
        return F.cross_entropy(scores, labels_B, reduction="none")


class PaddedWords(nn.Module):
    """Token 0 is padding: torch gives its row no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(7, 6, padding_idx=0), nn.Linear(6, 3)

    def forward(self, x: Tensor, labels_B: Tensor) -> Tensor:
        scores = self.out(torch.tanh(self.embedding(x) + 0.5).mean(1))
        return F.cross_entropy(scores, labels_B, reduction="none")


@dataclass(frozen=True)
class Wiring:
    """
    Attributes:
        is_sound: whether the loss of one example depends on that example alone; otherwise only a refusal is right.
        inputs: of four examples.
    """

    name: str
    model: Callable[[], nn.Module]
    inputs: Callable[[], Tensor]
    is_sound: bool = True


def pictures() -> Tensor:
    return torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(1))


def with_an_infinite_pixel() -> Tensor:
    x = pictures()
    x[2, 0, 3, 3] = torch.inf
    return x


def words() -> Tensor:
    return torch.tensor([[1, 2, 3, 0, 0], [4, 5, 6, 1, 0], [2, 2, 2, 2, 2], [3, 1, 6, 5, 4]])


def convolutions(*after: nn.Module, padding_mode: Literal["zeros", "reflect"] = "zeros") -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        first = nn.Conv2d(1, 4, 3, padding=1, padding_mode=padding_mode)
        return Classified(first, *copy.deepcopy(after), nn.Tanh(), nn.Flatten(), nn.Linear(256, 3))

    return build


WIRINGS = (
    Wiring("convolutions", convolutions(), pictures),
    Wiring("a picture that gives an infinite gradient", convolutions(), with_an_infinite_pixel),
    Wiring("reflecting padding", convolutions(padding_mode="reflect"), pictures),
    Wiring("embedding with padding_idx", PaddedWords, words),
    Wiring("embedding tied to the output", TiedWords, words),
    Wiring("LayerNorm without bias", convolutions(nn.LayerNorm([4, 8, 8], bias=False)), pictures),
    Wiring("BatchNorm", convolutions(nn.BatchNorm2d(4)), pictures, is_sound=False),
)


def truth(model: nn.Module, x: Tensor) -> Sum:
    """An example whose gradient is not finite contributes nothing."""
    model, x = copy.deepcopy(model).double(), x.double() if x.is_floating_point() else x
    parameters = list(model.parameters())
    sums = [torch.zeros_like(p) for p in parameters]
    for i in range(len(x)):
        gradients = torch.autograd.grad(model(x[i : i + 1], LABELS[i : i + 1])[0], parameters)
        norm = torch.sqrt(sum((g.square().sum() for g in gradients), torch.zeros(())))
        if norm.isfinite():
            for total, gradient in zip(sums, gradients, strict=True):
                total += gradient / norm.clamp(min=1)
    return sums


def ours(model: nn.Module, x: Tensor) -> Sum:
    from privacy.clipping import ClippedSum
    from privacy.clipping.selfcheck import check_against_autograd

    clipped = ClippedSum(model, 1.0)
    made_up = torch.randn_like(x) if x.is_floating_point() else x.flip(0)
    check_against_autograd(model, {"x": made_up, "labels_B": LABELS}, model)
    clipped.add_micro_batch(model, {"x": x, "labels_B": LABELS}, torch.zeros(len(x), dtype=torch.bool))
    sums = dict(clipped.sums())
    return [sums[name] for name, _ in model.named_parameters()]


def opacus_hooks(model: nn.Module, x: Tensor) -> Sum:
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    wrapped = GradSampleModule(model, loss_reduction="sum")
    optimizer = DPOptimizer(
        torch.optim.SGD(wrapped.parameters(), lr=1.0), noise_multiplier=0.0, max_grad_norm=1.0, expected_batch_size=1,
        loss_reduction="sum",
    )  # fmt: skip
    wrapped(x, LABELS).sum().backward()
    optimizer.clip_and_accumulate()
    return [p.summed_grad for p in model.parameters()]  # type: ignore[attr-defined]


def opacus_ghost(model: nn.Module, x: Tensor) -> Sum:
    from opacus.grad_sample import GradSampleModuleFastGradientClipping

    wrapped = GradSampleModuleFastGradientClipping(
        model, max_grad_norm=1.0, use_ghost_clipping=True, loss_reduction="sum"
    )
    loss_B = wrapped(x, LABELS)
    loss_B.sum().backward(retain_graph=True)
    factor_B = wrapped.get_clipping_coef()
    model.zero_grad()
    wrapped.disable_hooks()
    (factor_B * loss_B).sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def by_hand(model: nn.Module, x: Tensor) -> Sum:
    parameters = list(model.parameters())
    sums = [torch.zeros_like(p) for p in parameters]
    for i in range(len(x)):
        gradients = torch.autograd.grad(model(x[i : i + 1], LABELS[i : i + 1])[0], parameters)
        norm = torch.sqrt(torch.stack([g.square().sum() for g in gradients]).sum())
        for total, gradient in zip(sums, gradients, strict=True):
            total += gradient * (1 / (norm + 1e-6)).clamp(max=1)
    return sums


SYSTEMS = {"ours": ours, "opacus": opacus_hooks, "opacus_ghost": opacus_ghost, "by_hand": by_hand}


def verdict(system: str, wiring: Wiring) -> str:
    """ "exact", "wrong by E C", "not finite" or "refused: why"."""
    torch.manual_seed(0)
    model = wiring.model()
    expected = truth(model, wiring.inputs()) if wiring.is_sound else None
    try:
        found = SYSTEMS[system](model, wiring.inputs())
    except Exception as error:  # whatever a system says no with
        return f"refused: {str(error).strip().splitlines()[0][:160] if str(error).strip() else type(error).__name__}"
    if expected is None:
        return "accepted, though examples mix"
    gaps = [(a.double() - b).square().sum() for a, b in zip(found, expected, strict=True)]
    gap = float(torch.stack(gaps).sum().sqrt())
    if gap != gap:
        return "not finite"
    return "exact" if gap <= TOLERANCE else f"wrong by {gap:.2g} C"


def verdicts() -> dict[str, dict[str, str]]:
    """By wiring and system."""
    return {w.name: {system: verdict(system, w) for system in SYSTEMS} for w in WIRINGS}
