"""Whether private captioning teaches an encoder to see: the papers' claims in a small world.

    python benchmarks/small_world.py --short              one seed, at most 10 processor minutes
    python benchmarks/small_world.py --claim a --seeds 0 1 2 3 4 5

Strong controls stand beside the claims. The world (`data/synthetic/scenes.py`): cluttered, coloured
scenes of 32 x 32 pixels with one object, captioned with colour, kind and place; N = 10,000,000. The
encoder has 3 blocks of width 64, the captioner 0.17M parameters. Claims of Sander et al. 2024
(https://arxiv.org/abs/2403.02506) and Yu et al. 2023 (https://arxiv.org/abs/2306.08842):

    a  DP-Cap at epsilon 8 gives better features than an untrained encoder and hand-crafted ones;
       how much noise that allows
    b  DP-Cap is better than ViP, and ViP than its synthetic start
    c  at equal sigma / B the loss does not depend on B
    d  a warm start from synthetic pictures helps
    e  larger encoders do better
    f  features at epsilon 1, 2, 4, 8
    g  captions exactly right on scenes never seen, private and not (part of every captioner's row)

Private arms: `dpcap_ledger` is trained by `PrivateLoop` (Poisson coins, ledger,
`privacy/verify.py`); its items are the scenes' numbers. The other private arms take the same steps
without coins and ledger: the project's clipped sums, the noise multiplier that the project's plan
calibrates for epsilon, batches in order. "published" and numbers such as 1e-04 name TAN
simulations: sigma / B is that of a run with a larger batch; they are not private, and their epsilon
is null.

Fixed before any arm ran: seeds 0 to 5 of a and 0 alone elsewhere (later, after seed 0 and before
the others ran: seeds 1 to 5 of b, d, e and `epsilon_1`; and before its first, seeds 0 to 5 of a in
the second world); B = 300, T = 400 (long arms 256 and 1,500); the rates, C and shapes below, which
a prototype on another version of this world chose on its seed 0; sixteen probes, all of which count
in `mean_of_probes`: eight judges (`judges`) with 10 shots and with a linear probe, ridge on
standardised features, strength by leave-one-out. Two more accuracies do not count: DP-Cap's own
few-shot probe, which subtracts no mean (of encoders and colours; `published_few_shot`), and place,
which a mean over tokens cannot hold, since captioners add image positions behind the encoder
(`place`). Judges see photographs and families of fonts that no training shows. `--hard` is a second
world (one or two objects, more clutter) that chose nothing.

Every arm of every seed is a file below OUTPUT, so that a run that was stopped goes on; the program
prints one JSON object of all files.
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
# Processor seconds are reported, so one thread computes.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from data.synthetic import scenes  # noqa: E402
from data.synthetic.scenes import WORDS, Pool, Scenes, from_ink, pool, pools  # noqa: E402
from evaluation.few_shot import few_shot_probe, interval, split  # noqa: E402
from models.captioner import build_captioner  # noqa: E402
from models.config import captioner_config, masked_autoencoder_config  # noqa: E402
from models.masked_autoencoder import build_masked_autoencoder, to_patches  # noqa: E402

N = 10_000_000
PUBLISHED = 5.4e-7
"""sigma / B of DP-Cap's published run."""
HELD_OUT = 2**40
"""No training sees scenes from this number on."""
JUDGED = 2**41
"""Only the judges see scenes from this number on."""
MEAN = torch.tensor((0.485, 0.456, 0.406)).view(3, 1, 1)
STD = torch.tensor((0.229, 0.224, 0.225)).view(3, 1, 1)


@dataclass(frozen=True)
class Arm:
    """The training of one encoder.

    Attributes:
        task: captioner, or autoencoder.
        epsilon: the run is private.
        ratio: sigma / B of a simulation; 0 clips without noise. Without epsilon and ratio: no
            clipping and no noise.
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
    **{
        f"ratio_batch_{size}": Arm(ratio=1.1e-3, batch=size, steps=300)
        for size in (100, 200, 400, 800)
    },
    **{
        f"vip_ratio_batch_{b}": replace(
            VIP, epsilon=None, starts=False, ratio=1.1e-3, batch=b, steps=300
        )
        for b in (100, 800)
    },
    **{f"width_{width}": replace(DPCAP, starts=False, width=width) for width in (32, 96)},
    **{f"epsilon_{epsilon}": replace(DPCAP, epsilon=float(epsilon)) for epsilon in (1, 2, 4)},
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
    """Returns images with ImageNet's mean and standard deviation taken out."""
    return (images_BCHW / 255 - MEAN) / STD


def model_of(arm: Arm, world: Scenes, seed: int) -> nn.Module:
    """Returns the model of an arm with random weights."""
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
        autoencoder = masked_autoencoder_config("pico", **shape)
        return build_masked_autoencoder(autoencoder, generator=generator)
    words = {"vocab_size": len(WORDS), "num_tokens": world.num_tokens, "bos_id": 1, "eos_id": 2}
    return build_captioner(captioner_config("pico", **shape, **words), generator=generator)


@cache
def synthetic_pictures(count: int = 10_000) -> Tensor:
    """Returns textures and shapes as in the papers' starts, (count, 3, 32, 32) uint8."""
    from data.synthetic.generate import SyntheticData

    source = SyntheticData(0, 32)
    images = np.stack([source.example(index).image_HWC for index in range(count)])
    return torch.from_numpy(images).permute(0, 3, 1, 2)


def masks(model: Any, count: int, generator: torch.Generator) -> Tensor:
    """Returns the patches that a masked autoencoder does not see, (count, P) bool."""
    num_patches = model.config.encoder.num_patches
    rank = torch.rand(count, num_patches, generator=generator).argsort(1).argsort(1)
    return rank >= model.config.num_visible


def inputs(
    arm: Arm, model: nn.Module, world: Scenes, index_B: np.ndarray, generator: torch.Generator
) -> dict[str, Tensor]:
    """Returns the inputs of the model's loss, from scenes or from synthetic pictures."""
    if arm.task == "autoencoder":
        if arm.is_synthetic:
            pictures = synthetic_pictures()
            chosen = torch.randint(0, len(pictures), (len(index_B),), generator=generator)
            images = pictures[chosen]
        else:
            images = world.pairs(index_B)[0]
        return {"images_BCHW": normalised(images), "mask_BP": masks(model, len(index_B), generator)}
    images, tokens = world.pairs(index_B)
    return {"images_BCHW": normalised(images), "tokens_BL": tokens, "token_mask_BL": tokens > 0}


@torch.no_grad()
def heldout_scores(
    arm: Arm, model: Any, world: Scenes, among: str = "captioned", count: int = 1000
) -> dict[str, float]:
    """Returns loss, blind line, and shares of right words and captions, on held-out scenes."""
    from trainer.tasks.baselines import CaptionFrequencies

    index = np.arange(HELD_OUT, HELD_OUT + count)
    if arm.task == "autoencoder":
        on_scenes = replace(arm, is_synthetic=False)
        generator = torch.Generator().manual_seed(5)
        examples = inputs(on_scenes, model, world, index, generator)
        patches = to_patches(examples["images_BCHW"], 8)
        blind = (patches - patches.mean(0)).square().mean()
        return {"loss": float(model(**examples).mean()), "blind_loss": float(blind)}
    sprites = pools()[among]
    placed = world.placements(index, sprites)
    images, tokens = world.pairs(index, sprites)
    blind_line = CaptionFrequencies(len(WORDS))
    captions = {"tokens_BL": tokens, "token_mask_BL": tokens > 0}
    blind_line.add(captions, torch.zeros(count, dtype=torch.bool))
    right_parts = []
    losses = []
    for x, t in zip(normalised(images).split(250), tokens.split(250), strict=True):
        logits = model(x, t, output="logits")[:, :-1]
        targets = t[:, 1:]
        right_parts.append((logits.argmax(-1) == targets) | (targets == 0))
        losses.append(model(x, t, t > 0))
    right = torch.cat(right_parts)
    is_right = right.numpy()
    is_exact = right.all(1).numpy()
    caption_words = np.array(WORDS)[tokens[:, 1:].numpy()]
    scores = {
        "loss": float(torch.cat(losses).mean()),
        "blind_loss": blind_line.values()["blind_loss"],
    }
    letters = [word for word in WORDS if len(word) == 1 and word != "a"]
    vocabularies = {
        "colour": list(scenes.COLOURS),
        "clothes": list(scenes.CLOTHES),
        "letter": letters,
    }
    for name, vocabulary in vocabularies.items():
        scores[name] = float(is_right[np.isin(caption_words, vocabulary)].mean())
    scores["exact"] = float(is_exact.mean())
    if among == "new":
        # A fixed eighth of the pairs of kind and colour is in no training.
        is_left_out = scenes.is_left_out(sprites.number[placed.kind], placed.colour)[:, 0]
        is_left_out = is_left_out & (placed.number == 1)
        scores["exact, left-out pairs"] = float(is_exact[is_left_out].mean())
    return scores


def rate_at(arm: Arm, step: int) -> float:
    """Returns the rate of a step: warm-up over a twentieth of the steps, then a cosine to zero."""
    warm = max(1, arm.steps // 20)
    if step <= warm:
        return arm.rate * step / warm
    angle = math.pi * (step - warm) / (arm.steps - warm)
    return arm.rate * 0.5 * (1 + math.cos(angle))


@cache
def plan_of(epsilon: float, batch: int, steps: int) -> Any:
    """Returns the project's plan for N scenes, with the least noise multiplier for this epsilon."""
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
    """Returns the optimizer of an arm."""
    return torch.optim.AdamW(model.parameters(), lr=arm.rate, betas=(0.9, 0.95), weight_decay=0.005)


def train_steps(arm: Arm, model: nn.Module, world: Scenes, seed: int) -> Iterable[int]:
    """Trains; yields the number of each step behind it."""
    from privacy.clipping.clipped_sum import ClippedSum

    sigma = None if arm.ratio is None else arm.ratio * arm.batch
    if arm.epsilon is not None:
        sigma = plan_of(arm.epsilon, arm.batch, arm.steps).noise_multiplier
    optimizer = optimizer_of(arm, model)
    generator = torch.Generator().manual_seed(10**6 + seed)
    clipped = None if sigma is None else ClippedSum(model, arm.bound)
    parameters = dict(model.named_parameters())
    num_micro_batches = math.ceil(arm.batch / 300)
    micro_batch_size = math.ceil(arm.batch / num_micro_batches)
    for step in range(1, arm.steps + 1):
        first = seed * 1_000_000 + (step - 1) * arm.batch
        end = first + arm.batch
        for group in optimizer.param_groups:
            group["lr"] = rate_at(arm, step)
        if clipped is None:
            optimizer.zero_grad()
            batch = inputs(arm, model, world, np.arange(first, end), generator)
            model(**batch).mean().backward()
        else:
            assert sigma is not None
            clipped.zero_()
            for start in range(first, end, micro_batch_size):
                index = np.arange(start, min(start + micro_batch_size, end))
                micro_batch = inputs(arm, model, world, index, generator)
                is_padding_B = torch.zeros(len(index), dtype=torch.bool)
                clipped.add_micro_batch(model, micro_batch, is_padding_B)
            for name, total in clipped.sums():
                noise = torch.randn(total.shape, generator=generator)
                noised = (total.float() + sigma * arm.bound * noise) / arm.batch
                parameters[name].grad = noised.reshape(parameters[name].shape)
        optimizer.step()
        yield step
    if clipped is not None:
        clipped.detach()


def train_steps_with_ledger(
    arm: Arm, model: nn.Module, world: Scenes, folder: Path
) -> Iterable[int]:
    """Trains by PrivateLoop: an item is a scene's number, and the loss renders the scene."""
    from torch.utils.data import TensorDataset

    from privacy.loop import PrivateLoop, integers

    generator = torch.Generator()

    def loss(index_B: Tensor) -> Tensor:
        return model(**inputs(arm, model, world, index_B.numpy(), generator))

    with PrivateLoop(
        model,
        optimizer_of(arm, model),
        TensorDataset(torch.arange(N)),
        example=(integers(N),),
        loss=loss,
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


def train_arm(
    name: str, seed: int, world: Scenes, output: Path
) -> tuple[nn.Module, dict[str, Any]]:
    """Returns the trained model of an arm, and its trajectory."""
    arm = ARMS[name]
    model = model_of(arm, world, seed)
    if arm.starts:
        prefix = "encoder."
        weights = torch.load(output / f"{seed}-start.pt")
        encoder = {
            key.removeprefix(prefix): tensor
            for key, tensor in weights.items()
            if key.startswith(prefix)
        }
        model.encoder.load_state_dict(encoder)  # type: ignore[union-attr]
    steps = train_steps(arm, model, world, seed)
    if arm.uses_ledger:
        steps = train_steps_with_ledger(arm, model, world, output / f"{seed}-{name}")
    trajectory = []
    for step in steps:
        if step % max(1, arm.steps // 8) == 0:
            scores = heldout_scores(arm, model.eval(), world, count=500)
            trajectory.append({"step": step, **scores})
            print(name, seed, trajectory[-1], flush=True)
            model.train()
    facts: dict[str, Any] = {"trajectory": trajectory}
    if arm.uses_ledger:
        check = [sys.executable, "privacy/verify.py", str(output / f"{seed}-{name}")]
        process = subprocess.run(check, cwd=ROOT, capture_output=True, text=True)
        facts["verify"] = {
            "exit_code": process.returncode,
            "said": process.stdout.strip().splitlines()[-8:],
        }
    return model.eval(), facts


Labelled = tuple[Tensor, np.ndarray]


def judges(
    world: Scenes, seed: int, train: int = 600, test: int = 500
) -> dict[str, tuple[Labelled, Labelled]]:
    """Returns by name pictures with labels to fit on and to test on.

    No caption names these kinds, and no training shows these sprites.
    """
    from sklearn.datasets import load_digits

    world = Scenes(world.seed, world.size, 1, world.clutter)
    pixels, digit = load_digits(return_X_y=True)
    grey = np.rint(pixels.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    ink = grey.repeat(3, 1).repeat(3, 2)
    digit_sprites = {}
    for number in range(10):
        sprites = [from_ink(drawing, 1.0) for drawing in ink[digit == number]]
        digit_sprites[f"digit-{number}"] = np.stack(sprites)
    digits = pool(digit_sprites)
    sets: dict[str, tuple[Labelled, Labelled]] = {}

    def add_scenes(name: str, among: Pool, number: int, label: Callable[[Any], np.ndarray]) -> None:
        # Clip art has forty kinds.
        count = 2 * train if len(among.names) == 40 else train
        index = np.arange(count + test) + JUDGED + seed * 10**7 + number * 10**5
        placed = world.placements(index, among)
        x = world.render(placed, among)
        y = label(placed)
        to_fit = (x[:count], y[:count])
        to_test = (x[count:], y[count:])
        sets[name] = (to_fit, to_test)

    def place(placed: Any) -> np.ndarray:
        row = scenes.third_of(placed.y[:, 0])
        column = scenes.third_of(placed.x[:, 0])
        return 3 * row + column

    kinds = {name: pools()[name] for name in ("clothes", "letters", "clip art")}
    for number, (name, among) in enumerate({**kinds, "digits": digits}.items()):
        add_scenes(name, among, number, lambda placed: placed.kind[:, 0])
    add_scenes("colour", pools()["never"], 4, lambda placed: placed.colour[:, 0])
    add_scenes("place", pools()["never"], 5, place)
    centred = {"clothes": pools()["clothes"], "letters": pools()["letters"], "digits": digits}
    for name, among in centred.items():
        sprite = among.pictures.float()
        y = np.repeat(np.arange(len(among.names)), np.diff(among.first))
        colour = sprite[:, :3]
        opacity = sprite[:, 3:]
        paper = 1 - opacity + 0.2 * (1 - colour) * opacity
        framed = nn.functional.pad(paper.clamp(0, 1), (2, 2, 2, 2), value=1.0)
        x = (framed * 255).round().to(torch.uint8)
        fit_rows = split(y, (np.bincount(y).min() + 1) // 2, seed)
        other_rows = np.setdiff1d(np.arange(len(y)), fit_rows)
        test_rows = np.random.default_rng(seed).permutation(other_rows)[:test]
        to_fit = (x[fit_rows], y[fit_rows])
        to_test = (x[test_rows], y[test_rows])
        sets[f"{name} centred"] = (to_fit, to_test)
    return sets


def ridge_accuracy(
    fit: tuple[np.ndarray, np.ndarray], test: tuple[np.ndarray, np.ndarray]
) -> float:
    """Returns the accuracy of one-against-all ridge regression on standardised features.

    Its strength has the best leave-one-out accuracy, in closed form.
    """
    features, labels = fit
    test_features, test_labels = test
    mean = features.mean(0)
    deviation = features.std(0)
    # A constant feature becomes zero.
    scale = np.where(deviation > 1e-9, deviation, np.inf)
    x = (features.astype(np.float64) - mean) / scale
    z = (test_features.astype(np.float64) - mean) / scale
    classes, y = np.unique(labels, return_inverse=True)
    target = np.eye(len(classes))[y]
    centred = target - target.mean(0)
    if x.shape[1] > len(x):
        squares, u = np.linalg.eigh(x @ x.T)
        s = np.sqrt(np.maximum(squares, 1e-12))
        v = (x.T @ u) / s
    else:
        u, s, vt = np.linalg.svd(x, full_matrices=False)
        v = vt.T
    projected = u.T @ centred
    # (accuracy, -strength): of equal accuracies the weakest wins.
    best = (-1.0, 0.0)
    for strength in 10.0 ** np.arange(-1, 6):
        d = s * s / (s * s + strength)
        residual = centred - u @ (d[:, None] * projected)
        leverage = np.minimum((u * u) @ d, 1 - 1e-9)
        predicted = centred - residual / (1 - leverage)[:, None]
        accuracy = float(((predicted + target.mean(0)).argmax(1) == y).mean())
        best = max(best, (accuracy, -strength))
    weights = v @ ((s / (s * s - best[1]))[:, None] * projected)
    scores = z @ weights + target.mean(0)
    return float((classes[scores.argmax(1)] == test_labels).mean())


Describe = Callable[[Tensor], tuple[np.ndarray, np.ndarray]]


def probe_accuracies(
    sets: dict[str, tuple[Labelled, Labelled]], describe: Describe, seed: int
) -> dict[str, Any]:
    """Returns the accuracies of all probes.

    Args:
        describe: gives the features of pictures for few shots, and those for the linear probe.
    """
    accuracies: dict[str, dict[str, float]] = {"probes": {}, "published_few_shot": {}, "place": {}}
    for name, ((x, y), (z, test_y)) in sets.items():
        few_x, linear_x = describe(x)
        few_z, linear_z = describe(z)
        few_test = (few_z, test_y)
        of_splits = []
        for number in range(3):
            rows = split(y, 10, 100 * seed + number)
            of_splits.append(ridge_accuracy((few_x[rows], y[rows]), few_test))
        part = accuracies["place" if name == "place" else "probes"]
        part[f"{name}, 10 shots"] = float(np.mean(of_splits))
        part[f"{name}, linear"] = ridge_accuracy((linear_x, y), (linear_z, test_y))
        # Thousands of features take the published probe minutes.
        if name != "place" and few_x.shape[1] < 100:
            num_classes = 1 + int(y.max())
            published = few_shot_probe(
                (few_x, y), few_test, num_classes, (10,), num_splits=1, seed=100 * seed
            )
            accuracies["published_few_shot"][name] = published[10][0]
    mean = float(np.mean(list(accuracies["probes"].values())))
    return {**accuracies, "mean_of_probes": mean}


def model_features(model: Any) -> Describe:
    """Returns a function from pictures to a model's features, as in the papers.

    They are the mean of the last block's normalised tokens for few shots, and those of all blocks
    for linear probes.
    """
    from evaluation.encoder import tokens

    @torch.no_grad()
    def describe(x: Tensor) -> tuple[np.ndarray, np.ndarray]:
        last_parts = []
        block_parts = []
        for part in x.split(250):
            blocks, last = tokens(model.encoder, normalised(part), 3)
            last_parts.append(last[:, 1:].mean(1))
            block_parts.append(torch.cat([block[:, 1:].mean(1) for block in blocks], 1))
        return torch.cat(last_parts).numpy(), torch.cat(block_parts).numpy()

    return describe


def gradients(x: Tensor) -> Tensor:
    """Returns HOG features (B, 1764): 9 directions, cells of 4 x 4, blocks of 2 x 2 normalised."""
    grey = x.float().mean(1) / 255
    gx = torch.zeros_like(grey)
    gy = torch.zeros_like(grey)
    gx[:, :, 1:-1] = grey[:, :, 2:] - grey[:, :, :-2]
    gy[:, 1:-1] = grey[:, 2:] - grey[:, :-2]
    length = torch.hypot(gx, gy)
    # In units of a ninth of a half turn; a gradient counts in the two directions next to it.
    angle = torch.remainder(torch.atan2(gy, gx), math.pi) / math.pi * 9
    direction = angle.floor().long() % 9
    next_direction = (direction + 1) % 9
    share = angle - angle.floor()
    bins = torch.zeros(len(x), 9, *grey.shape[1:])
    bins.scatter_(1, direction[:, None], (length * (1 - share))[:, None])
    bins.scatter_add_(1, next_direction[:, None], (length * share)[:, None])
    cells = nn.functional.avg_pool2d(bins, 4)
    norm = nn.functional.avg_pool2d(cells.square().sum(1, keepdim=True), 2, 1).sqrt() + 0.02
    blocks = []
    for i, j in ((0, 0), (0, 1), (1, 0), (1, 1)):
        blocks.append(cells[:, :, i : i + 7, j : j + 7] / norm)
    return torch.cat(blocks, 1).flatten(1)


def colours(x: Tensor) -> Tensor:
    """Returns the roots of the shares of 4 x 4 x 4 colours, (B, 64)."""
    digits = x.long() // 64 * torch.tensor([16, 4, 1]).view(3, 1, 1)
    bins = digits.sum(1).flatten(1)
    counts = torch.zeros(len(x), 64).scatter_add_(1, bins, torch.ones(bins.shape))
    return counts.div(bins.shape[1]).sqrt()


def convolutions(x: Tensor, filters: int) -> Tensor:
    """Returns the features (B, 18 filters) of random filters on pictures of equal contrast.

    The filters have 6 x 6 pixels; both signs above a threshold are averaged over 3 x 3 parts of the
    picture.
    """
    normals = torch.randn(filters, 3, 6, 6, generator=torch.Generator().manual_seed(7))
    centred = (normals - normals.mean((1, 2, 3), keepdim=True)).flatten(1)
    weights = nn.functional.normalize(centred).view_as(normals)

    def smooth(y: Tensor) -> Tensor:
        return nn.functional.avg_pool2d(y, 7, 1, 3, count_include_pad=False)

    features = []
    for part in x.split(250):
        contrast = part.float() / 255 - smooth(part.float() / 255)
        deviation = (smooth(contrast.square().mean(1, keepdim=True)) + 0.01).sqrt()
        y = nn.functional.conv2d(contrast / deviation, weights)
        signs = torch.cat([(y - 1).relu(), (-y - 1).relu()], 1)
        features.append(nn.functional.adaptive_avg_pool2d(signs, 3).flatten(1))
    return torch.cat(features)


def hog_and_colours(x: Tensor) -> Tensor:
    """Returns the features of `gradients` and of `colours`, (B, 1828)."""
    return torch.cat([gradients(x), colours(x)], 1)


CONTROLS: dict[str, Callable[[Tensor], Tensor]] = {
    "pixels": lambda x: x.flatten(1) / 255,
    "hog": gradients,
    "colours": colours,
    "hog and colours": hog_and_colours,
    "convolutions 64": lambda x: convolutions(x, 64),
    "convolutions 256": lambda x: convolutions(x, 256),
}
"""Hand-crafted features by name."""
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


def control_features(features: Callable[[Tensor], Tensor]) -> Describe:
    """Returns a function from pictures to the same features for both probes."""

    def describe(x: Tensor) -> tuple[np.ndarray, np.ndarray]:
        array = features(x).numpy()
        return array, array

    return describe


def run_arm(
    name: str, seed: int, world: Scenes, output: Path, sets: Callable[[], Any]
) -> dict[str, Any]:
    """Returns the record of an arm and seed, from its file or made now."""
    path = output / f"{seed}-{name.replace(' ', '_')}.json"
    if path.exists():
        return json.loads(path.read_text())
    start_seconds = sum(os.times()[:4])
    record: dict[str, Any] = {}
    if name in CONTROLS:
        record |= {"heldout_loss": None, "epsilon": None}
        describe = control_features(CONTROLS[name])
    else:
        arm = ARMS[name]
        if arm.starts:
            run_arm("start", seed, world, output, sets)
        model, facts = train_arm(name, seed, world, output)
        torch.save(model.state_dict(), path.with_suffix(".pt"))
        record |= {
            "arm": asdict(arm),
            "epsilon": arm.epsilon,
            "formal_guarantee": arm.uses_ledger,
            **facts,
        }
        record["heldout"] = heldout_scores(arm, model, world)
        record["heldout_loss"] = record["heldout"]["loss"]
        if arm.task == "captioner":
            record["heldout_new_sprites"] = heldout_scores(arm, model, world, "new", 4000)
        if arm.epsilon is not None:
            record["noise_multiplier"] = plan_of(arm.epsilon, arm.batch, arm.steps).noise_multiplier
        describe = model_features(model)
    record |= probe_accuracies(sets(), describe, seed)
    record["processor_seconds"] = round(sum(os.times()[:4]) - start_seconds, 1)
    path.write_text(json.dumps(record, indent=1) + "\n")
    accuracy = f"mean of probes {record['mean_of_probes']:.3f}"
    print(name, seed, accuracy, f"{record['processor_seconds']} s", flush=True)
    return record


def summary(output: Path) -> dict[str, Any]:
    """Returns all records in a folder: arms with means over seeds, and paired differences."""
    by_arm: dict[str, dict[int, Any]] = {}
    for path in sorted(output.glob("*.json")):
        seed, _, file_name = path.stem.partition("-")
        name = file_name.replace("_and_", " and ").replace("convolutions_", "convolutions ")
        by_arm.setdefault(name, {})[int(seed)] = json.loads(path.read_text())
    arms = {}
    for name in (*CONTROLS, *ARMS):
        if name not in by_arm:
            continue
        runs = by_arm[name]
        first_run = runs[min(runs)]
        means: dict[str, Any] = {}
        for part in ("probes", "published_few_shot", "place"):
            means[part] = {}
            for key in first_run[part]:
                means[part][key] = mean_of(run[part][key] for run in runs.values())
        probe_means = [run["mean_of_probes"] for run in runs.values()]
        arms[name] = {
            "mean_of_probes": mean_of(probe_means),
            **means,
            "half_width": interval(probe_means)["half_width"],
            "mean_of_published_few_shot": mean_of(means["published_few_shot"].values()),
            "heldout_loss": mean_of(run["heldout_loss"] for run in runs.values()),
            "epsilon": first_run["epsilon"],
            "seeds": sorted(runs),
            "runs": runs,
        }
    differences = {}
    for better, worse in PAIRS:
        better_runs = by_arm.get(better, {})
        worse_runs = by_arm.get(worse, {})
        seeds = sorted(set(better_runs) & set(worse_runs))
        if not seeds:
            continue
        by_seed = [
            better_runs[seed]["mean_of_probes"] - worse_runs[seed]["mean_of_probes"]
            for seed in seeds
        ]
        differences[f"{better} - {worse}"] = {
            **interval(by_seed),
            "by_seed": by_seed,
            "seeds": seeds,
        }
    seconds = sum(run["processor_seconds"] for runs in by_arm.values() for run in runs.values())
    return {
        "benchmark": "small_world",
        "num_scenes": N,
        "arms": arms,
        "differences": differences,
        "processor_seconds": round(seconds, 1),
    }


def mean_of(values: Iterable[float | None]) -> float | None:
    """Returns the mean of the values that are not None; None without any."""
    numbers = [value for value in values if value is not None]
    return float(np.mean(numbers)) if numbers else None


def main() -> None:
    """Makes the records of the chosen arms; prints the summary of their folder."""
    from trainer.config.cli import Parser

    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--short", action="store_true", help="one seed of the arms that matter most"
    )
    parser.add_argument(
        "--claim",
        nargs="+",
        choices=CLAIMS,
        default=[],
        help="the claims that arms and seeds are made for",
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
    names = [*options.arms]
    if options.short:
        names += SHORT
    for claim in options.claim:
        names += CLAIMS[claim]
    if options.claim:
        names += CONTROLS
    elif options.short:
        # The last control has 4,608 features, which take a linear probe a minute.
        names += list(CONTROLS)[:-1]
    with contextlib.redirect_stdout(sys.stderr):
        for seed in options.seeds:
            sets = cache(lambda seed=seed: judges(world, seed))
            for name in dict.fromkeys(names):
                run_arm(name, seed, world, output, sets)
    print(json.dumps(summary(output)))


if __name__ == "__main__":
    from trainer.config.cli import run_command

    run_command(main)
