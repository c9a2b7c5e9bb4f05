"""Does private captioning teach an encoder to see? The papers' claims in a small world, beside controls that can win.

    python benchmarks/small_world.py --short              one seed, at most 10 processor minutes
    python benchmarks/small_world.py --claim a --seeds 0 1 2 3 4 5

The world (`data/synthetic/scenes.py`): cluttered, coloured scenes of 32 x 32 pixels with one object, captioned with colour, kind
and place; N = 10,000,000. The encoder has 3 blocks of width 64, the captioner 0.17M parameters. Claims of Sander et al. 2024
(https://arxiv.org/abs/2403.02506) and Yu et al. 2023 (https://arxiv.org/abs/2306.08842):

    a  DP-Cap at epsilon 8 gives better features than an untrained encoder and hand-crafted ones; how much noise that allows
    b  DP-Cap is better than ViP, and ViP than its synthetic start
    c  at equal sigma / B the loss does not depend on B
    d  a warm start from synthetic pictures helps
    e  larger encoders do better
    f  features at epsilon 1, 2, 4, 8
    g  captions exactly right on scenes never seen, private and not (part of every captioner's row)

Private arms: `dpcap_ledger` is trained by `PrivateLoop` (Poisson coins, ledger, `privacy/verify.py`); its items are the scenes'
numbers. The other private arms take the same steps without coins and ledger: the project's clipped sums, the noise multiplier
that the project's plan calibrates for epsilon, batches in order. "published" and numbers such as 1e-04 name TAN simulations:
sigma / B is that of a run with a larger batch; nothing about them is private, and their epsilon is null.

Fixed before any arm ran: seeds 0 to 5 of a and 0 alone elsewhere (later, after seed 0 and before the others ran: seeds 1 to 5 of
b, d, e and `epsilon_1`; and before its first, seeds 0 to 5 of a in the second world); B = 300, T = 400 (long arms 256
and 1,500); the rates, C and shapes below, which a prototype on another version of this world chose on its seed 0; sixteen probes,
all of which count in `mean_of_probes`: eight judges (`judges`) with 10 shots and with a linear probe, ridge on standardised
features, strength by leave-one-out. Beside them stand DP-Cap's own few-shot probe, which subtracts no mean (of encoders and
colours; `published_few_shot`), and place, which a mean over tokens cannot hold, since captioners add image positions behind the
encoder (`place`). Judges see photographs and families of fonts that no training shows. `--hard` is a second world (one or two
objects, more clutter) that chose nothing.

Every arm of every seed is a file below OUTPUT, so that a run that was stopped goes on; one JSON object of all that is there is
printed.
"""

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # processor seconds are reported

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from data.synthetic import scenes as w  # noqa: E402
from data.synthetic.scenes import WORDS, Pool, Scenes, from_ink, pool, pools  # noqa: E402
from evaluation.few_shot import few_shot_probe, interval, split  # noqa: E402
from models.captioner import build_captioner  # noqa: E402
from models.config import captioner_config, masked_autoencoder_config  # noqa: E402
from models.masked_autoencoder import build_masked_autoencoder, to_patches  # noqa: E402

N = 10_000_000
PUBLISHED = 5.4e-7
"""sigma / B of DP-Cap's published run."""
HELD_OUT, JUDGED = 2**40, 2**41
"""Scenes from here on are in no training, and in none but the judges'."""
MEAN, STD = (torch.tensor(v).view(3, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))


@dataclass(frozen=True)
class Arm:
    """How one encoder is trained.

    Attributes:
        task: captioner, or autoencoder.
        epsilon: the run is private.
        ratio: sigma / B of a simulation; 0 clips without noise. Neither of the two: no clipping and no noise.
        starts: from the synthetic start's encoder.
        uses_ledger: by PrivateLoop.
        is_synthetic: trained on rendered textures and shapes.
    """

    task: str = "captioner"
    epsilon: float | None = None
    ratio: float | None = None
    starts: bool = False
    batch: int = 300
    steps: int = 400
    rate: float = 8e-3
    bound: float = 1.0
    width: int = 64
    uses_ledger: bool = False
    is_synthetic: bool = False


DPCAP = Arm(epsilon=8, starts=True)
VIP = Arm("autoencoder", epsilon=8, starts=True, rate=4e-3, bound=0.1)
LONG = Arm(ratio=PUBLISHED, batch=256, steps=1500)
ARMS = {
    "untrained": Arm(steps=0),
    "start": Arm("autoencoder", batch=128, steps=1500, rate=4e-3, is_synthetic=True),
    "dpcap": DPCAP,
    "dpcap_ledger": replace(DPCAP, uses_ledger=True),
    "dpcap_random": replace(DPCAP, starts=False),
    "dpcap_published": Arm(ratio=PUBLISHED),
    "non_private": Arm(),
    "long_published": LONG,
    **{f"long_{ratio:.0e}": replace(LONG, ratio=ratio) for ratio in (3e-5, 1e-4, 3e-4)},
    "long_non_private": replace(LONG, ratio=None),
    "vip": VIP,
    "vip_published": replace(VIP, epsilon=None, ratio=PUBLISHED),
    **{f"ratio_batch_{b}": Arm(ratio=1.1e-3, batch=b, steps=300) for b in (100, 200, 400, 800)},
    **{
        f"vip_ratio_batch_{b}": replace(
            VIP, epsilon=None, starts=False, ratio=1.1e-3, batch=b, steps=300
        )
        for b in (100, 800)
    },
    **{f"width_{w}": replace(DPCAP, starts=False, width=w) for w in (32, 96)},
    **{f"epsilon_{e}": replace(DPCAP, epsilon=float(e)) for e in (1, 2, 4)},
}
CLAIMS = {
    "a": (
        "untrained",
        "start",
        "dpcap",
        "dpcap_ledger",
        *(name for name in ARMS if name.startswith("long")),
    ),
    "b": ("untrained", "start", "vip", "dpcap", "vip_published", "dpcap_published"),
    "c": tuple(name for name in ARMS if "ratio_batch" in name),
    "d": ("start", "dpcap", "dpcap_random"),
    "e": ("width_32", "dpcap_random", "width_96"),
    "f": ("start", "epsilon_1", "epsilon_2", "epsilon_4", "dpcap"),
    "g": ("dpcap", "dpcap_published", "non_private"),
}
SHORT = ("untrained", "start", "dpcap_ledger", "non_private")


def normalised(images_BCHW: Tensor) -> Tensor:
    return (images_BCHW / 255 - MEAN) / STD


def built(arm: Arm, world: Scenes, seed: int) -> nn.Module:
    """The model of an arm with random weights."""
    shape: dict[str, Any] = {
        "image_size": world.size,
        "patch_size": 8,
        "encoder_width": arm.width,
        "encoder_depth": 3,
        "encoder_num_heads": 4,
        "encoder_mlp_ratio": 2.0,
        "encoder_qkv_bias": True,
        "decoder_width": arm.width,
        "decoder_depth": 1,
        "decoder_num_heads": 4,
        "decoder_mlp_ratio": 2.0,
    }
    generator = torch.Generator().manual_seed(seed)
    if arm.task == "autoencoder":
        return build_masked_autoencoder(
            masked_autoencoder_config("pico", **shape), generator=generator
        )
    words = {"vocab_size": len(WORDS), "num_tokens": world.num_tokens, "bos_id": 1, "eos_id": 2}
    return build_captioner(captioner_config("pico", **shape, **words), generator=generator)


@cache
def synthetic_pictures(count: int = 10_000) -> Tensor:
    """(count, 3, 32, 32) uint8: textures and shapes, as the papers' starts are trained on."""
    from data.synthetic.generate import SyntheticData

    data = SyntheticData(0, 32)
    return torch.from_numpy(
        np.stack([data.example(index).image_HWC for index in range(count)])
    ).permute(0, 3, 1, 2)


def masks(model: Any, count: int, generator: torch.Generator) -> Tensor:
    """(count, P) bool: patches that a masked autoencoder does not see."""
    patches = model.config.encoder.num_patches
    return (
        torch.rand(count, patches, generator=generator).argsort(1).argsort(1)
        >= model.config.num_visible
    )


def inputs(
    arm: Arm, model: nn.Module, world: Scenes, index_B: np.ndarray, generator: torch.Generator
) -> dict[str, Tensor]:
    """What the model's loss takes, of scenes or of synthetic pictures."""
    if arm.task == "autoencoder":
        if arm.is_synthetic:
            images = synthetic_pictures()
            images = images[torch.randint(0, len(images), (len(index_B),), generator=generator)]
        else:
            images = world.pairs(index_B)[0]
        return {"images_BCHW": normalised(images), "mask_BP": masks(model, len(index_B), generator)}
    images, tokens = world.pairs(index_B)
    return {"images_BCHW": normalised(images), "tokens_BL": tokens, "token_mask_BL": tokens > 0}


@torch.no_grad()
def held_out(
    arm: Arm, model: Any, world: Scenes, among: str = "captioned", count: int = 1000
) -> dict[str, float]:
    """Loss, blind line, and shares of words and of whole captions that are right, on scenes that no training shows."""
    from trainer.tasks.blind import CaptionFrequencies

    index, words, right, losses = np.arange(HELD_OUT, HELD_OUT + count), np.array(WORDS), [], []
    if arm.task == "autoencoder":
        given = inputs(
            replace(arm, is_synthetic=False), model, world, index, torch.Generator().manual_seed(5)
        )
        patches = to_patches(given["images_BCHW"], 8)
        blind = (patches - patches.mean(0)).square().mean()
        return {"loss": float(model(**given).mean()), "blind_loss": float(blind)}
    placed = world.placements(index, pools()[among])
    images, tokens = world.pairs(index, pools()[among])
    blind_line = CaptionFrequencies(len(WORDS))
    blind_line.add(
        {"tokens_BL": tokens, "token_mask_BL": tokens > 0}, torch.zeros(count, dtype=torch.bool)
    )
    for x, t in zip(normalised(images).split(250), tokens.split(250), strict=True):
        logits = model(x, t, output="logits")[:, :-1]
        right.append((logits.argmax(-1) == t[:, 1:]) | (t[:, 1:] == 0))
        losses.append(model(x, t, t > 0))
    is_right, said, exact = (
        torch.cat(right).numpy(),
        words[tokens[:, 1:].numpy()],
        torch.cat(right).all(1).numpy(),
    )
    found = {
        "loss": float(torch.cat(losses).mean()),
        "blind_loss": blind_line.values()["blind_loss"],
    }
    letters = [word for word in WORDS if len(word) == 1 and word != "a"]
    for name, asked in (
        ("colour", list(w.COLOURS)),
        ("clothes", list(w.CLOTHES)),
        ("letter", letters),
    ):
        found[name] = float(is_right[np.isin(said, asked)].mean())
    found["exact"] = float(exact.mean())
    if among == "new":  # a fixed eighth of the pairs of kind and colour is in no training
        is_left_out = w.is_left_out(pools()[among].number[placed.kind], placed.colour)[:, 0] & (
            placed.number == 1
        )
        found["exact, left-out pairs"] = float(exact[is_left_out].mean())
    return found


def rate_at(arm: Arm, step: int) -> float:
    """Warm-up over a twentieth of the steps, then a cosine to zero."""
    warm = max(1, arm.steps // 20)
    if step <= warm:
        return arm.rate * step / warm
    return arm.rate * 0.5 * (1 + math.cos(math.pi * (step - warm) / (arm.steps - warm)))


@cache
def plan_of(epsilon: float, batch: int, steps: int) -> Any:
    """The project's plan for N scenes; its noise multiplier is the least for this epsilon."""
    from privacy.plan.numbers import make_plan
    from privacy.plan.releases import SENSITIVITY_SLACK
    from privacy.plan.request import PlanRequest

    request = PlanRequest(
        num_examples=N,
        expected_batch_size=batch,
        num_steps=steps,
        target_epsilon=epsilon,
        sensitivity_slack=SENSITIVITY_SLACK,
    )
    return make_plan(request)


def optimizer_of(arm: Arm, model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=arm.rate, betas=(0.9, 0.95), weight_decay=0.005)


def stepped(arm: Arm, model: nn.Module, world: Scenes, seed: int) -> Iterable[int]:
    """Trains; yields the number of each step that was taken."""
    from privacy.clipping.clipped_sum import ClippedSum

    sigma = None if arm.ratio is None else arm.ratio * arm.batch
    if arm.epsilon is not None:
        sigma = plan_of(arm.epsilon, arm.batch, arm.steps).noise_multiplier
    optimizer, generator = optimizer_of(arm, model), torch.Generator().manual_seed(10**6 + seed)
    clipped = None if sigma is None else ClippedSum(model, arm.bound)
    named, micro = dict(model.named_parameters()), math.ceil(arm.batch / math.ceil(arm.batch / 300))
    for step in range(1, arm.steps + 1):
        first = seed * 1_000_000 + (step - 1) * arm.batch
        for group in optimizer.param_groups:
            group["lr"] = rate_at(arm, step)
        if clipped is None:
            optimizer.zero_grad()
            model(
                **inputs(arm, model, world, np.arange(first, first + arm.batch), generator)
            ).mean().backward()
        else:
            assert sigma is not None
            clipped.zero_()
            for start in range(first, first + arm.batch, micro):
                index = np.arange(start, min(start + micro, first + arm.batch))
                clipped.add_micro_batch(
                    model,
                    inputs(arm, model, world, index, generator),
                    torch.zeros(len(index), dtype=torch.bool),
                )
            for name, total in clipped.sums():
                noise = torch.randn(total.shape, generator=generator)
                named[name].grad = (
                    (total.float() + sigma * arm.bound * noise) / arm.batch
                ).reshape(named[name].shape)
        optimizer.step()
        yield step
    if clipped is not None:
        clipped.detach()


def stepped_with_ledger(arm: Arm, model: nn.Module, world: Scenes, folder: Path) -> Iterable[int]:
    """The same by PrivateLoop: an item is a scene's number, and the loss renders it."""
    from torch.utils.data import TensorDataset

    from privacy.loop import PrivateLoop, integers

    generator = torch.Generator()
    with PrivateLoop(
        model,
        optimizer_of(arm, model),
        TensorDataset(torch.arange(N)),
        example=(integers(N),),
        loss=lambda index: model(**inputs(arm, model, world, index.numpy(), generator)),
        run_dir=folder,
        expected_batch_size=arm.batch,
        num_steps=arm.steps,
        target_epsilon=arm.epsilon,
        max_grad_norm=arm.bound,
        micro_batch_size=220,
        save_every=100,
        learning_rate=lambda step: rate_at(arm, step),
        data_version="scenes",
        unit="one scene with its caption",
        starts_from="public",
    ) as loop:
        for step in loop:
            yield step.number


def trained(name: str, seed: int, world: Scenes, output: Path) -> tuple[nn.Module, dict[str, Any]]:
    """The model of an arm, and its trajectory; its weights are kept in OUTPUT."""
    arm = ARMS[name]
    model = built(arm, world, seed)
    if arm.starts:
        weights = torch.load(output / f"{seed}-start.pt")
        model.encoder.load_state_dict(  # type: ignore[union-attr]
            {k[8:]: v for k, v in weights.items() if k.startswith("encoder.")}
        )
    steps = stepped(arm, model, world, seed)
    if arm.uses_ledger:
        steps = stepped_with_ledger(arm, model, world, output / f"{seed}-{name}")
    trajectory = []
    for step in steps:
        if step % max(1, arm.steps // 8) == 0:
            trajectory.append({"step": step, **held_out(arm, model.eval(), world, count=500)})
            print(name, seed, trajectory[-1], flush=True)
            model.train()
    found: dict[str, Any] = {"trajectory": trajectory}
    if arm.uses_ledger:
        check = [sys.executable, "privacy/verify.py", str(output / f"{seed}-{name}")]
        done = subprocess.run(check, cwd=ROOT, capture_output=True, text=True)
        found["verify"] = {
            "exit_code": done.returncode,
            "said": done.stdout.strip().splitlines()[-8:],
        }
    return model.eval(), found


Labelled = tuple[Tensor, np.ndarray]


def judges(
    world: Scenes, seed: int, train: int = 600, test: int = 500
) -> dict[str, tuple[Labelled, Labelled]]:
    """By name, pictures with labels to fit on and to ask. No caption names a kind here, and no training shows a sprite."""
    from sklearn.datasets import load_digits

    world = Scenes(world.seed, world.size, 1, world.clutter)
    pixels, digit = load_digits(return_X_y=True)
    ink = np.rint(pixels.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8).repeat(3, 1).repeat(3, 2)
    digits = pool(
        {f"digit-{k}": np.stack([from_ink(one, 1.0) for one in ink[digit == k]]) for k in range(10)}
    )
    found = {}

    def scenes(name: str, among: Pool, number: int, label: Callable[[Any], np.ndarray]) -> None:
        count = train * (1 + (len(among.names) == 40))
        index = np.arange(count + test) + JUDGED + seed * 10**7 + number * 10**5
        placed = world.placements(index, among)
        x, y = world.render(placed, among), label(placed)
        found[name] = (x[:count], y[:count]), (x[count:], y[count:])

    for number, (name, among) in enumerate(
        {**{k: pools()[k] for k in ("clothes", "letters", "clip art")}, "digits": digits}.items()
    ):
        scenes(name, among, number, lambda placed: placed.kind[:, 0])
    scenes("colour", pools()["never"], 4, lambda placed: placed.colour[:, 0])
    scenes(
        "place",
        pools()["never"],
        5,
        lambda placed: 3 * w.third_of(placed.y[:, 0]) + w.third_of(placed.x[:, 0]),
    )
    for name, among in (
        ("clothes", pools()["clothes"]),
        ("letters", pools()["letters"]),
        ("digits", digits),
    ):
        sprite, y = (
            among.pictures.float(),
            np.repeat(np.arange(len(among.names)), np.diff(among.first)),
        )
        paper = 1 - sprite[:, 3:] + 0.2 * (1 - sprite[:, :3]) * sprite[:, 3:]
        x = (
            (nn.functional.pad(paper.clamp(0, 1), (2, 2, 2, 2), value=1.0) * 255)
            .round()
            .to(torch.uint8)
        )
        fit = split(y, (np.bincount(y).min() + 1) // 2, seed)
        ask = np.random.default_rng(seed).permutation(np.setdiff1d(np.arange(len(y)), fit))[:test]
        found[f"{name} centred"] = (x[fit], y[fit]), (x[ask], y[ask])
    return found


def ridge_accuracy(fit: tuple[np.ndarray, np.ndarray], ask: tuple[np.ndarray, np.ndarray]) -> float:
    """One-against-all ridge on standardised features; its strength has the best leave-one-out accuracy, in closed form."""
    mean, scale = fit[0].mean(0), fit[0].std(0)
    x, z = (
        (a.astype(np.float64) - mean) / np.where(scale > 1e-9, scale, np.inf)
        for a in (fit[0], ask[0])
    )
    classes, y = np.unique(fit[1], return_inverse=True)
    target = np.eye(len(classes))[y]
    centred = target - target.mean(0)
    if x.shape[1] > len(x):
        squares, u = np.linalg.eigh(x @ x.T)
        s = np.sqrt(np.maximum(squares, 1e-12))
        v = (x.T @ u) / s
    else:
        u, s, vt = np.linalg.svd(x, full_matrices=False)
        v = vt.T
    shared, best = u.T @ centred, (-1.0, 0.0)
    for strength in 10.0 ** np.arange(-1, 6):
        d = s * s / (s * s + strength)
        left_out = (
            centred
            - (centred - u @ (d[:, None] * shared))
            / (1 - np.minimum((u * u) @ d, 1 - 1e-9))[:, None]
        )
        best = max(best, (float(((left_out + target.mean(0)).argmax(1) == y).mean()), -strength))
    scores = z @ (v @ ((s / (s * s - best[1]))[:, None] * shared)) + target.mean(0)
    return float((classes[scores.argmax(1)] == ask[1]).mean())


Describe = Callable[[Tensor], tuple[np.ndarray, np.ndarray]]


def probed(
    sets: dict[str, tuple[Labelled, Labelled]], describe: Describe, seed: int
) -> dict[str, Any]:
    """Accuracies. `describe` gives the features for few shots and those for the linear probe of pictures."""
    found: dict[str, dict[str, float]] = {"probes": {}, "published_few_shot": {}, "place": {}}
    for name, ((x, y), (z, asked)) in sets.items():
        (few, linear), (few_z, linear_z) = describe(x), describe(z)
        rows = [split(y, 10, 100 * seed + number) for number in range(3)]
        shots = float(np.mean([ridge_accuracy((few[r], y[r]), (few_z, asked)) for r in rows]))
        goes_to = found["place" if name == "place" else "probes"]
        goes_to[f"{name}, 10 shots"], goes_to[f"{name}, linear"] = (
            shots,
            ridge_accuracy((linear, y), (linear_z, asked)),
        )
        if name != "place" and few.shape[1] < 100:  # for thousands of numbers it takes minutes
            own = few_shot_probe(
                (few, y), (few_z, asked), 1 + int(y.max()), (10,), num_splits=1, seed=100 * seed
            )
            found["published_few_shot"][name] = own[10][0]
    return {**found, "mean_of_probes": float(np.mean(list(found["probes"].values())))}


def of_model(model: Any) -> Describe:
    """As in the papers: the mean of the last block's normalised tokens for few shots, those of all blocks for linear probes."""
    from evaluation.encoder import tokens

    @torch.no_grad()
    def describe(x: Tensor) -> tuple[np.ndarray, np.ndarray]:
        found = [tokens(model.encoder, normalised(part), 3) for part in x.split(250)]
        blocks = torch.cat(
            [torch.cat([one[:, 1:].mean(1) for one in kept], 1) for kept, _ in found]
        )
        return torch.cat([last[:, 1:].mean(1) for _, last in found]).numpy(), blocks.numpy()

    return describe


def gradients(x: Tensor) -> Tensor:
    """(B, 1764) HOG: 9 directions, cells of 4 x 4, blocks of 2 x 2 normalised."""
    grey = x.float().mean(1) / 255
    gx, gy = torch.zeros_like(grey), torch.zeros_like(grey)
    gx[:, :, 1:-1], gy[:, 1:-1] = grey[:, :, 2:] - grey[:, :, :-2], grey[:, 2:] - grey[:, :-2]
    length, angle = torch.hypot(gx, gy), torch.remainder(torch.atan2(gy, gx), math.pi) / math.pi * 9
    first, share = angle.floor().long() % 9, angle - angle.floor()
    bins = torch.zeros(len(x), 9, *grey.shape[1:]).scatter_(
        1, first[:, None], (length * (1 - share))[:, None]
    )
    bins.scatter_add_(1, (first[:, None] + 1) % 9, (length * share)[:, None])
    cells = nn.functional.avg_pool2d(bins, 4)
    norm = nn.functional.avg_pool2d(cells.square().sum(1, keepdim=True), 2, 1).sqrt() + 0.02
    return torch.cat(
        [cells[:, :, i : i + 7, j : j + 7] / norm for i in (0, 1) for j in (0, 1)], 1
    ).flatten(1)


def colours(x: Tensor) -> Tensor:
    """(B, 64): roots of the shares of 4 x 4 x 4 colours."""
    bins = (x.long() // 64 * torch.tensor([16, 4, 1]).view(3, 1, 1)).sum(1).flatten(1)
    return (
        torch.zeros(len(x), 64)
        .scatter_add_(1, bins, torch.ones(bins.shape))
        .div(bins.shape[1])
        .sqrt()
    )


def convolutions(x: Tensor, filters: int) -> Tensor:
    """(B, 18 filters): random filters of 6 x 6 on pictures of equal contrast, both signs above a threshold, 3 x 3 means."""
    weights = torch.randn(filters, 3, 6, 6, generator=torch.Generator().manual_seed(7))
    weights = nn.functional.normalize(
        (weights - weights.mean((1, 2, 3), keepdim=True)).flatten(1)
    ).view_as(weights)

    def smooth(y: Tensor) -> Tensor:
        return nn.functional.avg_pool2d(y, 7, 1, 3, count_include_pad=False)

    def describe(part: Tensor) -> Tensor:
        away = part.float() / 255 - smooth(part.float() / 255)
        y = nn.functional.conv2d(
            away / (smooth(away.square().mean(1, keepdim=True)) + 0.01).sqrt(), weights
        )
        return nn.functional.adaptive_avg_pool2d(
            torch.cat([(y - 1).relu(), (-y - 1).relu()], 1), 3
        ).flatten(1)

    return torch.cat([describe(part) for part in x.split(250)])


CONTROLS: dict[str, Callable[[Tensor], Tensor]] = {
    "pixels": lambda x: x.flatten(1) / 255,
    "hog": gradients,
    "colours": colours,
    "hog and colours": lambda x: torch.cat([gradients(x), colours(x)], 1),
    "convolutions 64": lambda x: convolutions(x, 64),
    "convolutions 256": lambda x: convolutions(x, 256),
}
"""Hand-crafted features."""
PAIRS = (
    *(("dpcap", worse) for worse in ("untrained", *CONTROLS, "start", "dpcap_random", "vip")),
    ("vip", "start"),
    ("dpcap_published", "untrained"),
    ("dpcap_published", "non_private"),
    ("non_private", "dpcap"),
    ("dpcap_ledger", "dpcap"),
    *(("long_published", worse) for worse in CONTROLS),
    ("dpcap_random", "width_32"),
    ("width_96", "dpcap_random"),
    ("dpcap", "epsilon_1"),
)


def of_control(features: Callable[[Tensor], Tensor]) -> Describe:
    """The same for both probes."""
    return lambda x: ((values := features(x).numpy()), values)


def run_arm(
    name: str, seed: int, world: Scenes, output: Path, sets: Callable[[], Any]
) -> dict[str, Any]:
    """The result of an arm and seed, from its file or made now."""
    path = output / f"{seed}-{name.replace(' ', '_')}.json"
    if path.exists():
        return json.loads(path.read_text())
    began, result = sum(os.times()[:4]), dict[str, Any]()
    if name in CONTROLS:
        result |= {"heldout_loss": None, "epsilon": None}
        describe = of_control(CONTROLS[name])
    else:
        arm = ARMS[name]
        if arm.starts:
            run_arm("start", seed, world, output, sets)
        model, found = trained(name, seed, world, output)
        torch.save(model.state_dict(), path.with_suffix(".pt"))
        result |= {
            "arm": asdict(arm),
            "epsilon": arm.epsilon,
            "formal_guarantee": arm.uses_ledger,
            **found,
        }
        result["heldout"] = held_out(arm, model, world)
        result["heldout_loss"] = result["heldout"]["loss"]
        if arm.task == "captioner":
            result["heldout_new_sprites"] = held_out(arm, model, world, "new", 4000)
        if arm.epsilon is not None:
            result["noise_multiplier"] = plan_of(arm.epsilon, arm.batch, arm.steps).noise_multiplier
        describe = of_model(model)
    result |= probed(sets(), describe, seed)
    result["processor_seconds"] = round(sum(os.times()[:4]) - began, 1)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(
        name,
        seed,
        f"mean of probes {result['mean_of_probes']:.3f}",
        f"{result['processor_seconds']} s",
        flush=True,
    )
    return result


def summary(output: Path) -> dict[str, Any]:
    """All results in a folder: arms with means over seeds, and paired differences."""
    by_arm: dict[str, dict[int, Any]] = {}
    for path in sorted(output.glob("*.json")):
        seed, _, name = path.stem.partition("-")
        by_arm.setdefault(
            name.replace("_and_", " and ").replace("convolutions_", "convolutions "), {}
        )[int(seed)] = json.loads(path.read_text())
    arms, differences = {}, {}
    for name in (name for name in (*CONTROLS, *ARMS) if name in by_arm):
        runs = by_arm[name]
        means: dict[str, Any] = {}
        for part in ("probes", "published_few_shot", "place"):
            means[part] = {
                key: mean_of(run[part][key] for run in runs.values())
                for key in runs[min(runs)][part]
            }
        arms[name] = {
            "mean_of_probes": mean_of(run["mean_of_probes"] for run in runs.values()),
            **means,
            "half_width": interval([run["mean_of_probes"] for run in runs.values()])["half_width"],
            "mean_of_published_few_shot": mean_of(means["published_few_shot"].values()),
            "heldout_loss": mean_of(run["heldout_loss"] for run in runs.values()),
            "epsilon": runs[min(runs)]["epsilon"],
            "seeds": sorted(runs),
            "runs": runs,
        }
    for better, worse in PAIRS:
        seeds = sorted(set(by_arm.get(better, ())) & set(by_arm.get(worse, ())))
        if seeds:
            each = [
                by_arm[better][seed]["mean_of_probes"] - by_arm[worse][seed]["mean_of_probes"]
                for seed in seeds
            ]
            differences[f"{better} - {worse}"] = {**interval(each), "by_seed": each, "seeds": seeds}
    seconds = sum(run["processor_seconds"] for runs in by_arm.values() for run in runs.values())
    found = {"benchmark": "small_world", "num_scenes": N, "arms": arms, "differences": differences}
    return {**found, "processor_seconds": round(seconds, 1)}


def mean_of(values: Iterable[float | None]) -> float | None:
    """The mean of the values that are there; None without any."""
    there = [value for value in values if value is not None]
    return float(np.mean(there)) if there else None


def main() -> None:
    from trainer.config.cli import Parser

    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--short", action="store_true", help="one seed of the arms that matter most"
    )
    parser.add_argument(
        "--claim", nargs="+", choices=CLAIMS, default=[], help="that arms and seeds are made for"
    )
    parser.add_argument(
        "--arms", nargs="+", choices=(*CONTROLS, *ARMS), default=[], metavar="NAME", help="by name"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument(
        "--hard", action="store_true", help="the second world: one or two objects, more clutter"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=ROOT / "runs/small-world",
        help="folder of results by arm and seed",
    )
    parser.add_argument(
        "--json", action="store_true", help="one JSON object on stdout, which it always prints"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    world = Scenes(objects=2, clutter=1.0) if options.hard else Scenes()
    output = options.output.resolve() / ("hard" if options.hard else "plain")
    output.mkdir(parents=True, exist_ok=True)
    wanted = dict.fromkeys(
        [
            *options.arms,
            *(SHORT if options.short else ()),
            *(name for claim in options.claim for name in CLAIMS[claim]),
        ]
    )
    if options.short or options.claim:  # 4,608 numbers take a linear probe a minute
        wanted |= dict.fromkeys(
            list(CONTROLS)[:-1] if options.short and not options.claim else CONTROLS
        )
    with contextlib.redirect_stdout(sys.stderr):
        for seed in options.seeds:
            sets = cache(lambda seed=seed: judges(world, seed))
            for name in wanted:
                run_arm(name, seed, world, output, sets)
    print(json.dumps(summary(output)))


if __name__ == "__main__":
    from trainer.config.cli import run_command

    run_command(main)
