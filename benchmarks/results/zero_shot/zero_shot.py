"""Zero-shot scoring of 200 labels: one prefix tree against one forward per label, in interleaved rounds.

    python benchmarks/results/zero_shot/zero_shot.py --json > record.json
    python benchmarks/results/zero_shot/zero_shot.py --size dpcap_tiny --image_size 224 --num_images 1 --rounds 2

Four ways, which must agree to 1e-5 nats per token: `forward_per_label` runs the whole model for each label; `decoder_per_label`
encodes the image once; `one_batch` sends all labels through the decoder together, padded; `prefix_tree` is evaluation/scoring.py.
The weights are random: the work does not depend on them.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch
from torch import Tensor

from data.examples.tokenizer import EMBEDDED_TOKENIZER, CaptionTokenizer
from evaluation.scoring import PrefixTree, encoded_captions, own_log_probs, tree_log_probs
from models.captioner import Captioner, build_captioner
from models.config import captioner_config
from tools.demo_words import TRANSLATIONS

TEMPLATE = "a photo of a {}"


def label_names(count: int) -> list[str]:
    """Nouns of the demo's word table: unlike colours and shapes, they share hardly any beginning."""
    names = dict.fromkeys(name.replace("+", " ") for name in TRANSLATIONS.values())
    if len(names) < count:
        raise SystemExit(f"there are {len(names)} names, not {count}")
    return list(names)[:count]


@torch.no_grad()
def forward_per_label(model: Captioner, images: Tensor, captions: list[tuple[int, ...]]) -> Tensor:
    """(B, C) log-probabilities, each by `model.forward`."""
    scores = []
    for caption in captions:
        tokens_BL = torch.tensor(caption).expand(len(images), -1)
        loss_B = model(images, tokens_BL, torch.ones_like(tokens_BL, dtype=torch.bool))
        scores.append(-loss_B.double() * (len(caption) - 1))
    return torch.stack(scores, dim=1)


@torch.no_grad()
def decoder_per_label(model: Captioner, images: Tensor, captions: list[tuple[int, ...]]) -> Tensor:
    """The same with one encoding of the images."""
    memory, scores = model.encode(images), []
    for caption in captions:
        tokens_BL = torch.tensor(caption).expand(len(images), -1)
        scores.append(-model.decoder(tokens_BL[:, :-1], memory, tokens_BL[:, 1:]).double().sum(1))
    return torch.stack(scores, dim=1)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of every way in every round, and how far their scores differ."""
    tokenizer = CaptionTokenizer.from_file(EMBEDDED_TOKENIZER)
    special = {"bos_id": tokenizer.bos_id, "eos_id": tokenizer.eos_id, "pad_id": tokenizer.pad_id}
    config = captioner_config(
        args.size, image_size=args.image_size, vocab_size=args.vocab_size or tokenizer.vocab_size, **special
    )
    generator = torch.Generator().manual_seed(0)
    model = build_captioner(config, generator=generator).eval()
    images = torch.randn(args.num_images, 3, args.image_size, args.image_size, generator=generator)
    prompts = [TEMPLATE.format(name) for name in label_names(args.num_labels)]
    captions = encoded_captions(tokenizer, prompts, config.num_tokens)
    tree = PrefixTree.of(captions)
    ways: dict[str, Callable[[], Tensor]] = {
        "forward_per_label": lambda: forward_per_label(model, images, captions),
        "decoder_per_label": lambda: decoder_per_label(model, images, captions),
        "one_batch": lambda: torch.stack(own_log_probs(model, images, [captions] * len(images))),
        "prefix_tree": lambda: tree_log_probs(model, images, tree),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    scores: dict[str, Tensor] = {}
    for number in range(args.rounds + 1):
        for name, way in ways.items():
            start = time.process_time() if args.cpu_time else time.perf_counter()
            scores[name] = way()
            spent = (time.process_time() if args.cpu_time else time.perf_counter()) - start
            if number > 0:  # the first round warms up
                seconds[name].append(spent)
    lengths = torch.from_numpy(tree.lengths_C)
    differences = {n: ((s - scores["forward_per_label"]) / lengths).abs().max().item() for n, s in scores.items()}
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "num_prompt_tokens": int(lengths.sum()),
        "num_tree_nodes": tree.num_nodes,
        "seconds": seconds,
        "median_seconds": medians,
        "times_faster_than_forward_per_label": {
            n: medians["forward_per_label"] / value for n, value in medians.items()
        },
        "largest_difference_nats_per_token": differences,
    }


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="nano", help="of the captioner (default: nano)")
    parser.add_argument("--image_size", type=int, default=64)
    parser.add_argument("--vocab_size", type=int, help="default: the embedded tokenizer's 4,096")
    parser.add_argument("--num_images", type=int, default=8)
    parser.add_argument("--num_labels", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cpu_time", action="store_true", help="processor seconds of this process, for busy machines")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    result = {
        "benchmark": "zero_shot",
        "arguments": {key: value for key, value in vars(args).items() if key != "json"},
        **measure(args),
        "torch": torch.__version__,
        "processors": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
    }
    if args.json:
        print(json.dumps(result, indent=1))
        return
    for name, median in result["median_seconds"].items():
        faster = result["times_faster_than_forward_per_label"][name]
        print(
            f"{name:20} {median:9.3f} s {faster:7.1f} x   difference {result['largest_difference_nats_per_token'][name]:.1e}"
        )


if __name__ == "__main__":
    main()
