"""Every optimizer against a float64 reference from its publication, whole and cut into flat partitions."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from privacy.step.noise_variance import NoiseVariance
from trainer.config.recipe import OptimizerSection
from trainer.optimizers import (
    fresh_state,
    make_optimizer,
    moments,
    parameter_groups,
    set_step,
)

Named = dict[str, Tensor]


# The optimizers again, from the publications' algorithms: float64, whole parameters, one loop. Slow and plain on purpose.


def is_excluded(parameter: Tensor) -> bool:
    """Biases, norms, tokens of one row."""
    return sum(size > 1 for size in parameter.shape) < 2


def sgd_reference(weights: Named, gradients: list[Named], lr: float, momentum: float, decay: float) -> Named:
    """Heavy ball: v <- momentum v + g + decay x; x <- x - lr v."""
    x = {n: w.double().clone() for n, w in weights.items()}
    v = {n: torch.zeros_like(w) for n, w in x.items()}
    for gradient in gradients:
        for n, g in ((n, g.double()) for n, g in gradient.items()):
            v[n] = momentum * v[n] + g + (0 if is_excluded(x[n]) else decay) * x[n]
            x[n] = x[n] - lr * v[n]
    return x


def adam_reference(
    weights: Named, gradients: list[Named], lr: float, betas: tuple[float, float], decay: float,
    *, eps: float = 0.0, noise: list[float] | None = None, floor: float = 0.0,
) -> Named:  # fmt: skip
    """AdamW; with `noise` (one standard deviation per step) DP-AdamBC of Tang et al. 2023.

    The expectation of the noise's part of v is computed from its definition, not by a recursion.
    """
    x = {n: w.double().clone() for n, w in weights.items()}
    for t in range(1, len(gradients) + 1):
        for n in x:
            past = [gradient[n].double() for gradient in gradients[:t]]
            m = sum((1 - betas[0]) * betas[0] ** (t - 1 - i) * g for i, g in enumerate(past)) / (1 - betas[0] ** t)
            v = sum((1 - betas[1]) * betas[1] ** (t - 1 - i) * g**2 for i, g in enumerate(past)) / (1 - betas[1] ** t)
            x[n] = x[n] * (1 - lr * (0 if is_excluded(x[n]) else decay))
            if noise is None:
                x[n] = x[n] - lr * m / (v**0.5 + eps)
            else:
                phi = sum((1 - betas[1]) * betas[1] ** (t - 1 - i) * s**2 for i, s in enumerate(noise[:t]))
                x[n] = x[n] - lr * m / (v - phi / (1 - betas[1] ** t)).clamp(min=floor).sqrt()
    return x


SHAPES = {
    "patch": (6, 3, 2, 2), "bias": (6,), "token": (1, 1, 6), "positions": (1, 4, 6), "head": (5, 6), "zero": (3, 4),
}  # fmt: skip
LR, DECAY, BETAS, EPS, MOMENTUM, FLOOR, STEPS = 0.05, 0.1, (0.8, 0.9), 1e-4, 0.7, 0.03, 4
STDS = [0.1, 0.5, 0.2, 0.05]
SECTIONS: dict[str, dict[str, object]] = {
    "adamw": {"name": "adamw", "betas": BETAS, "eps": EPS},
    "adam_bc": {"name": "adamw", "betas": BETAS, "noise_bias_correction": True, "variance_floor": FLOOR},
    "sgd": {"name": "sgd", "momentum": MOMENTUM},
    "sgd_without_momentum": {"name": "sgd", "momentum": 0.0},
}
REFERENCES: dict[str, Callable[[dict[str, Tensor], list[dict[str, Tensor]]], dict[str, Tensor]]] = {
    "adamw": lambda x, g: adam_reference(x, g, LR, BETAS, DECAY, eps=EPS),
    "adam_bc": lambda x, g: adam_reference(x, g, LR, BETAS, DECAY, noise=STDS, floor=FLOOR),
    "sgd": lambda x, g: sgd_reference(x, g, LR, MOMENTUM, DECAY),
    "sgd_without_momentum": lambda x, g: sgd_reference(x, g, LR, 0.0, DECAY),
}


def config(**values: object) -> OptimizerSection:
    return OptimizerSection.model_validate({"peak_lr": LR, **values})


def section(kind: str) -> OptimizerSection:
    return config(weight_decay=DECAY, **SECTIONS[kind])


def weights(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    drawn = {n: torch.randn(shape, generator=generator, dtype=torch.float64) for n, shape in SHAPES.items()}
    return {n: (torch.zeros_like(w) if n == "zero" else w).to(dtype) for n, w in drawn.items()}


def gradients() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [
        {n: 0.3 * torch.randn(shape, generator=generator, dtype=torch.float64) for n, shape in SHAPES.items()}
        for _ in range(STEPS)
    ]


def shapes() -> dict[str, torch.Size]:
    return {name: torch.Size(shape) for name, shape in SHAPES.items()}


def step(optimizer: torch.optim.Optimizer, number: int, noise: NoiseVariance) -> None:
    set_step(optimizer.param_groups, lr=LR, noise_variance=noise.after(number, STDS[number - 1]))
    optimizer.step()


@pytest.mark.parametrize("kind", SECTIONS)
def test_whole_parameters(kind: str) -> None:
    parameters = {n: nn.Parameter(w) for n, w in weights().items()}
    optimizer = make_optimizer(parameter_groups(parameters.items(), shapes(), section(kind)), section(kind))
    noise = NoiseVariance(BETAS[1])
    for number, gradient in enumerate(gradients(), 1):
        for n, p in parameters.items():
            p.grad = gradient[n].clone()
        step(optimizer, number, noise)
        for n, p in parameters.items():
            assert torch.equal(p.grad, gradient[n]), "gradients are not the optimizer's to change"  # type: ignore[arg-type]
    for n, expected in REFERENCES[kind](weights(), gradients()).items():
        torch.testing.assert_close(parameters[n].detach(), expected, rtol=1e-12, atol=1e-12, msg=f"{kind} {n}")
    kept = {k for s in optimizer.state.values() for k, v in s.items() if torch.is_tensor(v) and v.dim()}
    assert kept == set(moments(section(kind)))


@pytest.mark.parametrize("kind", SECTIONS)
def test_fresh_state_continues_where_the_moments_were(kind: str) -> None:
    """Two steps, then the rest with a new optimizer that has only the moments and the step number: bit-equal."""

    def run(restart: bool) -> Tensor:
        parameter = nn.Parameter(weights()["head"])
        noise = NoiseVariance(BETAS[1])

        def new() -> torch.optim.Optimizer:
            return make_optimizer(parameter_groups([("head", parameter)], shapes(), section(kind)), section(kind))

        optimizer = new()
        for number, gradient in enumerate(gradients(), 1):
            if restart and number == 3:
                kept = {k: optimizer.state[parameter][k].clone() for k in moments(section(kind))}
                optimizer, noise = new(), NoiseVariance(BETAS[1], noise.average)
                optimizer.state[parameter] = fresh_state(section(kind), parameter, 2) | kept
            parameter.grad = gradient["head"].clone()
            step(optimizer, number, noise)
        return parameter.detach()

    assert torch.equal(run(False), run(True))


def test_each_parameter_is_in_one_group_and_full_shapes_decide() -> None:
    """Under ZeRO-3 a parameter's own shape is (0,)."""
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2, bias=False))
    full = {name: p.shape for name, p in model.named_parameters()}
    for named in (dict(model.named_parameters()), {name: nn.Parameter(torch.empty(0)) for name in full}):
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
        (
            {"name": "sgd", "noise_bias_correction": True, "variance_floor": 1.0},
            "noise_bias_correction belongs to adamw",
        ),
        ({"noise_bias_correction": True}, "variance_floor go together"),
        ({"variance_floor": 1e-3}, "variance_floor go together"),
        ({"noise_bias_correction": True, "variance_floor": 1.0, "eps": 1e-8}, "eps is not read"),
    ],
)
def test_keys_of_other_optimizers_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**values)
