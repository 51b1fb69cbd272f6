"""One timed run of the loop over a batch of prompts, with what a report needs of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from specmla.budget.base import Budget
from specmla.decode import Prompt, decode_loop
from specmla.generate import build_step, make_runner
from specmla.models.deepseek import DeepseekForCausalLM
from specmla.verify.proposal import Drafter, RequestResult
from specmla.verify.sampling import SamplingParams
from specmla.verify.stats import AcceptanceStats
from specmla.verify.step import VerifyStep

MakeDrafter = Callable[[VerifyStep], Drafter]
PAGE = 64


@dataclass
class Run:
    """Tokens of each prompt with a mark on those that came from accepted drafts.

    Attributes:
        tokens: new tokens by prompt.
        drafted: by prompt, true where the token was an accepted draft.
        finish_reasons: "stop" or "length" by prompt.
        stats: over all verify steps.
        stats_by_prompt: the same for each prompt.
        seconds: wall time of the loop, prompts included.
    """

    tokens: list[list[int]]
    drafted: list[list[bool]]
    stats_by_prompt: list[AcceptanceStats]
    finish_reasons: list[str]
    stats: AcceptanceStats = field(default_factory=AcceptanceStats)
    seconds: float = 0.0

    def add(self, place: int, result: RequestResult) -> None:
        """Take in what a step emitted for the prompt at `place`."""
        count = len(result.new_tokens)
        self.tokens[place] += result.new_tokens
        self.finish_reasons[place] = result.finish_reason or ""
        self.drafted[place] += [j < result.num_accepted for j in range(count)]
        if not result.is_prompt:
            for counts in (self.stats, self.stats_by_prompt[place]):
                counts.observe(result.num_drafts, result.num_accepted, count, result.num_levels)

    @property
    def num_tokens(self) -> int:
        """Tokens emitted over all prompts."""
        return sum(len(t) for t in self.tokens)

    @property
    def tokens_per_s(self) -> float:
        """Emitted tokens per second of wall time."""
        return self.num_tokens / self.seconds


def run_loop(
    model: DeepseekForCausalLM,
    prompts: Sequence[Sequence[int]],
    sampling: Sequence[SamplingParams],
    drafter: Drafter | MakeDrafter | None = None,
    *,
    num_speculative_tokens: int | Budget = 4,
    backend: str | None = None,
    rule: str = "token_level",
    graphs: bool = False,
    on_tokens: Callable[[int], None] = lambda count: None,
) -> Run:
    """Continue the prompts in one batch; `on_tokens` hears how many tokens each step emitted.

    Graphs, if asked for, are captured before the clock starts.

    A function as drafter makes one beside the step, whose cache then has a layer for its rows.
    """
    batch: dict[Hashable, Prompt] = dict(enumerate(zip(prompts, sampling, strict=True)))
    step = build_step(
        model,
        num_pages=_num_pages(model, batch.values()),
        page_size=PAGE,
        backend=backend,
        rule=rule,
        num_draft_layers=int(callable(drafter)),
    )
    if callable(drafter):
        drafter = drafter(step)
    made = [AcceptanceStats() for _ in batch]
    run = Run([[] for _ in batch], [[] for _ in batch], made, [""] * len(batch))
    place = {name: i for i, name in enumerate(batch)}
    runner = make_runner(model, step, batch, drafter, num_speculative_tokens, graphs)
    _synchronize(model)
    start = time.perf_counter()
    for results in decode_loop(runner, batch, drafter, num_speculative_tokens):
        for result in results:
            run.add(place[result.request_id], result)
        on_tokens(sum(len(r.new_tokens) for r in results))
    _synchronize(model)
    run.seconds = time.perf_counter() - start
    return run


def _num_pages(model: DeepseekForCausalLM, batch: Iterable[Prompt]) -> int:
    longest = model.config.max_position_embeddings
    need = (min(longest, len(p) + (s.max_tokens or longest)) for p, s in batch)
    return sum(-(-n // PAGE) + 1 for n in need)


def _synchronize(model: DeepseekForCausalLM) -> None:
    if model.model.embed_tokens.weight.device.type == "cuda":
        torch.cuda.synchronize()
