"""The draft-verify loop, and what it needs put together for a model."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from specmla.backends.base import AttentionBackend
from specmla.batch_split import BatchRules
from specmla.bucket import Bucket
from specmla.budget.base import Budget
from specmla.budget.fixed import FixedBudget
from specmla.cache.blocks import BlockManager
from specmla.cache.latent import LatentCache
from specmla.decode import Prompt, decode_loop, prompt_problems
from specmla.errors import UnsupportedError, count_problems, kind_problem, require
from specmla.invariance import switch_problems
from specmla.models.deepseek import DeepseekForCausalLM
from specmla.models.moe import DeepseekMoE
from specmla.models.states import StateCollector
from specmla.verify.accept import Rule, rule_problems
from specmla.verify.captured import CapturedStep, Forward
from specmla.verify.captured_buckets import capture_problems, doubling_buckets
from specmla.verify.overlap_loop import overlapped_loop
from specmla.verify.plan import StepPlan
from specmla.verify.proposal import CapturableDrafter, Drafter, RequestResult
from specmla.verify.sampling import SamplingParams
from specmla.verify.step import VerifyStep
from specmla.verify.wiring import make_builder
from specmla.workspace import PrefillWorkspace, workspace_rows


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
        prefix_caching: share full pages of equal prefixes; of a batch-invariant model those that
            prompts wrote alone.
        allow_vocab_mismatch: take drafters whose vocabulary has another size.
        num_draft_layers: layers of the cache after the model's, for a drafter that keeps its rows
            in the same pages.

    Raises:
        ArgumentError: another model, sizes that are none, an unknown rule.
        UnsupportedError: no backend, or not the named one, can serve the model; one of which some
            parts are batch-invariant.
    """
    require(kind_problem("model", model, DeepseekForCausalLM), "build_step")
    config = model.config
    found = count_problems({"num_draft_layers": num_draft_layers}, 0)
    require(found + rule_problems(rule), "build_step")  # before anything is allocated
    found = switch_problems(model)
    if found:
        raise UnsupportedError("batch-invariant model", found)
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
    builder.configure(BatchRules(workspace=workspace, batch_invariant=model.batch_invariant))
    return VerifyStep(
        cache=cache,
        blocks=BlockManager(
            num_pages,
            page_size,
            prefix_caching=prefix_caching,
            prompts_only=model.batch_invariant,
        ),
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
            up to the prompts' number and K if True, and drafting of a `CapturableDrafter`; prompts
            run as they do without. On a CPU the same buffers are used, no graphs.
        overlap: plan every step before the last one's verdict has arrived (`overlapped_loop`).

    Raises:
        ArgumentError: a drafter of another vocabulary, prompts that can't be served.
        UnsupportedError: graphs on a GPU without `group_experts`; what `overlap` does not take.
        PoolFullError: the pool (the target's, or the drafter's own) is too small for all prompts.
        NumericsError: logits without a distribution.
    """
    require(prompt_problems(prompts, drafter), "generate")
    if not isinstance(num_speculative_tokens, Budget):
        FixedBudget(num_speculative_tokens)  # which refuses what are no counts
    if overlap:
        fixed = _fixed_drafts(num_speculative_tokens)
        buckets = _buckets(model, step, prompts, drafter, fixed, graphs)
        forward = make_forward(model, step)
        yield from overlapped_loop(step, forward, prompts, drafter, fixed, buckets)
        return
    runner = make_runner(model, step, prompts, drafter, num_speculative_tokens, graphs)
    yield from decode_loop(runner, prompts, drafter, num_speculative_tokens)


def make_forward(
    model: DeepseekForCausalLM, step: VerifyStep, layers: Sequence[int] = ()
) -> Forward:
    """Give what runs the model over a plan, and collects states of these layers, if any."""

    def forward(plan: StepPlan) -> Tensor | tuple[Tensor, Tensor]:
        states = StateCollector(layers, model.config.num_layers) if layers else None
        hidden = model(plan.token_ids, plan.metadata, step.cache, step.builder.backend, states)
        logits = model.logits(hidden[plan.logit_rows])
        return logits if states is None else (logits, states.joined())

    return forward


def _fixed_drafts(
    num_drafts: int | Mapping[Hashable, int] | Budget,
) -> int | Mapping[Hashable, int]:
    """Refuse what can't be overlapped."""
    if isinstance(num_drafts, Budget):
        name = type(num_drafts).__name__
        reason = f"num_speculative_tokens is a {name}, accepted are numbers, fixed for a run"
        raise UnsupportedError("overlap", [reason])
    return num_drafts


def _buckets(
    model: DeepseekForCausalLM,
    step: VerifyStep,
    prompts: Mapping[Hashable, Prompt],
    drafter: Drafter | None,
    num_drafts: int | Mapping[Hashable, int] | Budget,
    graphs: bool | Sequence[Bucket],
) -> list[Bucket]:
    """Give the buckets of a run; none where nothing is to be captured.

    Raises:
        ArgumentError: what are no buckets, or no parameters.
        UnsupportedError: experts on a GPU that read back which of them were hit.
    """
    sampling = [params for _, params in prompts.values()] or [SamplingParams()]
    buckets = [] if isinstance(graphs, bool) else graphs
    require(capture_problems(buckets, sampling, "graphs"), "generate")
    if not graphs or not prompts:
        return []
    loops = any(isinstance(m, DeepseekMoE) and m.grouped is None for m in model.modules())
    if loops and step.builder.device.type == "cuda":
        reason = "the loop over experts reads back which were hit; group_experts(model) first"
        raise UnsupportedError("graphs", [reason])
    if graphs is not True:
        return list(graphs)
    budget = num_drafts if isinstance(num_drafts, Budget) else FixedBudget(num_drafts)
    most = min(budget.max_drafts, step.max_seq_len - 1) if drafter is not None else 0
    trees = getattr(drafter, "drafts_trees", False)
    return doubling_buckets(len(prompts), 1 + most, trees=trees)


def make_runner(
    model: DeepseekForCausalLM,
    step: VerifyStep,
    prompts: Mapping[Hashable, Prompt],
    drafter: Drafter | None,
    num_drafts: int | Mapping[Hashable, int] | Budget,
    graphs: bool | Sequence[Bucket],
) -> CapturedStep:
    """Capture the steps of a run, or nothing: without buckets every step is eager.

    Arguments and errors are those of `generate`; `decode_loop` runs any prompts of the same kinds
    of sampling on what it gives.
    """
    if drafter is not None:
        step.check_drafter(drafter.vocab_size)
    forward = make_forward(model, step, getattr(drafter, "hidden_layers", ()))
    buckets = _buckets(model, step, prompts, drafter, num_drafts, graphs)
    if not buckets:
        return CapturedStep(step, forward, (), eager=True)
    sampling = [params for _, params in prompts.values()]
    chains = any(b.query_len > 1 and not b.trees for b in buckets)
    if isinstance(drafter, CapturableDrafter) and chains:
        drafter.capture(buckets, sampling)
    most = max(len(tokens) + (p.max_tokens or step.max_seq_len) for tokens, p in prompts.values())
    return CapturedStep(
        step,
        forward,
        buckets,
        sampling=sampling,
        draft_probs=False if drafter is None else None,
        eager=True,
        history=most,
    )
