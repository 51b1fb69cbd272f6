"""Linear maps and norms that can be switched to bits that don't depend on the number of rows.

Libraries choose tiles, and whether to split a sum, by the shape of the whole batch, so a row's last
bits change with its batch mates. Switched on, both run kernels of one fixed form instead.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor, nn

from specmla.errors import require

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
        require(_problems(rows, self.weight), "RMSNorm")
        from specmla.kernels.norm import norm_rows

        width = rows.shape[-1]
        eps = torch.finfo(rows.dtype).eps if self.eps is None else self.eps
        return norm_rows(rows.reshape(-1, width), self.weight, eps).view(rows.shape)


def multiply(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply rows `[..., I]` by a weight `[O, I]`: each row's bits depend on that row alone.

    Raises:
        ArgumentError: dtypes or a device that the kernel has not, or gradients asked for.
    """
    require(_problems(rows, weight), "multiply")
    from specmla.kernels.matmul import matmul_rows

    flat = rows.reshape(-1, 1, rows.shape[-1])
    return matmul_rows(flat, weight.t().unsqueeze(0), bias).view(*rows.shape[:-1], len(weight))


def multiply_heads(rows: Tensor, weight: Tensor) -> Tensor:
    """Multiply rows `[T, H, I]` by a weight a head `[H, I, O]`, as `multiply`; any strides.

    Raises:
        ArgumentError: as `multiply`.
    """
    require(_problems(rows, weight), "multiply_heads")
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
    require(_problems(rows, None), "multiply_codes")
    from specmla.kernels.matmul import WeightScale, matmul_rows

    return matmul_rows(rows, codes, None, WeightScale(scale, along_k))


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


def _problems(rows: Tensor, weight: Tensor | None) -> list[str]:
    found = []
    if weight is not None and rows.dtype != weight.dtype:
        found.append(f"rows are {rows.dtype}, the weight {weight.dtype}; must agree")
    if rows.dtype not in DTYPES or rows.device.type != "cuda":
        found += kernel_problems(rows.device, rows.dtype)
    asked = rows.requires_grad or (weight is not None and weight.requires_grad)
    if asked and torch.is_grad_enabled():
        found.append("gradients are asked for, batch-invariant kernels have none")
    return found
