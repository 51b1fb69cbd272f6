"""The verify step, as an engine calls it: plan, the engine's forward, verify, commit.

    step.add(request_id, prompt, sampling)
    plan = step.plan(proposal)                       # reserves pages, builds the metadata
    hidden = model(plan.token_ids, plan.metadata, step.cache)
    logits = model.logits(hidden[plan.logit_rows])
    results = step.commit(plan, step.verify(plan, logits))

From `plan` to `verify` nothing waits for the device; `commit` awaits one small copy, then moves the
lengths on. Roll-back is bookkeeping: rejected rows stay where they are, are never read and are
overwritten by later ones.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from torch import Tensor

from specmla.builder import MetadataBuilder
from specmla.cache.blocks import BlockManager
from specmla.cache.copies import fill_copies
from specmla.cache.latent import LatentCache
from specmla.errors import ArgumentError, NumericsError, require
from specmla.mask import DraftMask
from specmla.metadata import RequestRows
from specmla.verify.accept import Rule, find_rule, rule_problems
from specmla.verify.advance import advance_constraints
from specmla.verify.fused import check_impl
from specmla.verify.judge import Decision, Verdict, judge, logits_problems
from specmla.verify.moves import move_paths
from specmla.verify.pending import (
    batch_problems,
    new_rows,
    plan_requests,
)
from specmla.verify.plan import (
    PlanLayout,
    PlannedRequest,
    StepPlan,
    build_plan,
    host_arrays,
)
from specmla.verify.processors.attach import with_processors
from specmla.verify.processors.history import HeldHistory
from specmla.verify.proposal import DraftProposal, RequestResult
from specmla.verify.roster import RequestRoster
from specmla.verify.sampling import SamplingBatch
from specmla.verify.sampling_cache import SamplingCache
from specmla.verify.tree import tree_shape
from specmla.verify.tree_judge import tree_rule_problems
from specmla.verify.vocab import check_vocab
from specmla.verify.wiring import wiring_problems


class VerifyStep(RequestRoster):
    """Holds requests between steps and turns logits into committed tokens.

    Args:
        cache: the target's latent cache.
        blocks: its pages; nobody else may move them.
        builder: makes the metadata for the backend that the model runs on.
        vocab_size: W of the target.
        max_seq_len: context limit in tokens, emitted ones included.
        rule: an acceptance rule or the name of one in `specmla.verify.rules.registry.RULES`.
        acceptance: "torch" decides by the rule itself, "triton" by fused kernels, for the lossless
            rules.
        allow_vocab_mismatch: take drafters whose vocabulary has another size, where equal ids mean
            equal tokens and the rest is padding.

    Raises:
        ArgumentError: an unknown rule, an acceptance that does not know it, or cache, blocks and
            builder that don't fit each other.
    """

    def __init__(
        self,
        *,
        cache: LatentCache,
        blocks: BlockManager,
        builder: MetadataBuilder,
        vocab_size: int,
        max_seq_len: int,
        rule: str | Rule = "token_level",
        acceptance: str = "torch",
        allow_vocab_mismatch: bool = False,
    ) -> None:
        found = rule_problems(rule)
        found += wiring_problems(cache, blocks, builder, vocab_size, max_seq_len)
        require(found, "VerifyStep")
        super().__init__(blocks, vocab_size, max_seq_len)
        self.cache, self.builder, self.rule = cache, builder, rule
        self.allow_vocab_mismatch = allow_vocab_mismatch
        self._rule = find_rule(rule)
        check_impl(acceptance, self._rule, builder.device)
        self.acceptance = acceptance
        self._sampling = SamplingCache(builder.device)
        self._history = HeldHistory(builder.device)

    def check_drafter(self, vocab_size: int) -> None:
        """Refuse a drafter of another vocabulary size, unless `allow_vocab_mismatch` is set.

        Raises:
            ArgumentError: the sizes differ.
        """
        check_vocab(vocab_size, self.vocab_size, allow_mismatch=self.allow_vocab_mismatch)

    def plan(
        self,
        proposal: DraftProposal | None = None,
        request_ids: Sequence[Hashable] | None = None,
        layout: PlanLayout | None = None,
    ) -> StepPlan:
        """Reserve pages for every new row and build the step.

        A request with one pending token is a verify of the anchor and its drafts (none if the
        proposal has none for it); one with more is a prompt. Drafts past a request's limits
        (`max_tokens`, context) are not verified.

        Args:
            proposal: drafts, in any order of requests; requests that are not part of the step are
                ignored.
            request_ids: requests of this step, all active ones if None.
            layout: lays the step out in buffers of its own (`CapturedStep`); new tensors if None.

        Raises:
            ArgumentError: unknown names, another vocabulary, a step that was planned but neither
                committed nor cancelled, no request, a step that `layout` refuses.
            PoolFullError: too few pages; nothing was reserved.
        """
        found = ["the last planned step was neither committed nor cancelled"] if self._open else []
        names = list(self._table) if request_ids is None else list(request_ids)
        found += batch_problems(names, proposal)
        require(found, "VerifyStep.plan")
        if proposal is not None and isinstance(proposal.probs, Tensor):
            self.check_drafter(proposal.probs.shape[-1])
        states = [self._table[name] for name in names]
        planned = plan_requests(states, self.blocks.length, proposal, self.max_seq_len)
        if any(r.tree for r in planned):
            require(tree_rule_problems(self._rule), "VerifyStep.plan")
        sampling = self._sampling.get(r.state.sampling for r in planned)
        sampling = with_processors(sampling, planned, proposal, self.vocab_size, self._history)
        lay = self.lay_out if layout is None else layout.choose(planned, proposal, sampling)
        copies = self.blocks.reserve({r.request_id: len(r.pending) + r.num_drafts for r in planned})
        try:
            fill_copies(self.cache, self.blocks, copies, [r.request_id for r in planned])
            rows = [new_rows(r, self.blocks.block_ids(r.request_id)) for r in planned]
            self._open = lay(planned, rows, proposal, sampling)
        except BaseException:
            self._release(planned)
            raise
        return self._open

    def lay_out(
        self,
        planned: Sequence[PlannedRequest],
        rows: Sequence[RequestRows],
        proposal: DraftProposal | None,
        sampling: SamplingBatch,
    ) -> StepPlan:
        """Lay out a step in new tensors: what `plan` does without a `layout`."""
        mask = DraftMask.TREE if any(r.tree for r in planned) else DraftMask.CAUSAL
        metadata = self.builder.build(rows, mask, along=host_arrays(planned, proposal))
        return build_plan(planned, metadata, proposal, sampling, self.vocab_size)

    def verify(self, plan: StepPlan, logits: Tensor) -> Verdict:
        """Judge the drafts; nothing waits for the device.

        Args:
            plan: the planned step.
            logits: [R, W] of `plan.logit_rows`, float16 to float64 (to float32 for "triton").

        Raises:
            ArgumentError: not the step planned last, or logits of another shape, dtype or device.
        """
        self.check_open(plan)
        return self._judge(plan, logits)

    def _judge(self, plan: StepPlan, logits: Tensor) -> Verdict:
        found = logits_problems(plan, logits, self.vocab_size, self.acceptance)
        require(found, "VerifyStep.verify")
        return judge(plan, logits, self._rule, self.acceptance)

    def commit(self, plan: StepPlan, verdict: Verdict) -> list[RequestResult]:
        """Await the verdict, move lengths on, free what was rejected; results in plan order.

        Finished requests leave: their pages are given back and their names are free again.

        Raises:
            ArgumentError: not the step planned last, or the verdict of another one.
            NumericsError: a flagged row; the step is cancelled and no length has changed.
            ConstraintError: a constraint's `advance` raised; likewise, but see there.
        """
        self.check_open(plan)
        if verdict.plan is not plan:
            raise ArgumentError(
                "verdict is that of another plan; accepted is what verify(plan) gave"
            )
        decided = verdict.wait()
        flagged = [r.request_id for r, d in zip(plan.requests, decided, strict=True) if d.flagged]
        if flagged:
            self.cancel(plan)
            what = "logits" if plan.draft_probs is None else "logits or draft probabilities"
            text = f"{what} hold NaN or no finite value for requests {flagged}"
            raise NumericsError(text, flagged)
        move_paths(self.cache, self.blocks.block_ids, plan.requests, decided)
        try:
            advance_constraints(plan.requests, decided)
        except BaseException:
            self.cancel(plan)
            raise
        self._open = None
        pairs = zip(plan.requests, decided, strict=True)
        return [self._advance(request, decision) for request, decision in pairs]

    def _advance(
        self, request: PlannedRequest, decision: Decision, ahead: int = 0
    ) -> RequestResult:
        """Move a request on by what was decided; `ahead` rows after that stay reserved."""
        state, name = request.state, request.request_id
        emitted, reason = state.cut(decision.tokens)
        state.append(emitted)
        # All but the new anchor have a true row: prompt, old anchor, accepted drafts.
        done, is_prompt = len(state.tokens) - 1, request.is_prompt
        self.blocks.commit(name, done, state.tokens, ahead=ahead, is_prompt=is_prompt)
        if reason is not None:
            self.blocks.free(name)
            del self._table[name]
        return RequestResult(
            name,
            emitted,
            decision.num_drafts,
            decision.num_accepted,
            reason,
            is_prompt,
            *_tree_fields(request, decision),
            decision.logprobs_of(len(emitted), state.sampling),
        )


def _tree_fields(
    request: PlannedRequest, decision: Decision
) -> tuple[tuple[int, ...] | None, int | None]:
    """Give `path` and `num_levels` of a result."""
    if request.tree is None or decision.path is None:
        return None, None
    nodes, depths = request.tree.nodes, tree_shape(request.tree.parents).depths
    return tuple(nodes[row - 1] for row in decision.path), min(max(depths), decision.num_drafts)
