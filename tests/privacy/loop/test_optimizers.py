"""An optimizer brings no gradient without noise into a step, wherever it could keep one; whatever is the caller's goes on."""

import copy
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from privacy.errors import PrivacyConfigError
from privacy.guards.watched_engine import require_plain
from privacy.loop import WeightAverage
from tests.privacy.loop.own import D, K, cross_entropy, ledger_of, make, net, quick, weights

pytestmark = pytest.mark.usefixtures("trusted_models")

OF_TORCH = sorted(
    (
        kind
        for kind in vars(torch.optim).values()
        if isinstance(kind, type) and kind is not torch.optim.Optimizer
    ),
    key=lambda kind: kind.__name__,
)
QUICK = (
    *("Adam", "LBFGS", "Muon", "SGD", "SparseAdam", "warm-up", "rate as a tensor"),
    *(
        "rate",
        "key of its own",
        "attribute",
        "hook before",
        "another step",
        "state of nothing",
        "number in the state",
    ),
)
"""What `make test` tries of the tables below."""


def tried(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=[] if name in QUICK else pytest.mark.full) for name in names]


UNFIT = {
    "LBFGS": "needs no closure",
    "SparseAdam": "needs no closure",
    "Adafactor": "keeps 'row_var'",
}


def bare() -> nn.Module:
    """Matrices alone, since Muon takes nothing else."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, 5, bias=False), nn.Tanh(), nn.Linear(5, K, bias=False))


def of(kind: Any, model: nn.Module) -> torch.optim.Optimizer:
    more = {"momentum": 0.9} if kind in (torch.optim.SGD, torch.optim.RMSprop) else {}
    return kind(model.parameters(), lr=0.1, **more)


def gradients(model: nn.Module, *, sparse: bool = False) -> None:
    for p in model.parameters():
        p.grad = torch.randn_like(p).to_sparse() if sparse else torch.randn_like(p)


@pytest.mark.parametrize("name", tried(kind.__name__ for kind in OF_TORCH))
def test_every_optimizer_of_torch_is_taken_new_and_refused_after_a_step_of_its_own(
    name: str, tmp_path: Path
) -> None:
    kind = getattr(torch.optim, name)
    with quick():
        stepped = bare()
        optimizer = of(kind, stepped)
        gradients(stepped, sparse=kind is torch.optim.SparseAdam)
        optimizer.step(*([lambda: torch.zeros(())] if kind is torch.optim.LBFGS else []))
        optimizer.zero_grad()
        with pytest.raises(PrivacyConfigError, match="has taken steps already"):
            make(tmp_path / "stepped", stepped, optimizer=optimizer)
        model = bare()
        if name in UNFIT:
            with pytest.raises(PrivacyConfigError, match=UNFIT[name]):
                make(tmp_path / "new", model, optimizer=of(kind, model))
            return
        with make(tmp_path / "new", model, optimizer=of(kind, model), num_steps=2) as loop:
            list(loop)
    assert (
        not (tmp_path / "stepped/ledger.jsonl").exists()
        and ledger_of(tmp_path / "new").num_charged == 2
    )


def test_the_step_that_was_a_gradient_without_noise_is_none(tmp_path: Path) -> None:
    """Momentum of one own step, that step's gradient in `.grad`, or both: none of it is in the released weights."""
    with quick(silent=True, same_coins=True):
        plain, graded = net(), net()
        gradients(graded)
        graded[1].register_parameter("fixed", nn.Parameter(torch.zeros(3), requires_grad=False))
        graded[1].fixed.grad = torch.ones(3)
        for name, model in (("plain", plain), ("graded", graded)):
            with make(
                tmp_path / name,
                model,
                optimizer=torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9),
            ) as loop:
                loop.step()
    assert all(p.grad is None for p in graded.parameters())
    assert not graded[1].fixed.any()
    for a, b in zip(
        plain.parameters(), [*graded[0].parameters(), *graded[2].parameters()], strict=True
    ):
        assert torch.equal(a, b)


PLACES: dict[str, Callable[[Any, Tensor], object]] = {
    "rate": lambda o, g: o.param_groups[0].update(lr=g),
    "betas": lambda o, g: o.param_groups[0].update(betas=(0.9, g)),
    "key of its own": lambda o, g: o.param_groups[1].update(kept={"deep": [g]}),
    "an array": lambda o, g: o.param_groups[0].update(kept=g.numpy()),
    "attribute": lambda o, g: setattr(o, "kept", g),
    "attributes in a list": lambda o, g: setattr(o, "kept", [{"a": (g,)}]),
    "defaults": lambda o, g: o.defaults.update(kept=g),
    "hook before": lambda o, g: o.register_step_pre_hook(lambda *_: None),
    "hook after": lambda o, g: o.register_step_post_hook(lambda *_: None),
    "another step": lambda o, g: setattr(o, "step", lambda: None),
    "state of a parameter": lambda o, g: o.state[o.param_groups[0]["params"][0]].update(kept=g),
    "state of nothing": lambda o, g: o.state.update(kept=g),
    "number in the state": lambda o, _: o.state[o.param_groups[0]["params"][0]].update(kept=0.25),
}
SAID = "optimizer has taken steps already|optimizer has more than one number|optimizer has a hook|optimizer's state"


@pytest.mark.parametrize("place", tried(PLACES))
def test_what_could_hold_a_gradient_is_refused_at_the_start_and_between_steps(
    place: str, tmp_path: Path
) -> None:
    def adam(model: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(
            [{"params": model[0].parameters()}, {"params": model[2].parameters()}], lr=0.1
        )

    model = net()
    optimizer = adam(model)
    PLACES[place](optimizer, torch.randn(D))
    with pytest.raises(PrivacyConfigError, match=SAID):
        require_plain(model, optimizer)
    with quick():
        optimizer = adam(model)
        with make(tmp_path / "run", model, optimizer=optimizer) as loop:
            loop.step()
            PLACES[place](optimizer, torch.randn(D))
            with pytest.raises(PrivacyConfigError, match=SAID):
                loop.step()
            loop._run.saved = 1  # type: ignore[union-attr]  # weights are as they were; nothing has to be saved
    assert ledger_of(tmp_path / "run").num_charged == 1


def test_a_state_that_is_changed_in_place_loaded_or_stepped_elsewhere_is_found(
    tmp_path: Path,
) -> None:
    def loaded(optimizer: Any, before: Any) -> None:
        before["state"] = copy.deepcopy(optimizer.state_dict()["state"])
        before["state"][0]["exp_avg"] += 1
        optimizer.load_state_dict(before)

    changes: dict[str, Callable[[Any, Any], object]] = {
        "in place": lambda o, _: o.state[o.param_groups[0]["params"][1]]["exp_avg"].data.add_(1),
        "exchanged": lambda o, _: o.state[o.param_groups[0]["params"][1]].update(
            exp_avg=torch.zeros(5)
        ),
        "a count": lambda o, _: o.state[o.param_groups[0]["params"][1]]["step"].add_(1),
        "emptied": lambda o, _: o.state.clear(),
        "loaded": loaded,
    }

    def opened(name: str) -> Any:
        model = net()
        return make(
            tmp_path / name,
            model,
            optimizer=torch.optim.Adam(model.parameters(), lr=0.1),
            save_every=1,
        )

    with quick():
        for name, change in changes.items():
            with opened(name) as loop:
                optimizer = loop._engine.optimizer
                before = optimizer.state_dict()
                loop.step()
                change(optimizer, before)
                with pytest.raises(PrivacyConfigError, match="optimizer's state"):
                    loop.step()
            with opened(name) as loop:  # the checkpoint goes on, and is watched as well
                next(iter(loop._engine.optimizer.state.values()))["exp_avg"].add_(1)
                with pytest.raises(PrivacyConfigError, match="optimizer's state"):
                    loop.step()


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.2, total_steps=12),
    "cycles": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 6),
    "warm-up": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.StepLR(o, 2)], milestones=[2]
    ),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "a function": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"lr": 0.05},
    "foreach": {"lr": 0.05, "foreach": True},
    "fused": {"lr": 0.05, "fused": True},
    "rate as a tensor": {"lr": torch.tensor(0.05)},
}


@pytest.mark.parametrize("schedule", tried(SCHEDULERS))
def test_what_is_registered_goes_on_over_a_stop_to_the_bit(schedule: str, tmp_path: Path) -> None:
    """A scheduler that is made before the loop or in it, and an average: rates, weights and average of a run never left."""

    def run(name: str, leave_at: int, *, before: bool) -> tuple[list[float], Tensor, Tensor]:
        rates = []
        for last in (leave_at, 6):
            model: Any = net()
            decayed = {"params": [model[0].weight, model[2].weight], "weight_decay": 0.1}
            rest = {"params": [model[0].bias, model[2].bias], "weight_decay": 0.0}
            optimizer = torch.optim.AdamW([decayed, rest], lr=0.05)
            scheduler, average = (
                SCHEDULERS[schedule](optimizer) if before else None,
                WeightAverage(0.8),
            )
            with make(tmp_path / name, model, optimizer=optimizer, save_every=1) as loop:
                loop.register(scheduler or SCHEDULERS[schedule](optimizer), average)
                for step in loop:
                    rates.append(step.lr)
                    if step.number == last:
                        break
                with average.in_use():
                    averaged = weights(model)
                assert not torch.equal(averaged, weights(model))
        return rates, weights(model), averaged

    with quick(silent=True, same_coins=True):
        whole = run("whole", 6, before=True)
        for name, before in (("before", True), ("inside", False)):
            rates, ends, averaged = run(name, 4, before=before)
            assert rates == pytest.approx(whole[0]) and len(set(rates)) > 1
            assert torch.allclose(ends, whole[1], atol=1e-7) and torch.allclose(
                averaged, whole[2], atol=1e-7
            )


def test_what_cannot_be_kept_is_not_registered(tmp_path: Path) -> None:
    with quick(), make(tmp_path / "run") as loop:
        optimizer = loop._engine.optimizer
        moved = lr_scheduler.StepLR(optimizer, 5)
        moved.step()
        for thing in (moved, lr_scheduler.StepLR(of(torch.optim.SGD, net()), 5)):
            with pytest.raises(
                PrivacyConfigError,
                match="a new scheduler, of the optimizer that the loop was given",
            ):
                loop.register(thing)
        loop.register(WeightAverage(0.9))
        for other in (lr_scheduler.ReduceLROnPlateau(optimizer), WeightAverage(0.9), print):
            with pytest.raises(
                PrivacyConfigError, match=f"{type(other).__name__} cannot be registered"
            ):
                loop.register(other)  # type: ignore[arg-type]
        loop.step()
        with pytest.raises(PrivacyConfigError, match="before the first step"):
            loop.register(lr_scheduler.StepLR(optimizer, 5))
        with pytest.raises(PrivacyConfigError, match="at least 0 and below 1"):
            WeightAverage(1.0)


@pytest.mark.parametrize("settings", tried(SETTINGS))
def test_settings_and_a_rate_that_is_set_by_hand_go_on(settings: str, tmp_path: Path) -> None:
    with quick():
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), **SETTINGS[settings])
        with make(tmp_path / "run", model, optimizer=optimizer) as loop:
            for step in loop:
                optimizer.param_groups[0].update(
                    lr=0.1 / step.number, betas=(0.8, 0.99), weight_decay=0.01 * step.number
                )
    assert ledger_of(tmp_path / "run").num_charged == 6


def test_a_scheduler_that_begins_again_at_a_resume_is_said_with_both_rates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(leave_at: int, **changes: Any) -> str:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = lr_scheduler.CosineAnnealingLR(optimizer, 6)
        with make(tmp_path / "run", model, optimizer=optimizer, save_every=1, **changes) as loop:
            for step in loop:
                scheduler.step()
                if step.number == leave_at:
                    break
        return " ".join(capsys.readouterr().out.split())  # lines are folded

    with quick():
        assert "loop.register" not in run(2)
        assert "learning rate [0.1], and its last step took [0.09" in run(3)
        assert "loop.register" not in run(4, learning_rate=lambda step: 0.03)


@pytest.mark.parametrize("schedule", tried(SCHEDULERS))
def test_a_registered_scheduler_is_said_nothing_about_at_a_resume(
    schedule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rates = []
    with quick():
        for last in (2, 4):
            model = net()
            optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
            with make(tmp_path / "run", model, optimizer=optimizer, num_steps=6) as loop:
                loop.register(SCHEDULERS[schedule](optimizer))
                for step in loop:
                    rates.append(step.lr)
                    if step.number == last:
                        break
    assert "learning rate" not in capsys.readouterr().out
    optimizer = torch.optim.Adam(net().parameters(), lr=0.1)
    scheduler, expected = SCHEDULERS[schedule](optimizer), []
    with warnings.catch_warnings(action="ignore"):
        for _ in range(4):
            expected.append(optimizer.param_groups[0]["lr"])
            scheduler.step()
    assert rates == pytest.approx(expected)


@pytest.mark.parametrize(
    "place", ["between", "in the loss", "before the first step", "a part of it"]
)
def test_a_registered_scheduler_that_is_moved_by_hand_too_is_refused_before_a_charge(
    place: str, tmp_path: Path
) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    part = lr_scheduler.ExponentialLR(optimizer, 0.5)
    scheduler = lr_scheduler.ChainedScheduler([part]) if place == "a part of it" else part
    plain, is_late = cross_entropy(model), [False]

    def loss(x: Tensor, y: Tensor) -> Tensor:
        if is_late[0]:
            is_late[0] = False
            scheduler.step()
        return plain(x, y)

    with quick(), make(tmp_path / "run", model, optimizer=optimizer, loss=loss) as loop:
        loop.register(scheduler)
        taken = 0 if place == "before the first step" else 1
        for _ in range(taken):
            loop.step()
        if place == "in the loss":
            is_late[0] = True
        else:
            part.step()
        with pytest.raises(
            PrivacyConfigError,
            match=f"^{type(scheduler).__name__} is registered, .* remove scheduler.step",
        ):
            loop.step()
    assert ledger_of(tmp_path / "run").num_charged == taken
