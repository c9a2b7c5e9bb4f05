"""No weights carry more noised steps than their ledger says, whatever a program does with model, copies and folders."""

import copy
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from privacy.errors import PrivacyConfigError, PrivacyStateRefused
from tests.privacy.loop.own import K, cross_entropy, ledger_of, make, net, quick


def trained(run_dir: Path) -> nn.Module:
    model = net()
    with make(run_dir, model) as loop:
        loop.step()
        loop.step()
    return model


def loaded(model: nn.Module) -> nn.Module:
    other = net(1)
    other.load_state_dict(model.state_dict())
    return other


def with_a_new_head(model: nn.Module) -> nn.Module:
    return nn.Sequential(copy.deepcopy(model[0]), nn.Tanh(), nn.Linear(5, K))


def on_a_frozen_copy(model: nn.Module) -> nn.Module:
    frozen = copy.deepcopy(model[0]).requires_grad_(False)
    return nn.Sequential(frozen, nn.Tanh(), nn.Linear(5, K))


@pytest.mark.parametrize("copied", [copy.deepcopy, loaded, with_a_new_head, on_a_frozen_copy])
def test_a_copy_of_a_trained_model_is_refused_in_another_folder(
    copied: Callable[[nn.Module], nn.Module], tmp_path: Path
) -> None:
    with quick():
        model = trained(tmp_path / "one")
        with pytest.raises(PrivacyConfigError, match=r"0\.(weight|bias) was trained by the private run .*one"):
            make(tmp_path / "two", copied(model))
        assert not (tmp_path / "two/ledger.jsonl").exists()
        make(tmp_path / "two", net()).close()  # what the first run began with is nobody's


def test_a_trained_model_needs_the_ledger_that_charged_it(tmp_path: Path) -> None:
    """A folder that is gone, begun again, or put back as it was earlier states less than the weights carry."""
    with quick():
        model = trained(tmp_path / "run")
        shutil.copytree(tmp_path / "run", tmp_path / "earlier")
        with make(tmp_path / "run", model) as loop:
            loop.step()
        shutil.rmtree(tmp_path / "run")
        for one in (model, copy.deepcopy(model)):
            with pytest.raises(PrivacyConfigError, match=r"whose ledger .* is gone"):
                make(tmp_path / "run", one)
        assert not (tmp_path / "run/ledger.jsonl").exists()
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        shutil.copytree(tmp_path / "earlier", tmp_path / "run")
        with pytest.raises(PrivacyStateRefused, match="a trained model remembers"):
            make(tmp_path / "run", model)
        shutil.rmtree(tmp_path / "run")
        make(tmp_path / "run", net()).close()
        with pytest.raises(PrivacyStateRefused, match="a trained model remembers"):
            make(tmp_path / "run", model)


@pytest.mark.parametrize("how", ["weights", "gradient"])
def test_what_the_callers_loss_trains_is_refused_before_the_charge(how: str, tmp_path: Path) -> None:
    """It begins when the self-check has passed, by a counter, in the middle of a step."""
    model, calls = net(), [0]
    plain = cross_entropy(model)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        calls[0] += 1
        if calls[0] > 1000 and how == "weights":
            with torch.no_grad():
                model[0].weight.add_(x.mean())
        elif calls[0] > 1000:
            model[0].weight.grad = x.mean() * torch.ones_like(model[0].weight)
        return plain(x, y)

    with quick(), make(tmp_path / "run", model, loss=loss) as loop:
        loop.step()
        calls[0] = 1000
        with pytest.raises(PrivacyConfigError, match=r"the weights changed|gradient that is not the loop's"):
            loop.step()
        assert ledger_of(tmp_path / "run").num_charged == 1
