"""Every optimizer against a float64 reference from its publication; the rate of each step and of each layer."""

import math

import pytest
import torch
from torch import Tensor, nn

from tests.models.test_classifier import tiny_classifier
from trainer.config.recipe import OptimizerSection, ScheduleSection
from trainer.errors import ConfigError
from trainer.optimizers import (
    fresh_state,
    layer_rates,
    learning_rate,
    make_optimizer,
    moments,
    parameter_groups,
    set_rate,
)

SHAPES = {
    "patch": (6, 3, 2, 2),
    "bias": (6,),
    "token": (1, 1, 6),
    "positions": (1, 4, 6),
    "head": (5, 6),
    "zero": (3, 4),
}
LR, DECAY, BETAS, EPS, MOMENTUM, STEPS = 0.05, 0.1, (0.8, 0.9), 1e-4, 0.7, 4
SECTIONS: dict[str, dict[str, object]] = {
    "adamw": {"name": "adamw", "betas": BETAS, "eps": EPS},
    "sgd": {"name": "sgd", "momentum": MOMENTUM},
    "sgd_without_momentum": {"name": "sgd", "momentum": 0.0},
}


def reference(
    kind: str, weights: dict[str, Tensor], gradients: list[dict[str, Tensor]]
) -> dict[str, Tensor]:
    """The weights after these gradients, in float64 and from the definition of the moments, not by a recursion."""
    x = {n: w.double() for n, w in weights.items()}
    past: dict[str, list[Tensor]] = {n: [] for n in x}
    for t, gradient in enumerate(gradients, 1):
        for n in x:
            decay = (
                DECAY if sum(size > 1 for size in x[n].shape) > 1 else 0.0
            )  # not biases, norms, tokens of one row
            past[n].append(
                gradient[n].double() + (0 if kind == "adamw" else decay * x[n])
            )  # SGD's is added to the gradient
            g, age = (
                torch.stack(past[n]),
                torch.arange(t - 1.0, -1, -1, dtype=torch.float64).view(-1, *[1] * x[n].dim()),
            )
            if kind == "adamw":
                m, v = (
                    ((1 - b) * b**age * g**power).sum(0) / (1 - b**t)
                    for power, b in enumerate(BETAS, 1)
                )
                x[n] = x[n] * (1 - LR * decay) - LR * m / (v**0.5 + EPS)
            else:
                x[n] = x[n] - LR * ((MOMENTUM if kind == "sgd" else 0.0) ** age * g).sum(0)
    return x


def config(**values: object) -> OptimizerSection:
    return OptimizerSection.model_validate({"peak_lr": LR, **values})


def section(kind: str) -> OptimizerSection:
    return config(weight_decay=DECAY, **SECTIONS[kind])


def drawn(seed: int, scale: float) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        n: scale * torch.randn(shape, generator=generator, dtype=torch.float64)
        for n, shape in SHAPES.items()
    }


def weights() -> dict[str, Tensor]:
    return drawn(1, 1.0) | {"zero": torch.zeros(SHAPES["zero"], dtype=torch.float64)}


def gradients() -> list[dict[str, Tensor]]:
    return [drawn(seed, 0.3) for seed in range(2, 2 + STEPS)]


def shapes() -> dict[str, torch.Size]:
    return {name: torch.Size(shape) for name, shape in SHAPES.items()}


def step(optimizer: torch.optim.Optimizer) -> None:
    set_rate(optimizer.param_groups, LR)
    optimizer.step()


@pytest.mark.parametrize("kind", SECTIONS)
def test_whole_parameters(kind: str) -> None:
    parameters = {n: nn.Parameter(w) for n, w in weights().items()}
    optimizer = make_optimizer(
        parameter_groups(parameters.items(), shapes(), section(kind)), section(kind)
    )
    for gradient in gradients():
        for n, p in parameters.items():
            p.grad = gradient[n].clone()
        step(optimizer)
        for n, p in parameters.items():
            assert torch.equal(p.grad, gradient[n]), "gradients are not the optimizer's to change"  # type: ignore[arg-type]
    for n, expected in reference(kind, weights(), gradients()).items():
        torch.testing.assert_close(
            parameters[n].detach(), expected, rtol=1e-12, atol=1e-12, msg=f"{kind} {n}"
        )
    kept = {
        k for s in optimizer.state.values() for k, v in s.items() if torch.is_tensor(v) and v.dim()
    }
    assert kept == set(moments(section(kind)))


@pytest.mark.parametrize("kind", SECTIONS)
def test_fresh_state_continues_where_the_moments_were(kind: str) -> None:
    """Two steps, then the rest with a new optimizer that has only the moments and the step number: bit-equal."""

    def run(restart: bool) -> Tensor:
        parameter = nn.Parameter(weights()["head"])

        def new() -> torch.optim.Optimizer:
            return make_optimizer(
                parameter_groups([("head", parameter)], shapes(), section(kind)), section(kind)
            )

        optimizer = new()
        for number, gradient in enumerate(gradients(), 1):
            if restart and number == 3:
                kept = {k: optimizer.state[parameter][k].clone() for k in moments(section(kind))}
                optimizer = new()
                optimizer.state[parameter] = fresh_state(section(kind), parameter, 2) | kept
            parameter.grad = gradient["head"].clone()
            step(optimizer)
        return parameter.detach()

    assert torch.equal(run(False), run(True))


def test_each_parameter_is_in_one_group_and_full_shapes_decide() -> None:
    """Under ZeRO-3 a parameter's own shape is (0,)."""
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2, bias=False))
    full = {name: p.shape for name, p in model.named_parameters()}
    for named in (
        dict(model.named_parameters()),
        {name: nn.Parameter(torch.empty(0)) for name in full},
    ):
        found = parameter_groups(named.items(), full, config(weight_decay=0.1))
        groups = {group["weight_decay"]: {id(p) for p in group["params"]} for group in found}
        matrices = {id(named["0.weight"]), id(named["2.weight"])}
        assert groups == {0.1: matrices, 0.0: {id(p) for p in named.values()} - matrices}
        (only,) = parameter_groups(named.items(), full, config(weight_decay=0.0))
        assert len(only["params"]) == len(full)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "sgd", "betas": (0.9, 0.99)}, "betas belongs to adamw, not to sgd"),
        ({"name": "adamw", "momentum": 0.9}, "momentum belongs to sgd, not to adamw"),
    ],
)
def test_keys_of_other_optimizers_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**values)


# optimizer.layer_decay: which part of the rate each layer takes, and that a step takes it.


def published(name: str, depth: int, decay: float) -> float:
    """As in the masked autoencoder's release: layer 0 is the embedding, block i layer i + 1, the rest layer depth + 1."""
    if name.startswith(("encoder.class_token", "encoder.position", "encoder.patch_embedding")):
        layer = 0
    elif name.startswith("encoder.blocks"):
        layer = int(name.split(".")[2]) + 1
    else:
        layer = depth + 1
    return decay ** (depth + 1 - layer)


@pytest.mark.parametrize("trainable", ["all", "adapters"])
def test_rates_are_the_published_ones(trainable: str) -> None:
    model = tiny_classifier(trainable=trainable, encoder_depth=3, encoder_position="learned")
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    rates = layer_rates(names, 0.5)
    assert rates == {name: published(name, 3, 0.5) for name in names}
    assert set(layer_rates(names, None).values()) == {1.0}
    with pytest.raises(ConfigError, match=r"layer_decay.*no encoder\.blocks"):
        layer_rates(["head.weight"], 0.75)


def test_a_step_takes_its_layers_part_of_the_rate() -> None:
    model = tiny_classifier()
    decayed = OptimizerSection(name="sgd", peak_lr=1.0, momentum=0.0, layer_decay=0.5)
    named, before = (
        dict(model.named_parameters()),
        {n: p.detach().clone() for n, p in model.named_parameters()},
    )
    groups = parameter_groups(named.items(), {n: p.shape for n, p in named.items()}, decayed)
    optimizer = make_optimizer(groups, decayed)
    for step, lr in enumerate((0.1, 0.3)):
        for parameter in named.values():
            parameter.grad = torch.ones_like(parameter)
        set_rate(optimizer.param_groups, lr)
        optimizer.step()
        moved = 0.1 if step == 0 else 0.4
        for name, parameter in named.items():
            assert torch.allclose(
                before[name] - parameter, torch.tensor(moved * published(name, 2, 0.5)), atol=1e-6
            ), name


# The rate of each step

PEAK = 2e-3


def rates(num_steps: int, **schedule: object) -> list[float]:
    section = ScheduleSection.model_validate(schedule)
    return [learning_rate(step, num_steps, PEAK, section) for step in range(1, num_steps + 1)]


@pytest.mark.parametrize("warmup", [0, 1, 10, 49, 50])
def test_every_step_moves_and_the_peak_ends_the_warm_up(warmup: int) -> None:
    found = rates(50, warmup_steps=warmup)
    assert all(rate > 0 for rate in found)
    assert max(found) == found[max(warmup, 1) - 1] <= PEAK
    if warmup:
        assert found[:warmup] == pytest.approx(
            [PEAK * step / warmup for step in range(1, warmup + 1)]
        )
        assert found[warmup - 1] == PEAK
    assert all(
        a > b for a, b in zip(found[max(warmup, 1) - 1 :], found[max(warmup, 1) :], strict=False)
    ), "then it falls"


def test_cosines_in_numbers() -> None:
    """Of 3 steps after a warm-up of 2 one that would be zero one step past the end; DP-Cap's; and one that ends early."""
    cosine = [0.5 * (1 + math.cos(math.pi * k / 4)) for k in (1, 2, 3)]
    assert rates(5, warmup_steps=2) == pytest.approx([PEAK / 2, PEAK, *(PEAK * c for c in cosine)])
    short = rates(5708, warmup_steps=2000, decay_steps=10_000)  # ends at 55.7 % of the peak
    assert short == rates(10_000, warmup_steps=2000)[:5708]
    assert short[1999] == PEAK and short[-1] / PEAK == pytest.approx(0.557, abs=1e-3)
    assert 0.1 * PEAK < rates(100, warmup_steps=10, final_fraction=0.1)[-1] < 0.102 * PEAK
    after = rates(100, warmup_steps=10, decay_steps=50, final_fraction=0.1)
    assert after[50:] == pytest.approx([0.1 * PEAK] * 50)


@pytest.mark.parametrize("warmup", [0, 10, 70])
def test_vips_released_schedule(warmup: int) -> None:
    """min((t + 1) / warm-up, (1 + cos(pi t / T)) / 2) at t = 0, 1, ..., by torch's LambdaLR, as its training script has it."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    sgd = torch.optim.SGD([parameter], lr=PEAK)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        sgd, lambda t: min((t + 1) / max(warmup, 1), 0.5 * (1 + math.cos(math.pi * t / 100)))
    )
    expected = []
    for _ in range(100):
        expected.append(sgd.param_groups[0]["lr"])
        sgd.step()
        scheduler.step()
    assert rates(100, warmup_steps=warmup, decay="cosine_from_start") == pytest.approx(expected)
    assert all(rate > 0 for rate in expected) and (warmup != 10 or max(expected) < PEAK), (
        "the cosine has begun to fall"
    )
