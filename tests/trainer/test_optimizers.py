"""Every optimizer against a float64 reference from its publication, whole and cut into flat partitions."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from privacy.step.noise_variance import NoiseVariance
from tests.trainer import reference_optimizers as reference
from trainer.config.recipe import OptimizerSection
from trainer.optimizers import (
    fresh_state,
    is_matrix,
    make_optimizer,
    moments,
    parameter_groups,
    set_step,
)

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
    "adamw": lambda x, g: reference.adam(x, g, LR, BETAS, DECAY, eps=EPS),
    "adam_bc": lambda x, g: reference.adam(x, g, LR, BETAS, DECAY, noise=STDS, floor=FLOOR),
    "sgd": lambda x, g: reference.sgd(x, g, LR, MOMENTUM, DECAY),
    "sgd_without_momentum": lambda x, g: reference.sgd(x, g, LR, 0.0, DECAY),
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


def test_noise_variance_of_a_constant_bound_is_that_constant() -> None:
    noise = NoiseVariance(0.95)
    assert [noise.after(t, 0.3) for t in range(1, 50)] == pytest.approx([0.09] * 49, rel=1e-12)


def test_the_correction_removes_what_noise_adds() -> None:
    """Gradients of +-0.01 under noise of 1: the corrected second moment finds 1e-4 where the plain one says 1."""
    torch.manual_seed(0)
    chosen = config(betas=(0.0, 0.9999), noise_bias_correction=True, variance_floor=1e-12)
    parameter = nn.Parameter(torch.zeros(200, 100, dtype=torch.float64))
    optimizer = make_optimizer(parameter_groups([("a", parameter)], {"a": parameter.shape}, chosen), chosen)
    noise = NoiseVariance(0.9999)
    for t in range(1, 200):
        parameter.grad = 0.01 + torch.randn(200, 100, dtype=torch.float64)
        set_step(optimizer.param_groups, lr=0.0, noise_variance=noise.after(t, 1.0))
        optimizer.step()
    v = optimizer.state[parameter]["exp_avg_sq"] / (1 - 0.9999**199)
    assert float(v.mean()) == pytest.approx(1.0, abs=0.01)
    assert float(v.mean() - optimizer.param_groups[0]["noise_variance"]) == pytest.approx(1e-4, abs=1.5e-3)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((8, 4), True), ((16, 3, 8, 8), True), ((1, 10, 8), True), ((8,), False), ((1, 1, 8), False), ((), False)],
)
def test_weight_decay_is_for_matrices(shape: tuple[int, ...], expected: bool) -> None:
    assert is_matrix(torch.Size(shape)) is expected


class TestGroups:
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2, bias=False))

    @property
    def shapes(self) -> dict[str, torch.Size]:
        return {name: p.shape for name, p in self.model.named_parameters()}

    def groups(self, weight_decay: float) -> dict[float, set[int]]:
        found = parameter_groups(self.model.named_parameters(), self.shapes, config(weight_decay=weight_decay))
        assert len({group["weight_decay"] for group in found}) == len(found)
        return {group["weight_decay"]: {id(p) for p in group["params"]} for group in found}

    def test_each_parameter_once(self) -> None:
        matrices = {id(self.model[0].weight), id(self.model[2].weight)}
        others = {id(p) for p in self.model.parameters()} - matrices
        assert self.groups(0.005) == {0.005: matrices, 0.0: others}

    def test_without_decay_there_is_one_group(self) -> None:
        assert self.groups(0.0) == {0.0: {id(p) for p in self.model.parameters()}}

    def test_full_shapes_decide_where_parameters_are_sharded(self) -> None:
        """Under ZeRO-3 a parameter's own shape is (0,)."""
        sharded = [(name, nn.Parameter(torch.empty(0))) for name in self.shapes]
        found = parameter_groups(sharded, self.shapes, config(weight_decay=0.1))
        assert {group["weight_decay"]: len(group["params"]) for group in found} == {0.1: 2, 0.0: 3}


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


@pytest.mark.parametrize("kind", SECTIONS)
def test_what_is_written_can_be_read(kind: str) -> None:
    written = section(kind).model_dump()
    assert OptimizerSection.model_validate({k: v for k, v in written.items() if v is not None}) == section(kind)
