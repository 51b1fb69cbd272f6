"""Drafters for specmla, one a file; each knows specmla by its public names only."""

from drafters.block_model import BlockDraftModel, load_block_model, save_block_model
from drafters.ddtree import DDTreeDrafter
from drafters.dflash import DFlashDrafter
from drafters.draft_model import DraftModelDrafter
from drafters.dspark import DSparkDrafter
from drafters.eagle3 import Eagle3Drafter
from drafters.eagle3_model import Eagle3Model, load_eagle3, save_eagle3
from drafters.gqa_block import GQADFlashDrafter, GQADSparkDrafter
from drafters.gqa_eagle3 import GQAEagle3Drafter
from drafters.gqa_eagle3_model import GQAEagle3Model
from drafters.gqa_model import GQABlockModel
from drafters.model_tree import DraftModelTreeDrafter
from drafters.mtp import MTPDrafter
from drafters.ngram import NgramDrafter
from drafters.suffix import SuffixDrafter

__all__ = [
    "BlockDraftModel",
    "DDTreeDrafter",
    "DFlashDrafter",
    "DSparkDrafter",
    "DraftModelDrafter",
    "DraftModelTreeDrafter",
    "Eagle3Drafter",
    "Eagle3Model",
    "GQABlockModel",
    "GQADFlashDrafter",
    "GQADSparkDrafter",
    "GQAEagle3Drafter",
    "GQAEagle3Model",
    "MTPDrafter",
    "NgramDrafter",
    "SuffixDrafter",
    "load_block_model",
    "load_eagle3",
    "save_block_model",
    "save_eagle3",
]
