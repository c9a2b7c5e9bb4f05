"""Builds the privacy card of a run folder, with the initial weights that its manifests state."""

from pathlib import Path

from privacy.card import run_card
from privacy.card.model import PrivacyCard
from trainer.weights.provenance import initialisation_statement


def build_card(run_dir: Path) -> PrivacyCard:
    """Returns the card of a run folder; see `privacy.card.run_card.build_card`."""
    return run_card.build_card(run_dir, initialisation_statement)
