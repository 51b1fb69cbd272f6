"""The draft-verify loop, and what it needs put together for a model."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from specmla.backends.base import AttentionBackend
from specmla.batch_split import BatchRules
from specmla.bucket import Bucket
from specmla.budget.base import Budget, BudgetRequest, chosen_counts
from specmla.budget.fixed import FixedBudget
from specmla.cache.blocks import BlockManager
from specmla.cache.latent import LatentCache
from specmla.errors import UnsupportedError
from specmla.models.deepseek import DeepseekForCausalLM
from specmla.models.moe import DeepseekMoE
from specmla.models.states import StateCollector
from specmla.verify.accept import Rule
from specmla.verify.captured import CapturedStep, Forward
from specmla.verify.captured_buckets import doubling_buckets
from specmla.verify.hidden import committed_rows
from specmla.verify.overlap_loop import overlapped_loop
from specmla.verify.plan import StepPlan
from specmla.verify.proposal import Drafter, DraftRequest, RequestResult
from specmla.verify.sampling import SamplingParams
from specmla.verify.step import VerifyStep
from specmla.verify.wiring import make_builder
from specmla.workspace import PrefillWorkspace, workspace_rows

Prompt = tuple[Sequence[int], SamplingParams]


def build_step(
    model: DeepseekForCausalLM,
    *,
    num_pages: int,
    page_size: int = 64,
    backend: str | AttentionBackend | None = None,
    max_seq_len: int | None = None,
    rule: str | Rule = "token_level",
    acceptance: str = "torch",
    prefix_caching: bool = True,
    allow_vocab_mismatch: bool = False,
    num_draft_layers: int = 0,
) -> VerifyStep:
    """Allocate cache and prefill workspace on the model's device and wire a `VerifyStep` to them.

    Cached context of prompts is up-projected in chunks of at most 65,536 rows (`workspace_rows`),
    or as many as the pool has.

    Args:
        model: gives dims, dtype and device.
        num_pages: pages of the pool, of `page_size` tokens each.
        backend: an attention backend or the name of one, the best one that serves if None.
        max_seq_len: context limit, the model's own if None.
        rule: an acceptance rule or the name of one.
        acceptance: "torch" or "triton" decide by it.
        prefix_caching: share full pages of equal prefixes.
        allow_vocab_mismatch: take drafters whose vocabulary has another size.
        num_draft_layers: layers of the cache after the model's, for a drafter that keeps its rows
            in the same pages.

    Raises:
        UnsupportedError: no backend, or not the named one, can serve the model.
    """
    config = model.config
    limit = config.max_position_embeddings if max_seq_len is None else max_seq_len
    weight = model.model.embed_tokens.weight
    builder = make_builder(model, num_pages, page_size, backend, limit)
    cache = LatentCache(
        config.num_layers + num_draft_layers,
        num_pages,
        page_size,
        config.attention.cache_width,
        dtype=weight.dtype,
        device=weight.device,
    )
    workspace = PrefillWorkspace(cache.width, page_size, cache.dtype, cache.device)
    workspace.claim(min(workspace_rows(limit, num_pages, page_size), cache.num_slots))
    workspace.lock()
    builder.configure(BatchRules(workspace=workspace))
    return VerifyStep(
        cache=cache,
        blocks=BlockManager(num_pages, page_size, prefix_caching=prefix_caching),
        builder=builder,
        vocab_size=config.vocab_size,
        max_seq_len=limit,
        rule=rule,
        acceptance=acceptance,
        allow_vocab_mismatch=allow_vocab_mismatch,
    )


@torch.no_grad()
def generate(
    model: DeepseekForCausalLM,
    step: VerifyStep,
    prompts: Mapping[Hashable, Prompt],
    drafter: Drafter | None = None,
    num_speculative_tokens: int | Mapping[Hashable, int] | Budget = 4,
    graphs: bool | Sequence[Bucket] = False,
    overlap: bool = False,
) -> Iterator[list[RequestResult]]:
    """Continue all prompts together, one list of results per step, until every one has finished.

    Without a drafter this is plain decoding of the same model. Requests that were on the step
    before are left alone.

    Args:
        model: the target.
        step: made by `build_step` for it.
        prompts: tokens and parameters by request name.
        drafter: proposes tokens.
        num_speculative_tokens: K for all requests, or by request (absent: 0), or a budget that
            chooses it before each step.
        graphs: capture verifies as CUDA graphs first, in these buckets, or in `doubling_buckets`
            up to the prompts' number and K if True; prompts, trees and penalties run as they do
            without. On a CPU the same buffers are used, without graphs.
        overlap: plan every step before the last one's verdict has arrived (`overlapped_loop`).

    Raises:
        ArgumentError: a drafter of another vocabulary, prompts that can't be served.
        UnsupportedError: graphs on a GPU without `group_experts`; what `overlap` does not take.
        PoolFullError: the pool (the target's, or the drafter's own) is too small for all prompts.
        NumericsError: logits without a distribution.
    """
    if overlap:
        fixed = _fixed_drafts(num_speculative_tokens, graphs)
        yield from overlapped_loop(step, _forward(model, step), prompts, drafter, fixed)
        return
    runner = _make_runner(model, step, prompts, drafter, num_speculative_tokens, graphs)
    running: list[Hashable] = []
    try:
        for request_id, (tokens, sampling) in prompts.items():
            step.add(request_id, tokens, sampling)
            running.append(request_id)
        while running:
            wanted = draft_requests(step, num_speculative_tokens, running) if drafter else []
            verdict = runner.run(drafter.propose(wanted) if drafter and wanted else None, running)
            results = step.commit(verdict.plan, verdict)
            ended = [r.request_id for r in results if r.finish_reason]
            running = [name for name in running if name not in ended]
            if drafter:
                states = runner.states
                rows = None if states is None else committed_rows(verdict.plan, results, states)
                drafter.observe(results, rows)
                if isinstance(num_speculative_tokens, Budget):
                    num_speculative_tokens.observe(results)
                _reset(ended, drafter, num_speculative_tokens)
            yield results
    finally:  # an error, or a caller that stops early, leaves no request and no page behind
        step.drop(running)
        _reset(running, drafter, num_speculative_tokens)


def draft_requests(
    step: VerifyStep,
    num_drafts: int | Mapping[Hashable, int] | Budget,
    request_ids: Sequence[Hashable],
) -> list[DraftRequest]:
    """Give what a drafter may draft for, as `VerifyStep.draft_requests`, and let a budget choose K.

    The budget sees names and lengths: no draft of the coming step exists yet.
    """
    if not isinstance(num_drafts, Budget):
        return step.draft_requests(num_drafts, request_ids)
    most = step.draft_requests(num_drafts.max_drafts, request_ids)
    asked = [BudgetRequest(r.request_id, len(r.tokens), r.num_drafts) for r in most]
    chosen = zip(most, chosen_counts(num_drafts, asked), strict=True)
    return [
        r._replace(num_drafts=min(n, r.num_drafts), num_nodes=min(n, r.num_nodes))
        for r, n in chosen
    ]


def _forward(model: DeepseekForCausalLM, step: VerifyStep, layers: Sequence[int] = ()) -> Forward:
    """Give what runs the model over a plan, and collects states of these layers, if any."""

    def forward(plan: StepPlan) -> Tensor | tuple[Tensor, Tensor]:
        states = StateCollector(layers, model.config.num_layers) if layers else None
        hidden = model(plan.token_ids, plan.metadata, step.cache, step.builder.backend, states)
        logits = model.logits(hidden[plan.logit_rows])
        return logits if states is None else (logits, states.joined())

    return forward


def _fixed_drafts(
    num_drafts: int | Mapping[Hashable, int] | Budget, graphs: object
) -> int | Mapping[Hashable, int]:
    """Refuse what can't be overlapped."""
    found = ["graphs are given, accepted is False: captured steps are not overlapped"]
    found = found if graphs else []
    if isinstance(num_drafts, Budget):
        name = type(num_drafts).__name__
        found.append(f"num_speculative_tokens is a {name}, accepted are numbers, fixed for a run")
    if found or isinstance(num_drafts, Budget):
        raise UnsupportedError("overlap", found)
    return num_drafts


def _reset(names: Sequence[Hashable], drafter: Drafter | None, budget: object) -> None:
    """Let drafter and budget forget requests."""
    for name in names:
        if drafter:
            drafter.reset(name)
        if isinstance(budget, Budget):
            budget.reset(name)


def _make_runner(
    model: DeepseekForCausalLM,
    step: VerifyStep,
    prompts: Mapping[Hashable, Prompt],
    drafter: Drafter | None,
    num_drafts: int | Mapping[Hashable, int] | Budget,
    graphs: bool | Sequence[Bucket],
) -> CapturedStep:
    """Capture the steps of a run, or nothing: without buckets every step is eager."""
    if drafter:
        step.check_drafter(drafter.vocab_size)
    forward = _forward(model, step, getattr(drafter, "hidden_layers", ()))
    if not graphs or not prompts:
        return CapturedStep(step, forward, (), eager=True)
    loops = any(isinstance(m, DeepseekMoE) and m.grouped is None for m in model.modules())
    if loops and step.builder.device.type == "cuda":
        reason = "the loop over experts reads back which were hit; group_experts(model) first"
        raise UnsupportedError("graphs", [reason])
    budget = num_drafts if isinstance(num_drafts, Budget) else FixedBudget(num_drafts)
    most = budget.max_drafts if drafter else 0
    buckets = doubling_buckets(len(prompts), 1 + most) if graphs is True else list(graphs)
    return CapturedStep(
        step,
        forward,
        buckets,
        sampling=[sampling for _, sampling in prompts.values()],
        draft_probs=None if drafter else False,
        eager=True,
    )
