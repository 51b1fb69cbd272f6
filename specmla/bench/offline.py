"""Scores a drafter on recorded target states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from specmla.bench.compare_chances import overlap
from specmla.bench.recording import PAGE, MakeDrafter, Recording
from specmla.errors import ArgumentError
from specmla.generate import build_step
from specmla.models.deepseek import DeepseekForCausalLM
from specmla.models.states import FINAL
from specmla.verify.hidden import committed_rows
from specmla.verify.plan import StepPlan
from specmla.verify.proposal import Drafter
from specmla.verify.rules.terms import num_drafts as count_drafts
from specmla.verify.sampling import SamplingBatch, SamplingParams, processed_probs
from specmla.verify.stats import AcceptanceStats
from specmla.verify.step import VerifyStep


@dataclass
class OfflineScore:
    """What a drafter would have yielded along the texts.

    Attributes:
        stats: drafts count as accepted where they equal the text: that is greedy acceptance of a
            greedy recording, and `sample_match` of a sampled one.
        overlap: sums over steps of sum min(p, q) by place, as far as the drafts before it equal the
            text: there p is known. Chains only.
        reached: steps that came to each place.
    """

    stats: AcceptanceStats = field(default_factory=AcceptanceStats)
    overlap: list[float] = field(default_factory=list)
    reached: list[int] = field(default_factory=list)

    @property
    def overlap_per_position(self) -> list[float]:
        """Chance that token-level acceptance takes each place, if those before stand."""
        return [a / b for a, b in zip(self.overlap, self.reached, strict=True)]

    def as_dict(self) -> dict[str, Any]:
        """Give all counts and rates by name."""
        return self.stats.as_dict() | {
            "overlap_per_position": self.overlap_per_position,
            "reached_per_position": list(self.reached),
        }

    def add_overlap(self, values: Sequence[float]) -> None:
        """Add those of one step."""
        more = len(values) - len(self.overlap)
        self.overlap += [0.0] * more
        self.reached += [0] * more
        for place, value in enumerate(values):
            self.overlap[place] += value
            self.reached[place] += 1


@torch.no_grad()
def score_offline(
    recording: Recording,
    make: MakeDrafter,
    target: DeepseekForCausalLM,
    num_drafts: int = 4,
    seed: int = 0,
) -> OfflineScore:
    """Walk along the recorded texts, drafting at every step as the loop would.

    Args:
        recording: of this target.
        make: builds the drafter beside a step with a layer to spare.
        target: lends embedding, final norm and head; its layers are not run.
        num_drafts: K that is asked for, or nodes of a tree.
        seed: of the drafts of the first text; the others follow.

    Raises:
        ArgumentError: a drafter that asks for layers that were not recorded.
    """
    longest = max(map(len, recording.tokens))
    pages = -(-(longest + num_drafts) // PAGE) + 2
    step = build_step(
        target, num_pages=pages, page_size=PAGE, num_draft_layers=1, prefix_caching=False
    )
    drafter, score = make(step), OfflineScore()
    for text in range(len(recording.tokens)):
        walk = _Walk(recording, text, target, step, drafter)
        walk.run(num_drafts, SamplingParams(recording.temperature, seed=seed + text), score)
    return score


class _Walk:
    """One text."""

    def __init__(
        self,
        recording: Recording,
        text: int,
        target: DeepseekForCausalLM,
        step: VerifyStep,
        drafter: Drafter,
    ) -> None:
        layers: Sequence[int] = getattr(drafter, "hidden_layers", ())
        weight = target.model.embed_tokens.weight
        self.name, self.target, self.step, self.drafter = text, target, step, drafter
        self.tokens = recording.tokens[text].to(weight.device)
        self.final = recording.of_layers(text, (FINAL,)).to(weight)
        self.states = recording.of_layers(text, layers).to(weight) if layers else None
        self.prompt_len = recording.prompt_lens[text]

    def run(self, num_drafts: int, sampling: SamplingParams, score: OfflineScore) -> None:
        step, rest = self.step, len(self.tokens) - self.prompt_len
        if not rest:
            raise ArgumentError(f"recording: text {self.name} has nothing after its prompt")
        step.add(
            self.name, self.tokens[: self.prompt_len].tolist(), SamplingParams(max_tokens=rest)
        )
        while step.active:
            asked = [r._replace(sampling=sampling) for r in step.draft_requests(num_drafts)]
            plan = step.plan(self.drafter.propose(asked) if asked else None)
            rows = self._positions(plan)
            following = self.tokens[
                (rows[-len(plan.logit_rows) :] + 1).clamp(max=len(self.tokens) - 1)
            ]
            logits = torch.nn.functional.one_hot(following, self.target.config.vocab_size).float()
            (result,) = results = step.commit(plan, step.verify(plan, logits))
            states = self.states
            self.drafter.observe(
                results, None if states is None else committed_rows(plan, results, states[rows])
            )
            if result.is_prompt:
                continue
            counts = (result.num_drafts, result.num_accepted, len(result.new_tokens))
            score.stats.observe(*counts, result.num_levels)
            if plan.tree is None and result.num_drafts:
                known = min(result.num_accepted + 1, result.num_drafts)
                score.add_overlap(self._overlap(plan, rows, sampling)[:known])
        self.drafter.reset(self.name)

    def _positions(self, plan: StepPlan) -> Tensor:
        """Give the position of each row [T] of the step; drafts stand where the text goes on."""
        (request,) = plan.requests
        first = request.position + 1 - len(request.pending)
        pending = torch.arange(first, request.position + 1, device=self.tokens.device)
        depths = torch.arange(1, request.num_drafts + 1, device=self.tokens.device)
        if plan.tree is not None:
            depths = plan.tree.depths[0, : request.num_drafts]
        rows = torch.cat((pending, request.position + depths))
        return rows.clamp(max=len(self.tokens) - 1)

    def _overlap(self, plan: StepPlan, rows: Tensor, sampling: SamplingParams) -> list[float]:
        batch = SamplingBatch.build([sampling], self.tokens.device)
        p = processed_probs(self.target.logits(self.final[rows])[None], batch).probs
        q = None if batch.all_greedy else plan.draft_probs
        count = int(count_drafts(plan.drafts))
        found: list[float] = overlap(p[:, :-1], q, plan.drafts)[0, :count].tolist()
        return found
