"""Resets declarations of a recipe that belong to other data (contract 12).

A declaration counts only for the data that the recipe names itself.
"""

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
"""Key that names data, or a part of them -> keys that declare facts about them."""


class ResolvedRecipe(NamedTuple):
    """A recipe with overrides, before it is checked.

    Attributes:
        tree: the recipe's keys with the overrides.
        overrides: the overrides alone, as a tree.
        reset: keys of the recipe that do not count, since an override names other data.
    """

    recipe: Path
    tree: dict[str, Any]
    overrides: dict[str, Any]
    reset: list[str]

    def publicity_lines(self, config: "RunConfig") -> list[str]:
        """Returns lines for the console: which data count as public, and who declared it.

        Args:
            config: the checked configuration of `tree`.
        """
        provenance = config.data.provenance
        training_data = f"training data {config.data.shards}"
        declarations: list[tuple[str, str, str, bool]] = [
            (training_data, "data.provenance", provenance, provenance != "private")
        ]
        if config.heldout is not None:
            is_public = config.heldout.is_public
            heldout_data = f"held-out data {config.heldout.shards}"
            declarations.append(
                (heldout_data, "heldout.is_public", str(is_public).lower(), is_public)
            )
        lines = list[str]()
        for name, key, setting, is_public in declarations:
            source = f"declared by {self.recipe}"
            if leaf(self.overrides, key) is not None:
                source = "declared by the command line"
            elif leaf(self.tree, key) is None:
                source = "the default"
            verdict = f"{'public' if is_public else 'private'}: {name}"
            reason = f"({key} = {setting}, {source})"
            if len(verdict) + len(reason) < 80:
                lines.append(f"{verdict} {reason}")
            else:
                lines += [verdict, f"  {reason}"]
        if self.reset:
            keys = ", ".join(self.reset)
            lines += [
                f"ignored, because {self.recipe} says it of other data than these:",
                f"  {keys} (to declare it of these, repeat it on the command line)",
            ]
        return lines


def leaf(tree: Mapping[str, Any], key: str) -> Any:
    """Returns the value of `section.name`, or None where the tree has none."""
    section, _, name = key.partition(".")
    inner = tree.get(section)
    return inner.get(name) if isinstance(inner, Mapping) else None
