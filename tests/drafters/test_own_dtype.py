"""Drafters in a dtype, and of a page size, that are not the target's: drafts as honest as ever."""

from __future__ import annotations

import pytest
import torch

from drafters import (
    DFlashDrafter,
    DraftModelDrafter,
    DSparkDrafter,
    Eagle3Drafter,
    GQADSparkDrafter,
    GQAEagle3Drafter,
)
from specmla.testing import check_drafter
from tests.drafters.eagle3_network import tiny_eagle3
from tests.drafters.gqa_eagle3_network import tiny_gqa_eagle3
from tests.drafters.networks import tiny_block, tiny_target
from tests.drafters.test_check_drafter import Forgetful
from tests.drafters.test_gqa import tiny_gqa
from tests.e2e.conftest import make_step, prompts, run


def maker(target, kind: str, dtype: torch.dtype):
    """Build the drafter in `dtype`, on pages of 5 tokens; the target's hold 4."""
    if kind == "draft_model":
        model = tiny_target(1).to(dtype)
        return lambda step: DraftModelDrafter(model, num_pages=900, page_size=5)
    made, network = {
        "dflash": (DFlashDrafter, lambda: tiny_block(target, "dflash")),
        "dspark": (DSparkDrafter, lambda: tiny_block(target, "dspark")),
        "gqa_dspark": (GQADSparkDrafter, lambda: tiny_gqa(target, "dspark", draft_vocab=40)),
        "eagle3": (Eagle3Drafter, lambda: tiny_eagle3(target)),
        "gqa_eagle3": (GQAEagle3Drafter, lambda: tiny_gqa_eagle3(target)),
    }[kind]
    draft = network().to(dtype)
    return lambda step: made(target, draft, num_pages=900, page_size=5)


KINDS = ["draft_model", "dflash", "dspark", "gqa_dspark", "eagle3", "gqa_eagle3"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_bfloat16_drafter_serves_a_float32_target(kind: str) -> None:
    target = tiny_target(layers=3)
    make = maker(target, kind, torch.bfloat16)
    plain, _ = run(target, prompts(4))
    step = make_step(target, 4, num_pages=400)
    drafter = make(step)
    tokens, _ = run(target, prompts(4), drafter, 3, step)
    assert tokens == plain
    rows = drafter.cache.layer(0) if kind == "draft_model" else drafter.cache.rows.layer(0)
    assert rows.dtype is torch.bfloat16
    assert rows.shape[1] == 5
    check_drafter(make, target, num_drafts=3, num_samples=150, atol=0.03).raise_if_failed()


@pytest.mark.parametrize("kind", ["draft_model", "gqa_dspark", "eagle3"])
def test_a_float32_drafter_serves_a_bfloat16_target(kind: str) -> None:
    target = tiny_target(layers=3).bfloat16()
    make = maker(target, kind, torch.float32)
    check_drafter(make, target, num_drafts=3, num_samples=150, atol=0.03).raise_if_failed()


def test_wrong_rows_are_noticed_through_the_rounding() -> None:
    target = tiny_target(layers=3)
    make = maker(target, "dflash", torch.bfloat16)
    found = check_drafter(
        lambda step: Forgetful(make(step)), target, num_drafts=3, num_samples=20, atol=0.03
    )
    (text,) = found.failures
    assert text.startswith("cache: ")
