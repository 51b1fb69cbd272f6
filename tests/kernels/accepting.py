"""Steps for fused acceptance, and the pure rule on the same numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specmla.kernels.accept import Accepted, AcceptInputs, Filters, fused_accept
from specmla.verify.accept import Acceptance, decide, find_rule, step_numbers
from specmla.verify.rules.terms import num_drafts
from specmla.verify.sampling import SamplingBatch, SamplingParams, processed_probs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Step(NamedTuple):
    inputs: AcceptInputs
    batch: SamplingBatch

    @property
    def filters(self) -> Filters:
        batch = self.batch
        min_p = torch.zeros_like(batch.top_p) if batch.min_p is None else batch.min_p
        return Filters(batch.temperature, batch.top_k, batch.top_p, min_p, batch.any_filter)

    def fused(self, rule: str, *, block: int | None = None, slots: int | None = None) -> Accepted:
        return fused_accept(self.inputs, self.filters, rule, block=block, slots=slots)

    def kept_mass(self) -> Tensor:
        """Give the exact mass [B, K + 1] float64 of what each row keeps, to its maximum."""
        logits = self.inputs.logits[self.inputs.table].double()
        kept = processed_probs(logits, self.batch).probs > 0
        temperature = self.batch.temperature.double().clamp(min=1e-9)[:, None, None]
        raised = (logits - logits.amax(-1, keepdim=True)) / temperature
        return raised.exp().where(kept, 0.0).sum(-1)

    def pure(self, rule: str) -> tuple[Acceptance, Tensor]:
        """Give what the rule decides, and the flags [B] of rows and draws."""
        logits, table, drafts, q, seeds, positions = self.inputs
        probs, flagged = processed_probs(logits[table], self.batch)
        terms = find_rule(rule)(probs, drafts, q)
        u = step_numbers(terms.ending, seeds, positions, drafts.shape[1])
        found = decide(terms, drafts, u.accept, u.correction)
        reached = torch.arange(table.shape[1], device=table.device) <= num_drafts(drafts)[:, None]
        return found, (flagged & reached).any(1) | found.flagged


def make_step(
    params: Sequence[SamplingParams],
    *,
    num_drafts: int = 2,
    width: int = 50,
    dense: bool = True,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    device: str = DEVICE,
    sharp: float = 3.0,
) -> Step:
    """Draw logits, and drafts from a q that lies near p; the table is a permutation of the rows."""
    b, generator = len(params), torch.Generator().manual_seed(seed)
    logits = (torch.randn(b, num_drafts + 1, width, generator=generator) * sharp).to(dtype)
    noise = torch.randn(b, num_drafts, width, generator=generator)
    q = torch.softmax(logits[:, :num_drafts].float() + noise, -1)
    drafts = torch.zeros(b, num_drafts, dtype=torch.int64)
    if num_drafts:
        drafts = torch.multinomial(q.flatten(0, 1), 1, generator=generator).view(b, num_drafts)
    order = torch.randperm(b * (num_drafts + 1), generator=generator)
    table = order.argsort().view(b, num_drafts + 1)
    batch = SamplingBatch.build(params, device)
    positions = torch.arange(b) * 7 + 3
    inputs = AcceptInputs(
        logits.flatten(0, 1)[order].to(device),
        table.to(device),
        drafts.to(device),
        q.to(device) if dense else None,
        batch.seeds,
        positions.to(device),
    )
    return Step(inputs, batch)


PLAIN = [SamplingParams(1.0, seed=3), SamplingParams(0.6, seed=4), SamplingParams(1.4, seed=9)]
MIXED = [
    SamplingParams(1.0, seed=3),
    SamplingParams(0.0, seed=4),
    SamplingParams(1.3, 9, seed=5),
    SamplingParams(0.9, 0, 0.8, seed=6),
    SamplingParams(1.1, 20, 0.7, seed=7, min_p=0.02),
    SamplingParams(0.9, seed=8, min_p=0.05),
    SamplingParams(0.8, 0, 0.9, seed=9, min_p=0.3),
    SamplingParams(1.0, 1, seed=10),
]
