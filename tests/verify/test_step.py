"""`VerifyStep` on its own: order of calls, refusals that lose nothing, flagged logits."""

from __future__ import annotations

import pytest
import torch

from specmla import (
    ArgumentError,
    BlockManager,
    DraftProposal,
    LatentCache,
    MetadataBuilder,
    NumericsError,
    PoolFullError,
    SamplingParams,
    VerifyStep,
    get_backend,
)

W = 16


def make_step(num_pages: int = 8, page_size: int = 4, max_seq_len: int = 32, **kw) -> VerifyStep:
    backend = get_backend("reference")
    builder = MetadataBuilder(
        backend=backend,
        page_size=page_size,
        num_pages=num_pages,
        num_heads=2,
        kv_lora_rank=8,
        device="cpu",
        max_seq_len=max_seq_len,
    )
    cache = LatentCache(1, num_pages, page_size, 12, dtype=torch.float32, device="cpu")
    return VerifyStep(
        cache=cache,
        blocks=BlockManager(num_pages, page_size),
        builder=builder,
        vocab_size=W,
        max_seq_len=max_seq_len,
        **kw,
    )


def logits_for(plan, favourites: list[int]) -> torch.Tensor:
    logits = torch.zeros(plan.logit_rows.shape[0], W)
    logits[torch.arange(len(favourites)), torch.tensor(favourites)] = 5.0
    return logits


def propose(step, drafts: dict[str, list[int]]) -> DraftProposal:
    width = max(len(d) for d in drafts.values())
    rows = [d + [-1] * (width - len(d)) for d in drafts.values()]
    return DraftProposal(
        tuple(drafts), tuple(len(d) for d in drafts.values()), torch.tensor(rows).view(-1, width)
    )


def prefilled(step, *names: str, length: int = 3):
    """Add requests and take each through its prompt; all then have anchor 7."""
    for name in names:
        step.add(name, [1] * length, SamplingParams(max_tokens=20))
    plan = step.plan()
    step.commit(plan, step.verify(plan, logits_for(plan, [7] * len(names))))


def test_one_step_by_hand():
    step = make_step()
    prefilled(step, "a", "b")
    plan = step.plan(propose(step, {"b": [4, 5, 6], "a": [9]}))
    # Rows a: [7, 9]; b: [7, 4, 5, 6].
    assert plan.token_ids.tolist() == [7, 9, 7, 4, 5, 6]
    assert plan.metadata.positions.tolist() == [3, 4, 3, 4, 5, 6]
    assert plan.row_table.tolist() == [[0, 1, 1, 1], [2, 3, 4, 5]]
    assert plan.drafts.tolist() == [[9, -1, -1], [4, 5, 6]]
    # a: target says 9 then 2 (accept, bonus); b: 4 then 0 (accept one, correct).
    verdict = step.verify(plan, logits_for(plan, [9, 2, 4, 0, 1, 1]))
    a, b = step.commit(plan, verdict)
    assert (a.new_tokens, a.num_accepted, a.num_drafts) == ((9, 2), 1, 1)
    assert (b.new_tokens, b.num_accepted, b.num_drafts) == ((4, 0), 1, 3)
    assert list(step.tokens("b")) == [1, 1, 1, 7, 4, 0]
    assert step.blocks.length("b") == 5
    step.blocks.check_integrity()


def test_prompts_and_verifies_in_one_step_are_ordered_verifies_first():
    step = make_step()
    prefilled(step, "old")
    step.add("new", [2, 3, 4, 5, 6], SamplingParams())
    plan = step.plan(propose(step, {"old": [3]}), request_ids=["new", "old"])
    assert [r.request_id for r in plan.requests] == ["old", "new"]
    assert plan.token_ids.tolist() == [7, 3, 2, 3, 4, 5, 6]
    assert plan.logit_rows.tolist() == [0, 1, 6]
    results = step.commit(plan, step.verify(plan, logits_for(plan, [3, 8, 11])))
    assert [(r.request_id, r.new_tokens, r.is_prompt) for r in results] == [
        ("old", (3, 8), False),
        ("new", (11,), True),
    ]


def test_nan_logits_raise_and_change_nothing():
    step = make_step()
    prefilled(step, "a", "b")
    before = {n: (list(step.tokens(n)), step.blocks.length(n)) for n in step.active}
    free = step.blocks.num_free
    plan = step.plan(propose(step, {"a": [1, 2], "b": [3, 4]}))
    logits = logits_for(plan, [1] * 6)
    logits[4, 3] = float("nan")
    verdict = step.verify(plan, logits)
    with pytest.raises(NumericsError, match="'b'") as caught:
        step.commit(plan, verdict)
    assert caught.value.request_ids == ("b",)
    assert before == {n: (list(step.tokens(n)), step.blocks.length(n)) for n in step.active}
    assert step.blocks.num_free == free
    step.blocks.check_integrity()
    plan = step.plan()  # and the step can go on
    step.commit(plan, step.verify(plan, logits_for(plan, [1, 1])))


def test_full_pool_refuses_and_leaves_no_reservation():
    step = make_step(num_pages=4, page_size=4)
    prefilled(step, "a", "b")
    free = step.blocks.num_free
    with pytest.raises(PoolFullError):
        step.plan(propose(step, {"a": [1] * 5, "b": [1] * 6}))
    assert step.blocks.num_free == free
    step.blocks.check_integrity()
    plan = step.plan(propose(step, {"a": [1], "b": []}))
    step.cancel(plan)
    assert step.blocks.num_free == free


def test_refusals_name_what_was_wrong():
    step = make_step()
    with pytest.raises(ArgumentError, match=r"ids \[16\].*0 to 15"):
        step.add("a", [16], SamplingParams())
    with pytest.raises(ArgumentError, match="0 tokens"):
        step.add("a", [], SamplingParams())
    with pytest.raises(ArgumentError, match="32 tokens"):
        step.add("a", [1] * 32, SamplingParams())
    prefilled(step, "a")
    with pytest.raises(ArgumentError, match="in use"):
        step.add("a", [1], SamplingParams())
    with pytest.raises(ArgumentError, match="unknown"):
        step.plan(request_ids=["zzz"])
    probs = torch.full((1, 1, W + 3), 1 / (W + 3))
    with pytest.raises(ArgumentError, match=f"{W + 3}.*{W}"):
        step.plan(DraftProposal(("a",), (1,), torch.tensor([[2]]), probs))
    plan = step.plan()
    with pytest.raises(ArgumentError, match="neither committed nor cancelled"):
        step.plan()
    with pytest.raises(ArgumentError, match=r"\[R, W\]"):
        step.verify(plan, torch.zeros(1, W + 1))
    with pytest.raises(ArgumentError, match="part of the planned step"):
        step.remove("a")
    verdict = step.verify(plan, torch.zeros(1, W))
    step.cancel(plan)
    for act in (
        lambda: step.commit(plan, verdict),
        lambda: step.verify(plan, torch.zeros(1, W)),
        lambda: step.cancel(plan),
        lambda: step.cancel(None),
        lambda: step.commit(None, None),
        lambda: step.verify(None, torch.zeros(1, W)),
    ):
        with pytest.raises(ArgumentError, match=r"not the step planned last.*no step is open"):
            act()
    step.remove("a")
    assert step.active == ()
    with pytest.raises(ArgumentError, match="rule is 'wishful'"):
        make_step(rule="wishful")


def test_a_name_used_again_takes_its_new_parameters():
    step = make_step()
    step.add("a", [1, 2], SamplingParams(max_tokens=1))
    plan = step.plan()
    assert step.commit(plan, step.verify(plan, logits_for(plan, [3])))[0].finish_reason == "length"
    step.add("a", [1, 2], SamplingParams(temperature=1.0, seed=5))
    plan = step.plan()
    assert not plan.sampling.all_greedy
    step.cancel(plan)


def test_fork_shares_pages_until_one_is_written():
    step = make_step(num_pages=12)
    prefilled(step, "a", length=6)
    rows = torch.arange(8 * 12.0).view(8, 12)
    step.cache.store(0, rows[:6, :8], rows[:6, 8:], slots_of(step, "a", 6))
    free = step.blocks.num_free
    step.fork("a", "b", SamplingParams(max_tokens=9, seed=1))
    assert step.blocks.num_free == free
    plan = step.plan(propose(step, {"a": [2], "b": [3, 4]}))
    step.blocks.check_integrity()
    # The shared tail was copied before either request writes into it.
    for name in ("a", "b"):
        held = step.cache.gather(0, slots_of(step, name, 6))
        assert torch.equal(held, rows[:6])
    assert step.blocks.block_ids("a")[1] != step.blocks.block_ids("b")[1]
    step.commit(plan, step.verify(plan, logits_for(plan, [2, 5, 9, 1, 1])))
    assert list(step.tokens("a")) == [1] * 6 + [7, 2, 5]
    assert list(step.tokens("b")) == [1] * 6 + [7, 9]
    with pytest.raises(ArgumentError, match="in use"):
        step.fork("a", "b", SamplingParams())


def test_a_failed_page_copy_costs_rows_but_no_truth(monkeypatch):
    step = make_step(num_pages=12)
    prefilled(step, "a", length=6)
    step.fork("a", "b", SamplingParams(seed=1))

    def fail(pairs):
        raise OSError("out of luck")

    with monkeypatch.context() as patch:
        patch.setattr(step.cache, "copy_pages", fail)
        with pytest.raises(OSError, match="out of luck"):
            step.plan()
    step.blocks.check_integrity()
    assert sorted(step.blocks.length(n) for n in "ab") == [4, 6]
    plan = step.plan()  # the rows that were not copied are pending again
    assert sum(r.is_prompt for r in plan.requests) == 1


def slots_of(step, name: str, count: int) -> torch.Tensor:
    pages, size = step.blocks.block_ids(name), step.blocks.page_size
    return torch.tensor([pages[i // size] * size + i % size for i in range(count)])


def test_drafts_after_a_padded_one_are_not_counted():
    """A -1 inside a request's count ends its drafts there (BL-29)."""
    step = make_step()
    prefilled(step, "a")
    proposal = DraftProposal(("a",), (3,), torch.tensor([[5, -1, 7]]))
    plan = step.plan(proposal)
    (result,) = step.commit(plan, step.verify(plan, logits_for(plan, [5, 15, 15, 15])))
    assert result.new_tokens == (5, 15)
    assert (result.num_drafts, result.num_accepted) == (1, 1)
