"""The draft model's own cache is right after every step, whatever was accepted."""

from __future__ import annotations

import copy

import pytest
import torch

from drafters import DraftModelDrafter
from specmla import DeepseekConfig, DeepseekForCausalLM, MLAConfig, SamplingParams
from tests.e2e.conftest import VOCAB, ScriptedDrafter, make_step, prompts, run


def tiny(
    layers: int, hidden: int, seed: int, limit: int = 160, vocab: int = VOCAB
) -> DeepseekForCausalLM:
    torch.manual_seed(seed)
    attention = MLAConfig(
        hidden_size=hidden,
        num_heads=2,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
    )
    model = DeepseekForCausalLM(DeepseekConfig(attention, layers, vocab, 32, limit))
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.25)
    return model.eval()


@pytest.fixture(scope="module")
def target() -> DeepseekForCausalLM:
    return tiny(2, 32, 1)


class Checked(DraftModelDrafter):
    """Compares every draft with one full pass of the draft model over the committed tokens."""

    checked = 0

    def propose(self, requests):
        before = {r.request_id: list(r.tokens) for r in requests}
        proposal = super().propose(requests)
        assert sorted(proposal.request_ids) == sorted(before)
        for name, row, count in zip(
            proposal.request_ids, proposal.tokens.tolist(), proposal.counts, strict=True
        ):
            tokens = before[name]
            for token in row[:count]:
                logits = self.model.forward_full(torch.tensor([tokens]))[0, -1]
                assert token == int(logits.argmax())
                tokens.append(token)
                self.checked += 1
        return proposal


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("same_model", [False, True])
def test_greedy_drafts_equal_a_full_pass_of_the_draft_model(target, page_size, same_model):
    draft = target if same_model else tiny(1, 16, 2)
    drafter = Checked(draft, num_pages=600, page_size=page_size, backend="reference")
    for layer in range(draft.config.num_layers):
        drafter.cache.layer(layer).fill_(float("nan"))
    plain, _ = run(target, prompts(6))
    tokens, history = run(target, prompts(6), drafter, 4)
    assert tokens == plain
    assert drafter.checked > 100
    assert drafter.blocks.num_free == 600
    verified = [r for step in history for r in step if r.num_drafts]
    if same_model:  # the draft is the target: everything is accepted, at every length of K
        assert all(r.num_accepted == r.num_drafts for r in verified)
    else:
        assert any(r.num_accepted < r.num_drafts for r in verified)


def test_each_request_has_its_own_k(target):
    drafter = Checked(target, num_pages=600, page_size=4, backend="reference")
    plain, _ = run(target, prompts(6))
    tokens, _ = run(target, prompts(6), drafter, {"r0": 1, "r1": 3, "r3": 5, "r5": 2})
    assert tokens == plain
    assert drafter.checked


def test_sampled_drafts_report_the_distribution_they_were_drawn_from(target):
    draft = tiny(1, 16, 2)
    drafter = DraftModelDrafter(draft, num_pages=100, page_size=4, backend="reference")
    step = make_step(target)
    filters = {"temperature": 0.7, "top_k": 5, "top_p": 0.9}
    for name, (tokens, sampling) in prompts(4, **filters).items():
        step.add(name, tokens, sampling)
    step.add("greedy", [3, 1, 4], SamplingParams())
    with torch.no_grad():
        plan = step.plan()
        hidden = target(plan.token_ids, plan.metadata, step.cache, step.builder.backend)
        step.commit(plan, step.verify(plan, target.logits(hidden[plan.logit_rows])))
        proposal = drafter.propose(step.draft_requests(3))
    assert proposal.probs.shape == (5, 3, VOCAB)
    torch.testing.assert_close(proposal.probs.sum(-1), torch.ones(5, 3))
    kept = (proposal.probs > 0).sum(-1)
    row = proposal.request_ids.index("greedy")
    assert (kept[row] == 1).all()
    assert ((kept >= 1) & (kept <= 5)).all()
    assert (proposal.probs.gather(2, proposal.tokens[..., None]) > 0).all()


def test_seeded_output_is_the_same_alone_and_in_a_batch(target):
    def drafter():
        return DraftModelDrafter(tiny(1, 16, 2), num_pages=600, page_size=4, backend="reference")

    batch = prompts(6, temperature=1.0)
    together, _ = run(target, batch, drafter(), 3)
    for name in ("r1", "r4"):
        alone, _ = run(target, {name: batch[name]}, drafter(), 3)
        assert alone[name] == together[name]


def test_a_step_without_drafts_in_between(target):
    """Requests that skip drafting for a while catch up with several pending tokens."""
    drafter = Checked(target, num_pages=600, page_size=4, backend="reference")
    turn = iter(range(10_000))

    class Sometimes(ScriptedDrafter):
        def propose(self, requests):
            inner = [r for r in requests if next(turn) % 3 == 0]
            return drafter.propose(inner)

        def observe(self, results, hidden=None):
            drafter.observe(results)

        def reset(self, request_id):
            drafter.reset(request_id)

    plain, _ = run(target, prompts(6))
    tokens, _ = run(target, prompts(6), Sometimes(None), 4)
    assert tokens == plain
    assert drafter.checked


def test_a_draft_model_with_a_shorter_context_stops_drafting_in_time(target):
    draft = tiny(1, 16, 2, limit=24)
    drafter = Checked(draft, num_pages=600, page_size=4, backend="reference")
    plain, _ = run(target, prompts(6))
    tokens, history = run(target, prompts(6), drafter, 4)
    assert tokens == plain
    assert drafter.checked
    late = [r for r in history[-1] if not r.is_prompt]
    assert all(r.num_drafts == 0 for r in late)


def test_a_draft_model_of_a_smaller_vocabulary(target):
    """Ids that the draft model lacks are emitted by the target and drafted on from (BL-51)."""
    draft = tiny(1, 16, 2, vocab=VOCAB - 20)
    plain, _ = run(target, prompts(6))
    assert any(t >= VOCAB - 20 for tokens in plain.values() for t in tokens)
    for temperature in (0.0, 1.0):
        drafter = DraftModelDrafter(draft, num_pages=600, page_size=4, backend="reference")
        step = make_step(target, allow_vocab_mismatch=True)
        tokens, history = run(target, prompts(6, temperature=temperature), drafter, 3, step)
        assert any(r.num_drafts for results in history for r in results)
        assert temperature or tokens == plain


def test_a_float64_draft_model_samples(target):
    drafter = DraftModelDrafter(
        copy.deepcopy(target).double(), num_pages=600, page_size=4, backend="reference"
    )
    batch = prompts(3, temperature=1.0)
    _, history = run(drafter.model, batch, drafter, 3)
    verified = [r for step in history for r in step if r.num_drafts]
    # The draft is the target: with unrounded probabilities nothing is refused.
    assert verified
    assert all(r.num_accepted == r.num_drafts for r in verified)
