"""`OverlappedStep` by hand: what is made on the device, late stops and flags, refusals."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from specmla import (
    ArgumentError,
    DraftProposal,
    DraftsAhead,
    NumericsError,
    OverlappedStep,
    PoolFullError,
    QueryLenSupport,
    SamplingParams,
)
from tests.verify.test_step import W, logits_for, make_step, propose
from tests.verify.test_step_processors import Brackets


def overlapped(*names: str, length: int = 3, num_pages: int = 16, **params):
    """Give requests whose prompt was computed and committed; all then have anchor 7."""
    step = make_step(num_pages=num_pages)
    overlap = OverlappedStep(step)
    for name in names:
        step.add(name, [1] * length, SamplingParams(**{"max_tokens": 20, **params}))
    take(overlap, None, [7] * len(names))
    overlap.commit()
    return step, overlap


def take(overlap, drafts, favourites):
    """Plan a step and put it under way; the target's choice of each row is given."""
    plan = overlap.plan(drafts)
    overlap.verify(plan, logits_for(plan, favourites))
    return plan


def test_a_step_planned_before_the_last_verdict_by_hand():
    step, overlap = overlapped("a", "b")
    take(overlap, propose(step, {"a": [4, 5], "b": [6, 6]}), [4, 9, 0, 6, 6, 8])
    # a accepts 4 and goes on with 9; b accepts both and goes on with 8.
    plan = overlap.plan(propose(step, {"a": [2], "b": [3, 2]}))
    assert [r.position for r in plan.requests] == [6, 6], "bounds"
    assert plan.positions.tolist() == [5, 6]
    assert plan.token_ids.tolist() == [9, 2, 8, 3, 2]
    assert plan.metadata.positions.tolist() == [5, 6, 6, 7, 8]
    assert plan.metadata.verify.row_extent.tolist() == [6, 7, 7, 8, 9]
    assert plan.metadata.verify.seq_lens.tolist() == [7, 9]
    pages = {n: step.blocks.block_ids(n) for n in "ab"}
    slots = [pages["a"][1] * 4 + 1, pages["a"][1] * 4 + 2]
    slots += [pages["b"][p // 4] * 4 + p % 4 for p in (6, 7, 8)]
    assert plan.metadata.slot_mapping.tolist() == slots
    assert step.tokens("a")[-1] == 7, "the host knows nothing of it yet"
    first = overlap.commit()
    assert [r.new_tokens for r in first] == [(4, 9), (6, 6, 8)]
    overlap.verify(plan, logits_for(plan, [2, 1, 3, 0, 0]))
    assert [r.new_tokens for r in overlap.commit()] == [(2, 1), (3, 0)]
    assert list(step.tokens("a")) == [1, 1, 1, 7, 4, 9, 2, 1]
    assert list(step.tokens("b")) == [1, 1, 1, 7, 6, 6, 8, 3, 0]
    step.blocks.check_integrity()


def test_drafts_ahead_skip_what_the_step_under_way_emits():
    step, overlap = overlapped("a", "b")
    take(overlap, propose(step, {"a": [4, 5], "b": [6, 6]}), [4, 9, 0, 6, 6, 8])
    wanted = overlap.draft_requests(2, ahead=True)
    assert [r.num_drafts for r in wanted] == [5, 5], "2, and 3 that may be emitted"
    guesses = DraftProposal(("b", "a"), (4, 4), torch.tensor([[6, 6, 8, 10], [4, 9, 2, 3]]))
    plan = overlap.plan(DraftsAhead(guesses, 2))
    assert plan.drafts.tolist() == [[2, 3], [10, -1]], "b's do not run on into a's"
    assert plan.token_ids.tolist() == [9, 2, 3, 8, 10, 0]


def test_a_prompt_under_way_has_a_known_length_and_an_unknown_token():
    step = make_step()
    overlap = OverlappedStep(step)
    step.add("a", [1, 2, 3], SamplingParams())
    take(overlap, None, [5])
    plan = overlap.plan()
    assert plan.token_ids.tolist() == [5]
    assert plan.positions.tolist() == [3]
    step.add("b", [2, 2], SamplingParams())
    overlap.verify(plan, logits_for(plan, [6]))
    assert overlap.commit()[0].is_prompt
    plan = overlap.plan()
    assert plan.token_ids.tolist() == [6, 2, 2], "the new prompt stands behind"
    overlap.verify(plan, logits_for(plan, [7, 8]))
    with pytest.raises(ArgumentError, match="two steps are under way"):
        overlap.anchors(["b", "a"])
    overlap.commit()
    anchors = overlap.anchors(["b", "a"])
    assert (anchors.tokens.tolist(), anchors.positions.tolist()) == ([8, 7], [2, 5])


def test_rows_past_a_limit_are_inert():
    """Whether the second step may verify two drafts or none, only the first one's outcome says."""
    step, overlap = overlapped("a", max_tokens=5)  # length 8, one token of it is there
    for favourites, drafts, live in (([4, 5, 9], 0, 1), ([4, 0, 0], 1, 2), ([0, 0, 0], 2, 3)):
        take(overlap, propose(step, {"a": [4, 5]}), favourites)
        plan = overlap.plan(propose(step, {"a": [2, 2]}))
        assert (plan.drafts >= 0).sum() == drafts
        assert plan.metadata.verify.row_extent.tolist()[live:] == [0] * (3 - live)
        assert plan.metadata.slot_mapping.tolist()[live:] == [-1] * (3 - live)
        assert plan.metadata.positions.max() <= 6
        assert plan.logit_rows.tolist()[live:] == [live - 1] * (3 - live)
        overlap.cancel(plan)
        overlap._flights.cancel_all()
        step.blocks.check_integrity()


def test_a_request_at_its_limit_is_not_run_again():
    step, overlap = overlapped("a", "b", max_tokens=2)
    take(overlap, None, [3, 3])
    assert overlap.ready == ()
    with pytest.raises(ArgumentError, match="end with the step under way"):
        overlap.plan(request_ids=["a"])
    with pytest.raises(ArgumentError, match="empty"):
        overlap.plan()
    assert [r.finish_reason for r in overlap.commit()] == ["length", "length"]
    assert step.blocks.num_free == step.blocks.num_pages


def test_a_stop_is_cut_one_step_late():
    step, overlap = overlapped("a", "b", stop_token_ids=(5,))
    take(overlap, propose(step, {"a": [4, 5, 6], "b": [1, 1, 1]}), [4, 5, 6, 7, 0, 0, 0, 0])
    take(overlap, propose(step, {"a": [8], "b": [2]}), [8, 8, 2, 2])
    a, b = overlap.commit()
    assert (a.new_tokens, a.finish_reason) == ((4, 5), "stop")
    assert step.active == ("b",)
    step.blocks.check_integrity()
    assert step.blocks.num_free == step.blocks.num_pages - step.blocks.owned("b")
    step.add("a", [3, 3], SamplingParams())  # the name is free, and means another request now
    (b,) = overlap.commit()
    assert (b.request_id, b.new_tokens) == ("b", (2, 2))
    assert list(step.tokens("a")) == [3, 3]
    plan = overlap.plan()
    assert [(r.request_id, r.is_prompt) for r in plan.requests] == [("b", False), ("a", True)]


def test_a_flag_that_arrives_late_costs_steps_but_no_truth():
    step, overlap = overlapped("a", "b")
    before = {n: (list(step.tokens(n)), step.blocks.length(n)) for n in step.active}
    free = step.blocks.num_free
    plan = overlap.plan(propose(step, {"a": [1, 2], "b": [3, 4]}))
    logits = logits_for(plan, [1, 2, 3, 3, 4, 5])
    logits[4] = float("nan")
    overlap.verify(plan, logits)
    plan = take(overlap, propose(step, {"a": [1], "b": [1]}), [1] * 4)
    assert plan.token_ids.min() >= 0
    assert plan.token_ids.max() < W
    with pytest.raises(NumericsError, match=r"\['b'\]") as caught:
        overlap.commit()
    assert caught.value.request_ids == ("b",)
    assert overlap.num_flying == 0
    assert before == {n: (list(step.tokens(n)), step.blocks.length(n)) for n in step.active}
    assert step.blocks.num_free == free
    overlap.remove("b")
    take(overlap, None, [1])
    assert overlap.commit()[0].new_tokens == (1,)
    step.blocks.check_integrity()


def test_garbage_of_a_flagged_row_stays_within_what_was_reserved():
    overlap = overlapped("a", "b")[1]
    take(overlap, DraftProposal(("a", "b"), (1, 1), torch.ones(2, 1).long()), [0] * 4)
    flight = overlap._flights.last
    garbage = flight.verdict.acceptance._replace(
        num_accepted=torch.tensor([-9, 99]), next_token=torch.tensor([-1, 2**40])
    )
    flight.verdict = dataclasses.replace(flight.verdict, acceptance=garbage)
    plan = overlap.plan()
    assert plan.token_ids.tolist() == [0, W - 1]
    assert plan.positions.tolist() == [4, 5]


def test_bounds_keep_to_the_context_limit():
    """31 rows are the most that a context of 32 tokens has; the bound alone would be 34."""
    step, overlap = overlapped("a", length=26, max_tokens=None)
    take(overlap, propose(step, {"a": [4, 4, 4]}), [4, 4, 4, 5])
    plan = overlap.plan(propose(step, {"a": [6, 6, 6]}))
    assert plan.metadata.positions.tolist() == [30, 0, 0, 0]
    overlap.verify(plan, logits_for(plan, [9] * 4))
    overlap.commit()
    assert [r.finish_reason for r in overlap.commit()] == ["length"]
    assert step.blocks.num_free == step.blocks.num_pages


def test_a_uniform_backend_is_refused():
    step = make_step()
    has = dataclasses.replace(
        step.builder.backend.capabilities, query_len_support=QueryLenSupport.UNIFORM
    )
    step.builder.backend = SimpleNamespace(capabilities=has)
    with pytest.raises(ArgumentError, match="is UNIFORM, accepted are SINGLE_ONLY and VARLEN"):
        OverlappedStep(step)


def test_a_flag_of_a_request_that_has_gone_disturbs_nobody():
    overlap = overlapped("a", "b")[1]
    plan = overlap.plan()
    logits = logits_for(plan, [1, 2])
    logits[1] = float("nan")
    overlap.verify(plan, logits)
    overlap.remove("b")
    assert [r.request_id for r in overlap.commit()] == ["a"]


def test_a_full_pool_leaves_the_step_under_way_alone():
    step, overlap = overlapped("a", num_pages=4)
    take(overlap, propose(step, {"a": [4] * 8}), [4] * 8 + [5])
    owned = step.blocks.owned("a")
    with pytest.raises(PoolFullError):
        overlap.plan(propose(step, {"a": [5] * 6}))
    assert step.blocks.owned("a") == owned
    plan = overlap.plan(propose(step, {"a": [5]}))
    overlap.cancel(plan)
    assert step.blocks.owned("a") == owned, "what the step under way writes stays"
    assert overlap.commit()[0].new_tokens == (4,) * 8 + (5,)
    step.blocks.check_integrity()


def test_pages_stay_in_bounds_of_two_steps():
    step, overlap = overlapped("a", length=8)
    take(overlap, propose(step, {"a": [4, 4, 4]}), [0] * 4)
    plan = overlap.plan(propose(step, {"a": [1, 1, 1]}))
    assert step.blocks.owned("a") == 4, "8 rows and 2 (K + 1) more"
    overlap.commit()
    assert step.blocks.owned("a") == 4, "9 rows and K + 1 more"
    overlap.verify(plan, logits_for(plan, [2] * 4))
    overlap.commit()
    assert step.blocks.owned("a") == 3


def test_refusals():
    step, overlap = overlapped("a")
    tree = DraftProposal(("a",), (2,), torch.tensor([[1, 2]]), parents=((-1, -1),))
    probs = torch.full((1, 2, W), 1 / W)
    drawn = DraftProposal(("a",), (2,), torch.tensor([[1, 2]]), probs)
    for drafts, reason in (
        (tree, "trees, accepted are chains"),
        (DraftsAhead(drawn, 2), "probs, accepted is None"),
        (DraftsAhead(propose(step, {"a": [1]}), -1), "num_drafts is -1"),
    ):
        with pytest.raises(ArgumentError, match=reason):
            overlap.plan(drafts)
    with pytest.raises(ArgumentError, match="no step is under way"):
        overlap.commit()
    step.add("c", [1, 2], SamplingParams(repetition_penalty=1.5), Brackets())
    with pytest.raises(ArgumentError, match=r"\['c'\] have a constraint, which needs every token"):
        overlap.plan()
    step.remove("c")
    plan = overlap.plan()
    with pytest.raises(ArgumentError, match="neither verified nor cancelled"):
        overlap.plan()
    with pytest.raises(ArgumentError, match="neither verified"):
        overlap.anchors(["a"])
    overlap.verify(plan, logits_for(plan, [1]))
    with pytest.raises(ArgumentError, match="verified once"):
        overlap.verify(plan, logits_for(plan, [1]))
    with pytest.raises(ArgumentError, match="nothing to cancel"):
        overlap.cancel(plan)
    take(overlap, None, [2])
    with pytest.raises(ArgumentError, match="two steps are under way"):
        overlap.plan()
    with pytest.raises(ArgumentError, match="open step"):
        OverlappedStep(step)


def test_the_step_itself_refuses_what_is_under_way():
    step, overlap = overlapped("a", "b")
    take(overlap, None, [1, 1])
    with pytest.raises(ArgumentError, match="neither committed nor cancelled"):
        step.plan()
    for act in (lambda: step.remove("a"), lambda: step.fork("a", "c", SamplingParams())):
        with pytest.raises(ArgumentError, match="part of the planned step"):
            act()
    step.add("waiting", [1], SamplingParams())
    with pytest.raises(ArgumentError, match=r"\['b'\] are part of steps of an OverlappedStep"):
        step.drop(["waiting", "b"])
    assert step.active == ("a", "b", "waiting"), "nothing was dropped"
    step.drop(["waiting", "waiting"])
    assert [r.new_tokens for r in overlap.commit()] == [(1,), (1,)]
    take(overlap, None, [1, 1])
    overlap.drop(["a", "b", "b", "unknown"])
    assert overlap.num_flying == 0
    assert step.blocks.num_free == step.blocks.num_pages
    step.add("a", [1], SamplingParams())
    step.cancel(step.plan())


def test_a_step_that_was_planned_elsewhere_stays_untouched():
    """By the `VerifyStep` itself or by another `OverlappedStep` over it."""
    step, overlap = overlapped("a", "b", "c")
    other = OverlappedStep(step)
    for plan_of, finish in (
        (step, lambda plan, verdict: step.commit(plan, verdict)),
        (other, lambda plan, verdict: other.commit()),
    ):
        plan = plan_of.plan(request_ids=["a", "b"])
        assert overlap.ready == ()
        for act in (overlap.plan, lambda: overlap.anchors(["a"])):
            with pytest.raises(ArgumentError, match="planned elsewhere"):
                act()
        with pytest.raises(ArgumentError, match="part of the planned step"):
            overlap.remove("a")
        if "c" in step.active:
            overlap.remove("c")
        verdict = plan_of.verify(plan, logits_for(plan, [3, 4]))
        assert [r.new_tokens for r in finish(plan, verdict)] == [(3,), (4,)]
        step.blocks.check_integrity()
    take(overlap, None, [5, 5])
    assert [r.new_tokens for r in overlap.commit()] == [(5,), (5,)]
    step.plan(request_ids=["a"])
    overlap.drop(["a", "b"])
    assert step.blocks.num_free == step.blocks.num_pages
