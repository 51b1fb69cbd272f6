"""Linear maps and norms that can be switched to bits that don't depend on the number of rows.

Libraries choose tiles, and whether to split a sum, by the shape of the whole batch, so a row's last
bits change with its batch mates. Switched on, both run kernels of one fixed form instead.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor, nn

from specmla.errors import require
from specmla.weight_scales import BLOCK

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of the kernels."""


class Linear(nn.Linear):
    """`nn.Linear`, or the product of `specmla.kernels.matmul`.

    Attributes:
        batch_invariant: whether the bits of a row of the result depend on that row alone; without
            gradients then.
    """

    batch_invariant = False

    def forward(self, rows: Tensor) -> Tensor:
        """Map `[..., I]` to `[..., O]`."""
        if self.batch_invariant:
            return multiply(rows, self.weight, self.bias)
        return super().forward(rows)


class RMSNorm(nn.RMSNorm):
    """`nn.RMSNorm`, or the norm of `specmla.kernels.norm`; `batch_invariant` as in `Linear`."""

    batch_invariant = False

    def forward(self, rows: Tensor) -> Tensor:
        """Norm `[..., D]` over the last dimension."""
        if not self.batch_invariant:
            return super().forward(rows)
        width = rows.shape[-1]
        found = _problems(rows, self.weight)
        if self.normalized_shape != (width,):
            found.append(f"rows are [..., {width}], normed are {list(self.normalized_shape)}")
        require(found, "RMSNorm")
        from specmla.kernels.norm import norm_rows

        eps = torch.finfo(rows.dtype).eps if self.eps is None else self.eps
        weight = None if self.weight is None else self.weight.contiguous()
        return norm_rows(rows.reshape(-1, width), weight, eps).view(rows.shape)


def multiply(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply rows `[..., I]` by a weight `[O, I]`: each row's bits depend on that row alone.

    Raises:
        ArgumentError: shapes that don't fit, dtypes or a device that the kernel has not, or
            gradients asked for.
    """
    found = _problems(rows, weight) + _misfits(rows, weight.shape[1:])
    if bias is not None and (bias.shape != weight.shape[:1] or not bias.is_contiguous()):
        found.append(f"bias is {list(bias.shape)}, accepted is {list(weight.shape[:1])} contiguous")
    require(found, "multiply")
    from specmla.kernels.matmul import matmul_rows

    flat = rows.reshape(-1, 1, rows.shape[-1])
    return matmul_rows(flat, weight.t().unsqueeze(0), bias).view(*rows.shape[:-1], len(weight))


def multiply_heads(rows: Tensor, weight: Tensor) -> Tensor:
    """Multiply rows `[T, H, I]` by a weight a head `[H, I, O]`, as `multiply`; any strides.

    Raises:
        ArgumentError: as `multiply`.
    """
    found = _problems(rows, weight) + _misfits(rows, weight.shape[:2], 3)
    require(found, "multiply_heads")
    from specmla.kernels.matmul import matmul_rows

    return matmul_rows(rows, weight)


def multiply_codes(rows: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """Multiply rows `[..., I]` by a weight `[O, I]` of e4m3 codes, as `multiply`.

    Args:
        rows: of the dtype that weights are widened to.
        codes: [O, I] uint8. scale: [O, ceil(I / 128)] float32.

    Raises:
        ArgumentError: as `multiply`.
    """
    require(_misfits(rows, codes.shape[1:]), "multiply_codes")
    flat, weight = rows.reshape(-1, 1, rows.shape[-1]), codes.t().unsqueeze(0)
    made = multiply_codes_by_head(flat, weight, scale.unsqueeze(0), along_k=False)
    return made.view(*rows.shape[:-1], len(codes))


def multiply_codes_by_head(rows: Tensor, codes: Tensor, scale: Tensor, *, along_k: bool) -> Tensor:
    """Multiply rows `[T, H, I]` by codes a head `[H, I, O]`, as `multiply_heads`.

    Args:
        rows, codes: any strides.
        scale: [H, I, ceil(O / 128)] float32 if `along_k`, else [H, O, ceil(I / 128)].
        along_k: the scales' rows are what is summed over.

    Raises:
        ArgumentError: as `multiply`.
    """
    found = _problems(rows, None, codes) + _misfits(rows, codes.shape[:2], 3)
    heads, inner, width = codes.shape
    held = (heads, *((inner, width) if along_k else (width, inner)))
    wanted = (*held[:2], -(-held[2] // BLOCK))
    if tuple(scale.shape) != wanted or scale.dtype != torch.float32:
        found.append(
            f"scale is {scale.dtype} {list(scale.shape)}, accepted is torch.float32 {list(wanted)}"
        )
    require(found, "multiply_codes")
    from specmla.kernels.matmul import WeightScale, matmul_rows

    return matmul_rows(rows, codes, None, WeightScale(scale, along_k))


def sum_values(rows: Tensor) -> Tensor:
    """Sum `[..., I]` to `[..., 1]`, as `multiply`."""
    return multiply(rows, rows.new_ones(1, rows.shape[-1]))


def sum_weighted(pairs: Tensor, weights: Tensor) -> Tensor:
    """Sum `[T, k, D]` over k, each times its weight `[T, k]`, to `[T, D]`: in float32, in order.

    Raises:
        ArgumentError: as `multiply`; the weights have a dtype of their own.
    """
    found = _problems(pairs, None) + _problems(weights, None)
    if pairs.dim() != 3 or pairs.shape[:2] != weights.shape:
        found.append(
            f"weights are {list(weights.shape)}, accepted is [T, k] of {list(pairs.shape)}"
        )
    if pairs.device != weights.device:
        found.append(f"pairs are on {pairs.device}, the weights on {weights.device}; must agree")
    require(found, "sum_weighted")
    from specmla.kernels.expert_sum import expert_sum

    return expert_sum(pairs.contiguous(), weights.contiguous())


def kernel_problems(device: torch.device, dtype: torch.dtype) -> list[str]:
    """List why the kernels can't serve tensors of that device and dtype."""
    found = []
    if dtype not in DTYPES:
        found.append(f"dtype is {dtype}, accepted are {[str(d) for d in DTYPES]}")
    if importlib.util.find_spec("triton") is None:
        return [*found, "the package triton is not installed"]
    from specmla.kernels.store import runs_on

    if not runs_on(device):
        found.append(f"device is {device.type!r}, accepted is 'cuda' (or Triton's interpreter)")
    return found


def _problems(rows: Tensor, weight: Tensor | None, codes: Tensor | None = None) -> list[str]:
    found = []
    if weight is not None and rows.dtype != weight.dtype:
        found.append(f"rows are {rows.dtype}, the weight {weight.dtype}; must agree")
    held = weight if codes is None else codes
    if held is not None and rows.device != held.device:
        found.append(f"rows are on {rows.device}, the weight on {held.device}; must agree")
    if rows.dtype not in DTYPES or rows.device.type != "cuda":
        found += kernel_problems(rows.device, rows.dtype)
    asked = rows.requires_grad or (weight is not None and weight.requires_grad)
    if asked and torch.is_grad_enabled():
        found.append("gradients are asked for, batch-invariant kernels have none")
    return found


def _misfits(rows: Tensor, last: tuple[int, ...], dims: int | None = None) -> list[str]:
    """List why rows don't end in these sizes, in so many dimensions: a kernel reads what it is told
    to, past the weight's end too."""
    if rows.shape[-len(last) :] == last and dims in (None, rows.dim()):
        return []
    return [
        f"rows are {list(rows.shape)}, accepted with this weight are [..., {str(list(last))[1:]}"
    ]
