"""The up-projection by W_UV with the output's quantisation in its epilogue.

A program computes BLOCK_M rows of one head, whole groups of its columns. What is quantised is the
product rounded to the model's dtype, so the codes are those of a separate quantisation.
"""

# Kernel bodies are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specmla.kernels.direct import DirectKernel
from specmla.kernels.e2m1 import E2M1_MAX, encode_e2m1, has_nan, join_halves
from specmla.kernels.e4m3 import E4M3_MAX, clamp_finite, decode_e4m3, encode_e4m3
from specmla.kernels.launch import next_power_of_2
from specmla.kernels.matmul import SCALE_BLOCK

BLOCK_N, NUM_WARPS = 128, 8
TILES = {2: (32, 32), 4: (16, 16)}
"""Rows and products of a step, by bytes of an element; the same for any number of rows, so that the
bits of a row don't depend on the others."""
LEAST_ABSMAX = tl.constexpr(1e-10)
LARGEST = tl.constexpr(3.4028234663852886e38)

NONE, STATIC, GROUPS, NVFP4 = (tl.constexpr(i) for i in range(4))


@triton.jit
def group_absmax(value):
    """Largest size in each row of [M, N], NaN where there is one."""
    largest = tl.max(tl.where(value == value, tl.abs(value), 0.0), axis=1)
    return tl.where(has_nan(value), float("nan"), largest)


@triton.jit(
    do_not_specialize=["num_rows"],
    do_not_specialize_on_alignment=["block_scale_ptr", "scale_ptr", "weight_scale_ptr"],
)
def lift_kernel(
    out_ptr,  # [T, H * V] of the model's dtype, uint8 codes, or [T, H * V / 2] uint8
    block_scale_ptr,  # [T, H * V / GROUP], float32 or uint8, or None
    scale_ptr,  # [1] float32, or None
    latent_ptr,  # [T, H, C]
    weight_ptr,  # [H, C, V], uint8 codes of e4m3 if they have scales
    weight_scale_ptr,  # [H, V, C / 128] float32, or None
    num_rows,
    stride_out,
    stride_block_t,
    stride_block_g,
    stride_latent_t,
    stride_latent_h,
    stride_weight_h,
    stride_weight_c,
    stride_weight_v,
    stride_weight_scale_h,
    stride_weight_scale_v,
    stride_weight_scale_c,
    C: tl.constexpr,
    V: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One tile of BLOCK_M rows and BLOCK_N columns of a head; GROUP columns share a made scale."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    first, head = tl.program_id(1) * BLOCK_N, tl.program_id(2).to(tl.int64)
    cols = first + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    alive = (rows < num_rows)[:, None]
    latent_at = (latent_ptr + rows * stride_latent_t + head * stride_latent_h)[:, None]
    weight_at = weight_ptr + head * stride_weight_h + cols.to(tl.int64)[None, :] * stride_weight_v
    if weight_scale_ptr is not None:
        shift = cols.to(tl.int64) * stride_weight_scale_v
        weight_scale_at = weight_scale_ptr + head * stride_weight_scale_h + shift
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, C, BLOCK_K):
        at = k + ks
        latent = tl.load(latent_at + at[None, :], mask=alive & (at < C)[None, :], other=0.0)
        inside = (at < C)[:, None] & (cols < V)[None, :]
        weight = tl.load(
            weight_at + at.to(tl.int64)[:, None] * stride_weight_c, mask=inside, other=0
        )
        if weight_scale_ptr is not None:
            scale_at = weight_scale_at + k // SCALE_BLOCK * stride_weight_scale_c
            weight_scale = tl.load(scale_at, mask=cols < V, other=0.0)
            weight = (decode_e4m3(weight) * weight_scale[None, :]).to(latent.dtype)
        acc = tl.dot(latent, weight, acc, input_precision="ieee")
    rounded = acc.to(latent_ptr.dtype.element_ty)
    out_at = out_ptr + (rows * stride_out)[:, None]
    kept = alive & (cols < V)[None, :]
    columns = head * V + cols[None, :]
    value = clamp_finite(rounded.to(tl.float32), LARGEST)
    if KIND == NONE:
        tl.store(out_at + columns, rounded, mask=kept)
    elif KIND == STATIC:
        tl.store(out_at + columns, encode_e4m3(tl.div_rn(value, tl.load(scale_ptr))), mask=kept)
    else:
        count: tl.constexpr = BLOCK_N // GROUP
        grouped = tl.reshape(value, [BLOCK_M * count, GROUP])
        absmax = group_absmax(grouped)
        if KIND == GROUPS:
            made = tl.div_rn(tl.maximum(absmax, LEAST_ABSMAX), E4M3_MAX)
            made = tl.where(absmax == absmax, made, float("nan"))
            code = encode_e4m3(tl.div_rn(grouped, made[:, None]))
            tl.store(out_at + columns, tl.reshape(code, [BLOCK_M, BLOCK_N]), mask=kept)
        else:
            whole = tl.load(scale_ptr)
            made = encode_e4m3(tl.div_rn(absmax, whole * E2M1_MAX))
            step = decode_e4m3(made) * whole
            is_zero = step == 0.0
            share = tl.div_rn(grouped, tl.where(is_zero, 1.0, step)[:, None])
            code = tl.where(is_zero[:, None], 0, encode_e2m1(share))
            halves = tl.arange(0, BLOCK_N // 2)[None, :]
            packed = join_halves(tl.reshape(code, [BLOCK_M, BLOCK_N]))
            byte_at = out_at + (head * V + first) // 2 + halves
            tl.store(byte_at, packed, mask=alive & (first + 2 * halves < V))
        group = tl.arange(0, count)[None, :]
        block_at = block_scale_ptr + (rows * stride_block_t)[:, None]
        block_at += ((head * V + first) // GROUP + group) * stride_block_g
        made = tl.reshape(made, [BLOCK_M, count])
        tl.store(block_at, made, mask=alive & (first + group * GROUP < V))


LIFT = DirectKernel(lift_kernel)


def lift_rows(
    latent: Tensor,
    weight: Tensor,
    kind: int,
    values: Tensor,
    scale: Tensor | None = None,
    block_scale: Tensor | None = None,
    weight_scale: Tensor | None = None,
) -> None:
    """Write latents [T, H, C] times W_UV [H, C, V] into the first T rows of `values`.

    Args:
        latent: last stride 1. weight: of the same dtype, or uint8 codes of e4m3; any strides.
        kind: 0 as they are, 1 e4m3 by `scale`, 2 e4m3 by groups, 3 nvfp4.
        values: [>= T, H * V] of the dtype, uint8, or [>= T, H * V / 2] uint8; columns contiguous.
        scale: [1] float32, for kinds 1 and 3. block_scale: [>= T, groups] float32 or uint8, for
            kinds 2 and 3, of whole groups in a head.
        weight_scale: [H, V, ceil(C / 128)] float32, of the weight's codes.
    """
    num_rows, heads, rank = latent.shape
    width = weight.shape[2]
    if not num_rows:
        return
    block_m, block_k = TILES[latent.element_size()]
    block_n = max(16, min(BLOCK_N, next_power_of_2(width)))
    grid = (triton.cdiv(num_rows, block_m), triton.cdiv(width, block_n), heads)
    with torch.cuda.device_of(latent):
        LIFT.launch(
            grid,
            values,
            block_scale,
            scale,
            latent.detach(),
            weight.detach(),
            weight_scale,
            num_rows,
            values.stride(0),
            *(block_scale.stride() if block_scale is not None else (0, 0)),
            *latent.stride()[:2],
            *weight.stride(),
            *((0, 0, 0) if weight_scale is None else weight_scale.stride()),
            C=rank,
            V=width,
            KIND=kind,
            GROUP=heads * width // block_scale.shape[1] if block_scale is not None else 1,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )


def aot_variants() -> list[tuple[Any, dict[str, str], dict[str, int], dict[str, Any]]]:
    """List what is compiled ahead of time: kernel, signature, constexprs, launch options."""
    out = []
    forms = ((0, 1, "bf16"), (1, 1, "bf16"), (2, 128, "bf16"), (2, 64, "fp16"), (3, 16, "bf16"))
    plain = [(*form, False) for form in (*forms, (0, 1, "fp32"), (3, 16, "fp32"))]
    by_codes = [(*form, True) for form in (*forms[1:], (2, 128, "fp32"))]
    for kind, group, element, codes in (*plain, *by_codes):
        block_m, block_k = TILES[4 if element == "fp32" else 2]
        constexprs: dict[str, Any] = {"stride_weight_c": 1, "C": 512, "V": 128, "KIND": kind}
        constexprs |= {"GROUP": group, "BLOCK_M": block_m, "BLOCK_N": BLOCK_N, "BLOCK_K": block_k}
        if not codes:
            constexprs["weight_scale_ptr"] = None
        if kind < 2:
            constexprs["block_scale_ptr"] = None
        if kind in (0, 2):
            constexprs["scale_ptr"] = None
        signature = {"block_scale_ptr": "*fp32" if kind == 2 else "*u8", "scale_ptr": "*fp32"}
        signature |= {"out_ptr": "*u8" if kind else f"*{element}"}
        signature |= {"latent_ptr": f"*{element}", "weight_scale_ptr": "*fp32"}
        signature |= {"weight_ptr": "*u8" if codes else f"*{element}"}
        signature |= dict.fromkeys(constexprs, "constexpr")
        scalars = [name for name in lift_kernel.arg_names if name not in signature]
        signature |= dict.fromkeys(scalars, "i32")
        options = {"num_warps": NUM_WARPS, "enable_fp_fusion": False}
        out.append((lift_kernel, signature, constexprs, options))
    return out
