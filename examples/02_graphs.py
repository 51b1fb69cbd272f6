"""Verify steps as CUDA graphs: captured once, replayed over whoever is there.

Plan, layers and acceptance of a step are one replay. Prompts are not captured: they run eagerly,
because the engine says so. On a CPU the same buffers are used, without graphs.
"""

import torch

from drafters import NgramDrafter
from specmla import (
    CapturedStep,
    DeepseekConfig,
    DeepseekForCausalLM,
    MLAConfig,
    SamplingParams,
    build_step,
    doubling_buckets,
)

MAX_RUNNING, NUM_DRAFTS = 4, 3
attention = MLAConfig(
    hidden_size=64,
    num_heads=4,
    kv_lora_rank=128,
    qk_nope_head_dim=32,
    qk_rope_head_dim=32,
    v_head_dim=32,
)
config = DeepseekConfig(attention, 2, vocab_size=256, intermediate_size=128,
                        max_position_embeddings=512)  # fmt: skip
torch.manual_seed(0)
model = DeepseekForCausalLM(config).eval().to("cuda" if torch.cuda.is_available() else "cpu")
step = build_step(model, num_pages=64, page_size=16)
drafter = NgramDrafter(config.vocab_size)


def forward(plan):
    """Our model runner: what it reads besides the plan stays where it is."""
    hidden = model(plan.token_ids, plan.metadata, step.cache, step.builder.backend)
    return model.logits(hidden[plan.logit_rows])


graphs = CapturedStep(step, forward, doubling_buckets(MAX_RUNNING, 1 + NUM_DRAFTS), eager=True)

for i in range(MAX_RUNNING):
    prompt = list(b"to be or not to be, to be or" * (i + 1))
    step.add(f"request {i}", prompt, SamplingParams(max_tokens=12 + 8 * i))
while step.active:
    wanted = step.draft_requests(NUM_DRAFTS)
    verdict = graphs.run(drafter.propose(wanted) if wanted else None)
    results = step.commit(verdict.plan, verdict)
    drafter.observe(results)
    for result in results:
        if result.finish_reason:
            drafter.reset(result.request_id)
            print(f"{result.request_id}: finished by {result.finish_reason}")

step.blocks.check_integrity()
print(f"pages free again: {step.blocks.num_free} of {step.blocks.num_pages}")
