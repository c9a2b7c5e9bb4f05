"""A loop of one's own on a model that `fully_shard` has sharded: the steps of a whole one, and each coordinate noised once."""

import contextlib
import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from privacy import verify
from privacy.errors import PrivacyConfigError
from privacy.ledger.records import read_ledger
from privacy.loop import PrivateLoop, integers
from privacy.noise.source import SystemNoise
from tests.distributed.ranks import run_ranks
from tests.docs.pages import blocks
from tests.docs.test_library_example import installed
from tests.privacy.loop.own import quick

TOKENS, LENGTH, WIDTH, KINDS = 7, 4, 5, 3
BOUND, BATCH = 0.5, 15


class Reader(nn.Module):
    """Rows that two ranks share unevenly, a parameter of one row, of which rank 1 holds none, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.block = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.fixed = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.gate = nn.Linear(WIDTH, 1)
        self.head = nn.Linear(WIDTH, KINDS)

    def forward(self, tokens_BL: Tensor) -> Tensor:
        x_BLD = self.embedding(tokens_BL)
        x_BLD = x_BLD + self.fixed(self.block(x_BLD))
        return self.head((torch.sigmoid(self.gate(x_BLD)) * x_BLD).mean(1))


def sharded(model: nn.Module | None = None, **how: Any) -> nn.Module:
    """A block of several layers, a layer that is a unit of its own, and the rest."""
    model = Reader() if model is None else model
    fully_shard(model.block, **how)
    fully_shard(model.head, **how)
    return fully_shard(model, **how)


def texts() -> list[tuple[Tensor, int]]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(TOKENS, (60, LENGTH), generator=generator)
    return [(row, int(row.sum()) % KINDS) for row in tokens]


def loss_of(model: nn.Module) -> Callable[..., Tensor]:
    return lambda x, y: F.cross_entropy(model(x), y, reduction="none")


def opened(
    model: nn.Module, run_dir: Path, optimizer: torch.optim.Optimizer, **changes: Any
) -> PrivateLoop:
    asked: dict[str, Any] = {
        "loss": loss_of(model),
        "expected_batch_size": BATCH,
        "num_steps": 3,
        "noise_multiplier": 4.0,
        "max_grad_norm": BOUND,
        "micro_batch_size": 8,
        "starts_from": "public",
    }
    example = (integers(TOKENS, LENGTH), integers(KINDS))
    return PrivateLoop(
        model, optimizer, texts(), example=example, run_dir=run_dir, **(asked | changes)
    )


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.05)


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().double()
        for name, p in model.named_parameters()
    }


def steps_of(
    model: nn.Module, run_dir: Path, leave_at: int | None = None
) -> list[dict[str, Tensor]]:
    """Whole weights after each step without noise."""
    seen = []
    with (
        quick(silent=True, same_coins=True),
        opened(model, run_dir, adam(model), save_every=3) as loop,
    ):
        for step in loop:
            seen.append(whole_weights(model))
            model(
                torch.zeros(2, LENGTH, dtype=torch.int64)
            )  # an evaluation gathers weights, and leaves some so
            if step.number == leave_at:
                break
    return seen


def rank_all(device: torch.device, folder: str) -> Any:
    """One start of two processes for all tests, since the import of FSDP takes each of them seconds."""
    left = Path(folder) / "left"
    steps = [*steps_of(sharded(), left, leave_at=1), *steps_of(sharded(), left)]
    return [steps, rank_noise(Path(folder)), rank_refusals(Path(folder))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shards")


@pytest.fixture(scope="module")
def found(folder: Path) -> Any:
    """What both ranks found, test by test."""
    return list(zip(*run_ranks(f"{__name__}:rank_all", 2, folder=str(folder)), strict=True))


def test_steps_in_shards_are_those_of_whole_weights_also_after_a_resume(
    found: Any, folder: Path, tmp_path: Path
) -> None:
    alone = steps_of(Reader(), tmp_path / "alone")
    for seen in found[0]:
        for mine, theirs in zip(seen, alone, strict=True):
            assert all(
                torch.allclose(mine[name], theirs[name], rtol=0, atol=1e-6) for name in theirs
            )
    moved = {name for name, p in alone[-1].items() if not torch.equal(p, alone[0][name])}
    assert moved == {name for name in alone[0] if not name.startswith("fixed")}
    model = Reader()
    assert steps_of(model, folder / "left") == []  # what two ranks wrote in shards, one reads whole
    assert all(
        torch.allclose(p, alone[-1][name], rtol=0, atol=1e-6)
        for name, p in whole_weights(model).items()
    )


class Counting(SystemNoise):
    """Counts what is drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[int] = []

    def rounded_normal(self, deviation: float, count: int, device: torch.device) -> Tensor:
        self.counts.append(count)
        return super().rounded_normal(deviation, count, device)


NOISY_STEPS = 20


def rank_noise(folder: Path) -> Any:
    """With gradients that are nothing next to the noise, a step of SGD is the noise."""
    model, noise = sharded(), Counting()
    with quick() as patch:
        patch.setattr("privacy.run.mechanism.SystemNoise", lambda: noise)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
        steps, before = [], whole_weights(model)
        with opened(
            model,
            folder / "noise",
            optimizer,
            num_steps=NOISY_STEPS,
            expected_batch_size=1,
            noise_multiplier=3.0,
            save_every=NOISY_STEPS,
            loss=lambda x, y: 1e-6 * loss_of(model)(x, y),
        ) as loop:
            owned = loop._engine.layout.count(dist.get_rank())
            for _ in loop:
                after = whole_weights(model)
                steps.append({name: after[name] - before[name] for name in after})
                before = after
    return noise.counts, owned, steps


def test_each_coordinate_is_noised_once_by_one_owner_with_the_deviation_of_the_plan(
    found: Any,
) -> None:
    ranks = found[1]
    shapes = {name: p.numel() for name, p in Reader().named_parameters() if p.requires_grad}
    total = sum(shapes.values())
    assert sum(owned for _, owned, _ in ranks) == total and all(
        0 < owned < total for _, owned, _ in ranks
    )
    for counts, owned, steps in ranks:
        assert sum(counts) == NOISY_STEPS * owned
        assert all(
            torch.equal(a[name], b[name])
            for a, b in zip(steps, ranks[0][2], strict=True)
            for name in a
        )
    expected = (3.0 * BOUND) ** 2  # over the public batch size, 1
    for name, count in shapes.items():
        values = torch.stack([step[name].view(-1) for step in ranks[0][2]])
        variance = float(values.square().mean()) / expected
        assert abs(variance - 1) < 6 * math.sqrt(2 / (count * NOISY_STEPS)), (name, variance)
    every = torch.cat(
        [torch.stack([step[name].view(-1) for step in ranks[0][2]]) for name in shapes], 1
    )
    assert abs(float(every.square().mean()) / expected - 1) < 6 * math.sqrt(2 / every.numel())
    correlated = torch.corrcoef(every.T)
    assert float((correlated - correlated.diag().diag()).abs().max()) < 0.95  # no two share a draw


def in_tensor_parallel() -> nn.Module:
    model, mesh = Reader(), init_device_mesh("cpu", (2,))
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            whole = distribute_tensor(p.detach(), mesh, [Shard(0)])
            module.register_parameter(name, nn.Parameter(whole, requires_grad=p.requires_grad))
    return model


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "in part": (
        lambda: (model := Reader(), fully_shard(model.block))[0],
        "call fully_shard(model) on the model itself",
    ),
    "inside": (
        lambda: nn.Sequential(fully_shard(Reader())),
        "call fully_shard(model) on the model itself",
    ),
    "HSDP": (
        lambda: sharded(mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "shards"))),
        "a loop takes all ranks in one dimension",
    ),
    "reversed": (
        lambda: sharded(mesh=DeviceMesh("cpu", [1, 0])),
        "a loop takes all ranks in one dimension",
    ),
    "tensor parallel": (in_tensor_parallel, "call fully_shard(model) on the model itself"),
    "ignored": (
        lambda: fully_shard(model := Reader(), ignored_params=set(model.head.parameters())),
        "without ignored_params",
    ),
    "columns": (
        lambda: fully_shard(nn.Linear(4, WIDTH), shard_placement_fn=lambda p: Shard(p.dim() - 1)),
        "call fully_shard without shard_placement_fn",
    ),
    "bf16": (
        lambda: sharded(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)),
        "call fully_shard without mp_policy",
    ),
}


def rank_refusals(folder: Path) -> Any:
    said = {}
    with quick():
        for name, (made, _) in REFUSED.items():
            model = made()
            try:
                opened(model, folder / "refused", adam(model)).close()
            except PrivacyConfigError as error:
                said[name] = str(error)
        model = sharded()
        with opened(model, folder / "refused", adam(model)) as loop:
            loop.step()
            for meddle in (backward, write, change_rate):
                undo = meddle(loop.module, loop._engine.optimizer)
                try:
                    loop.step()
                except PrivacyConfigError as error:
                    undo()
                    said[meddle.__name__] = str(error)
    return said


def backward(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Somebody trains by hand, with FSDP's own reduction."""
    model.set_requires_gradient_sync(True)
    model(torch.zeros(2, LENGTH, dtype=torch.int64)).sum().backward()
    return optimizer.zero_grad


def write(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """On one rank alone, into its own shard."""
    assert isinstance(model, FSDPModule)
    model.reshard()
    p = model.embedding.weight
    assert isinstance(p, DTensor)
    local = p.to_local().detach()
    before = local.clone()
    if dist.get_rank() == 1:
        local += 1
    return lambda: local.copy_(before)


def change_rate(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Ranks would step differently, and no two hold the same shard to see it by."""
    optimizer.param_groups[0]["lr"] = 0.1 * (1 + dist.get_rank())
    return lambda: None


def test_shards_that_a_loop_cannot_train_are_refused_and_so_is_a_hand_in_it(
    found: Any, folder: Path
) -> None:
    for said in found[2]:
        assert {
            name: wanted in said.get(name, "") for name, (_, wanted) in REFUSED.items()
        } == dict.fromkeys(REFUSED, True), said
        assert "has a gradient that is not the loop's" in said["backward"]
        assert "the weights changed" in said["write"]
        assert "ranks hold different weights" in said["change_rate"]
    assert read_ledger(folder / "refused/ledger.jsonl").num_charged == 1


def rank_page(device: torch.device, folder: str) -> str:
    """The first program of the page with the lines for shards, at the two places that the page says."""
    programs = [block for block in blocks("docs/own_loop.md") if block.language == "python"]
    (lines,) = (block.text for block in programs if "init_process_group" in block.text)
    before, after = lines.split("# before the optimizer is made\n")
    text = before + programs[0].text.replace("optimizer = ", f"{after}optimizer = ", 1)
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, installed(), contextlib.redirect_stdout(printed):
        patch.chdir(folder)
        patch.setattr(dist, "init_process_group", lambda *_: None)  # the test has
        exec(compile(text, "docs/own_loop.md", "exec"), {})
    said = next(line for line in text.splitlines() if "# epsilon" in line).rpartition("# ")[2]
    assert printed.getvalue().splitlines()[-1] == said
    return said


@pytest.mark.full
def test_the_program_of_the_page_runs_on_two_ranks(tmp_path: Path) -> None:
    run_ranks(f"{__name__}:rank_page", 2, folder=str(tmp_path))
    code, found = verify.verify(tmp_path / "runs/loop", None)
    assert code == 0 and found["epsilon"] == pytest.approx(1.3183, abs=1e-3)
