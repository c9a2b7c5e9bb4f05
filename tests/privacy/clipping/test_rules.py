"""Every rule alone, against a loop of single examples, opacus' hooks, and adversarial examples; and every refusal."""

import inspect
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from privacy.clipping import ClippedSum
from privacy.errors import PrivacyConfigError
from privacy.gradients.rules import RULES
from privacy.plan.releases import SENSITIVITY_SLACK
from tests.privacy.clipping import oracle
from tests.privacy.clipping.neighbours import Product
from tests.privacy.clipping.test_sensitivity import change

B = 5

Make = Callable[[], nn.Module]


def ids(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(0, 7, (B, *shape))


def reals(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(B, *shape)


# name, layer, input without the batch. T = B = 5 in several rows: no size may be mistaken for another.
LAYERS: list[tuple[str, Make, Callable[[], Tensor]]] = [
    ("linear", lambda: nn.Linear(4, 6), reals(4)),
    ("linear3d", lambda: nn.Linear(4, 6), reals(B, 4)),
    ("linear4d", lambda: nn.Linear(4, 6), reals(2, B, 4)),
    ("linear5d", lambda: nn.Linear(4, 6, bias=False), reals(2, 3, 2, 4)),
    ("wide_linear", lambda: nn.Linear(40, 50), reals(3, 40)),
    ("conv1d", lambda: nn.Conv1d(3, 4, 3, stride=2, padding=1, dilation=2), reals(3, 9)),
    ("conv1d_same", lambda: nn.Conv1d(3, 4, 4, padding="same"), reals(3, 9)),
    (
        "conv2d",
        lambda: nn.Conv2d(3, 4, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2)),
        reals(3, 7, 6),
    ),
    ("patches", lambda: nn.Conv2d(3, 8, 4, stride=4), reals(3, 9, 9)),
    ("conv2d_grouped", lambda: nn.Conv2d(4, 6, 3, groups=2, padding="same"), reals(4, 5, 5)),
    ("conv2d_depthwise", lambda: nn.Conv2d(4, 4, 3, groups=4, bias=False), reals(4, 5, 5)),
    (
        "conv2d_reflect",
        lambda: nn.Conv2d(2, 3, 3, padding=(1, 2), padding_mode="reflect"),
        reals(2, 5, 5),
    ),
    (
        "conv2d_circular",
        lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"),
        reals(2, 5, 5),
    ),
    (
        "conv3d",
        lambda: nn.Conv3d(2, 3, (2, 2, 3), stride=(2, 1, 1), padding=(0, 1, 0)),
        reals(2, 4, 3, 4),
    ),
    (
        "transposed_conv1d",
        lambda: nn.ConvTranspose1d(3, 4, 3, stride=2, padding=1, output_padding=1),
        reals(3, B),
    ),
    (
        "transposed_conv2d",
        lambda: nn.ConvTranspose2d(3, 4, (3, 2), stride=(2, 1), dilation=(1, 2)),
        reals(3, 4, B),
    ),
    (
        "transposed_conv2d_grouped",
        lambda: nn.ConvTranspose2d(4, 6, 3, padding=(2, 1), dilation=3, output_padding=2, groups=2),
        reals(4, 3, 4),
    ),
    (
        "transposed_conv3d",
        lambda: nn.ConvTranspose3d(2, 3, (2, 2, 3), padding=(1, 0, 1)),
        reals(2, 4, 3, 4),
    ),
    ("prelu", lambda: nn.PReLU(), reals(B, 4)),
    ("prelu_channels", lambda: nn.PReLU(4), reals(4, B)),
    ("layer_norm", lambda: nn.LayerNorm(4), reals(B, 4)),
    ("layer_norm_2d", lambda: nn.LayerNorm((3, 4)), reals(2, 3, 4)),
    ("layer_norm_flat", lambda: nn.LayerNorm(4, bias=False), reals(4)),
    ("rms_norm", lambda: nn.RMSNorm(4), reals(B, 4)),
    ("rms_norm_eps", lambda: nn.RMSNorm((3, 4), eps=0.1), reals(2, 3, 4)),
    ("group_norm", lambda: nn.GroupNorm(2, 4), reals(4, 5, 3)),
    ("group_norm_flat", lambda: nn.GroupNorm(2, 4), reals(4)),
    ("embedding", lambda: nn.Embedding(7, 3), ids(6)),
    ("embedding_flat", lambda: nn.Embedding(7, 3), ids()),
    ("embedding_2d", lambda: nn.Embedding(7, 3, padding_idx=2), ids(3, 4)),
]
IDS = [row[0] for row in LAYERS]


class Weighted(nn.Module):
    """loss_i = |layer(x_i) - w_i|^2 / 2: an output gradient that differs by example and position."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return (self.layer(x) - w).square().flatten(1).sum(1) / 2


def randomised(layer: nn.Module) -> nn.Module:
    with torch.no_grad():
        for p in layer.parameters():
            p.normal_()
    return layer


def case(make: Make, x: Callable[[], Tensor], seed: int = 0) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(seed)
    model = Weighted(randomised(make())).double()
    inputs = x().double() if x().is_floating_point() else x()
    scale = torch.logspace(-1, 1, B).double()
    if inputs.is_floating_point():
        inputs = inputs * scale.view(-1, *[1] * (inputs.dim() - 1))
    w = torch.randn_like(model.layer(inputs))
    return model, {"x": inputs, "w": w}


@pytest.mark.parametrize("micro", [None, pytest.param(1, marks=pytest.mark.full), 3])
@pytest.mark.parametrize(("name", "make", "x"), LAYERS, ids=IDS)
def test_float64_equals_the_loop(
    name: str, make: Make, x: Callable[[], Tensor], micro: int | None
) -> None:
    model, inputs = case(make, x)
    assert oracle.error(model, inputs, micro=micro) <= 1e-9


@pytest.mark.parametrize(("name", "make", "x"), LAYERS, ids=IDS)
def test_no_rule_reads_the_values_of_parameters(
    name: str, make: Make, x: Callable[[], Tensor]
) -> None:
    """A sharded engine has taken them away by then."""
    model, inputs = case(make, x)
    g = torch.randn_like(model.layer(inputs["x"]))
    found = []
    for value in (1.0, math.nan):
        for p in model.layer.parameters():
            nn.init.constant_(p, value)
        contributions = RULES[type(model.layer)](model.layer, inputs["x"], g)
        found.append(
            [
                x
                for one in contributions.values()
                for x in vars(one).values()
                if isinstance(x, Tensor)
            ]
        )
    assert found[0] and all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("frozen", ["weight", "bias"])
@pytest.mark.parametrize(("name", "make", "x"), LAYERS, ids=IDS)
def test_one_of_weight_and_bias_may_be_frozen(
    name: str, make: Make, x: Callable[[], Tensor], frozen: str
) -> None:
    model, inputs = case(make, x)
    if getattr(model.layer, "bias", None) is None:
        pytest.skip("no bias")
    getattr(model.layer, frozen).requires_grad_(False)
    assert oracle.error(model, inputs) <= 1e-9


@pytest.mark.parametrize(("name", "make", "x"), LAYERS, ids=IDS)
def test_called_with_keywords_only(name: str, make: Make, x: Callable[[], Tensor]) -> None:
    model, inputs = case(make, x)
    key = next(iter(inspect.signature(model.layer.forward).parameters))
    task = lambda x, w: (model.layer(**{key: x}) - w).square().flatten(1).sum(1)  # noqa: E731
    assert oracle.error(model, inputs, task=task) <= 1e-9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "make", "x"), LAYERS, ids=IDS)
def test_contract_4_common_mean_and_cancelling_gradients(
    name: str, make: Make, x: Callable[[], Tensor], dtype: torch.dtype
) -> None:
    for seed, mean in enumerate((0.0, 30.0, 1000.0, 1e5)):
        torch.manual_seed(seed)
        model = Product(randomised(make())).to(dtype)
        inputs = x() + mean if x().is_floating_point() else x()
        inputs = inputs.to(dtype) if inputs.is_floating_point() else inputs
        w = torch.randn_like(model.layer(inputs))
        if w.dim() > 2:
            w = w - w.mean(1, keepdim=True)
        others, last = ({"x": inputs[rows], "w": w[rows]} for rows in (slice(-1), slice(-1, None)))
        assert change(model, others, last) <= 1 + SENSITIVITY_SLACK


@pytest.mark.parametrize(
    ("layer", "word"),
    [
        (nn.MultiheadAttention(4, 2), "scaled_dot_product_attention"),
        (nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0), "self_attn"),
        (nn.BatchNorm2d(4).eval(), "no clipping rule covers it"),
        (nn.BatchNorm2d(4, affine=False), "mixes the examples"),
        (nn.BatchNorm1d(4, track_running_stats=False).eval(), "mixes the examples"),
        (nn.InstanceNorm2d(4, affine=True), "no clipping rule covers it"),
        (nn.EmbeddingBag(4, 4), "no clipping rule covers it"),
        (nn.LSTM(4, 4, 2, dropout=0.1), "dropout = 0"),
        (nn.Embedding(4, 4, max_norm=1.0), "max_norm"),
        (nn.Embedding(4, 4, max_norm=1.0).requires_grad_(False), "max_norm"),
        (nn.EmbeddingBag(4, 4, max_norm=1.0).requires_grad_(False), "max_norm"),
        (nn.InstanceNorm1d(4, track_running_stats=True), "running statistics"),
        (nn.Embedding(4, 4, scale_grad_by_freq=True), "scale_grad_by_freq"),
        (nn.ParameterList([torch.ones(3)]), "attributes of the module"),
        (nn.ParameterDict({"a": torch.ones(3)}), "attributes of the module"),
        (nn.LSTM(4, 4), "0.weight_ih_l0"),
        (nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), "parametrization"),
        (nn.Dropout(0.1), "p = 0"),
        (nn.Dropout2d(0.1), "p = 0"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None,
)
def test_contract_3_refused_before_training_with_a_way_out(layer: nn.Module, word: str) -> None:
    with pytest.raises(PrivacyConfigError, match=re.escape(word)):
        ClippedSum(nn.Sequential(layer, nn.Linear(4, 4)), 1.0)


def test_frozen_layers_of_any_kind_are_no_obstacle() -> None:
    frozen = nn.Sequential(
        nn.MultiheadAttention(4, 2), nn.BatchNorm1d(4), nn.Bilinear(4, 4, 4)
    ).requires_grad_(False)
    ClippedSum(nn.ModuleList([frozen.eval(), nn.Linear(4, 4)]), 1.0)


def test_contract_13_dropout_counts_when_it_is_active() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).eval()
    total = ClippedSum(model, 1.0)
    task = lambda x: model(x).sum(1)  # noqa: E731
    total.add_micro_batch(task, {"x": torch.randn(3, 4)}, torch.zeros(3, dtype=torch.bool))
    model.train()
    with pytest.raises(PrivacyConfigError, match="layer 1"):
        total.add_micro_batch(task, {"x": torch.randn(3, 4)}, torch.zeros(3, dtype=torch.bool))


@pytest.mark.parametrize(
    ("layer", "x"),
    [
        (nn.Linear(3, 3), torch.randn(3)),
        (nn.LayerNorm(3), torch.randn(3)),
        (nn.Conv1d(3, 3, 1), torch.randn(3, 4)),
    ],
)
def test_an_input_without_a_batch_dimension_is_refused(layer: nn.Module, x: Tensor) -> None:
    """B = 3 as well, so that the sizes alone look right."""
    total = ClippedSum(layer, 1.0)
    with pytest.raises(PrivacyConfigError, match="batch dimension"):
        total.add_micro_batch(
            lambda x: layer(x).reshape(3, -1).sum(1), {"x": x}, torch.zeros(3, dtype=torch.bool)
        )


def test_contract_3_a_parameter_that_its_layers_rule_does_not_know_is_refused() -> None:
    layer = nn.Linear(3, 3)
    layer.extra = nn.Parameter(torch.ones(3))
    with pytest.raises(PrivacyConfigError, match="extra"):
        ClippedSum(layer, 1.0).add_micro_batch(
            lambda x: layer(x).sum(1), {"x": torch.randn(2, 3)}, torch.zeros(2, dtype=torch.bool)
        )


def test_the_guide_to_a_new_rule_runs() -> None:
    """The section of docs/extending.md is a program: its code blocks run in order and register a rule that is exact."""
    text = (Path(__file__).parents[3] / "docs" / "extending.md").read_text()
    text = text.split("\n## A clipping rule\n")[1].split("\n## ")[0]
    scope: dict[str, object] = {}
    before = dict(RULES)
    try:
        for block in re.findall(r"```python\n(.*?)```", text, re.S):
            exec(compile(block, "docs/extending.md", "exec"), scope)
        make = scope["Scale"]
        assert make in RULES
        model, inputs = case(lambda: make(4), reals(B, 4))  # type: ignore[operator]
        assert oracle.error(model, inputs) <= 1e-9
    finally:
        RULES.clear()
        RULES.update(before)
