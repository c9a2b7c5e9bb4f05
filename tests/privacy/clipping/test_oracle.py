"""Every rule and every way to combine them against a loop of single examples, in float64 and float32."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from privacy.clipping import ClippedSum
from tests.privacy.clipping import oracle


class Tiny(nn.Module):
    """Every supported kind of parameter: patches, raw ones, norms, a reused layer, a tied head, an unused layer."""

    def __init__(self, *, tied: bool = True, width: int = 12, vocab: int = 11):
        super().__init__()
        self.late = nn.Linear(width, width)  # registered before the layers that run earlier
        self.patch = nn.Conv2d(3, width, 4, stride=4)
        self.class_token = nn.Parameter(torch.randn(1, 1, width))
        self.position = nn.Parameter(torch.randn(1, 5, width))
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width, bias=False)
        self.wide = nn.Linear(width, 2)
        self.narrow = nn.Linear(2, width)
        self.embedding = nn.Embedding(vocab, width)
        self.head = nn.Linear(width, vocab)
        self.unused = nn.Linear(3, 3)
        if tied:
            self.head.weight = self.embedding.weight
        self.mix_frozen = nn.Linear(width, width).requires_grad_(False)

    def forward(self, images_BCHW: Tensor, tokens_BL: Tensor) -> Tensor:
        x = self.patch(images_BCHW).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], 1) + self.position
        x = x + self.mix(F.gelu(self.mix(self.norm(x))))
        x = x + self.narrow(F.gelu(self.wide(self.mix_frozen(x))))
        pooled = self.late(x[:, 0])
        text = self.embedding(tokens_BL[:, :-1]) + pooled[:, None] + x.mean(1, keepdim=True)
        logits = self.head(text)
        return F.cross_entropy(logits.transpose(1, 2), tokens_BL[:, 1:], reduction="none").mean(1)


def tiny(
    seed: int = 0, *, tied: bool = True, dtype: torch.dtype = torch.float64
) -> tuple[Tiny, dict[str, Tensor]]:
    torch.manual_seed(seed)
    model = Tiny(tied=tied).to(dtype)
    inputs = {
        "images_BCHW": torch.randn(7, 3, 8, 8, dtype=dtype)
        * torch.logspace(-1, 1, 7, dtype=dtype)[:, None, None, None],
        "tokens_BL": torch.randint(0, 11, (7, 6)),
    }
    return model, inputs


@pytest.mark.parametrize("mode", ["bookkeeping", "two_pass"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "micro", [3, *(pytest.param(size, marks=pytest.mark.full) for size in (1, 7))]
)
def test_float64_equals_the_loop(tied: bool, micro: int, mode: str) -> None:
    model, inputs = tiny(tied=tied)
    assert oracle.error(model, inputs, micro=micro, mode=mode) < 1e-9


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e300])
def test_contract_5_a_nonfinite_example_contributes_zero(bad: float) -> None:
    model, inputs = tiny()
    poisoned = {k: v.clone() for k, v in inputs.items()}
    poisoned["images_BCHW"][3, 0, 2, 2] = bad
    total = ClippedSum(model, 0.5)
    stats = total.add_micro_batch(model, poisoned, torch.zeros(7, dtype=torch.bool))
    keep = torch.tensor([0, 1, 2, 4, 5, 6])
    expected = oracle.clipped_sum(model, model, {k: v[keep] for k, v in inputs.items()}, 0.5)
    if int(stats.num_nonfinite) == 1:
        assert oracle.relative_error(dict(total.sums()), expected) < 1e-10
    else:  # 1e300 may survive a layer norm; then it is clipped like any other
        assert bad == 1e300
        assert (oracle.flat(dict(total.sums())) - oracle.flat(expected)).norm() <= 0.5 * 1.001


def test_the_model_is_left_as_it_was() -> None:
    model, inputs = tiny()
    before = copy.deepcopy(model.state_dict())
    total = ClippedSum(model, 1.0)
    total.add_micro_batch(model, inputs, torch.zeros(7, dtype=torch.bool))
    assert all(p.grad is None for p in model.parameters())
    assert "class_token" not in model.__dict__
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    with pytest.raises(IndexError):
        total.add_micro_batch(
            model,
            {**inputs, "tokens_BL": inputs["tokens_BL"] + 50},
            torch.zeros(7, dtype=torch.bool),
        )
    assert "class_token" not in model.__dict__
