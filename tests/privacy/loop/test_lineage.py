"""What weights carry is composed from what the caller says, who always has to say it."""

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from privacy import verify
from privacy.card.run_card import initial_weights_of_loop, read_recipe
from privacy.errors import PrivacyConfigError, PrivacyStateRefused
from privacy.guards.isolation import Isolation
from privacy.ledger.claim import read_copies
from privacy.loop import PrivateLoop, floats, lineage
from tests.privacy.loop.own import D, cross_entropy, ledger_of, make, net, quick
from tests.privacy.published import rewrite, sentences

pytestmark = pytest.mark.usefixtures("trusted_models")


def trained(run_dir: Path, **changes: object) -> nn.Module:
    model = net()
    with make(run_dir, model, **changes) as loop:
        list(loop)
    return model


@pytest.mark.parametrize("changes", [{}, {"starts_from": None}])
def test_a_loop_is_told_where_its_weights_come_from(
    changes: dict[str, None], tmp_path: Path
) -> None:
    """A new one and a resume alike; the answer is given, and nothing is made."""
    asked = {"loss": None, "example": (floats(D),), "run_dir": tmp_path / "run"} | changes
    with pytest.raises(
        PrivacyConfigError, match=r'starts_from="public" if no private run .*frozen'
    ):
        PrivateLoop(net(), None, [], **asked)  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()
    with quick():
        trained(tmp_path / "one")
    said = initial_weights_of_loop(read_recipe(tmp_path / "one")).statement
    assert "no private run" in said


def test_the_claim_composes_all_runs_behind_the_weights(tmp_path: Path) -> None:
    """An average of two that have a common start; verify.py and the card find the same."""
    model = net()
    with quick():
        trained(tmp_path / "first")
        for name in ("left", "right"):
            trained(tmp_path / name, starts_from=tmp_path / "first")
        with make(
            tmp_path / "run", model, starts_from=[tmp_path / "left", tmp_path / "right"]
        ) as loop:
            list(loop)
    code, found = verify.verify(tmp_path / "run", None)
    assert (code, found["epsilon"]) == (0, pytest.approx(loop.epsilon, rel=1e-6))
    copies = read_copies(tmp_path / "run", ledger_of(tmp_path / "run").opened)
    assert [run for run, _ in copies] == ["left", "right", "first"]
    with pytest.raises(PrivacyConfigError, match="part of the claim"):
        make(tmp_path / "run", model, starts_from=tmp_path / "left")
    (tmp_path / "run/behind/ledger-2.jsonl").unlink()
    assert verify.verify(tmp_path / "run", None)[0] == 6
    with pytest.raises(PrivacyStateRefused, match="cannot be read"):
        make(tmp_path / "run", model, starts_from=[tmp_path / "left", tmp_path / "right"])


def test_the_configuration_names_the_runs_that_the_ledger_composes(tmp_path: Path) -> None:
    """Also after a resume, and where one run is given under two names. Without them in the ledger the two contradict each
    other."""
    run = tmp_path / "run"
    with quick():
        trained(tmp_path / "first")
        trained(tmp_path / "second", starts_from=tmp_path / "first")
        shutil.copytree(tmp_path / "second", tmp_path / "copy")
        starts = [tmp_path / name for name in ("second", "copy", "first")]
        for said in (starts, starts[:1]):
            with make(run, starts_from=said) as loop:
                loop.step()
            assert read_recipe(run)["init"] == {"starts_from": ["second", "first"]}
        assert verify.verify(run, None)[0] == 0
    shutil.rmtree(run / "behind")
    rewrite(run, lambda records: records[0].pop("behind"))
    code, found = verify.verify(run, None)
    assert code == 5 and "config.toml starts from first, second" in sentences(found)


def test_two_copies_of_a_run_that_both_went_on_are_refused(tmp_path: Path) -> None:
    """The weights carry the steps of both, and each ledger lacks those of the other."""
    with quick():
        with make(tmp_path / "one") as loop:
            loop.step()
        shutil.copytree(tmp_path / "one", tmp_path / "two")
        trained(tmp_path / "one")
        make(tmp_path / "run", starts_from=[tmp_path / "one", tmp_path / "two"]).close()
        lineage.TRAINED.clear()
        trained(tmp_path / "two")
        with pytest.raises(
            PrivacyConfigError, match="copies of one run that were both trained further"
        ):
            make(tmp_path / "next", starts_from=[tmp_path / "one", tmp_path / "two"])
    assert not (tmp_path / "next/ledger.jsonl").exists()


def test_what_is_no_run_with_a_guarantee_is_refused(tmp_path: Path) -> None:
    for bad, said in (
        (tmp_path / "nowhere", "not a run folder"),
        ([], "an empty list"),
        ("Public", "not a run folder"),
    ):
        with pytest.raises(PrivacyConfigError, match=said):
            make(tmp_path / "run", starts_from=bad)


def test_a_run_folder_that_is_put_back_is_noticed(tmp_path: Path) -> None:
    """It states less than this program has spent in it."""
    with quick():
        with make(tmp_path / "run") as loop:
            loop.step()
        shutil.copytree(tmp_path / "run", tmp_path / "earlier")
        model = trained(tmp_path / "run")
        shutil.rmtree(tmp_path / "run")
        shutil.copytree(tmp_path / "earlier", tmp_path / "run")
        with pytest.raises(PrivacyStateRefused, match="a trained model remembers"):
            make(tmp_path / "run", model)
        shutil.rmtree(tmp_path / "run")
        make(tmp_path / "run", net()).close()


@pytest.mark.parametrize("how", ["weights", "gradient"])
def test_what_the_callers_loss_trains_is_refused_before_the_charge(
    how: str, tmp_path: Path
) -> None:
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

    with quick() as patch, make(tmp_path / "run", model, loss=loss) as loop:
        patch.setattr(Isolation, "_is_chosen", lambda _self: False)  # it might see it first
        loop.step()
        calls[0] = 1000
        with pytest.raises(
            PrivacyConfigError, match=r"the weights changed|gradient that is not the loop's"
        ):
            loop.step()
        assert ledger_of(tmp_path / "run").num_charged == 1
