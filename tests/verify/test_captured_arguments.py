"""What is no bucket and no parameter is refused by name, before anything is captured."""

from __future__ import annotations

import pytest
import torch

from drafters import DraftModelDrafter, NgramDrafter
from specmla import ArgumentError, SamplingParams, build_step, generate
from specmla.bucket import Bucket
from specmla.verify.captured import CapturedStep
from specmla.verify.captured_overlap import CapturedOverlap
from specmla.verify.draft_graphs import DraftGraphs
from specmla.verify.overlap import OverlappedStep
from specmla.verify.overlap_plan import DraftsAhead
from tests.drafters.networks import VOCAB, tiny_target
from tests.e2e.conftest import make_step
from tests.e2e.conftest import model as model

PROMPTS = {0: ([1, 2, 3], SamplingParams(max_tokens=6)), 1: ([4], SamplingParams(max_tokens=3))}
WRONG = ["yes", 1, 2.5, None, [3], [(2, 4)], Bucket(1, 1), {}]


def nothing(*_: object) -> torch.Tensor:
    raise AssertionError("nothing is run")


@pytest.mark.parametrize("given", WRONG)
def test_what_is_no_bucket(model, given):
    step = make_step(model)
    wrong = [None]
    for call in (
        lambda: CapturedStep(step, nothing, given, sampling=wrong, eager=True),
        lambda: CapturedOverlap(OverlappedStep(step), nothing, given, sampling=wrong, eager=True),
        lambda: DraftGraphs(torch.device("cpu"), given, wrong, nothing, nothing),
    ):
        with pytest.raises(ArgumentError) as caught:
            call()
        assert f"buckets is {given!r}, accepted is a sequence of Bucket" in str(caught.value)
        assert "sampling is [None], accepted is a sequence of SamplingParams" in str(caught.value)


def test_draft_probs(model):
    with pytest.raises(ArgumentError, match="draft_probs is 'x', accepted are True, False"):
        CapturedStep(make_step(model), nothing, [Bucket(1, 2)], draft_probs="x")


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("given", WRONG)
def test_graphs_of_generate(given, overlap):
    model = tiny_target()
    step = build_step(model, num_pages=8, page_size=16)
    with pytest.raises(ArgumentError, match=r"graphs is .*, accepted is a sequence of Bucket"):
        next(generate(model, step, PROMPTS, graphs=given, overlap=overlap))
    with pytest.raises(ArgumentError, match=r"sampling is .None., accepted"):
        next(generate(model, step, {0: ([1], None)}, graphs=True, overlap=overlap))
    assert not step.active
    assert step.blocks.num_free == 8


@pytest.mark.parametrize("overlap", [False, True])
def test_more_drafts_than_a_context_holds(overlap):
    """K beyond the context captures no more rows than it has, and changes no token."""
    model = tiny_target()

    def tokens(num_drafts: int, **options: bool) -> dict[int, list[int]]:
        step = build_step(model, num_pages=8, page_size=16)
        found: dict[int, list[int]] = {0: [], 1: []}
        drafter = NgramDrafter(VOCAB)
        for results in generate(model, step, PROMPTS, drafter, num_drafts, **options):
            for r in results:
                found[r.request_id] += r.new_tokens
        return found

    assert tokens(2**40, graphs=True, overlap=overlap) == tokens(2)


def test_rows_that_int32_can_not_count():
    assert Bucket(2**26, 31).num_rows < 2**31
    with pytest.raises(ArgumentError, match=r"2147483647 \* 5, accepted is below 2\*\*31"):
        Bucket(2**31 - 1, 5)


def test_a_drafter_that_was_captured_is_captured_again(model):
    """What is asked for a second time is checked as it was the first time."""
    target = tiny_target()
    drafter = DraftModelDrafter(target, num_pages=4, backend="reference")
    for _ in range(2):
        with pytest.raises(ArgumentError, match=r"buckets is \[3\], accepted"):
            drafter.capture([3], [SamplingParams()])
        drafter.capture([Bucket(1, 2)], [SamplingParams()])


class Silent(NgramDrafter):
    """Has nothing to say now and then, and then gives None."""

    turns = 0

    def propose(self, requests):
        self.turns += 1
        return None if self.turns % 2 else super().propose(requests)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_drafter_that_gives_none(overlap):
    model = tiny_target()

    def tokens(drafter, **options: bool) -> list[tuple[int, ...]]:
        step = build_step(model, num_pages=8, page_size=16)
        prompts = {0: ([1, 2, 1, 2, 1], SamplingParams(max_tokens=20))}
        found = [
            r.new_tokens for rs in generate(model, step, prompts, drafter, **options) for r in rs
        ]
        assert step.blocks.num_free == 8
        return [token for new in found for token in new]

    assert tokens(Silent(VOCAB), graphs=True, overlap=overlap) == tokens(None)
    step = OverlappedStep(build_step(model, num_pages=8, page_size=16))
    step.step.add(0, [1, 2], SamplingParams(max_tokens=4))
    with pytest.raises(ArgumentError, match="proposal is None, accepted is a DraftProposal"):
        step.plan(DraftsAhead(None, 2))
