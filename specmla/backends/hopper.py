"""The Hopper backend: one warp-specialised kernel for the verify step, written in Gluon."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from specmla.backends.base import (
    AttentionOutput,
    Capabilities,
    GraphSupport,
    Requirements,
)
from specmla.backends.format_reasons import name_reasons
from specmla.backends.step_size import StepSize
from specmla.backends.triton_prompts import TritonPrompts
from specmla.buffers import Buffer
from specmla.cache.formats.base import CacheFormat, byte_problems
from specmla.cache.formats.plain import quantised
from specmla.cache.operations import fp8_rows
from specmla.errors import UnsupportedError, require
from specmla.kernels import inputs
from specmla.kernels.hopper.bounds import plan_buffers, plan_shape
from specmla.mask import DraftMask
from specmla.metadata import VerifyPart
from specmla.query import QueryLenSupport

CAPABILITY = (9, 0)
ARCH = "sm_90"
MIN_SMS = 16
SMALL_PAGES = (16, 32)


PIECE_KEYS = 2048
"""Keys of a piece of batch-invariant results."""


class HopperBackend(TritonPrompts):
    """Attends by the Hopper kernel.

    Args:
        batch_invariant: cut at multiples of `piece_keys`: the bits of a row depend on its own query
            and keys alone, not on other requests nor on how many rows its request brings. Scratch
            then grows with the width of the block table. Of plain rows only.
        piece_keys: keys of such a piece.
        cache_format: quantised format of the caches to read, one of `capabilities.formats`. Rows
            are then attended 32 at a time, each with a pass of its own over the keys: e4m3 saves
            time up to 32 packed rows a request.

    Raises:
        ArgumentError: another format, or `piece_keys` is no positive multiple of 64.
    """

    capabilities = Capabilities(
        name="hopper",
        query_len_support=QueryLenSupport.VARLEN,
        masks=frozenset(DraftMask),
        dtypes=(torch.bfloat16, torch.float16),
        device_types=("cuda",),
        page_size_multiple=16,
        ranks=(512,),
        rope_dims=(64,),
        min_capability=CAPABILITY,
        architectures=(ARCH,),
        graphs=GraphSupport.RAGGED,
        priority=30,
        batch_invariant=True,
        formats=("fp8",),
        summary="warp-specialised, planned on the device; sm_90 only, pages of 16, 32 or n * 64",
    )

    def __init__(
        self,
        *,
        batch_invariant: bool = False,
        piece_keys: int = PIECE_KEYS,
        cache_format: CacheFormat | None = None,
    ) -> None:
        found = name_reasons(cache_format, self.capabilities.formats)
        if piece_keys < 1 or piece_keys % 64:
            found.append(f"piece_keys is {piece_keys}, accepted are positive multiples of 64")
        require(found, "HopperBackend")
        self.cache_format = quantised(cache_format)
        self.batch_invariant = batch_invariant
        self._run = piece_keys // 64 if batch_invariant else 0

    def unavailable(self) -> list[str]:
        """Report a missing triton package or a ROCm build of torch."""
        found = super().unavailable()
        if torch.version.hip is not None:
            found.append("torch is built for ROCm, accepted is a CUDA build")
        return found

    def declared_problems(self, need: Requirements) -> list[str]:
        """List what holds on any machine: pages of 16, 32 or multiples of 64 tokens."""
        found = super().declared_problems(need)
        if need.page_size % 64 and need.page_size not in SMALL_PAGES and not need.page_size % 16:
            found.append(
                f"page_size is {need.page_size}, accepted are {list(SMALL_PAGES)} and multiples "
                "of 64"
            )
        return found + self._invariance_problems()

    def _invariance_problems(self) -> list[str]:
        if not self.batch_invariant or self.cache_format is None:
            return []
        return [f"batch_invariant over {self.cache_format.name!r} is True, accepted is False"]

    def problems(self, need: Requirements) -> list[str]:
        """List what is in the way, the one architecture included."""
        found = super().problems(need)
        if need.device.type == "cuda" and torch.cuda.is_available():
            has = torch.cuda.get_device_properties(need.device)
            if (has.major, has.minor) != CAPABILITY:
                found.append(f"compute capability is {has.major}.{has.minor}, accepted is 9.0")
            if has.multi_processor_count < MIN_SMS:
                found.append(
                    f"the device has {has.multi_processor_count} multiprocessors, accepted are "
                    f"{MIN_SMS} or more"
                )
        return found

    def plan(
        self,
        part: VerifyPart,
        *,
        num_heads: int,
        kv_lora_rank: int,
        dtype: torch.dtype = torch.bfloat16,
    ) -> VerifyPart:
        """Lay the step's pieces out on the device, from its live lengths; shared by all layers.

        Nothing is read back and no size depends on a length, so a captured plan follows the rows,
        requests and lengths of its replay, within T, B and the width of the table. A part that
        has a plan of the same shape gets it again, written anew.
        """
        from specmla.kernels.hopper.plan import make_plan

        if not part.num_requests:
            return part
        return dataclasses.replace(part, plan=make_plan(part, num_heads, self._run))

    def scratch(self, size: StepSize) -> list[Buffer]:
        """Say what `plan` reserves: two slots an SM, or one for each run of each tile.

        Raises:
            UnsupportedError: another architecture.
        """
        if size.device.arch != ARCH:
            reason = f"architecture is {size.device.arch}, accepted is {ARCH}"
            raise UnsupportedError(f"backend {self.capabilities.name!r}", [reason])
        shape = plan_shape(
            size.num_rows, size.num_requests, size.num_heads, self._run, size.table_keys
        )
        return list(plan_buffers(shape, size.device.num_sms)) if size.num_requests else []

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
            ArgumentError: shapes, dtypes, strides, a scale or a plan that can't be taken; all are
                listed.
        """
        if self.cache_format is not None:
            return self._attend_codes(q_latent, q_rope, latent_cache, part, softmax_scale)
        repeat = getattr(part.plan, "repeat", None)
        if repeat is not None:
            again = repeat.attend(q_latent, q_rope, latent_cache, part, softmax_scale)
            if again is not None:
                return AttentionOutput(*again)
        found = inputs.mqa_problems(q_latent, q_rope, latent_cache, part)
        require(
            found or _problems(q_latent, q_rope, latent_cache, part, softmax_scale),
            "HopperBackend.forward_mqa",
        )
        from specmla.kernels.hopper.launch import hopper_attention

        with torch.cuda.device_of(q_latent):
            out, lse = hopper_attention(
                q_latent, q_rope, latent_cache, part, part.plan, softmax_scale
            )
        return AttentionOutput(out, lse)

    def _attend_codes(
        self, q_latent: Tensor, q_rope: Tensor, cache: Tensor, part: VerifyPart, scale: float
    ) -> AttentionOutput:
        packed = self.cache_format
        assert packed is not None
        found = inputs.mqa_problems(q_latent, q_rope, cache, part, packed.bytes_per_row)
        found += byte_problems(packed, q_latent, q_rope, cache) + self._invariance_problems()
        require(
            found or _problems(q_latent, q_rope, cache, part, scale), "HopperBackend.forward_mqa"
        )
        from specmla.kernels.hopper.small_fp8.launch import small_fp8_attention

        with torch.cuda.device_of(q_latent):
            out, lse = small_fp8_attention(
                q_latent, q_rope, cache, part, part.plan, scale, fp8_rows(packed).scale
            )
        return AttentionOutput(out, lse)


def _problems(
    q_latent: Tensor, q_rope: Tensor, latent_cache: Tensor, part: VerifyPart, scale: float
) -> list[str]:
    """List what this kernel can't take beyond what the Triton kernels can't."""
    found = []
    if (q_latent.shape[2], q_rope.shape[2]) != (512, 64):
        found.append(
            f"C and R are {q_latent.shape[2]} and {q_rope.shape[2]}, accepted are 512 and 64"
        )
    if q_latent.dtype not in HopperBackend.capabilities.dtypes:
        accepted = [str(d) for d in HopperBackend.capabilities.dtypes]
        found.append(f"dtype is {q_latent.dtype}, accepted are {accepted}")
    if part.page_size % 64 and part.page_size not in SMALL_PAGES:
        found.append(
            f"page_size is {part.page_size}, accepted are {list(SMALL_PAGES)} and multiples of 64"
        )
    if (
        latent_cache.data_ptr() % 16
        or latent_cache.stride(0) * latent_cache.itemsize % 16
        or not latent_cache.shape[0]
    ):
        found.append(
            f"latent_cache starts at {latent_cache.data_ptr()} with page stride "
            f"{latent_cache.stride(0)} and {latent_cache.shape[0]} pages, accepted are an address "
            "and a stride in bytes that 16 divides, and at least one page"
        )
    if not scale > 0:
        found.append(f"softmax_scale is {scale}, accepted are positive values")
    shape = getattr(part.plan, "shape", None)
    wanted = (part.num_rows, part.num_requests, q_latent.shape[1])
    has = shape and (shape.num_rows, shape.num_requests, shape.num_heads)
    if getattr(part.plan, "program", None) is None or has != wanted:
        found.append(
            f"part.plan is {type(part.plan).__name__} for (T, B, H) = {has}, accepted is what this "
            f"backend's plan() gives for {wanted}"
        )
    return found
