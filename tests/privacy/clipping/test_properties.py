"""Properties over random shapes, sharing, order of registration, padding, splits and frozen parameters (hypothesis)."""

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from privacy.clipping import ClippedSum
from privacy.releases import SENSITIVITY_SLACK
from tests.privacy.clipping import oracle

FEW = settings(
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    derandomize=True,
)
MANY = settings(FEW, max_examples=2000)

small = st.integers(1, 5)


def make_layer(kind: str, width: int, generator: torch.Generator) -> nn.Module:
    """A layer of (B, T, width) -> (B, T, width)."""
    match kind:
        case "linear":
            layer: nn.Module = nn.Linear(width, width)
        case "linear_without_bias":
            layer = nn.Linear(width, width, bias=False)
        case "layer_norm":
            layer = nn.LayerNorm(width)
        case "rms_norm":
            layer = nn.RMSNorm(width)
        case "scale":
            layer = Scale(width)
        case "conv":
            layer = Middle(nn.Conv1d(width, width, 3, padding=1))
        case _:
            layer = Middle(nn.GroupNorm(1, width))
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))
    return layer


KINDS = ["linear", "linear_without_bias", "layer_norm", "rms_norm", "scale", "conv", "group_norm"]


class Scale(nn.Module):
    """Raw parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma, self.shift, self.power = (
            nn.Parameter(torch.ones(s)) for s in ((1, 1, width), (1, 1, width), (1, 1, 1))
        )

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma + self.shift * self.power


class Middle(nn.Module):
    """A layer that wants channels in the middle."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.transpose(1, 2)).transpose(1, 2)


class Random(nn.Module):
    """Token embedding, layers in any order with repetitions, a head that may share the embedding's weight."""

    def __init__(self, kinds: list[str], order: list[int], registration: list[int], tied: bool, width: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        layers = [make_layer(kind, width, generator) for kind in kinds]
        self.order = [i % len(layers) for i in order]
        for i in sorted(range(len(layers)), key=lambda i: registration[i % len(registration)]):
            self.add_module(f"layer{i}", layers[i])
        linears = [layer for layer in layers if isinstance(layer, nn.Linear)]
        if tied and len(linears) > 1:
            linears[1].weight = linears[0].weight
        self.head, self.tokens = nn.Linear(width, 6, bias=False), nn.Embedding(6, width)
        with torch.no_grad():
            self.tokens.weight.copy_(torch.randn(6, width, generator=generator))
            self.head.weight.copy_(torch.randn(6, width, generator=generator))
        if tied:
            self.head.weight = self.tokens.weight
        self.unused = nn.Linear(2, 2)

    def forward(self, ids: Tensor, scale: Tensor) -> Tensor:
        x = self.tokens(ids) * scale[:, None, None]
        for i in self.order:
            x = x + self.get_submodule(f"layer{i}")(x).tanh()
        return self.head(x).square().mean((1, 2))


models = st.builds(
    Random,
    st.lists(st.sampled_from(KINDS), min_size=1, max_size=4),
    st.lists(st.integers(0, 3), min_size=1, max_size=6),
    st.permutations(range(4)),
    st.booleans(),
    st.integers(2, 5),
)


def data(batch: int, tokens: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 6, (batch, tokens), generator=generator)
    return {"ids": ids, "scale": torch.logspace(-1, 1, batch).double()}


def summed(
    model: nn.Module, inputs: dict[str, Tensor], c: float, sizes: list[int], padding: Tensor, mode: str
) -> dict[str, Tensor]:
    total, start = ClippedSum(model, c, mode=mode, self_check=False), 0  # type: ignore[arg-type]
    while start < len(padding):
        rows = slice(start, start + sizes[start % len(sizes)])
        total.add_micro_batch(model, {k: v[rows] for k, v in inputs.items()}, padding[rows])
        start = rows.stop
    total.detach()
    return dict(total.sums())


def check_random_model(
    model: Random, batch: int, tokens: int, sizes: list[int], is_padding: list[bool], is_frozen: list[bool], mode: str
) -> None:
    """Equal to the loop over the examples that are no padding, whatever is frozen and however the batch is split."""
    model = model.double()
    parameters = list(model.parameters())
    for i, p in enumerate(parameters):
        p.requires_grad_(not is_frozen[i % len(is_frozen)])
    assume(any(p.requires_grad for i in model.order for p in model.get_submodule(f"layer{i}").parameters()))
    model.unused.requires_grad_(True)
    inputs = data(batch, tokens, seed=batch + 10 * tokens)
    padding = torch.tensor([is_padding[i % len(is_padding)] for i in range(batch)])
    kept = {k: v[~padding] for k, v in inputs.items()}
    assume(not padding.all())
    c = max(oracle.median_norm(model, model, kept), 1e-3)
    expected = oracle.clipped_sum(model, model, kept, c)
    actual = summed(model, inputs, c, sizes, padding, mode)
    assert actual.keys() == expected.keys()
    assert (oracle.flat(actual) - oracle.flat(expected)).norm() <= 1e-9 * max(float(oracle.flat(expected).norm()), c)


def check_sensitivity(model: Random, batch: int, tokens: int, exponent: int, mode: str) -> None:
    """In fp32, one example of any size moves the sum by at most C (1 + r)."""
    model, inputs = (
        model.float(),
        {k: v.float() if v.is_floating_point() else v for k, v in data(batch, tokens, 3).items()},
    )
    inputs["scale"][-1] = 10.0**exponent
    alone = torch.arange(batch) < batch - 1
    total = summed(model, inputs, 0.1, [batch], alone, mode)
    assert oracle.flat(total).isfinite().all()
    assert oracle.flat(total).norm() <= 0.1 * (1 + SENSITIVITY_SLACK)


MODES = st.sampled_from(["bookkeeping", "two_pass"])
RANDOM_MODEL = {
    "model": models,
    "batch": st.integers(1, 9),
    "tokens": small,
    "sizes": st.lists(st.sampled_from([1, 3, 8, 9]), min_size=1, max_size=3),
    "is_padding": st.lists(st.booleans(), min_size=1, max_size=4),
    "is_frozen": st.lists(st.sampled_from([False, False, True]), min_size=1, max_size=4),
    "mode": MODES,
}
SENSITIVITY = {
    "model": models,
    "batch": st.integers(1, 4),
    "tokens": small,
    "exponent": st.integers(-30, 38),
    "mode": MODES,
}


BUDGETS = [FEW, pytest.param(MANY, marks=pytest.mark.full)]


@pytest.mark.parametrize("budget", BUDGETS)
def test_random_models_equal_the_loop(budget: settings) -> None:
    budget(given(**RANDOM_MODEL)(check_random_model))()


@pytest.mark.parametrize("budget", BUDGETS)
def test_contract_4_random_models_stay_below_the_bound(budget: settings) -> None:
    budget(given(**SENSITIVITY)(check_sensitivity))()
