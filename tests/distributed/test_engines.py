"""Engines against one process with a float64 loop: clipped sums and optimizer steps. Two real ranks each.

All engines against each other, and their noise: test_parity.py.

The batch is dealt out unevenly (5 and 2 examples, or 7 and none), so padding and empty ranks are always part of it.
"""

import itertools
import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from data.batch import Batch
from models.captioner import build_captioner
from models.config import captioner_config
from privacy.clipping import ClippedSum
from privacy.noise.source import NoiseSource, SystemNoise
from privacy.plan.numbers import make_plan
from privacy.plan.request import PlanRequest
from privacy.ranks import collectives as distributed
from privacy.ranks.engine import Engine
from privacy.sampling.sampler import sampler_of
from privacy.step.step import Charge, Mechanism, train_step
from privacy.sums.reduction import reduce_to_owners
from privacy.sums.totals import real_numbers
from tests.distributed.ranks import run_ranks
from tests.privacy.clipping import oracle
from trainer.config.machine import MachineSettings, load_machine_settings
from trainer.config.recipe import OptimizerSection
from trainer.engines import build_engine, sharder
from trainer.errors import ConfigError
from trainer.optimizers import make_optimizer, parameter_groups

ENGINES = [("local", 1), ("deepspeed", 1), ("deepspeed", 2), ("deepspeed", 3)]
OPTIMIZER = OptimizerSection(peak_lr=1e-2, eps=1e-4, weight_decay=0.01)
NUM_EXAMPLES, MICRO_BATCH, MICRO_BATCHES = 7, 2, 4


def fresh_captioner(after: Callable[[torch.nn.Module], None] | None = None) -> torch.nn.Module:
    config = captioner_config(
        "pico",
        image_size=16,
        patch_size=8,
        vocab_size=37,
        num_tokens=7,
        encoder_width=16,
        encoder_depth=2,
        encoder_num_heads=2,
        decoder_width=24,
        decoder_depth=1,
        decoder_num_heads=2,
    )
    return build_captioner(config, generator=torch.Generator().manual_seed(3), module_hook=after)


def tiny_captioner(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    model = fresh_captioner()
    with (
        torch.no_grad()
    ):  # away from the initial zeros and ones, so that every parameter has a gradient of its own
        generator = torch.Generator().manual_seed(4)
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.to(dtype)


def pairs(count: int = NUM_EXAMPLES) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    scale = torch.logspace(-1, 0.5, count)[:, None, None, None]
    lengths = torch.randint(3, 8, (count, 1), generator=generator)
    return {
        "images_BCHW": torch.randn(count, 3, 16, 16, generator=generator) * scale,
        "tokens_BL": torch.randint(3, 37, (count, 7), generator=generator),
        "token_mask_BL": torch.arange(7)[None] < lengths,
    }


def double(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}


def micro_batches(inputs: dict[str, Tensor], counts: tuple[int, ...]) -> list[Batch]:
    """This rank's part, as MICRO_BATCHES padded micro-batches."""
    rank = distributed.rank()
    start = sum(counts[:rank])
    mine = list(range(start, start + counts[rank]))
    batches = []
    for first in range(0, MICRO_BATCH * MICRO_BATCHES, MICRO_BATCH):
        rows = mine[first : first + MICRO_BATCH]
        padding = MICRO_BATCH - len(rows)
        part = {k: torch.cat([v[rows], torch.zeros_like(v[:padding])]) for k, v in inputs.items()}
        batches.append(Batch(part, torch.tensor([False] * len(rows) + [True] * padding)))
    return batches


class NoLedger:
    """Stands for the ledger; checks that the intent comes first and `done` last."""

    def __init__(self) -> None:
        self.open_intent = False

    def intent(self, step: int, **release: Any) -> None:
        assert not self.open_intent
        self.open_intent = True

    def done(self, step: int, **noised: object) -> None:
        assert self.open_intent
        self.open_intent = False


class RecordedNoise(SystemNoise):
    def __init__(self) -> None:
        self.draws: list[Tensor] = []

    def rounded_normal(self, deviation: float, count: int, device: torch.device) -> Tensor:
        draw = super().rounded_normal(deviation, count, device)
        assert draw.dtype == torch.int64
        self.draws.append(draw.double() / deviation)
        return draw


def a_mechanism(
    engine: Engine, clipped: ClippedSum, noise: NoiseSource, sigma: float, expected_batch_size: int
) -> Mechanism:
    request = PlanRequest(
        num_examples=1000 * expected_batch_size,
        expected_batch_size=expected_batch_size,
        num_steps=100,
        noise_multiplier=sigma,
        allow_small_noise=True,
    )
    plan = make_plan(request)
    return Mechanism(
        plan=plan,
        sampler=sampler_of(plan),
        clipped=clipped,
        noise=noise,
        engine=engine,
        task=engine.module,
    )


def not_charged() -> Charge:
    """A step of a run without a ledger."""
    return Charge(NoLedger(), lambda step: OPTIMIZER.peak_lr, lambda step: None)


def machine_settings(stage: int, **more: Any) -> MachineSettings:
    """A ds_config with every parameter sharded, small ones included; `more` goes into zero_optimization or next to it."""
    zero: dict[str, Any] = {
        "stage": stage,
        **({"stage3_param_persistence_threshold": 0} if stage == 3 else {}),
    }
    beside = {"bf16", "fp16", "activation_checkpointing"}
    zero |= {key: more.pop(key) for key in list(more) if key not in beside}
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump({"zero_optimization": zero, **more}, file)
        file.flush()
        return load_machine_settings(Path(file.name))


def build(device: torch.device, name: str, stage: int, **more: Any) -> Any:
    return build_engine(
        name, tiny_captioner(), OPTIMIZER, machine_settings(stage, **more), device, MICRO_BATCH
    )  # type: ignore[arg-type]


def whole_parameters(engine: Any, kind: str = "param") -> dict[str, Tensor]:
    """Master weights, or a moment, put together from all ranks' pieces."""
    mine = [(s.piece, s.tensors[kind].clone().cpu()) for s in engine.state()]
    out = {name: torch.full((shape.numel(),), torch.nan) for name, shape in engine.shapes.items()}
    for pieces in distributed.gather_objects(mine):
        for piece, values in pieces:
            out[piece.name][piece.offset : piece.offset + piece.length] = values
    return {name: values.view(engine.shapes[name]) for name, values in out.items()}


Case = tuple[tuple[str, int], tuple[int, ...]]
"""An engine, and how many examples each rank has."""


def rank_clipped_sums(
    device: torch.device, cases: list[Case], c: float
) -> dict[Case, dict[str, Tensor]]:
    found = {}
    for case in cases:
        engine = build(device, *case[0])
        clipped = ClippedSum(engine.module, c, shapes=engine.shapes)
        for batch in micro_batches(pairs(), case[1]):
            clipped.add_micro_batch(engine.module, batch.inputs, batch.is_padding_B)
        shards = reduce_to_owners(clipped.accumulator, clipped.exponent, engine.layout)
        found[case] = {
            f"{s.name}|{s.offset}": real_numbers(s.values, clipped.exponent) for s in shards
        }
    return found


DEALS = [(5, 2), (7, 0)]


@pytest.mark.parametrize("engines", [ENGINES[3:], pytest.param(ENGINES, marks=pytest.mark.full)])
def test_clipped_sums_are_as_good_as_a_float32_loop(engines: list[tuple[str, int]]) -> None:
    exact_model, model, inputs = tiny_captioner(torch.float64), tiny_captioner(), pairs()
    c = oracle.median_norm(exact_model, exact_model, double(inputs))
    exact = oracle.clipped_sum(exact_model, exact_model, double(inputs), c)
    loop_error = oracle.relative_error(oracle.clipped_sum(model, model, inputs, c), exact)
    cases = list(itertools.product(engines, DEALS))
    ranks = run_ranks(f"{__name__}:rank_clipped_sums", 2, cases=cases, c=c)
    for case in cases:
        found = {
            n: torch.full((p.numel(),), torch.nan, dtype=torch.float64)
            for n, p in model.named_parameters()
        }
        for key, values in (item for rank in ranks for item in rank[case].items()):
            parameter, offset = key.split("|")
            found[parameter][int(offset) : int(offset) + len(values)] = values
        error = oracle.relative_error(found, exact)
        assert error <= 2 * loop_error, (case, error, loop_error)


def rank_three_steps(
    device: torch.device, engines: list[tuple[str, int]], counts: tuple[int, ...]
) -> dict[tuple[str, int], Any]:
    """Every engine's whole weights, and its raw replicas, compared without a collective that would hide a difference."""
    found = {}
    for name, stage in engines:
        engine = build(device, name, stage)
        clipped = ClippedSum(engine.module, 1e9, shapes=engine.shapes, noise_multiplier=0.0)
        run = a_mechanism(engine, clipped, SystemNoise(), 0.0, NUM_EXAMPLES)
        for step in (1, 2, 3):
            train_step(run, not_charged(), step, iter(micro_batches(pairs(), counts)))
        is_whole = (name, stage) != ("deepspeed", 3)
        raw = (
            {n: p.detach().clone() for n, p in engine.module.named_parameters()}
            if is_whole
            else None
        )
        found[name, stage] = whole_parameters(engine), raw
    return found


@pytest.mark.parametrize(
    ("engines", "counts"),
    [(ENGINES[:1], (7,)), pytest.param(ENGINES, (5, 2), marks=pytest.mark.full)],
)
def test_without_noise_and_clipping_it_is_ordinary_training(
    engines: list[tuple[str, int]], counts: Any
) -> None:
    """By `local`; test_parity.py compares the others with that."""
    model, inputs = tiny_captioner(), pairs()
    groups = parameter_groups(
        list(model.named_parameters()), {n: p.shape for n, p in model.named_parameters()}, OPTIMIZER
    )
    optimizer = make_optimizer(groups, OPTIMIZER)
    for _ in range(3):
        optimizer.zero_grad()
        (model(**inputs).sum() / NUM_EXAMPLES).backward()
        optimizer.step()
    expected = {n: p.detach() for n, p in model.named_parameters()}
    ranks = run_ranks(f"{__name__}:rank_three_steps", len(counts), engines=engines, counts=counts)
    for engine in engines:
        (weights, raw), *others = (rank[engine] for rank in ranks)
        assert oracle.relative_error(weights, expected) < 1e-5, engine
        assert raw is None or all(
            torch.equal(raw[n], other[n]) for _, other in others for n in expected
        ), engine


CPU = {"device": "cpu"}


def clipped_steps(engine: Engine, num_steps: int) -> dict[str, Tensor]:
    clipped = ClippedSum(engine.module, 1.0, shapes=engine.shapes, noise_multiplier=0.0)
    run = a_mechanism(engine, clipped, SystemNoise(), 0.0, NUM_EXAMPLES)
    for step in range(1, num_steps + 1):
        train_step(run, not_charged(), step, iter(micro_batches(pairs(), (5, 2))))
    return whole_parameters(engine)


READERS = {
    "gradient_clipping": 1.0,
    "gradient_accumulation_steps": 2,
    "train_micro_batch_size_per_gpu": 3,
    "zero_optimization_stage": 2,
    "bfloat16_enabled": True,
    "fp16_enabled": True,
}
"""Methods of DeepSpeed's engine that say what it understood, each with what was not meant."""


def rank_understands_otherwise(device: torch.device) -> dict[str, str]:
    """What building an engine ends in where DeepSpeed says that it understood one setting otherwise than it was meant."""
    import deepspeed

    initialize = deepspeed.initialize
    found = {}
    for name, value in READERS.items():

        def misunderstand(name: str = name, value: object = value, **options: Any) -> Any:
            engine, *others = initialize(**options)
            setattr(engine, name, lambda: value)
            return engine, *others

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(deepspeed, "initialize", misunderstand)
            try:
                build(device, "deepspeed", 1)
                found[name] = "nothing"
            except RuntimeError as error:
                found[name] = str(error)
    return found


def test_contract_14_an_engine_that_understood_something_else_is_refused() -> None:
    """First of all gradient clipping, which would clip the noised sum; DeepSpeed's default became 1.0 in 0.19.3."""
    (found,) = run_ranks(f"{__name__}:rank_understands_otherwise", 1)
    assert (
        found["gradient_clipping"]
        == "DeepSpeed runs with gradient_clipping = 1.0, but 0.0 was asked for"
    )
    assert set(found) == set(READERS)
    for name, value in READERS.items():
        assert re.fullmatch(
            rf"DeepSpeed runs with \S+ = {value}, but \S+ was asked for", found[name]
        ), found[name]


def rank_zero_init(device: torch.device) -> dict[str, Any]:
    machine = machine_settings(3, zero_init=True)
    shard, most = sharder("deepspeed", machine, device, MICRO_BATCH), [0]
    assert shard is not None
    model: list[torch.nn.Module] = []

    def after(module: torch.nn.Module) -> None:
        model[:] = model or [module]  # the root comes first
        most[0] = max(most[0], sum(p.numel() for p in model[0].parameters() if not p.is_meta))
        shard(module)

    engine = build_engine(
        "deepspeed", fresh_captioner(after), OPTIMIZER, machine, device, MICRO_BATCH
    )
    initial, num_steps = whole_parameters(engine), 2
    trained = clipped_steps(engine, num_steps)
    state = {s.piece: {k: v.clone() for k, v in s.tensors.items()} for s in engine.state()}
    again = build_engine(
        "deepspeed",
        fresh_captioner(sharder("deepspeed", machine, device, MICRO_BATCH)),
        OPTIMIZER,
        machine,
        device,
        MICRO_BATCH,
    )
    again.load_state(state, num_steps=num_steps)
    inputs = pairs()
    with torch.no_grad():
        losses = [e.module(**inputs) for e in (engine, again)]
    return {
        "most": most[0],
        "initial": initial,
        "trained": trained,
        "losses": losses,
        "continued": [clipped_steps(e, 1) for e in (engine, again)],
        "whole": clipped_steps(
            build_engine(
                "deepspeed", fresh_captioner(), OPTIMIZER, machine_settings(3), device, MICRO_BATCH
            ),
            num_steps,
        ),
    }


def test_zero_init_builds_the_same_model_in_shards_and_resumes_from_pieces() -> None:
    plain = fresh_captioner()
    for found in run_ranks(f"{__name__}:rank_zero_init", 2):
        assert all(torch.equal(found["initial"][n], p) for n, p in plain.named_parameters())
        assert all(torch.equal(found["trained"][n], p) for n, p in found["whole"].items())
        largest = max(sum(p.numel() for p in m.parameters(recurse=False)) for m in plain.modules())
        assert found["most"] <= largest  # one module at a time
        assert torch.equal(*found["losses"])
        first, second = found["continued"]
        assert all(torch.equal(first[n], second[n]) for n in first)


def test_zero_init_elsewhere_is_refused() -> None:
    with pytest.raises(ConfigError, match="zero_init needs --engine deepspeed"):
        sharder("local", machine_settings(3, zero_init=True), torch.device("cpu"), MICRO_BATCH)
