"""Caption retrieval by likelihood: image to text and text to image, recall at 1, 5 and 10.

    python launch_scripts/evaluate.py retrieval --checkpoint runs/x --data shards:heldout/ --max_examples 1000

Every caption is scored for every image, so the work grows with the square of the number of images.
"""

import argparse
from typing import TYPE_CHECKING, Any

from evaluation.commands.captions import add_captioned, open_captioned
from evaluation.commands.common import add_checkpoint
from evaluation.commands.zero_shot import add_too_long, open_captioner

if TYPE_CHECKING:
    from evaluation.results import Results

NAME = "retrieval"
HELP = "which caption belongs to which image? (recall at 1, 5 and 10)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See `evaluation.commands`."""
    add_checkpoint(parser)
    add_captioned(parser)
    add_too_long(parser)


def run(args: argparse.Namespace) -> "Results":
    """See `evaluation.commands`."""
    import torch

    from data.errors import DataError
    from evaluation.results import DataUse, ModelFacts, Results
    from evaluation.retrieval import recalls, same_texts
    from evaluation.scoring import PrefixTree, encoded_captions, fits, tree_log_probs
    from evaluation.sources.captioned import decoded

    opened, model = open_captioner(args)
    tokenizer = opened.task.make_example(train=False).tokenizer  # type: ignore[attr-defined]
    source = open_captioned(args)
    size = model.config.encoder.image_size
    images: list[torch.Tensor] = []
    captions, owners, left_out, too_long = [], [], 0, 0
    for batch in decoded(source, image_size=size, batch_size=args.batch_size, count=args.max_examples):
        left_out += batch.num_undecodable
        for image, example in zip(batch.images_BCHW, batch.examples, strict=True):
            texts = [" ".join(caption.split()) for caption in example.captions]
            if args.too_long == "skip":
                kept = [text for text in texts if fits(tokenizer, text, model.config.num_tokens)]
                too_long += len(texts) - len(kept)
                texts = kept
            if not texts:
                left_out += 1
                continue
            captions += texts
            owners += [len(images)] * len(texts)
            images.append(torch.from_numpy(image))
    if len(images) < 2:
        raise DataError(f"{source.name}: retrieval needs at least two images with captions, found {len(images)}")
    tree = PrefixTree.of(encoded_captions(tokenizer, captions, model.config.num_tokens))
    device = next(model.parameters()).device
    parts = torch.stack(images).split(args.batch_size)
    log_probs_NC = torch.cat([tree_log_probs(model, part.to(device), tree) for part in parts])
    found = recalls(log_probs_NC, tree.lengths_C, same_texts(captions, owners, len(images)))
    scalars: dict[str, float] = {}
    table: list[dict[str, Any]] = []
    for rule, one in found.items():
        for way, by_rank in (("image_to_text", one.image_to_text), ("text_to_image", one.text_to_image)):
            scalars |= {f"{way}_recall{rank}_{rule}": value for rank, value in by_rank.items()}
            table.append({"rule": rule, "way": way, **{f"recall@{rank}": value for rank, value in by_rank.items()}})
    uses = [DataUse("images with captions", source.name, len(images), left_out)]
    details = {"num_captions": len(captions), "num_too_long": too_long, "num_tree_nodes": tree.num_nodes}
    return Results(NAME, scalars, uses, ModelFacts.of(opened.path, opened.manifest), table, details)
