"""The step on a GPU: no host sync from plan to verify, no growth, greedy equal to plain."""

from __future__ import annotations

import pytest
import torch

from drafters import DraftModelDrafter, NgramDrafter
from specmla import (
    DeepseekConfig,
    DeepseekForCausalLM,
    MLAConfig,
    SamplingParams,
    build_step,
)
from specmla.cli.difference import first_difference
from specmla.cli.run import run_loop

pytestmark = pytest.mark.gpu
VOCAB = 512


def tiny(
    layers: int, dtype: torch.dtype, seed: int = 0, rank: int = 128, rope: int = 32
) -> DeepseekForCausalLM:
    torch.manual_seed(seed)
    attention = MLAConfig(
        hidden_size=256,
        num_heads=12,
        kv_lora_rank=rank,
        qk_nope_head_dim=32,
        qk_rope_head_dim=rope,
        v_head_dim=48,
    )
    model = DeepseekForCausalLM(DeepseekConfig(attention, layers, VOCAB, 512, 1024))
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.06)
    return model.eval().to("cuda", dtype)


def prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCAB, (7 + 23 * i,), generator=generator).tolist() for i in range(count)]


def forward(model, step, plan):
    hidden = model(plan.token_ids, plan.metadata, step.cache, step.builder.backend)
    return model.logits(hidden[plan.logit_rows])


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("backend", ["triton", "rows", "reference"])
def test_nothing_waits_from_plan_to_verify(backend, temperature):
    model = tiny(2, torch.bfloat16)
    step = build_step(model, num_pages=64, backend=backend)
    drafter = DraftModelDrafter(tiny(1, torch.bfloat16, 1), num_pages=64, backend=backend)
    for i, prompt in enumerate(prompts(4)):
        step.add(i, prompt, SamplingParams(temperature, top_p=0.9, seed=i, max_tokens=60))
    with torch.no_grad():
        for turn in range(8):
            wanted = step.draft_requests(4)
            # The first turns compile kernels and fill the allocator's pools.
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error" if turn >= 4 else "default")
            try:
                proposal = drafter.propose(wanted) if wanted else None
                plan = step.plan(proposal)
                verdict = step.verify(plan, forward(model, step, plan))
            finally:
                torch.cuda.set_sync_debug_mode("default")
            results = step.commit(plan, verdict)
            drafter.observe(results)
            assert all(r.num_drafts == 4 for r in results if not r.is_prompt)


def test_memory_does_not_grow_after_warm_up():
    model = tiny(2, torch.bfloat16)
    step = build_step(model, num_pages=256, backend="triton")
    drafter = NgramDrafter(VOCAB, prompt_lookup_min=1)
    for i, prompt in enumerate(prompts(4)):
        step.add(i, prompt, SamplingParams(max_tokens=400))
    peaks = []
    with torch.no_grad():
        for turn in range(60):
            plan = step.plan(drafter.propose(w) if (w := step.draft_requests(4)) else None)
            step.commit(plan, step.verify(plan, forward(model, step, plan)))
            if turn == 20:
                torch.cuda.reset_peak_memory_stats()
            peaks.append(torch.cuda.memory_reserved())
    assert peaks[-1] == peaks[20]


@pytest.mark.parametrize("backend", ["triton", "rows"])
@pytest.mark.parametrize(("dtype", "margin"), [(torch.float32, 1e-4), (torch.bfloat16, 6e-2)])
def test_greedy_loop_equals_plain_up_to_rounding_ties(backend, dtype, margin):
    """bf16 logits of about 2 are 2^-7 apart; a few of those steps are a tie, not a bug."""
    model, batch = tiny(3, dtype), prompts(5)
    sampling = [SamplingParams(max_tokens=64)] * len(batch)
    plain = run_loop(model, batch, sampling, backend=backend)
    drafters = (
        DraftModelDrafter(model, num_pages=64, backend=backend),
        NgramDrafter(VOCAB, prompt_lookup_min=1),
    )
    for drafter in drafters:
        run = run_loop(model, batch, sampling, drafter, backend=backend)
        difference = first_difference(model, batch, plain.tokens, run.tokens)
        assert difference is None or difference.top1_margin <= margin
        assert run.stats.num_accepted_draft_tokens > 0


def test_nan_logits_are_flagged_before_anything_changes():
    from specmla import NumericsError

    model = tiny(1, torch.bfloat16)
    step = build_step(model, num_pages=16, backend="triton")
    step.add("a", [1, 2, 3], SamplingParams(max_tokens=4))
    with torch.no_grad():
        plan = step.plan()
        logits = forward(model, step, plan)
        logits[0, 5] = float("nan")
        verdict = step.verify(plan, logits)
    with pytest.raises(NumericsError):
        step.commit(plan, verdict)
    assert step.blocks.length("a") == 0
