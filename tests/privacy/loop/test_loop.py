"""A loop of one's own takes the steps that its ledger charges, and no others."""

import copy
import errno
import itertools
import json
import os
import random
import shutil
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from privacy import verify
from privacy.errors import BudgetSpent, ConfigError, PrivacyConfigError, PrivacyStateRefused
from privacy.loop import PrivateLoop, floats, integers
from privacy.loop.fields import Unusable
from privacy.loop.reading import ItemNotRead, Losses, chance_of_label
from privacy.noise.source import SystemNoise
from tests.privacy.loop.own import (
    N,
    Rows,
    clipped_mean,
    ledger_of,
    make,
    members_of,
    net,
    quick,
    rows,
    weights,
)


class Panic(BaseException):
    """As extensions in Rust raise."""


class Stubborn(torch.Tensor):
    """A class of tensors that lets nothing be done with it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError("no")


BROKEN: dict[str, Any] = {
    "another shape": (torch.zeros(7), 1),
    "another kind": ("text", 1),
    "a label out of range": (torch.zeros(6), 3),
    "a label that is a fraction": (torch.zeros(6), 0.5),
    "NaN": (torch.full((6,), torch.nan), 1),
    "infinity": (torch.full((6,), torch.inf), 1),
    "one part": (torch.zeros(6),),
    "nothing": None,
    "no dense tensor": (torch.ones(6).to_sparse(), 1),
    "a tensor that refuses": (torch.ones(6).as_subclass(Stubborn), 1),
    "it raises": KeyError("broken record"),
    "its decoder panics": Panic(),
    "its generator is closed": GeneratorExit(),
}


def test_without_noise_a_step_is_the_clipped_mean_of_whom_the_coins_draw(tmp_path: Path) -> None:
    """Example by example with torch's own backward, over the public batch size, for members that the sampler gives.

    A broken item, whatever is wrong with it, counts as zero and moves nothing else, and the run goes on to its end.
    """

    def raised(item: Any) -> Any:
        if isinstance(item, BaseException):
            raise item
        return item

    data = Rows([*rows(), *BROKEN.values()])
    data.change = raised
    model = net()
    twin = copy.deepcopy(model)
    drawn, not_finite = set[int](), [N + list(BROKEN).index(name) for name in ("NaN", "infinity")]
    with (
        quick(silent=True),
        make(
            tmp_path / "run",
            model,
            data,
            expected_batch_size=40,
            num_steps=4,
            unusable_as_zero=True,
        ) as loop,
    ):
        nonce = bytes.fromhex(ledger_of(tmp_path / "run").nonces[-1])
        for step in loop:
            members = members_of(loop, step.number, nonce).tolist()
            drawn |= {*members}
            mean = clipped_mean(twin, [rows()[i] for i in members if i < N], 40)
            with torch.no_grad():
                for p, g in zip(twin.parameters(), mean, strict=True):
                    p -= 0.5 * g.to(p.dtype)
            assert step.private["num_examples"].inside() == sum(
                i < N or i in not_finite for i in members
            )
    assert torch.allclose(weights(model), weights(twin), atol=1e-6)
    assert ledger_of(tmp_path / "run").closed == "finished"
    assert len([i for i in drawn if i >= N]) > len(BROKEN) / 2


@pytest.mark.parametrize(
    ("fails", "said"),
    [
        (lambda: Path("/nowhere/file").read_bytes(), "FileNotFoundError"),
        (lambda: torch.empty(2**60), "RuntimeError: .*memory"),
    ],
    ids=["file", "memory"],
)
def test_a_machine_that_fails_ends_the_run_before_its_charge(
    tmp_path: Path, fails: Any, said: str
) -> None:
    """A disk, a network or memory is no property of an item, so its failure is no zero gradient."""
    data = rows()
    with quick(), make(tmp_path / "run", dataset=data) as loop:
        loop.step()
        data.change = lambda _: fails()
        with pytest.raises(RuntimeError, match=f"could not be read: {said}"):
            loop.step()
        with pytest.raises(PrivacyConfigError, match="this loop is over"):
            loop.step()
    assert ledger_of(tmp_path / "run").num_charged == 1


def test_a_step_needs_gradients(tmp_path: Path) -> None:
    with quick(), make(tmp_path / "run") as loop:
        with (
            torch.inference_mode(),
            pytest.raises(PrivacyConfigError, match="take steps outside of it"),
        ):
            loop.step()
        assert loop.step().number == 1


def test_items_draw_random_numbers_of_their_own(tmp_path: Path) -> None:
    """An augmentation of one item must not depend on which others were read, nor move dropout."""
    augmented = rows()
    augmented.change = lambda item: (item[0] + torch.randn(6), item[1])

    def weights_of(data: Rows, name: str, **changes: Any) -> torch.Tensor:
        model = net()
        with quick(silent=True) as patch:  # with the same coins and keys in all runs
            patch.setattr("secrets.token_bytes", lambda size=32: bytes(range(size)))
            with make(tmp_path / name, model, data, **changes) as loop:
                list(loop)
        return weights(model)

    alone = weights_of(augmented, "alone")
    assert torch.allclose(alone, weights_of(augmented, "micro", micro_batch_size=32), atol=1e-6)
    assert not torch.allclose(alone, weights_of(rows(), "plain"), atol=1e-3)


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(rows())


def test_what_batches_cannot_be_drawn_from_is_refused_with_its_replacement(tmp_path: Path) -> None:
    counting, count = rows(), itertools.count()
    counting.change = lambda item: (
        item[0] + next(count),
        item[1],
    )  # depends on how many were read before
    refused = {
        "give the data set, not a DataLoader": torch.utils.data.DataLoader(
            rows(), batch_size=8, shuffle=True
        ),
        "take a map-style data set": Stream(),
        "is empty": Rows(),
        "is not the same when it is read again": counting,
        "items cannot be used": Rows([(torch.zeros(5), 0)] * 20),
    }
    with quick():
        for said, data in refused.items():
            with pytest.raises(PrivacyConfigError, match=said):
                make(tmp_path / "run", dataset=data)
    assert not (tmp_path / "run/ledger.jsonl").exists()


def test_models_and_optimizers_that_void_the_claim_are_refused(tmp_path: Path) -> None:
    wrapper = type("DistributedDataParallel", (nn.Sequential,), {})
    normalised = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    less = net()
    cases: list[tuple[str, nn.Module, Any]] = [
        ("not DistributedDataParallel", wrapper(net()), None),
        ("BatchNorm", normalised, None),
        ("torch.bfloat16", net().bfloat16(), None),
        ("the optimizer has to hold", less, torch.optim.SGD(less[0].parameters(), lr=0.1)),
        (
            "holds a parameter of shape",
            less,
            torch.optim.SGD([*less.parameters(), *net().parameters()], lr=0.1),
        ),
    ]
    with quick():
        for said, model, given in cases:
            with pytest.raises(PrivacyConfigError, match=said):
                make(tmp_path / "run", model, optimizer=given)
    assert not (tmp_path / "run/ledger.jsonl").exists()


OTHERS = [
    getattr(torch.optim, name) for name in ("SGD", "AdamW", "RMSprop", "Adagrad", "NAdam", "ASGD")
]


@pytest.mark.parametrize(
    "kind", [torch.optim.Adam, *(pytest.param(one, marks=pytest.mark.full) for one in OTHERS)]
)
def test_a_loop_that_is_left_goes_on_as_if_it_had_not_been(kind: Any, tmp_path: Path) -> None:
    """Weights, moments and counts come back to the bit: the same coins then give the same end."""

    def run(run_dir: Path, *, leave_at: int | None) -> torch.Tensor:
        with quick(silent=True, same_coins=True):
            more = {"momentum": 0.9} if kind is torch.optim.SGD else {}
            model = net()
            with make(run_dir, model, optimizer=kind(model.parameters(), lr=0.1, **more)) as loop:
                for step in loop:
                    if step.number == leave_at:
                        break
            if leave_at is not None:
                model = net(seed=1)
                with make(
                    run_dir, model, optimizer=kind(model.parameters(), lr=0.1, **more)
                ) as loop:
                    assert loop.steps_done == leave_at
                    list(loop)
            return weights(model)

    assert torch.equal(run(tmp_path / "whole", leave_at=None), run(tmp_path / "left", leave_at=3))
    assert ledger_of(tmp_path / "left").num_charged == 6


def test_a_finished_run_says_so_takes_no_more_steps_and_holds_its_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with quick():
        model = net()
        with make(tmp_path / "run", model) as loop:
            list(loop)
        assert "finished" not in capsys.readouterr().out
        again = net(seed=5)
        with make(tmp_path / "run", again) as loop:
            said = capsys.readouterr().out.replace("\n  ", " ")
            assert (
                f"{tmp_path / 'run'} is finished (6 steps): epsilon 1.000" in said
                and "another run_dir" in said
            )
            assert list(loop) == [] and loop.epsilon == 1.0
            with pytest.raises(PrivacyConfigError, match="all 6 steps"):
                loop.step()
        assert torch.equal(weights(model), weights(again))


def test_a_folder_serves_one_loop_at_a_time_and_one_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("privacy.step.run_folder.LOCK_PATIENCE", 0.0)
    with quick():
        with make(tmp_path / "run") as loop:
            loop.step()
            with pytest.raises(ConfigError, match="in use"):
                make(tmp_path / "run")
        for changes, error in (
            ({"noise_multiplier": 2.0}, PrivacyConfigError),
            ({"num_steps": 7}, PrivacyConfigError),
            ({"max_grad_norm": 0.5}, PrivacyConfigError),
            ({"dataset": rows(61)}, PrivacyConfigError),
            ({"dataset": Rows([*rows()[:-1], (torch.ones(6), 1)])}, PrivacyConfigError),
            ({"model": nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))}, ConfigError),
        ):
            with pytest.raises(error):
                make(tmp_path / "run", **changes)
        (tmp_path / "run/private/sampling.key").rename(tmp_path / "key")
        with pytest.raises(PrivacyStateRefused):
            make(tmp_path / "run")
    assert ledger_of(tmp_path / "run").num_charged == 1


def test_contract_1_and_7_two_copies_of_a_folder_that_both_go_on_share_no_coin_and_no_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step by step beside each other, with the same seeds before each start and each step."""
    draws, drawn = list[bytes](), SystemNoise.rounded_normal

    def noted(
        source: SystemNoise, deviation: float, count: int, device: torch.device
    ) -> torch.Tensor:
        noise = drawn(source, deviation, count, device)
        draws.append(noise.numpy().tobytes())
        return noise

    def seed() -> None:
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002  (what an old library draws from)
        torch.manual_seed(0)

    monkeypatch.setattr(SystemNoise, "rounded_normal", noted)
    monkeypatch.setattr("time.time", lambda: 2e9)
    with quick():
        with make(tmp_path / "run") as loop:
            next(iter(loop))
        charged = ledger_of(tmp_path / "run").num_charged
        copies, loops = [tmp_path / name for name in ("left", "right")], list[PrivateLoop]()
        for folder in copies:
            shutil.copytree(tmp_path / "run", folder)
            seed()
            loops.append(make(folder))
        steps = [iter(loop) for loop in loops]
        for _ in range(6 - charged):
            for step in steps:
                seed()
                next(step)
        members: list[list[np.ndarray]] = []
        for folder, loop in zip(copies, loops, strict=True):
            nonce = bytes.fromhex(ledger_of(folder).nonces[-1])
            members.append([members_of(loop, step, nonce) for step in range(charged + 1, 7)])
            loop.close()
    assert charged == 1 and len(draws) == 4 * (1 + 2 * 5)  # of each parameter in each step
    assert len({*draws}) == len(draws)
    assert not any(np.array_equal(left, right) for left, right in zip(*members, strict=True))


def test_two_loops_on_one_model_are_told_apart(tmp_path: Path) -> None:
    """What both spend adds up in the weights, and neither ledger would know."""
    with quick():
        model = net()
        with make(tmp_path / "one", model) as one, make(tmp_path / "two", model) as two:
            one.step()
            with pytest.raises(PrivacyConfigError, match="the weights changed"):
                two.step()
        with make(tmp_path / "one", model) as one:
            assert one.steps_done == 1
            one.step()
        with make(tmp_path / "four", net()) as four, make(tmp_path / "five", net()) as five:
            assert four.step().number == five.step().number == 1
    assert ledger_of(tmp_path / "two").num_charged == 0


def test_a_run_whose_crashes_used_up_the_reserve_stops(tmp_path: Path) -> None:
    """Every abandoned step is charged; the last one is not taken."""
    with quick():
        for _ in range(3):
            loop = make(tmp_path / "run", save_every=6)
            loop.step()
            loop.close()
        with make(tmp_path / "run", save_every=6) as loop:
            for _ in range(5):
                loop.step()
            with pytest.raises(BudgetSpent):
                loop.step()
        assert ledger_of(tmp_path / "run").num_charged == 8


@pytest.mark.parametrize("delta", [pytest.param(0.1, marks=pytest.mark.full), 1 / 60])
def test_a_delta_of_1_over_n_or_more_is_said_wherever_an_epsilon_is(
    delta: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with quick():
        with (
            pytest.warns(UserWarning, match="protects nobody"),
            make(tmp_path / "run", target_delta=delta) as loop,
        ):
            list(loop)
        assert "protects nobody" in loop.claim
        found = verify.verify(tmp_path / "run", None)[1]
        assert "1/n or more protects nobody" in json.dumps(found)
        assert "1/n or more protects nobody" in verify.to_text(found).splitlines()[-1]
        with (
            pytest.warns(UserWarning, match="protects nobody"),
            make(tmp_path / "run", target_delta=delta),
        ):
            assert "protects nobody" in capsys.readouterr().out
        with warnings.catch_warnings(), make(tmp_path / "default") as loop:
            warnings.simplefilter("error")
            assert loop.claim == "epsilon 1.000 at delta 0.00833333"


def test_items_that_count_as_zero_are_counted_with_their_reasons(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Labels from 1 on lose the last class, and no line of the run would tell."""
    data = Rows((x, y + 1) for x, y in rows())
    lost = sum(y == 3 for _, y in data)
    with quick():
        make(
            tmp_path / "run", dataset=Rows([*data, (torch.zeros(7), 1)]), unusable_as_zero=True
        ).close()
        said = capsys.readouterr().out.replace("\n  ", " ")
        assert (
            f"{lost + 1} of 61 items cannot be used" in said
            and f"({lost} times: item_1 holds integers" in said
        )
        assert "1 times: item_0 has shape (7,)" in said
        make(tmp_path / "whole").close()
        assert "cannot be used" not in capsys.readouterr().out


def unreadable(number: int) -> Any:
    """Each in its own words."""
    return OSError(f"cannot identify image file {number}.jpg")


GOOD = [(torch.full((6,), 0.01 * i), i % 3) for i in range(1000)]
RARE = [(x, 2 if i in (5, 300, 600, 900) else i % 2) for i, (x, _) in enumerate(GOOD)]
KINDS = (
    *(
        ValueError,
        KeyError,
        TypeError,
        IndexError,
        ZeroDivisionError,
        AttributeError,
        ArithmeticError,
        LookupError,
    ),
    *(AssertionError, NotImplementedError, EOFError),
)
LOST: dict[str, tuple[list[Any], str | None]] = {
    "labels from 1 on": ([(x, y + 1) for x, y in GOOD], "more than 1 %"),
    "-1 for what has no label": ([*GOOD, *[(torch.ones(6), -1)] * 12], "more than 1 %"),
    "pictures of many sizes": (
        [*GOOD, *((torch.ones(7 + i), i % 3) for i in range(12))],
        "more than 1 %",
    ),
    "unreadable files": ([*GOOD, *map(unreadable, range(12))], "more than 1 %"),
    "a rare class": ([*GOOD, *[(torch.ones(6), 3)] * 3], "3 of the 3 with one value of item_1"),
    "a class from another camera": (
        [*RARE, *[(torch.ones(9), 2)] * 6],
        "6 of the 10 with one value of item_1",
    ),
    "two rare classes": (
        [*GOOD, *[(torch.ones(6), 3)] * 3, *[(torch.ones(6), 4)] * 3],
        "3 of the 3 with one value",
    ),
    "both of one of three classes": ([*GOOD, *[(torch.ones(9), 2)] * 2], None),
    "of the class that most have": (
        [*((x, int(y > 1 and x[0] > 9)) for x, y in GOOD), *[(torch.ones(9), 0)] * 9],
        None,
    ),
    "ten of a thousand": ([*GOOD[:990], *((torch.ones(7), i % 3) for i in range(10))], None),
    "many reasons": (
        [*GOOD, *((torch.ones(7), i % 3) for i in range(9)), *map(unreadable, range(9))],
        "more than 1 %",
    ),
    "all for one reason each": ([*GOOD, *(kind("broken") for kind in KINDS)], "more than 1 %"),
    "a single item": ([*GOOD[:30], (torch.ones(7), 1)], None),
    "a single label out of range": ([*GOOD, (torch.ones(6), 3)], None),
}


@pytest.mark.parametrize("name", LOST)
def test_losses_that_no_accident_explains_are_refused_before_a_charge_unless_they_are_meant(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def raised(item: Any) -> Any:
        if isinstance(item, BaseException):
            raise item
        return item

    items, why = LOST[name]
    data = Rows(items)
    data.change = raised
    with quick():
        if why is not None:
            with pytest.raises(
                PrivacyConfigError, match=f"{why}.* unusable_as_zero=True if that is meant$"
            ) as refused:
                make(tmp_path / "run", dataset=data)
            assert "\n" not in str(refused.value)
            assert not (tmp_path / "run/ledger.jsonl").exists()
        make(tmp_path / "run", dataset=data, unusable_as_zero=why is not None).close()
    assert "items cannot be used" in capsys.readouterr().out


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_label_that_is_lost_is_seen_whatever_its_shape(
    shape: tuple[int, ...], tmp_path: Path
) -> None:
    """Nine of nine, by another shape; of two that many have, chance takes both."""

    def labelled(items: list[Any]) -> Rows:
        return Rows((x, torch.tensor(y).view(shape)) for x, y in items)

    def loss_of(model: Any) -> Any:
        return lambda x, y: nn.functional.cross_entropy(model(x), y.view(-1), reduction="none")

    example = (floats(6), integers(3, *shape))
    with quick():
        model = net()
        some = labelled([*[(x, y % 2) for x, y in GOOD], *[(torch.ones(7), 2)] * 9])
        with pytest.raises(PrivacyConfigError, match="9 of the 9 with one value of item_1"):
            make(tmp_path / "refused", model, some, example=example, loss=loss_of(model))
        both = labelled([*GOOD, *[(torch.ones(7), 2)] * 2])
        make(tmp_path / "taken", model, both, example=example, loss=loss_of(model)).close()
    assert not (tmp_path / "refused/ledger.jsonl").exists()


def test_the_chance_that_a_label_is_lost_is_that_of_a_draw_and_no_lower() -> None:
    """By counting all draws of 4 of 9 items, 3 of which have the label; and never refused where many labels are lost alike."""
    draws = [sum(i < 3 for i in draw) for draw in itertools.combinations(range(9), 4)]
    for number in range(4):
        exact = sum(lost >= number for lost in draws) / len(draws)
        assert exact <= chance_of_label(9, 3, 4, number) + 1e-12
    assert chance_of_label(9, 3, 4, 3) == pytest.approx(
        sum(lost == 3 for lost in draws) / len(draws)
    )
    generator, refused = torch.Generator().manual_seed(2), 0
    for _ in range(20):
        losses = Losses()
        label_N = torch.randint(2, (100_000,), generator=generator)
        losses.used["y"].update(Counter(label_N[900:].tolist()))
        for label in label_N[:900].tolist():
            error = Unusable("broken")
            error.labels = {"y": label}
            losses.add(error)
        refused += bool(losses.more_than_an_accident(100_000))
    assert refused == 0


def test_losses_are_seen_where_the_data_have_a_version(tmp_path: Path) -> None:
    """Without a pass over all items, some of them are looked at."""
    data = Rows((x, y + 2 * (i % 20 == 7)) for i, (x, y) in enumerate(GOOD))
    with quick(), pytest.raises(PrivacyConfigError, match="items cannot be used"):
        make(tmp_path / "run", dataset=data, data_version="1")
    assert not (tmp_path / "run/ledger.jsonl").exists()


def test_a_batch_without_a_finite_example_is_said_when_it_happens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = rows()
    with quick(), make(tmp_path / "run", dataset=data) as loop:
        loop.step()
        assert "not finite" not in capsys.readouterr().out
        data.change = lambda item: (item[0] * torch.inf, item[1])
        assert loop.step().private["num_nonfinite"].inside() > 0
        assert "step 2: loss or gradients of all" in capsys.readouterr().out


MEANT = {
    "delta": "target_delta",
    "epsilon": "target_epsilon",
    "steps": "num_steps",
    "noise": "noise_multiplier",
    "batch_size": "expected_batch_size",
    "max_norm": "max_grad_norm",
    "loss_fn": "loss",
    "workers": "num_workers",
    "optimiser": "optimizer",
    "train_dataset": "dataset",
    "rundir": "run_dir",
    "micro_batchsize": "micro_batch_size",
}


def test_a_keyword_of_another_library_gets_the_name_that_is_meant() -> None:
    for name, meant in MEANT.items():
        with pytest.raises(
            PrivacyConfigError, match=rf"PrivateLoop takes no {name}: did you mean {meant}\?$"
        ) as refused:
            PrivateLoop(net(), **{name: 1})
        assert "\n" not in str(refused.value)
    with pytest.raises(PrivacyConfigError, match="it takes data_version, dataset, example"):
        PrivateLoop(net(), poisson=True)


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # torch's half-made loader
def test_a_machine_that_lets_no_worker_start_is_named_before_any_charge(tmp_path: Path) -> None:
    """Queues of processes lie in /dev/shm, and the system names no file when it is read-only or full."""

    def refused(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with quick() as patch, make(tmp_path / "run", num_workers=1) as loop:
        patch.setattr("multiprocessing.synchronize._multiprocessing.SemLock", refused)
        with pytest.raises(
            ItemNotRead, match=r"workers cannot start: Read-only file system; they need /dev/shm"
        ):
            loop.step()
    assert ledger_of(tmp_path / "run").num_charged == 0
