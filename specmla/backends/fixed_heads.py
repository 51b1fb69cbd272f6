"""Any backend behind the contract of kernels that compute a fixed number of heads.

CUTLASS MLA is one: it reads 128 heads a row whatever the model has, and writes as many.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from specmla.backends.base import AttentionBackend, AttentionOutput, Requirements
from specmla.backends.head_workspace import HeadWorkspace
from specmla.backends.step_size import StepSize
from specmla.buffers import Buffer
from specmla.errors import count_problems, kind_problem, require
from specmla.metadata import PrefillPart, VerifyPart


class FixedHeads(AttentionBackend):
    """Gives a backend queries of `num_heads` heads and slices its outputs back.

    Queries are copied into one growing workspace (`pad_heads`), in which the surplus heads of a row
    are those of the next: no head is filled in, and what the backend makes of the surplus is
    dropped. Outputs are views [T, H, C] and [T, H] of the backend's own [T, num_heads, ...].

    The workspace must not be shared by concurrent calls: one instance serves one thread and one
    stream. A call that finds it in use raises. Capture graphs after `reserve`.

    Args:
        backend: what attends.
        num_heads: that it is given, at least those of the model.

    Raises:
        ArgumentError: fewer than one head.
    """

    def __init__(self, backend: AttentionBackend, num_heads: int = 128) -> None:
        wrong = kind_problem("backend", backend, AttentionBackend)
        require(wrong + count_problems({"num_heads": num_heads}), "FixedHeads")
        has = backend.capabilities
        self.backend, self.num_heads = backend, num_heads
        self.capabilities = dataclasses.replace(
            has,
            name=f"{has.name}-{num_heads}-heads",
            max_heads=num_heads,
            padded_heads=num_heads,
            summary=f"{has.name}, queries padded to {num_heads} heads",
        )
        self.batch_invariant, self.folds_prompts = backend.batch_invariant, backend.folds_prompts
        self.cache_format, self.query_form = backend.cache_format, backend.query_form
        self._workspace = HeadWorkspace()

    @property
    def workspace_bytes(self) -> int:
        """Bytes of padded queries held so far."""
        return self._workspace.num_bytes

    def reserve(
        self,
        num_rows: int,
        *,
        kv_lora_rank: int,
        rope_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """Claim the workspace for up to T rows and fix it: later growth raises.

        Args:
            num_rows: largest T. kv_lora_rank: C. rope_dim: R. dtype: of queries.
            device: that they lie on.

        Raises:
            BusyError: a call is using it.
        """
        where = torch.empty(0, device=device).device
        rows = num_rows * self.num_heads
        with self._workspace.claimed():
            self._workspace.reserve("q_latent", rows * kv_lora_rank, dtype, where)
            self._workspace.reserve("q_rope", rows * rope_dim, dtype, where)
            self._workspace.finalise()

    def unavailable(self) -> list[str]:
        """Ask the backend."""
        return self.backend.unavailable()

    def problems(self, need: Requirements) -> list[str]:
        """List what the backend can't serve with the fixed heads, and too many of them."""
        found = self.backend.problems(dataclasses.replace(need, num_heads=self.num_heads))
        return found + self._head_problems(need.num_heads)

    def declared_problems(self, need: Requirements) -> list[str]:
        """List what holds on any machine."""
        padded = dataclasses.replace(need, num_heads=self.num_heads)
        return self.backend.declared_problems(padded) + self._head_problems(need.num_heads)

    def _head_problems(self, num_heads: int) -> list[str]:
        if 1 <= num_heads <= self.num_heads:
            return []
        return [f"num_heads is {num_heads}, accepted are 1 to {self.num_heads}"]

    def plan(
        self,
        part: VerifyPart,
        *,
        num_heads: int,
        kv_lora_rank: int,
        dtype: torch.dtype = torch.bfloat16,
    ) -> VerifyPart:
        """Let the backend plan for the fixed heads.

        Raises:
            ArgumentError: more heads than that.
        """
        require(self._head_problems(num_heads), "FixedHeads.plan")
        return self.backend.plan(
            part, num_heads=self.num_heads, kv_lora_rank=kv_lora_rank, dtype=dtype
        )

    def scratch(self, size: StepSize) -> list[Buffer]:
        """Say what the backend's plan reserves for the fixed heads."""
        return self.backend.scratch(dataclasses.replace(size, num_heads=self.num_heads))

    def forward_mqa(
        self,
        q_latent: Tensor,
        q_rope: Tensor,
        latent_cache: Tensor,
        part: VerifyPart,
        *,
        softmax_scale: float,
    ) -> AttentionOutput:
        """Attend absorbed queries; see `AttentionBackend.forward_mqa`. Outputs have gaps.

        Raises:
            ArgumentError: shapes that disagree, too many heads, a workspace that would have to
                grow after `reserve`, or what the backend can't take.
            BusyError: another call is using the workspace.
        """
        require(self._query_problems(q_latent, q_rope), "FixedHeads.forward_mqa")
        heads = q_latent.shape[1]
        with self._workspace.claimed():
            got = self.backend.forward_mqa(
                self._workspace.padded("q_latent", q_latent, self.num_heads),
                self._workspace.padded("q_rope", q_rope, self.num_heads),
                latent_cache,
                part,
                softmax_scale=softmax_scale,
            )
        return AttentionOutput(got.out[:, :heads], got.lse[:, :heads])

    def _query_problems(self, q_latent: Tensor, q_rope: Tensor) -> list[str]:
        if q_latent.dim() != 3 or q_rope.dim() != 3 or q_latent.shape[:2] != q_rope.shape[:2]:
            return [
                f"q_latent is {tuple(q_latent.shape)} and q_rope {tuple(q_rope.shape)}, accepted "
                "are [T, H, C] and [T, H, R]"
            ]
        return self._head_problems(q_latent.shape[1])

    def forward_mha(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        part: PrefillPart,
        *,
        softmax_scale: float,
        causal: bool = True,
    ) -> AttentionOutput:
        """Attend prompt rows with their own heads; see `AttentionBackend.forward_mha`."""
        return self.backend.forward_mha(
            query, key, value, part, softmax_scale=softmax_scale, causal=causal
        )

    def attend_keys(self, *given: Any, **options: Any) -> AttentionOutput:
        """Attend as the backend does, see `AttentionBackend.attend_keys`."""
        return self.backend.attend_keys(*given, **options)

    def merge_states(self, held: AttentionOutput, got: AttentionOutput) -> None:
        """Merge as the backend does."""
        self.backend.merge_states(held, got)

    def fold_mha(self, *given: Any, **scale: Any) -> None:
        """Carry prompt rows on, see `AttentionBackend.fold_mha`."""
        self.backend.fold_mha(*given, **scale)
