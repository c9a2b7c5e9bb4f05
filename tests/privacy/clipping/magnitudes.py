"""An adversary that looks for an example whose norm reads low: contract 4 for inputs and output gradients of any magnitude.

`norms` compares weight times exact gradient norm of every example with C, for magnitudes of 1e-38 to 1e38, apart for inputs and
output gradients, where squares underflow, overflow or cancel. The examples of a micro-batch are pairs of their own.
"""

import math
import random
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from privacy.clipping import ClippedSum
from tests.privacy.clipping.neighbours import DTYPES, MODES, ByChunks, Convolved, Found, Product, watched


class Twice(nn.Module):
    """One Linear for two inputs: the norm of a sum of two contributions, of which bf16 loses no bit, whatever their size."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return (self.layer(x) * w).flatten(1).sum(1) + (self.layer(x.flip(1)) * w).flatten(1).sum(1)


class Tied(nn.Module):
    """An embedding and a Linear of one weight; x is the Linear's input and, with w's scale, the embedding's gradient."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(width, width)
        self.head = nn.Linear(width, width, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        ids = torch.arange(x.shape[1], device=x.device).expand(len(x), -1) % 3
        return (self.head(x) * w).flatten(1).sum(1) + (self.embedding(ids) * x * w.amax((1, 2))[:, None, None]).flatten(
            1
        ).sum(1)


class Embedded(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3, width)

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return (self.embedding(torch.zeros(x.shape[:2], dtype=torch.long, device=x.device)) * w).flatten(1).sum(1)


MODELS: dict[str, tuple[int, Callable[[int], nn.Module]]] = {
    "ghost": (96, lambda width: Product(nn.Linear(width, width))),
    "written_out": (6, lambda width: Product(nn.Linear(width, width))),
    "layer_norm": (96, lambda width: Product(nn.LayerNorm(width))),
    "shared": (96, Twice),
    "shared_written_out": (6, Twice),
    "tied": (96, Tied),
    "embedding": (96, Embedded),
    "convolution": (96, lambda width: Convolved(nn.Conv1d(width, width, 1))),
    "grouped_convolution": (96, lambda width: Convolved(nn.Conv1d(width, width, 1, groups=4))),
    "chunked": (96, ByChunks),
}


def norms(device: torch.device, seed: str, num_pairs: int, examples: int = 64) -> Iterator[Found]:
    """|clipped gradient| / C of every example of micro-batches whose examples have magnitudes of their own.

    The gradient is that of the same model in float64, the weight the one that was given. The worst example is also summed alone.
    """
    rng = random.Random(seed)
    while num_pairs > 0:
        name, dtype = rng.choice(list(MODELS)), rng.choice(list(DTYPES))
        width, make = MODELS[name]
        model = make(width).to(device, DTYPES[dtype])
        bound, tokens = 10.0 ** rng.uniform(-6, 1), rng.choice([1, 2, 3, 7, 24])
        x, w = (t.to(device) for t in draw_magnitudes(rng, (examples, tokens, width), bound, DTYPES[dtype]))
        mode, function = rng.choice(MODES), rng.choice(["flat", "automatic", "per_layer"])
        seen: list[Tensor] = []
        clipped = ClippedSum(model, bound, mode=mode, function=watched(function, seen), self_check=False)  # type: ignore[arg-type]
        padding = torch.zeros(examples, dtype=torch.bool, device=device)
        clipped.add_micro_batch(model, {"x": x, "w": w}, padding)
        with torch.no_grad():
            is_finite = model(x, w).isfinite().cpu()
        weight = torch.where(is_finite, seen[-1], 0)
        sizes = torch.where(weight > 0, weight * exact_norms(make(width), model, x, w), 0) / bound
        if name == "layer_norm":  # the model itself rounds, and where squares overflow loses, what is normalised
            sizes *= 0.5
        if dtype == "bf16" and name in ("tied", "chunked"):
            sizes *= 1 - 2.0**-7  # the model itself rounds these output gradients
        worst = int(sizes.argmax())
        clipped.zero_()
        clipped.add_micro_batch(model, {"x": x, "w": w}, torch.arange(examples, device=device) != worst)
        alone = math.sqrt(sum(float(total.detach().double().square().sum()) for _, total in clipped.sums())) / bound
        clipped.detach()
        num_pairs -= examples + 1
        yield Found(
            max(float(sizes[worst]), alone), examples + 1, (name, dtype), (name, dtype, mode, function, tokens, bound)
        )


def draw_magnitudes(
    rng: random.Random, shape: tuple[int, ...], bound: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Inputs and output gradients of 1e-38 to 1e38: apart, where a square is lost, or with a product near the bound."""
    generator = torch.Generator().manual_seed(rng.getrandbits(63))
    exponents, spreads, signs = [], [], []
    for _ in range(shape[0]):
        large, small, free = rng.uniform(16, 19), rng.uniform(-24, -19), rng.uniform(-38, 38)
        near = min(38, max(-38, math.log10(bound) - free + rng.uniform(-4, 3)))
        exponents.append(rng.choice([(large, small), (small, large), (free, rng.uniform(-38, 38)), (free, near)]))
        spreads.append(rng.choice([0, 0, 0.5, 3]))
        signs.append(rng.random() < 0.4)
    spread = torch.tensor(spreads, dtype=torch.float64)[:, None, None]
    found = []
    for column in torch.tensor(exponents, dtype=torch.float64).unbind(1):
        noise = torch.randn(shape, generator=generator, dtype=torch.float64) * spread
        sign = torch.where(torch.tensor(signs)[:, None, None], torch.randn(shape, generator=generator).sign(), 1)
        found.append((sign * (10.0 ** (column[:, None, None] + noise)).clamp(max=3e38)).to(dtype))
    return found[0], found[1]


def exact_norms(double: nn.Module, model: nn.Module, x: Tensor, w: Tensor) -> Tensor:
    """(B,) gradient norms of the model in float64 on the CPU."""
    double = double.double()
    double.load_state_dict({name: value.double().cpu() for name, value in model.state_dict().items()})
    if isinstance(double, ByChunks):
        double.head.max_logits = 1 << 40  # in one piece, which torch.func can differentiate
    parameters = dict(double.named_parameters())

    def loss(parameters: dict[str, Tensor], x: Tensor, w: Tensor) -> Tensor:
        return torch.func.functional_call(double, parameters, (x[None], w[None]))[0]

    gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(
        parameters, x.double().cpu(), w.double().cpu()
    )
    return torch.stack([g.flatten(1).norm(dim=1) for g in gradients.values()]).norm(dim=0).detach()
