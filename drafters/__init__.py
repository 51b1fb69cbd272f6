"""Drafters for specmla, one a file; each knows specmla by its public names only."""

from drafters.draft_model import DraftModelDrafter
from drafters.ngram import NgramDrafter

__all__ = ["DraftModelDrafter", "NgramDrafter"]
