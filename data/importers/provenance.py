"""What an import says of itself, for everybody to read: its rules, and no count or name from the data."""

from typing import Any

PROVENANCE = "provenance.json"


def provenance(version: int, settings: dict[str, Any]) -> dict[str, Any]:
    """The content of `provenance.json`; `deduplication` is written for the privacy card (recipe key data.deduplication)."""
    conversion, owner_limit = settings["conversion"], settings["max_per_owner"]
    return {
        "kind": "import",
        "importer_version": version,
        "source_format": settings["source_format"],
        "images": (
            f"{conversion['side']} side at most {conversion['size']} pixels, encoded again as {conversion['image_format']} "
            "without metadata"
        ),
        "captions": "cleaned one by one by fixed rules; the first usable caption of an image is its text",
        "labels": "kept as they are; an example needs a caption or a label",
        "deduplication": deduplication(settings["duplicate_distance"]),
        "max_examples_per_owner": owner_limit,
        "owners": None if owner_limit is None else _owners(owner_limit),
    }


def deduplication(distance: int | None) -> str:
    """What was removed, and that the removal is outside of the guarantee."""
    near = (
        "Near copies were kept."
        if distance is None
        else f"So were near copies: pictures whose 64-bit perceptual hashes differ in at most {distance} bits."
    )
    return (
        f"Exact copies (SHA-256 of pixels, caption and label) were removed before training. {near} Copies that remain act as a "
        "group and multiply the privacy loss. The removal itself looks across examples: it is not part of the guarantee "
        "(Debenedetti et al. 2024, Privacy side channels in machine learning systems)."
    )


def _owners(limit: int) -> str:
    return (
        f"At most {limit} examples of one owner were kept, chosen by a keyed hash of their content; examples without an owner "
        "were dropped. The guarantee of an owner is the group epsilon of that size; removal of copies came before and is "
        "outside of it."
    )
