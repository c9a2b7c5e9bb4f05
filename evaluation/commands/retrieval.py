"""Caption retrieval by likelihood: image to text and text to image, recall at 1, 5 and 10.

    python launch_scripts/evaluate.py retrieval --checkpoint runs/x --data shards:heldout/ --max_examples 1000

Every caption is scored for every image, so the work grows with the square of the number of images.
"""

from typing import TYPE_CHECKING, Any

from evaluation.commands.captioner import CaptionedOptions, TooLongOptions, open_captioned, open_captioner

if TYPE_CHECKING:
    from evaluation.results import Results


class RetrievalOptions(TooLongOptions, CaptionedOptions):
    """Options of `retrieval`."""


def retrieval(options: RetrievalOptions) -> "Results":
    """Scores all captions for all images."""
    import torch

    from data.errors import DataError
    from evaluation.results import DataUse, Results
    from evaluation.retrieval import recalls, same_texts
    from evaluation.scoring import PrefixTree, encoded_captions, fits, tree_log_probs
    from evaluation.sources.captioned import decoded

    model, tokenizer, facts = open_captioner(options)
    source = open_captioned(options)
    size = model.config.encoder.image_size
    images: list[torch.Tensor] = []
    captions, owners, left_out, too_long = [], [], 0, 0
    for batch in decoded(source, image_size=size, batch_size=options.batch_size, count=options.max_examples):
        left_out += batch.num_undecodable
        for image, example in zip(batch.images_BCHW, batch.examples, strict=True):
            texts = [" ".join(caption.split()) for caption in example.captions]
            if options.too_long == "skip":
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
    parts = torch.stack(images).split(options.batch_size)
    log_probs_NC = torch.cat([tree_log_probs(model, part.to(device), tree) for part in parts])
    by_rule = recalls(log_probs_NC, tree.lengths_C, same_texts(captions, owners, len(images)))
    scalars: dict[str, float] = {}
    table: list[dict[str, Any]] = []
    for rule, recall in by_rule.items():
        for way, by_rank in (("image_to_text", recall.image_to_text), ("text_to_image", recall.text_to_image)):
            scalars |= {f"{way}_recall{rank}_{rule}": value for rank, value in by_rank.items()}
            table.append({"rule": rule, "way": way, **{f"recall@{rank}": value for rank, value in by_rank.items()}})
    uses = [DataUse("images with captions", source.name, len(images), left_out)]
    details = {"num_captions": len(captions), "num_too_long": too_long, "num_tree_nodes": tree.num_nodes}
    return Results("retrieval", scalars, uses, facts, table, details)
