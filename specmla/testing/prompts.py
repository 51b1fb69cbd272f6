"""Hostile input for the up-projected path: prompts over cached context, in chunks or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specmla.backends.base import AttentionBackend, AttentionOutput
from specmla.batch_split import BatchRules
from specmla.builder import MetadataBuilder
from specmla.cache.latent import LatentCache
from specmla.metadata import PrefillPart, RequestKind
from specmla.prefill import PromptAttention
from specmla.prompt_keys import PromptKeys
from specmla.reference import absorbed_mqa
from specmla.testing.case import VerifyCase, make_case
from specmla.workspace import PrefillWorkspace


@dataclass(frozen=True)
class PromptCase:
    """A `VerifyCase` whose requests are prompts, and one layer's up-projections.

    Attributes:
        base: cache, requests and rotated queries; NaN in all unused slots.
        q_nope: [T, H, P].
        w_uk: [H, P, C]. w_uv: [H, C, V]. In the case's dtype.
    """

    base: VerifyCase
    q_nope: Tensor
    w_uk: Tensor
    w_uv: Tensor

    def workspace(self, num_rows: int) -> PrefillWorkspace:
        """Make a locked workspace of that many rows, full of NaN."""
        spec = self.base.spec
        made = PrefillWorkspace(spec.width, spec.page_size, spec.dtype, spec.device)
        made.claim(num_rows)
        made.lock()
        made.rows(made.num_rows).fill_(float("nan"))
        return made

    def part(
        self, backend: AttentionBackend, workspace: PrefillWorkspace | None = None
    ) -> PrefillPart:
        """Build the prompt part of a step of all requests."""
        spec, pool = self.base.spec, self.base.latent_cache
        builder = MetadataBuilder(
            backend=backend,
            page_size=spec.page_size,
            num_pages=pool.shape[0],
            num_heads=spec.num_heads,
            kv_lora_rank=spec.kv_lora_rank,
            device=spec.device,
            max_seq_len=max(r.seq_len for r in self.base.requests),
            dtype=spec.dtype,
        ).configure(BatchRules(workspace=workspace))
        requests = [r._replace(kind=RequestKind.PROMPT) for r in self.base.requests]
        part = builder.build(requests).prefill
        assert part is not None
        return part

    def attend(
        self, backend: AttentionBackend, workspace: PrefillWorkspace | None = None
    ) -> AttentionOutput:
        """Attend all requests as a layer does: values [T, H, V] and their LSE."""
        attention, query = self.inputs(backend)
        return attention.attend(query, self.part(backend, workspace))

    def inputs(self, backend: AttentionBackend) -> tuple[PromptAttention, Tensor]:
        """Give a layer's attention and the query rows [T, H, P + R]."""
        cache = LatentCache.from_pool([self.base.latent_cache])
        attention = PromptAttention(
            backend, self.base.softmax_scale, partial(cache.gather, 0), self.expand
        )
        return attention, torch.cat((self.q_nope, self.base.q_rope), dim=-1)

    def expand(self, rows: Tensor) -> PromptKeys:
        """Up-project rows [n, A] to keys and values."""
        rank = self.base.spec.kv_lora_rank
        kv_latent, k_rope = rows[:, :rank], rows[:, rank:]
        k_nope = torch.einsum("nc,hpc->nhp", kv_latent, self.w_uk)
        return PromptKeys(k_nope, k_rope, torch.einsum("nc,hcv->nhv", kv_latent, self.w_uv))

    def oracle(self, dtype: torch.dtype = torch.float64) -> AttentionOutput:
        """Attend in `dtype` by the absorbed specification, which up-projects no key."""
        q_latent = torch.einsum("thp,hpc->thc", self.q_nope.to(dtype), self.w_uk.to(dtype))
        got = absorbed_mqa(
            q_latent,
            self.base.q_rope.to(dtype),
            self.base.latent_cache,
            self.base.tables(),
            softmax_scale=self.base.softmax_scale,
        )
        return AttentionOutput(torch.einsum("thc,hcv->thv", got.out, self.w_uv.to(dtype)), got.lse)


def make_prompt_case(
    batch: str | Sequence[tuple[int, int]], *, nope_dim: int = 128, v_dim: int = 128, **options: Any
) -> PromptCase:
    """Build a case of prompts (query_len, seq_len), each with a row at least.

    Args:
        batch: as `make_case` takes it; `seq_len` includes the new rows.
        nope_dim: P. v_dim: V.
        options: fields of `CaseSpec`.
    """
    base = make_case(batch, **options)
    spec, draw = base.spec, torch.Generator().manual_seed(base.spec.seed + 1)
    heads, rank = spec.num_heads, spec.kv_lora_rank
    num_rows = base.q_latent.shape[0]

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=draw) * scale).to(spec.device, spec.dtype)

    return PromptCase(
        base,
        normal(num_rows, heads, nope_dim),
        normal(heads, nope_dim, rank, scale=rank**-0.5),
        normal(heads, rank, v_dim, scale=rank**-0.5),
    )
