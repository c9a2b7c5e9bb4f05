"""What a recipe declares of its data; it counts only for the data that the recipe names itself (contract 12)."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from trainer.config.recipe import RunConfig

_OF_TRAINING_DATA = (
    "data.provenance",
    "data.deduplication",
    "data.dataset_name",
    "data.dataset_owner",
    "data.dataset_purpose",
    "data.dataset_licence",
    "data.dataset_contact",
    "data.dataset_validity",
    "privacy.max_examples_per_owner",
    "heldout.is_public",
    "init.disjoint_data",
)
DECLARED_OF = {
    "data.shards": _OF_TRAINING_DATA,
    "data.caption_field": _OF_TRAINING_DATA,
    "data.label_field": _OF_TRAINING_DATA,
    "heldout.shards": ("heldout.is_public",),
    "init.checkpoint": ("init.disjoint_data",),
}
"""Key that names data, or a part of them -> keys that declare something of them."""


class Resolved(NamedTuple):
    """A recipe with overrides, before it is checked.

    Attributes:
        tree: what holds.
        overrides: the overrides alone, as a tree.
        reset: keys of the recipe that do not count, since an override names other data.
    """

    recipe: Path
    tree: dict[str, Any]
    overrides: dict[str, Any]
    reset: list[str]

    def what_is_public(self, config: "RunConfig") -> list[str]:
        """Which data count as public and who declared it, in lines for the console.

        Args:
            config: what `tree` means.
        """
        data, heldout = config.data, config.heldout
        named: list[tuple[str, str, str, bool]] = [
            (
                f"training data {data.shards}",
                "data.provenance",
                data.provenance,
                data.provenance != "private",
            )
        ]
        if heldout is not None:
            what = f"held-out data {heldout.shards}"
            named.append(
                (what, "heldout.is_public", str(heldout.is_public).lower(), heldout.is_public)
            )
        lines = list[str]()
        for what, key, value, is_public in named:
            if leaf(self.overrides, key) is not None:
                who = "declared by the command line"
            else:
                who = (
                    "the default" if leaf(self.tree, key) is None else f"declared by {self.recipe}"
                )
            said, reason = (
                f"{'public' if is_public else 'private'}: {what}",
                f"({key} = {value}, {who})",
            )
            lines += [f"{said} {reason}"] if len(said) + len(reason) < 80 else [said, f"  {reason}"]
        if self.reset:
            lines += [
                f"ignored, because {self.recipe} says it of other data than these:",
                f"  {', '.join(self.reset)} (to declare it of these, repeat it on the command line)",
            ]
        return lines


def leaf(tree: Mapping[str, Any], key: str) -> Any:
    """The value of `section.name`, None where the tree has none."""
    section, _, name = key.partition(".")
    inner = tree.get(section)
    return inner.get(name) if isinstance(inner, Mapping) else None
