"""Every drafter that has rows of its own, by name, and where these rows are."""

from __future__ import annotations

import torch

from drafters import (
    DDTreeDrafter,
    DFlashDrafter,
    DraftModelDrafter,
    DraftModelTreeDrafter,
    DSparkDrafter,
    Eagle3Drafter,
    GQADFlashDrafter,
    GQADSparkDrafter,
    GQAEagle3Drafter,
    MTPDrafter,
)
from specmla import VerifyStep
from tests.drafters.eagle3_network import tiny_eagle3
from tests.drafters.gqa_eagle3_network import tiny_gqa_eagle3
from tests.drafters.networks import tiny_block, tiny_mtp, tiny_target
from tests.drafters.test_gqa import tiny_gqa

BLOCKS = {"dflash": DFlashDrafter, "dspark": DSparkDrafter}
GQA_BLOCKS = {"gqa_dflash": GQADFlashDrafter, "gqa_dspark": GQADSparkDrafter}
KINDS = (
    *("draft_model", "model_tree", "mtp", "eagle3", "gqa_eagle3"),
    *(*BLOCKS, *GQA_BLOCKS, "ddtree"),
)


def maker(target, kind: str, pages: int):
    """What builds a drafter beside a step; its pool is small enough to run full."""
    if kind == "draft_model":
        model = tiny_target(1).double()
        return lambda step: DraftModelDrafter(
            model, num_pages=pages, page_size=3, backend="reference"
        )
    if kind == "model_tree":
        model = tiny_target(1).double()
        return lambda step: DraftModelTreeDrafter(
            model, num_pages=pages, page_size=3, backend="reference", rates=(0.5, 0.4, 0.3)
        )
    if kind == "mtp":
        module = tiny_mtp(target).double()
        return lambda step: MTPDrafter(target, module, step)
    if kind == "ddtree":
        inner = maker(target, "dflash", pages)
        return lambda step: DDTreeDrafter(inner(step))
    own = {"num_pages": pages, "page_size": 3}
    if kind == "gqa_eagle3":
        head = tiny_gqa_eagle3(target, fc_norm=True, norm_output=True).double()
        return lambda step: GQAEagle3Drafter(target, head, **own)
    if kind in GQA_BLOCKS:
        draft = tiny_gqa(target, kind.removeprefix("gqa_")).double()
        return lambda step: GQA_BLOCKS[kind](target, draft, **own)
    if kind == "eagle3":
        head = tiny_eagle3(target).double()
        return lambda step: Eagle3Drafter(target, head, **own, backend="reference")
    draft = tiny_block(target, kind).double()
    return lambda step: BLOCKS[kind](target, draft, **own, backend="reference")


def pool_of(drafter, step: VerifyStep):
    """A drafter's rows, its pages, and the layers that are its own."""
    drafter = getattr(drafter, "blocks", drafter) if isinstance(drafter, DDTreeDrafter) else drafter
    if isinstance(drafter, MTPDrafter):
        last = step.cache.num_layers - 1
        return step.cache, step.blocks, range(last, last + 1)
    if isinstance(drafter, DraftModelDrafter):
        return drafter.cache, drafter.blocks, range(drafter.cache.num_layers)
    return drafter.cache.rows, drafter.cache.blocks, range(drafter.cache.rows.num_layers)


def rows_of(drafter, step: VerifyStep, name, count: int, first: int) -> torch.Tensor:
    """The first `count` rows [L, count, A] that a drafter holds of a request's run."""
    cache, blocks, layers = pool_of(drafter, step)
    start = first if isinstance(drafter, MTPDrafter) else 0  # the others count from their first row
    pages, size = blocks.block_ids(name), blocks.page_size
    slots = [pages[i // size] * size + i % size for i in range(start, start + count)]
    return torch.stack([cache.gather(i, torch.tensor(slots, dtype=torch.int64)) for i in layers])
