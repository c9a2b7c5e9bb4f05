"""What stands in the way of private training and needs no decision is changed by `fix`, and said; the fallback does the rest."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from privacy.errors import PrivacyConfigError
from privacy.guards.selfcheck import check_against_autograd
from privacy.loop import fix, integers
from privacy.loop.fields import Example, Unusable
from tests.privacy.loop.own import D, K, make, quick, weights


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(inplace=True), nn.Conv2d(6, 8, 3)
        )
        self.norm, self.head = nn.BatchNorm2d(8), nn.Linear(8, 2)
        self.drop = nn.Dropout(0.5, inplace=True)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.head(self.norm(self.body(x)).flatten(2).mean(2))).sin().sum(1)


def test_fix_makes_a_network_with_batch_norm_trainable_and_says_what_it_changed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    torch.manual_seed(0)
    model, inputs = Convolutions(), {"x": torch.randn(3, 3, 8, 8)}
    nn.init.normal_(model.norm.weight)
    scale = model.norm.weight.clone()
    with pytest.raises(PrivacyConfigError, match="the forward draws random numbers"):
        check_against_autograd(model, inputs)
    model.drop.eval()
    with pytest.raises(
        PrivacyConfigError, match=r"^2 layers are refused: layer body\.1 .*; layer norm "
    ):
        check_against_autograd(model, inputs)
    model.drop.train()
    lines = fix(model, inputs)
    said = capsys.readouterr().out
    assert (
        said.replace("\n  ", " ").splitlines() == lines and max(map(len, said.splitlines())) <= 80
    )
    assert [line.partition(":")[0] for line in lines] == [
        *("body.1", "body.2", "norm", "drop", "unused.weight", "unused.bias")
    ]
    assert "BatchNorm2d became GroupNorm of 2 groups" in lines[0] and "pre-training" in lines[0]
    assert isinstance(model.norm, nn.GroupNorm) and torch.equal(model.norm.weight, scale)
    check_against_autograd(model, inputs)
    assert fix(model, inputs) == []


def test_a_network_that_writes_in_place_trains_unchanged() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 3), nn.ReLU(inplace=True)
    )
    check_against_autograd(
        model, {"x": torch.randn(3, 3, 8, 8)}, lambda x: model(x).sin().flatten(1).sum(1)
    )


def test_integers_that_must_stay_are_in_made_up_items_and_in_padding_and_required_of_others() -> (
    None
):
    field = integers(30, 7, fixed={29: 3, 4: 1})
    example = Example({"ids": field})
    for ids in (*example.made_up(5)["ids"], example.padding()["ids"]):
        assert (ids == 29).sum() == 3 and (ids == 4).sum() == 1
        assert torch.equal(example.read({"ids": ids})["ids"], ids)
    assert {int(i) for i in field.made_up(400, torch.Generator()).unique()} == {*range(30)}
    with pytest.raises(Unusable, match="or not 29 3 times"):
        example.read({"ids": torch.tensor([29, 29, 4, 0, 0, 0, 0])})
    for wrong in ({30: 1}, {3: 0}, {3: 8}, {-1: 1}):
        with pytest.raises(PrivacyConfigError, match="fixed must map"):
            integers(30, 7, fixed=wrong)


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = (
            nn.MultiheadAttention(D // 2, 1, batch_first=True),
            nn.Linear(D, K),
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.unflatten(1, (2, D // 2))
        return self.head(self.attention(tokens, tokens, tokens)[0].flatten(1))


def test_a_loop_names_what_it_differentiates_as_a_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    model = Attending()
    before = weights(model)
    with quick(), make(tmp_path / "run", model, num_steps=2) as loop:
        said = capsys.readouterr().out
        assert "fallback: attention (MultiheadAttention) covers " in said
        loop.step()
    assert not torch.equal(weights(model), before)
    with quick(), pytest.raises(PrivacyConfigError, match=r"^layer attention \(MultiheadAttention"):
        make(tmp_path / "other", Attending(), fallback=False)
