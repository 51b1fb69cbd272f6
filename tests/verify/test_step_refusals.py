"""`VerifyStep` refuses what does not belong to it and keeps its state."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specmla import ArgumentError, LatentCache, SamplingParams, VerifyStep, cache_format
from tests.verify.test_step import W, logits_for, make_step, prefilled, propose


@pytest.mark.parametrize("drafts", [[3], [3, 4, 5]], ids=["fewer-rows", "more-rows"])
def test_verdict_of_another_plan_is_refused(drafts):
    step = make_step()
    prefilled(step, "a")
    first = step.plan(propose(step, {"a": [1, 2]}))
    verdict = step.verify(first, logits_for(first, [1, 2, 3]))
    step.cancel(first)
    plan = step.plan(propose(step, {"a": drafts}))
    before = list(step.tokens("a"))
    with pytest.raises(ArgumentError, match="verdict is that of another plan"):
        step.commit(plan, verdict)
    assert list(step.tokens("a")) == before
    step.blocks.check_integrity()
    logits = logits_for(plan, [9] * (len(drafts) + 1))
    assert step.commit(plan, step.verify(plan, logits))[0].new_tokens == (9,)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_of_other_dtypes_are_refused(dtype, temperature):
    step = make_step()
    step.add("a", [1, 2], SamplingParams(temperature))
    plan = step.plan()
    with pytest.raises(ArgumentError, match=r"logits has dtype .*, accepted .*\['torch.bfloat16"):
        step.verify(plan, torch.zeros(1, W).to(dtype))
    with pytest.raises(ArgumentError, match="logits is on meta, accepted is cpu"):
        step.verify(plan, torch.zeros(1, W, device="meta"))


def test_names_must_be_hashable():
    step = make_step()
    prefilled(step, "a")
    with pytest.raises(ArgumentError, match=r"request_id is \[\['b'\]\], accepted are hashable"):
        step.add(["b"], [1], SamplingParams())
    with pytest.raises(ArgumentError, match=r"request_ids is .* accepted are hashable names"):
        step.plan(request_ids=[["a"]])
    assert step.active == ("a",)


def test_a_name_unequal_to_itself_is_part_of_its_step():
    step, name = make_step(), float("nan")
    step.add(name, [1, 2], SamplingParams())
    plan = step.plan()
    with pytest.raises(ArgumentError, match="part of the planned step"):
        step.remove(name)
    assert len(step.commit(plan, step.verify(plan, logits_for(plan, [7])))) == 1


@pytest.mark.parametrize("wanted", [2.0, {"a": 2.5}, -1, {"a": -1}, None])
def test_draft_counts_are_integers(wanted):
    step = make_step()
    prefilled(step, "a")
    with pytest.raises(ArgumentError, match="for 'a', accepted are integers >= 0"):
        step.draft_requests(wanted)
    assert step.draft_requests(np.int64(2))[0].num_drafts == 2


@pytest.mark.parametrize("wanted", [2.0, {"a": -1}])
def test_draft_counts_are_integers_before_prompts_are_computed_too(wanted):
    step = make_step()
    step.add("a", [1, 2], SamplingParams())
    with pytest.raises(ArgumentError, match="for 'a', accepted are integers >= 0"):
        step.draft_requests(wanted)
    assert step.draft_requests(2) == []


def test_parts_that_do_not_fit():
    step, small = make_step(), make_step(num_pages=2)
    parts = {"cache": step.cache, "blocks": step.blocks, "builder": step.builder}
    packed = cache_format("fp8", 8, 4, dtype=torch.float32)
    quantised = LatentCache(1, 8, 4, 12, dtype=torch.float32, device="cpu", format=packed)
    for changed, message in (
        ({"cache": quantised}, "cache holds Fp8Format.* reads plain rows; must agree"),
        ({"builder": small.builder}, "blocks has 8 pages, the builder takes 2"),
        ({"cache": small.cache}, "blocks has 8 pages, the cache only 2"),
        ({"builder": make_step(page_size=2).builder}, r"page_size .* \[2, 4\], must agree"),
        ({"vocab_size": 0}, "vocab_size is 0, accepted are values >= 1"),
        ({"max_seq_len": 1}, "max_seq_len is 1, accepted are 2 to 32"),
        ({"max_seq_len": 33}, "max_seq_len is 33, accepted are 2 to 32"),
    ):
        with pytest.raises(ArgumentError, match=message):
            VerifyStep(**{"vocab_size": W, "max_seq_len": 32, **parts, **changed})
