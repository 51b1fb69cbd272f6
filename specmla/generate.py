"""The draft-verify loop, and what it needs put together for a model."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence

import torch

from specmla.backends.base import Requirements
from specmla.backends.select import select_backend
from specmla.builder import MetadataBuilder
from specmla.cache.blocks import BlockManager
from specmla.cache.latent import LatentCache
from specmla.models.deepseek import DeepseekForCausalLM
from specmla.verify.proposal import Drafter, RequestResult
from specmla.verify.sampling import SamplingParams
from specmla.verify.step import VerifyStep

Prompt = tuple[Sequence[int], SamplingParams]


def build_step(
    model: DeepseekForCausalLM,
    *,
    num_pages: int,
    page_size: int = 64,
    backend: str | None = None,
    max_seq_len: int | None = None,
    rule: str = "token_level",
    prefix_caching: bool = True,
    allow_vocab_mismatch: bool = False,
) -> VerifyStep:
    """Allocate a cache on the model's device and wire a `VerifyStep` to it.

    Args:
        model: gives dims, dtype and device.
        num_pages: pages of the pool, of `page_size` tokens each.
        backend: name of an attention backend, the best one that serves if None.
        max_seq_len: context limit, the model's own if None.
        rule: acceptance rule.
        prefix_caching: share full pages of equal prefixes.
        allow_vocab_mismatch: take drafters whose vocabulary has another size.

    Raises:
        UnsupportedError: no backend, or not the named one, can serve the model.
    """
    config, attention = model.config, model.config.attention
    weight = model.model.embed_tokens.weight
    need = Requirements(
        device=weight.device,
        dtype=weight.dtype,
        num_heads=attention.num_heads,
        kv_lora_rank=attention.kv_lora_rank,
        qk_rope_head_dim=attention.qk_rope_head_dim,
        page_size=page_size,
    )
    limit = config.max_position_embeddings if max_seq_len is None else max_seq_len
    builder = MetadataBuilder(
        backend=select_backend(need, backend),
        page_size=page_size,
        num_pages=num_pages,
        num_heads=attention.num_heads,
        kv_lora_rank=attention.kv_lora_rank,
        device=weight.device,
        max_seq_len=limit,
    )
    cache = LatentCache(
        config.num_layers,
        num_pages,
        page_size,
        attention.cache_width,
        dtype=weight.dtype,
        device=weight.device,
    )
    return VerifyStep(
        cache=cache,
        blocks=BlockManager(num_pages, page_size, prefix_caching=prefix_caching),
        builder=builder,
        vocab_size=config.vocab_size,
        max_seq_len=limit,
        rule=rule,
        allow_vocab_mismatch=allow_vocab_mismatch,
    )


@torch.no_grad()
def generate(
    model: DeepseekForCausalLM,
    step: VerifyStep,
    prompts: Mapping[Hashable, Prompt],
    drafter: Drafter | None = None,
    num_speculative_tokens: int | Mapping[Hashable, int] = 4,
) -> Iterator[list[RequestResult]]:
    """Continue all prompts together, one list of results per step, until every one has finished.

    Without a drafter this is plain decoding of the same model. If it stops early (an error, or the
    caller), the unfinished requests stay in `step`: go on with `prompts={}`, or remove them.

    Args:
        model: the target.
        step: made by `build_step` for it.
        prompts: tokens and parameters by request name.
        drafter: proposes tokens.
        num_speculative_tokens: K for all requests, or by request (absent: 0).

    Raises:
        ArgumentError: a drafter of another vocabulary, prompts that can't be served; none of them
            was added.
        PoolFullError: the pool is too small for all prompts at once.
        NumericsError: logits without a distribution.
    """
    if drafter:
        step.check_drafter(drafter.vocab_size)
    _add_all(step, prompts)
    while step.active:
        wanted = step.draft_requests(num_speculative_tokens) if drafter else []
        plan = step.plan(drafter.propose(wanted) if drafter and wanted else None)
        try:
            hidden = model(plan.token_ids, plan.metadata, step.cache, step.builder.backend)
            verdict = step.verify(plan, model.logits(hidden[plan.logit_rows]))
        except BaseException:
            step.cancel(plan)  # or the step could never be used again
            raise
        results = step.commit(plan, verdict)
        if drafter:
            drafter.observe(results)
            for result in results:
                if result.finish_reason:
                    drafter.reset(result.request_id)
        yield results


def _add_all(step: VerifyStep, prompts: Mapping[Hashable, Prompt]) -> None:
    """Add all prompts, or none."""
    added: list[Hashable] = []
    try:
        for request_id, (tokens, sampling) in prompts.items():
            step.add(request_id, tokens, sampling)
            added.append(request_id)
    except BaseException:
        for request_id in added:
            step.remove(request_id)
        raise
