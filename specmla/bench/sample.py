"""The float64 check of a large case, on some of its requests."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass
from itertools import accumulate

import torch

from specmla.backends.base import AttentionOutput
from specmla.bench.verify import Oracle, compute_oracle
from specmla.testing import (
    VerifyCase,
    assert_attention_within_budget,
    assert_within_budget,
    relative_error,
)

MOST_REQUESTS = 8
MOST_FLOPS = 2e11
"""A request is checked beyond the first only while all chosen ones cost less than this."""


@dataclass(frozen=True)
class SampledOracle:
    """What some requests of a case must give.

    Attributes:
        requests: how many.
        rows: [n] int64, their packed rows in the case.
        oracle: for these rows.
        width: A, for the error budget.
    """

    requests: int
    rows: torch.Tensor
    oracle: Oracle
    width: int

    def relative_error(self, got: AttentionOutput) -> float:
        """Give ||got - exact|| / ||exact|| over the chosen rows."""
        return relative_error(got.out[self.rows], self.oracle.exact.out)

    def verdict(self, got: AttentionOutput, *, checks_lse: bool) -> tuple[str | None, str | None]:
        """Give what is wrong with a result, and what is only worth a note.

        All rows must be finite; the chosen ones must keep the error budget.
        """
        if not bool(got.out.isfinite().all()):
            bad = int((~got.out.isfinite()).any(-1).any(-1).sum())
            return f"{bad} of {got.out.shape[0]} rows are not finite", None
        chosen = AttentionOutput(got.out[self.rows], got.lse[self.rows])
        exact, plain = self.oracle.exact, self.oracle.plain
        try:
            if not checks_lse:
                assert_within_budget(chosen.out, exact.out, plain.out)
            assert_attention_within_budget(
                chosen, exact, plain, self.oracle.plain_lse, score_width=self.width
            )
        except AssertionError as wrong:
            is_note = not checks_lse and str(wrong).startswith("lse")
            return (None, str(wrong)) if is_note else (str(wrong), None)
        return None, None


def sampled_oracle(case: VerifyCase) -> SampledOracle:
    """Compute the specification for a few requests, the longest among them.

    Which others is drawn from the case's seed.
    """
    chosen = _chosen(case)
    starts = [0, *accumulate(r.query_len for r in case.requests)]
    rows = torch.tensor(
        [row for i in chosen for row in range(starts[i], starts[i + 1])],
        dtype=torch.int64,
        device=case.q_latent.device,
    )
    part = dataclasses.replace(
        case,
        q_latent=case.q_latent[rows],
        q_rope=case.q_rope[rows],
        requests=tuple(case.requests[i] for i in chosen),
    )
    return SampledOracle(len(chosen), rows, compute_oracle(part), case.latent_cache.shape[-1])


def _chosen(case: VerifyCase) -> list[int]:
    costs = [
        2
        * r.query_len
        * r.seq_len
        * case.spec.num_heads
        * (case.spec.width + case.spec.kv_lora_rank)
        for r in case.requests
    ]
    others = [i for i, r in enumerate(case.requests) if r.query_len]
    first = max(others, key=costs.__getitem__)
    others.remove(first)
    random.Random(case.spec.seed).shuffle(others)
    chosen, spent = [first], costs[first]
    for i in others:
        if len(chosen) == MOST_REQUESTS or spent + costs[i] > MOST_FLOPS:
            break
        chosen.append(i)
        spent += costs[i]
    return sorted(chosen)
