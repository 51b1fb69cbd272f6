"""FlashMLA's dense decode kernel as a backend: an adapter over its operator library, if present."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from torch import Tensor

from specmla.backends.base import AttentionOutput, Capabilities, GraphSupport, Requirements
from specmla.backends.flashmla_op import (
    ARCH,
    CAPABILITY,
    DTYPES,
    OPERATOR,
    PAGE_SIZE,
    RANK,
    ROPE_DIM,
    Operator,
    dense_decode,
    flashmla_library,
)
from specmla.backends.flashmla_plan import (
    MASKS,
    FlashMLAPlan,
    make_plan,
    part_problems,
    plan_buffers,
)
from specmla.backends.step_size import StepSize
from specmla.backends.triton_prompts import TritonPrompts
from specmla.buffers import Buffer
from specmla.errors import UnsupportedError, require
from specmla.kernels import inputs
from specmla.mask import DraftMask
from specmla.metadata import VerifyPart
from specmla.query import QueryLenSupport

HINT = "pip install --no-deps sgl-flash-mla, or FlashMLABackend(library=FILE)"


class FlashMLABackend(TritonPrompts):
    """Attends by FlashMLA's operator; prompts go through our Triton kernel.

    It knows one Q a batch, pages of 64, and rows that are aligned bottom right (causal) or see all
    keys (full): ragged requests, trees, windows and other extents are refused. On a GPU extents are
    not read: a row whose extent the operator does not compute gets NaN, never a wrong result.

    Args:
        library: its operator library; None looks for the installed package sgl-flash-mla. It is
            loaded when first used, never imported.
        operator: `dense_decode_fwd` itself, instead of a library.

    Raises:
        ArgumentError: both are given.
    """

    capabilities = Capabilities(
        name="flashmla",
        query_len_support=QueryLenSupport.UNIFORM,
        masks=MASKS,
        dtypes=DTYPES,
        device_types=("cuda",),
        page_size_multiple=PAGE_SIZE,
        ranks=(RANK,),
        rope_dims=(ROPE_DIM,),
        min_capability=CAPABILITY,
        architectures=(ARCH,),
        graphs=GraphSupport.UNIFORM,
        priority=-10,
        summary="FlashMLA's own operator, if its library is there; sm_90 only, pages of 64",
    )

    def __init__(self, library: Path | str | None = None, operator: Operator | None = None) -> None:
        both = library is not None and operator is not None
        reasons = ["library and operator are given, accepted is one"] if both else []
        require(reasons, "FlashMLABackend")
        file = None if library is None else Path(library)
        self._library = flashmla_library("library", file, HINT)
        self._operator = operator

    def unavailable(self) -> list[str]:
        """Report a missing library, and a missing triton package; nothing is loaded."""
        absent = [] if self._operator is not None else self._library.absent()
        return absent + super().unavailable()

    def declared_problems(self, need: Requirements) -> list[str]:
        """List what holds on any machine: pages of 64 tokens, no multiples of them."""
        found = super().declared_problems(need)
        if need.page_size > PAGE_SIZE and not need.page_size % PAGE_SIZE:
            found.append(f"page_size is {need.page_size}, accepted is {PAGE_SIZE}")
        return found

    def problems(self, need: Requirements) -> list[str]:
        """List what is in the way; the library is loaded only where nothing else is."""
        found = super().problems(need)
        if need.device.type == "cuda" and torch.cuda.is_available():
            got = torch.cuda.get_device_capability(need.device)
            if got > CAPABILITY:
                found.append(f"compute capability is {got[0]}.{got[1]}, accepted is 9.0")
        return found or ([] if self._operator is not None else self._library.missing())

    def plan(
        self,
        part: VerifyPart,
        *,
        num_heads: int,
        kv_lora_rank: int,
        dtype: torch.dtype = torch.bfloat16,
    ) -> VerifyPart:
        """Check the step's form and tidy its table on the device; the schedule comes with the
        first layer's call.

        A part that has a plan of the same shape gets it again, written anew, its schedule dropped.
        Captured in a graph, the first layer's call makes the schedule at every replay.

        Raises:
            ArgumentError: ragged requests, a tree, windows, other pages, and on a CPU extents that
                are not those of the mask; all reasons are listed.
        """
        require(part_problems(part), "FlashMLABackend.plan")
        if not part.num_rows:
            return part
        return dataclasses.replace(part, plan=make_plan(part, num_heads, dtype))

    def scratch(self, size: StepSize) -> list[Buffer]:
        """Say what `plan` reserves; what the operator allocates by itself is not known here.

        Raises:
            UnsupportedError: another architecture.
        """
        if size.device.arch != ARCH:
            reason = f"architecture is {size.device.arch}, accepted is {ARCH}"
            raise UnsupportedError(f"backend {self.capabilities.name!r}", [reason])
        return plan_buffers(size) if size.num_rows else []

    def forward_mqa(
        self,
        q_latent: Tensor,
        q_rope: Tensor,
        latent_cache: Tensor,
        part: VerifyPart,
        *,
        softmax_scale: float,
    ) -> AttentionOutput:
        """Attend absorbed queries; see `AttentionBackend.forward_mqa`.

        Raises:
            ArgumentError: shapes, dtypes, strides or a plan that can't be taken; all are listed.
            UnsupportedError: there is no library.
        """
        found = inputs.mqa_problems(q_latent, q_rope, latent_cache, part)
        require(found or _call_problems(q_latent, q_rope, part), "FlashMLABackend.forward_mqa")
        rows, heads, rank = q_latent.shape
        if not rows:
            return AttentionOutput(q_latent.new_empty(0, heads, rank), _no_lse(q_latent))
        plan: FlashMLAPlan = part.plan
        requests, length, _ = plan.shape
        query = torch.cat([q_latent, q_rope], dim=-1).view(requests, length, heads, -1)
        with torch.cuda.device_of(q_latent):
            out, lse, plan.schedule = dense_decode(
                self._loaded(),
                query,
                latent_cache,
                (part.seq_lens, plan.block_table),
                softmax_scale=softmax_scale,
                causal=part.mask is DraftMask.CAUSAL,
                schedule=plan.schedule,
            )
        wrong = lse.shape != (requests, heads, length) or lse.dtype != torch.float32
        reason = f"LSE of the operator is {lse.dtype} {tuple(lse.shape)}, accepted is [B, H, Q]"
        require([reason] if wrong else [], "FlashMLABackend.forward_mqa")
        out, lse = out.reshape(rows, heads, rank), lse.transpose(1, 2).reshape(rows, heads)
        return AttentionOutput(
            torch.where(plan.is_set[..., None], plan.out[..., None], out),
            torch.where(plan.is_set, plan.lse, lse),
        )

    def _loaded(self) -> Operator:
        if self._operator is None:
            if missing := self._library.missing():
                raise UnsupportedError(f"backend {self.capabilities.name!r}", missing)
            self._operator = self._library.operator(OPERATOR)
        return self._operator


def _call_problems(q_latent: Tensor, q_rope: Tensor, part: VerifyPart) -> list[str]:
    found = part_problems(part)
    if (q_latent.shape[2], q_rope.shape[2]) != (RANK, ROPE_DIM):
        dims = f"{q_latent.shape[2]} and {q_rope.shape[2]}"
        found.append(f"C and R are {dims}, accepted are {RANK} and {ROPE_DIM}")
    if q_latent.dtype not in DTYPES:
        found.append(f"dtype is {q_latent.dtype}, accepted are {[str(d) for d in DTYPES]}")
    wanted = (part.num_requests, max(part.query_lens, default=0), q_latent.shape[1])
    has = getattr(part.plan, "shape", None)
    if part.num_rows and (not isinstance(part.plan, FlashMLAPlan) or has != wanted):
        found.append(
            f"part.plan is {type(part.plan).__name__} for (B, Q, H) = {has}, accepted is what this "
            f"backend's plan() gives for {wanted}"
        )
    elif part.num_rows and part.plan.out.dtype != q_latent.dtype:
        found.append(f"dtype is {q_latent.dtype}, the step was planned for {part.plan.out.dtype}")
    return found


def _no_lse(q_latent: Tensor) -> Tensor:
    return q_latent.new_empty(0, q_latent.shape[1], dtype=torch.float32)
