"""Clipped sums on the device against a float64 loop on the CPU; two_pass repeats itself to the last bit; nothing waits."""

import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from unittest import mock

import torch
from torch import Tensor, nn

from models.captioner import build_captioner
from models.config import captioner_config
from privacy.clipping import SUMS
from privacy.clipping.clipped_sum import Mode
from privacy.guards.selfcheck import check_against_autograd
from privacy.numerics.fused import can_compile
from tests.gpu.checks import Check, Setting
from tests.privacy.clipping import oracle, test_models, test_waits
from tests.privacy.clipping.neighbours import Product
from trainer.engines.blocks import compile_blocks, require_compiler
from trainer.errors import ConfigError

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Relative to the norm of the sum. The gradients themselves are computed in that precision."""
MODES: tuple[Mode, Mode] = ("bookkeeping", "two_pass")
Made = tuple[nn.Module, dict[str, Tensor]]


def captioner() -> Made:
    """Wide and long enough for ghost norms of several tiles, and not a multiple of them."""
    config = captioner_config(
        "pico",
        image_size=64,
        patch_size=8,
        vocab_size=211,
        num_tokens=21,
        encoder_width=96,
        encoder_depth=2,
        encoder_num_heads=2,
        decoder_width=72,
        decoder_depth=2,
        decoder_num_heads=2,
    )
    generator = torch.Generator().manual_seed(3)
    model = build_captioner(config, generator=generator)
    with torch.no_grad():  # away from the initial zeros and ones
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    inputs = {
        "images_BCHW": torch.randn(6, 3, 64, 64, generator=generator)
        * torch.logspace(-1, 0.5, 6)[:, None, None, None],
        "tokens_BL": torch.randint(3, 211, (6, 21), generator=generator),
        "token_mask_BL": torch.arange(21)[None] < torch.randint(3, 22, (6, 1), generator=generator),
    }
    return model, inputs


def linear_on_tokens() -> Made:
    """One layer alone, wide enough for a ghost norm of 100 tokens, which are much alike: a wrong norm shows."""
    generator = torch.Generator().manual_seed(5)
    model = Product(nn.Linear(320, 256, bias=False))
    scale = torch.logspace(-1, 1, 8)[:, None, None]
    return model, {
        "x": (1 + torch.randn(8, 100, 320, generator=generator)) * scale,
        "w": 1 + torch.randn(8, 100, 256, generator=generator),
    }


MODELS: dict[str, Callable[[], Made]] = {
    "linear": linear_on_tokens,
    "captioner": captioner,
    **{name: test_models.MODELS[name] for name in ("masked_autoencoder", "classifier", "adapters")},
}


def moved(made: Made, device: torch.device, dtype: torch.dtype) -> Made:
    model, inputs = made
    return model.to(device, dtype), {
        name: x.to(device, dtype if x.is_floating_point() else None) for name, x in inputs.items()
    }


def nobody_padding(inputs: Mapping[str, Tensor]) -> Tensor:
    first = next(iter(inputs.values()))
    return torch.zeros(len(first), dtype=torch.bool, device=first.device)


def expected_sum(made: Made, dtype: torch.dtype) -> tuple[dict[str, Tensor], float]:
    """The sum at half the median norm, in float64 from the weights and inputs as `dtype` holds them; and that bound."""
    model, inputs = moved(
        moved(made, torch.device("cpu"), dtype), torch.device("cpu"), torch.float64
    )
    bound = oracle.median_norm(model, model, inputs) / 2
    return oracle.clipped_sum(model, model, inputs, bound), bound


def error_of(made: Made, bound: float, mode: Mode, expected: Mapping[str, Tensor]) -> float:
    model, inputs = made
    clipped = SUMS[mode](model, bound)
    try:
        clipped.add_micro_batch(model, inputs, nobody_padding(inputs))
        found = {name: total.double().cpu() for name, total in clipped.sums()}
    finally:
        clipped.detach()
    return oracle.relative_error(found, expected)


def checks(setting: Setting) -> Iterator[Check]:
    if setting.is_cuda:
        found = can_compile(setting.device)
        yield Check("fused functions", found, found, "torch.compile works on this device")
    for (name, make), dtype in itertools.product(MODELS.items(), TOLERANCE):
        expected, bound = expected_sum(make(), dtype)
        for mode in MODES:
            error = error_of(moved(make(), setting.device, dtype), bound, mode, expected)
            title = f"sum, {name}, {dtype}, {mode}".replace("torch.", "")
            yield Check(
                title, error <= TOLERANCE[dtype], error, f"relative error <= {TOLERANCE[dtype]:g}"
            )
    yield from _compiled(setting)
    for name, make in MODELS.items():  # the check that every start makes, on this device's kernels
        check_against_autograd(*moved(make(), setting.device, torch.float32))
        yield Check(
            f"self-check, {name}", True, "equal", "the unclipped sum is torch's own gradient"
        )
    yield from _repeats(setting)
    yield from _waits(setting)


def _compiled(setting: Setting) -> Iterator[Check]:
    try:
        require_compiler(setting.device)
    except ConfigError as error:
        yield Check("sum, captioner, compiled", None, str(error), "as without compilation")
        return
    expected, bound = expected_sum(captioner(), torch.float32)
    for mode in setting.choose(MODES, MODES[:1]):
        model, inputs = moved(captioner(), setting.device, torch.float32)
        compile_blocks(model)
        error = error_of((model, inputs), bound, mode, expected)
        limit = TOLERANCE[torch.float32]
        yield Check(
            f"sum, captioner, compiled, {mode}",
            error <= limit,
            error,
            f"relative error <= {limit:g}",
        )


def _repeats(setting: Setting) -> Iterator[Check]:
    """The second backward of two_pass must repeat the first: atomic additions in its path would show here."""
    for dtype in TOLERANCE:
        made = moved(captioner(), setting.device, dtype)
        first, *others = (_gradients(made) for _ in range(setting.choose(20, 3)))
        differ = sum(
            not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
            for other in others
        )
        title = f"backward repeats, {dtype}".replace("torch.", "")
        yield Check(title, differ == 0, {"runs": len(others), "differ": differ}, "equal bits")


def _gradients(made: Made) -> list[Tensor]:
    """Gradients with respect to the blocks' outputs, which is what the second pass of two_pass computes anew."""
    model, inputs = made
    outputs: list[Tensor] = []
    hooks = [
        layer.register_forward_hook(lambda _, __, out: outputs.append(out))
        for layer in model.modules()
        if isinstance(layer, nn.Linear)
    ]
    loss = model(**inputs).sum()
    for hook in hooks:
        hook.remove()
    return list(torch.autograd.grad(loss, outputs))


def _waits(setting: Setting) -> Iterator[Check]:
    """Host synchronisations inside a micro-batch: counted by the driver on CUDA, by operations that would wait on CPU."""
    for (name, make), mode, dtype in itertools.product(MODELS.items(), MODES, TOLERANCE):
        model, inputs = moved(deepcopy(make()), setting.device, dtype)
        clipped = SUMS[mode](model, 1.0)
        is_padding_B = nobody_padding(inputs)
        clipped.add_micro_batch(model, inputs, is_padding_B)  # hooks and buffers are made
        found = _waits_of(setting, lambda: clipped.add_micro_batch(model, inputs, is_padding_B))  # noqa: B023 - at once
        clipped.detach()
        title = f"waits, {name}, {mode}, {dtype}".replace("torch.", "")
        yield Check(title, not found, found, "no synchronisation inside a micro-batch")


def _waits_of(setting: Setting, work: Callable[[], object]) -> list[str]:
    if not setting.is_cuda:
        from privacy.clipping import clipped_sum

        with (
            mock.patch.object(clipped_sum, "needs_blanking", return_value=True),
            test_waits.Waits() as waits,
        ):
            work()  # as on CUDA, where it is not asked whether a value is finite
        return waits.found
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return [f"{w.filename}:{w.lineno}" for w in caught if "synchroniz" in str(w.message)]
