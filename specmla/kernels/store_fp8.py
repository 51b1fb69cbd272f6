"""Store rows as e4m3 codes: quantise new tokens' latent and rotated key into a pool of bytes."""

# Kernel bodies are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specmla.kernels.direct import DirectKernel
from specmla.kernels.e4m3 import clamp_finite, dynamic_scale, encode_e4m3
from specmla.kernels.fp8_rows import Fp8Rows
from specmla.kernels.launch import next_power_of_2

BLOCK_COLS, TILE = 64, 2048
NUM_WARPS = 4


@triton.jit(
    do_not_specialize=["num_rows", "num_slots"],
    do_not_specialize_on_alignment=["slots_ptr"],
)
def store_fp8_kernel(
    pool_ptr,  # [N, G, bytes] uint8
    scales_ptr,  # the same memory as float32, or None
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
    CODES: tl.constexpr,
    GROUP: tl.constexpr,
    SCALES_AT: tl.constexpr,
    COPIES: tl.constexpr,
    SCALED: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """One tile of BLOCK_ROWS tokens and one group of columns, or BLOCK_COLS of them."""
    step: tl.constexpr = GROUP if GROUP > 0 else BLOCK_COLS
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    lanes = tl.arange(0, BLOCK_COLS)
    cols = tl.program_id(1) * step + lanes
    slot = tl.load(slots_ptr + rows, mask=rows < num_rows, other=-1)
    live = (slot >= 0) & (slot < num_slots)
    slot = tl.where(live, slot, 0)
    inside = live[:, None] & ((lanes < step) & (cols < CODES))[None, :]
    is_latent = (cols < C)[None, :]
    latent_at = rows[:, None] * stride_latent_t + cols[None, :] * stride_latent_c
    rope_at = rows[:, None] * stride_rope_t + (cols - C)[None, :] * stride_rope_r
    latent = tl.load(kv_latent_ptr + latent_at, mask=inside & is_latent, other=0.0)
    rope = tl.load(k_rope_ptr + rope_at, mask=inside & (cols >= C)[None, :], other=0.0)
    value = tl.where(is_latent, latent, rope).to(tl.float32)
    row_at = slot // G * stride_page + slot % G * stride_row
    if GROUP > 0:
        value = clamp_finite(value, LIMIT)
        own = dynamic_scale(value)
        value = tl.div_rn(value, own[:, None])
        scales_at = row_at // 4 + SCALES_AT + tl.program_id(1)
        for copy in tl.static_range(COPIES):
            tl.store(scales_ptr + scales_at + copy, own, mask=live)
    elif SCALED:
        value = tl.div_rn(value, scale)
    tl.store(pool_ptr + row_at[:, None] + cols[None, :], encode_e4m3(value), mask=inside)


STORE_FP8 = DirectKernel(store_fp8_kernel)


def store_fp8_rows(
    form: Fp8Rows, pool: Tensor, kv_latent: Tensor, k_rope: Tensor, slots: Tensor
) -> None:
    """Quantise rows ([T, C], [T, R]) and write them at `slots` [T] of `pool` [N, G, bytes] uint8.

    Slots outside `0 .. N * G - 1` are skipped. The caller has checked shapes and dtypes, and that
    rows lie at multiples of 4 bytes where they hold scales.
    """
    from specmla.kernels.store import store_rows

    num_rows, (num_pages, page_size, _) = slots.shape[0], pool.shape
    if num_rows == 0:
        return
    block = next_power_of_2(form.group) if form.group else BLOCK_COLS
    block_rows = max(1, TILE // block)
    grid = (triton.cdiv(num_rows, block_rows), triton.cdiv(form.codes, form.group or block))
    with torch.cuda.device_of(pool):
        STORE_FP8.launch(
            grid,
            pool,
            pool.view(torch.float32) if form.group else None,
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
            C=kv_latent.shape[1],
            CODES=form.codes,
            GROUP=form.group,
            SCALES_AT=form.scales_at,
            COPIES=form.copies,
            SCALED=form.scale != 1.0,
            LIMIT=torch.finfo(kv_latent.dtype).max,
            BLOCK_ROWS=block_rows,
            BLOCK_COLS=block,
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )
    rope = k_rope.shape[1]
    if rope and form.codes == kv_latent.shape[1]:
        plain = pool.view(torch.bfloat16)[..., form.rope_at : form.rope_at + rope]
        # Converted by torch: Triton's interpreter truncates to bf16.
        store_rows(plain, kv_latent[:, :0].bfloat16(), k_rope.bfloat16(), slots)


def aot_variants() -> list[tuple[Any, dict[str, str], dict[str, int], dict[str, Any]]]:
    """List what is compiled ahead of time: kernel, signature, constexprs, launch options."""
    out = []
    forms = (
        (Fp8Rows(576, scale=0.5), "bf16", BLOCK_COLS),
        (Fp8Rows(576), "fp16", BLOCK_COLS),
        (Fp8Rows(512, 128, 128, rope_at=264), "bf16", 128),
        (Fp8Rows(576, 576, 144, 2), "fp32", 1024),
    )
    for form, element, block in forms:
        constexprs: dict[str, Any] = {"stride_latent_c": 1, "stride_rope_r": 1, "G": 64, "C": 512}
        constexprs |= {"CODES": form.codes, "GROUP": form.group, "SCALES_AT": form.scales_at}
        constexprs |= {"COPIES": form.copies, "SCALED": form.scale != 1.0, "LIMIT": 65504.0}
        constexprs |= {"BLOCK_ROWS": TILE // block, "BLOCK_COLS": block}
        signature = {"pool_ptr": "*u8", "scales_ptr": "*fp32", "scale": "fp32"}
        signature |= {"kv_latent_ptr": f"*{element}", "k_rope_ptr": f"*{element}"}
        signature |= {"slots_ptr": "*i64"} | dict.fromkeys(constexprs, "constexpr")
        scalars = [name for name in store_fp8_kernel.arg_names if name not in signature]
        signature |= dict.fromkeys(scalars, "i32")
        options = {"num_warps": NUM_WARPS, "enable_fp_fusion": False}
        out.append((store_fp8_kernel, signature, constexprs, options))
    return out
