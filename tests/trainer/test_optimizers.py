import pytest
import torch
from torch import nn

from trainer.config import OptimizerSection
from trainer.optimizers import is_matrix, make_optimizer, parameter_groups


def config(**values: object) -> OptimizerSection:
    return OptimizerSection.model_validate({"peak_lr": 1e-2, **values})


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


def test_one_step_of_adamw() -> None:
    """First step: the sign of the gradient times the rate, and decoupled decay of the matrix alone."""
    model = nn.Linear(3, 2)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    shapes = {name: p.shape for name, p in model.named_parameters()}
    section = config(betas=(0.8, 0.9), eps=1e-12, weight_decay=0.5)
    optimizer = make_optimizer(parameter_groups(model.named_parameters(), shapes, section), section)
    assert all(group["betas"] == (0.8, 0.9) and group["lr"] == 1e-2 for group in optimizer.param_groups)
    for p in model.parameters():
        p.grad = torch.full_like(p, -0.7)
    optimizer.step()
    assert torch.allclose(model.weight, before["weight"] * (1 - 1e-2 * 0.5) + 1e-2)
    assert torch.allclose(model.bias, before["bias"] + 1e-2)
