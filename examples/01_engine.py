"""An engine with its own scheduler around `VerifyStep`: no loop of ours, requests come and go.

Each turn picks who runs, drafts, plans, runs the model, verifies and commits.
"""

import torch

from drafters import NgramDrafter
from specmla import DeepseekConfig, DeepseekForCausalLM, MLAConfig, SamplingParams, build_step

config = DeepseekConfig(
    attention=MLAConfig(
        hidden_size=64,
        num_heads=4,
        kv_lora_rank=128,
        qk_nope_head_dim=32,
        qk_rope_head_dim=32,
        v_head_dim=32,
    ),
    num_layers=2,
    vocab_size=256,
    intermediate_size=128,
    max_position_embeddings=512,
)
torch.manual_seed(0)
model = DeepseekForCausalLM(config).eval()
step = build_step(model, num_pages=64, page_size=16)
drafter = NgramDrafter(config.vocab_size)

waiting = {f"request {i}": list(b"to be or not to be, to be or" * (i + 1)) for i in range(5)}
MAX_RUNNING = 3

with torch.no_grad():
    while waiting or step.active:
        # Our scheduler: at most three requests at once, first come, first served.
        while waiting and len(step.active) < MAX_RUNNING:
            name = next(iter(waiting))
            step.add(name, waiting.pop(name), SamplingParams(max_tokens=24, seed=len(waiting)))

        # Two drafts for a crowd, four for a few; the step caps them at what each may still emit.
        wanted = step.draft_requests(2 if len(step.active) == MAX_RUNNING else 4)
        plan = step.plan(drafter.propose(wanted) if wanted else None)

        # Our model runner: any model whose layers are `MLAAttention` and that takes the metadata.
        hidden = model(plan.token_ids, plan.metadata, step.cache, step.builder.backend)
        logits = model.logits(hidden[plan.logit_rows])

        results = step.commit(plan, step.verify(plan, logits))
        drafter.observe(results)
        for result in results:
            if result.finish_reason:
                drafter.reset(result.request_id)
                print(f"{result.request_id}: finished by {result.finish_reason}")

step.blocks.check_integrity()
print(f"pages free again: {step.blocks.num_free} of {step.blocks.num_pages}")
