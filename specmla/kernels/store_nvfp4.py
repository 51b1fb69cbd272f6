"""Store rows as `nvfp4_ds_mla`: e2m1 latents with an e4m3 scale for every 16, e4m3 rotated key."""

# Kernel bodies are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specmla.kernels.direct import DirectKernel
from specmla.kernels.e2m1 import E2M1_MAX, encode_e2m1, has_nan, join_halves
from specmla.kernels.e4m3 import E4M3_MAX, clamp_finite, decode_e4m3, encode_e4m3

BLOCK = 128
NUM_WARPS = 4
LEAST_GROUP_SCALE = tl.constexpr(2.0**-6)


class Nvfp4Rows(NamedTuple):
    """C and R of rows, and the scale of all of them."""

    rank: int
    rope: int
    scale: float = 1.0


@triton.jit(
    do_not_specialize=["num_rows", "num_slots"],
    do_not_specialize_on_alignment=["slots_ptr"],
)
def store_nvfp4_kernel(
    pool_ptr,  # [N, G, bytes] uint8
    kv_latent_ptr,  # [T, C]
    k_rope_ptr,  # [T, R]
    slots_ptr,  # [T] int64
    scale,
    num_rows,
    num_slots,
    stride_page,
    stride_row,
    stride_latent_t,
    stride_latent_c,
    stride_rope_t,
    stride_rope_r,
    G: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    SCALED: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK runs of 16 numbers: groups of latents, and runs of the rotated keys after them."""
    groups: tl.constexpr = C // 16
    runs: tl.constexpr = groups + (R + 15) // 16
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row, run = at // runs, at % runs
    slot = tl.load(slots_ptr + row, mask=row < num_rows, other=-1)
    live = (slot >= 0) & (slot < num_slots)
    slot = tl.where(live, slot, 0)
    row_at = slot // G * stride_page + slot % G * stride_row
    is_group = live & (run < groups)
    cols = run[:, None] * 16 + tl.arange(0, 16)[None, :]
    is_rope = live[:, None] & (cols >= C) & (cols < C + R)
    latent_at = row[:, None] * stride_latent_t + cols * stride_latent_c
    rope_at = row[:, None] * stride_rope_t + (cols - C) * stride_rope_r
    latent = tl.load(kv_latent_ptr + latent_at, mask=is_group[:, None], other=0.0).to(tl.float32)
    rope = tl.load(k_rope_ptr + rope_at, mask=is_rope, other=0.0).to(tl.float32)
    latent = clamp_finite(latent, LIMIT)
    if SCALED:
        latent, rope = tl.div_rn(latent, scale), tl.div_rn(rope, scale)
    bad = has_nan(latent)
    largest = tl.max(tl.where(latent == latent, tl.abs(latent), 0.0), axis=1)
    wanted = tl.minimum(tl.maximum(tl.div_rn(largest, E2M1_MAX), LEAST_GROUP_SCALE), E4M3_MAX)
    code = encode_e4m3(wanted)
    code += (decode_e4m3(code) < wanted).to(tl.uint8)
    code = tl.where(bad, 0x7F, code).to(tl.uint8)
    # Where the scale is NaN so are the shares, whose code is 0.
    share = tl.div_rn(latent, decode_e4m3(code)[:, None])
    halves = run[:, None] * 8 + tl.arange(0, 8)[None, :]
    packed = join_halves(encode_e2m1(share))
    tl.store(pool_ptr + row_at[:, None] + halves, packed, mask=is_group[:, None])
    tl.store(pool_ptr + row_at + (C // 2 + R) + run, code, mask=is_group)
    tl.store(pool_ptr + row_at[:, None] + (cols - C // 2), encode_e4m3(rope), mask=is_rope)


STORE_NVFP4 = DirectKernel(store_nvfp4_kernel)


def store_nvfp4_rows(
    form: Nvfp4Rows, pool: Tensor, kv_latent: Tensor, k_rope: Tensor, slots: Tensor
) -> None:
    """Quantise rows ([T, C], [T, R]) and write them at `slots` [T] of `pool` [N, G, bytes] uint8.

    Slots outside `0 .. N * G - 1` are skipped. The caller has checked shapes and dtypes.
    """
    num_rows, (num_pages, page_size, _) = slots.shape[0], pool.shape
    if num_rows == 0:
        return
    runs = form.rank // 16 + triton.cdiv(form.rope, 16)
    with torch.cuda.device_of(pool):
        STORE_NVFP4.launch(
            (triton.cdiv(num_rows * runs, BLOCK),),
            pool,
            kv_latent.detach(),
            k_rope.detach(),
            slots.contiguous(),
            form.scale,
            num_rows,
            num_pages * page_size,
            *pool.stride()[:2],
            *kv_latent.stride(),
            *k_rope.stride(),
            G=page_size,
            C=form.rank,
            R=form.rope,
            SCALED=form.scale != 1.0,
            LIMIT=min(torch.finfo(kv_latent.dtype).max, torch.finfo(torch.float32).max),
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )


def aot_variants() -> list[tuple[Any, dict[str, str], dict[str, int], dict[str, Any]]]:
    """List what is compiled ahead of time: kernel, signature, constexprs, launch options."""
    out = []
    for element, scaled in (("bf16", True), ("fp16", False), ("fp32", False)):
        constexprs: dict[str, Any] = {"stride_latent_c": 1, "stride_rope_r": 1, "G": 64, "C": 512}
        constexprs |= {"R": 64, "SCALED": scaled, "LIMIT": 65504.0, "BLOCK": BLOCK}
        signature = {"pool_ptr": "*u8", "slots_ptr": "*i64", "scale": "fp32"}
        signature |= {"kv_latent_ptr": f"*{element}", "k_rope_ptr": f"*{element}"}
        signature |= dict.fromkeys(constexprs, "constexpr")
        scalars = [name for name in store_nvfp4_kernel.arg_names if name not in signature]
        signature |= dict.fromkeys(scalars, "i32")
        options = {"num_warps": NUM_WARPS, "enable_fp_fusion": False}
        out.append((store_nvfp4_kernel, signature, constexprs, options))
    return out
