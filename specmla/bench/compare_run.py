"""One run of a drafter under one rule over prompts, timed, with what is expected of its drafts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specmla.bench.compare_chances import GREEDY, MULTI_ROUND, step_chances
from specmla.bench.continuation import ComparedRun, Continuation
from specmla.generate import build_step
from specmla.models.deepseek import DeepseekForCausalLM
from specmla.models.states import StateCollector
from specmla.verify.accept import LOSSLESS
from specmla.verify.hidden import committed_rows
from specmla.verify.plan import StepPlan
from specmla.verify.proposal import Drafter, DraftRequest, HiddenRows, RequestResult
from specmla.verify.sampling import SamplingParams
from specmla.verify.step import VerifyStep

PAGE = 64
MakeDrafter = Callable[[VerifyStep], Drafter]


@dataclass(frozen=True)
class Contender:
    """A drafter in a comparison.

    Attributes:
        name: in the report.
        make: builds a fresh one beside a step with a layer to spare; None decodes plainly.
        tree: it proposes trees.
        chain: name of the contender that drafts chains with the same model, if there is one.
    """

    name: str
    make: MakeDrafter | None
    tree: bool = False
    chain: str | None = None


@dataclass(frozen=True)
class RunSettings:
    """What all runs of a comparison share.

    Attributes:
        num_drafts: K of chains, and the greatest depth of trees.
        num_nodes: most nodes of a tree.
        max_tokens: new tokens of a continuation.
        batch: prompts at once.
        seed: of the first prompt; the others follow.
        backend: attention backend of the target by name, the best one if None.
    """

    num_drafts: int = 4
    num_nodes: int = 12
    max_tokens: int = 64
    batch: int = 1
    seed: int = 0
    backend: str | None = None


class ContenderRun:
    """A run in parts, so that several can take turns; one fresh drafter serves all of it.

    Args:
        target: the model.
        prompts: tokens of each.
        contender: makes the drafter.
        rule: name of a rule that `VerifyStep` takes.
        temperature: 0 for greedy.
        settings: sizes and seeds.

    Attributes:
        result: what has run so far.
    """

    def __init__(
        self,
        target: DeepseekForCausalLM,
        prompts: Sequence[Sequence[int]],
        contender: Contender,
        rule: str,
        temperature: float,
        settings: RunSettings,
    ) -> None:
        longest = max(map(len, prompts)) + settings.max_tokens + settings.num_nodes
        step = build_step(
            target,
            num_pages=settings.batch * (-(-longest // PAGE) + 2),
            page_size=PAGE,
            backend=settings.backend,
            rule=rule,
            num_draft_layers=int(contender.make is not None),
        )
        drafter = contender.make(step) if contender.make else None
        rules = _probed(contender, temperature)
        self._loop = _Loop(target, step, drafter, contender, settings, rules)
        self._prompts, self._temperature, self._settings = prompts, temperature, settings
        self._ends = target.config.eos_token_ids
        self.result = ComparedRun([Continuation() for _ in prompts], 0.0)

    @torch.no_grad()
    def run(self, part: range) -> None:
        """Continue the prompts of `part` together."""
        for i in part:
            sampling = SamplingParams(
                self._temperature,
                seed=self._settings.seed + i,
                max_tokens=self._settings.max_tokens,
                stop_token_ids=self._ends,
            )
            self._loop.step.add(i, self._prompts[i], sampling)
        began = time.perf_counter()
        aside = self._loop.run(self.result.continuations)
        self.result.seconds += time.perf_counter() - began - aside


def parts_of(num_prompts: int, batch: int) -> list[range]:
    """Cut prompts into those that run together."""
    return [range(i, min(i + batch, num_prompts)) for i in range(0, num_prompts, batch)]


def run_contender(
    target: DeepseekForCausalLM,
    prompts: Sequence[Sequence[int]],
    contender: Contender,
    rule: str,
    temperature: float,
    settings: RunSettings,
) -> ComparedRun:
    """Continue all prompts, `settings.batch` at a time; see `ContenderRun`."""
    made = ContenderRun(target, prompts, contender, rule, temperature, settings)
    for part in parts_of(len(prompts), settings.batch):
        made.run(part)
    return made.result


def _probed(contender: Contender, temperature: float) -> tuple[str, ...]:
    """Name the rules whose chances a run gives."""
    if contender.make is None:
        return ()
    if not temperature:
        return (GREEDY,)
    return (MULTI_ROUND, "sample_match") if contender.tree else tuple(LOSSLESS)


class _Loop:
    """Steps until no request is left."""

    def __init__(
        self,
        target: DeepseekForCausalLM,
        step: VerifyStep,
        drafter: Drafter | None,
        contender: Contender,
        settings: RunSettings,
        rules: tuple[str, ...],
    ) -> None:
        self.target, self.step, self.drafter = target, step, drafter
        self.tree, self.settings, self.rules = contender.tree, settings, rules
        self._layers: Sequence[int] = getattr(drafter, "hidden_layers", ())

    def run(self, found: list[Continuation]) -> float:
        """Continue; give the seconds spent on chances and counts."""
        step, aside = self.step, 0.0
        while step.active:
            wanted = self._wanted() if self.drafter else []
            plan = step.plan(self.drafter.propose(wanted) if self.drafter and wanted else None)
            logits, states = self._forward(plan)
            results = step.commit(plan, step.verify(plan, logits))
            if self.drafter:
                rows = None if states is None else committed_rows(plan, results, states.joined())
                self._tell(results, rows)
            self._synchronize()
            began = time.perf_counter()
            self._count(plan, logits, results, found)
            self._synchronize()
            aside += time.perf_counter() - began
        return aside

    def _wanted(self) -> list[DraftRequest]:
        """Ask for chains of K, or for trees as deep as those with more nodes."""
        k, nodes = self.settings.num_drafts, self.settings.num_nodes
        if not self.tree:
            return self.step.draft_requests(k)
        asked = self.step.draft_requests(max(k, nodes))
        return [r._replace(num_drafts=min(k, r.num_drafts)) for r in asked]

    def _forward(self, plan: StepPlan) -> tuple[Tensor, StateCollector | None]:
        model, layers = self.target, self._layers
        states = StateCollector(layers, model.config.num_layers) if layers else None
        cache, backend = self.step.cache, self.step.builder.backend
        hidden = model(plan.token_ids, plan.metadata, cache, backend, states)
        return model.logits(hidden[plan.logit_rows]), states

    def _tell(self, results: Sequence[RequestResult], rows: HiddenRows | None) -> None:
        assert self.drafter is not None
        self.drafter.observe(results, rows)
        for result in results:
            if result.finish_reason:
                self.drafter.reset(result.request_id)

    def _count(
        self,
        plan: StepPlan,
        logits: Tensor,
        results: Sequence[RequestResult],
        found: list[Continuation],
    ) -> None:
        chances = step_chances(plan, logits, self.rules) if plan.drafts.shape[1] else None
        for place, result in enumerate(results):
            mine = found[int(str(result.request_id))]
            mine.tokens += result.new_tokens
            if result.is_prompt:
                continue
            counts = (result.num_drafts, result.num_accepted, len(result.new_tokens))
            mine.stats.observe(*counts, result.num_levels)
            if chances is not None:
                mine.add(chances, place)

    def _synchronize(self) -> None:
        if self.step.builder.device.type == "cuda":
            torch.cuda.synchronize(self.step.builder.device)


def with_seed(settings: RunSettings, turn: int) -> RunSettings:
    """Give the settings of a later turn: other seeds for every prompt."""
    return replace(settings, seed=settings.seed + 1_000_003 * turn)
