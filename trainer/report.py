"""The privacy card of a run folder of the trainer, whose manifests say what the weights started from."""

from pathlib import Path

from privacy.card import folder
from privacy.card.model import PrivacyCard
from trainer.weights.provenance import initialisation_statement


def build_card(run_dir: Path) -> PrivacyCard:
    """See `privacy.card.folder.build_card`."""
    return folder.build_card(run_dir, initialisation_statement)
