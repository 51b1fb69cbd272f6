"""`kv_b_proj` whose weight stays e4m3 codes: half of the memory, widened where it is multiplied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from specmla.config import MLAConfig
from specmla.errors import UnsupportedError, require
from specmla.quant_output import QuantOutput
from specmla.row_local import DTYPES, multiply_codes, multiply_codes_by_head
from specmla.up_projection import UpProjection
from specmla.weight_scales import BLOCK, CODES, row_scales, scale_shapes, value_problems


class E4M3UpProjection(UpProjection):
    """`UpProjection` by a kernel that widens codes in registers (CUDA, or Triton's interpreter).

    Each weight is code times scale, rounded to the model's dtype: to the bit what loading them
    widened stores, so results differ from those in the order of float32 sums alone. Heads may begin
    anywhere in a block of scales. A row's bits don't depend on the batch. No gradients.

    Put in place of a layer's `kv_b_proj`; `load` writes other weights later, at the same addresses.

    Args:
        config: of the layer.
        dtype: of the model.
        device: of the codes; torch's default if None.

    Raises:
        ArgumentError: a dtype that the kernel has not.

    Attributes:
        weight: [H * (P + V), C] uint8, the codes' bits: a cast of the model leaves them alone.
        scale: [H * (P + V), ceil(C / 128)] float32, whatever the granularity of the checkpoint.
    """

    scale: Tensor
    like: Tensor

    def __init__(
        self, config: MLAConfig, dtype: torch.dtype, device: torch.device | None = None
    ) -> None:
        accepted = f"accepted are {[str(d) for d in DTYPES]}"
        require(
            [f"dtype is {dtype!r}, {accepted}"] if dtype not in DTYPES else [], "E4M3UpProjection"
        )
        nn.Module.__init__(self)
        self.config = config
        self.in_features = config.kv_lora_rank
        self.out_features = config.num_heads * (config.qk_nope_head_dim + config.v_head_dim)
        shape = (self.out_features, self.in_features)
        codes = torch.empty(shape, dtype=torch.uint8, device=device)
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.register_parameter("bias", None)
        blocks = -(-shape[1] // BLOCK)
        scale = torch.empty(shape[0], blocks, dtype=torch.float32, device=device)
        self.register_buffer("scale", scale, persistent=False)
        like = torch.empty(0, dtype=dtype, device=device)
        self.register_buffer("like", like, persistent=False)

    @classmethod
    def from_codes(
        cls, config: MLAConfig, codes: Tensor, scale: Tensor, dtype: torch.dtype
    ) -> E4M3UpProjection:
        """Copy codes and scale to a new module on their device, see `load`."""
        device = codes.device if isinstance(codes, Tensor) else None  # which load refuses
        made = cls(config, dtype, device)
        made.load(codes, scale)
        return made

    @torch.no_grad()
    def load(self, codes: Tensor, scale: Tensor) -> None:
        """Copy other weights in, in place: captured graphs stay valid.

        Args:
            codes: [H * (P + V), C] e4m3.
            scale: of 128 x 128 blocks, of channels or of the tensor (`scale_shapes`), any floating
                dtype; finite and > 0.

        Raises:
            ArgumentError: other shapes or dtypes, or such values; nothing was written.
        """
        shape, found = tuple(self.weight.shape), []
        if _kind(codes) != (CODES, shape):
            found.append(f"codes are {_told(codes)}, accepted are {CODES} {list(shape)}")
        accepted = scale_shapes(shape)
        dtype, given = _kind(scale)
        if given not in accepted or dtype is None or not dtype.is_floating_point:
            found.append(
                f"scale is {_told(scale)}, accepted are floating ones of "
                f"{', '.join(str(list(s)) for s in accepted)}"
            )
        require(found or value_problems("scale", scale), "E4M3UpProjection.load")
        self.weight.copy_(codes.view(torch.uint8))
        self.scale.copy_(row_scales(scale, shape))

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the model: of what goes in and comes out."""
        return self.like.dtype

    def forward(self, kv_latent: Tensor) -> Tensor:
        """Up-project `[..., C]` to `[..., H * (P + V)]`."""
        return multiply_codes(kv_latent, self.weight, self.scale)

    def absorb(self, q_nope: Tensor) -> Tensor:
        """Turn queries `[T, H, P]` into queries of latents `[T, H, C]`."""
        w_uk, _ = self._by_head(self.weight)
        scale, _ = self._by_head(self.scale)
        return multiply_codes_by_head(q_nope, w_uk, scale, along_k=True)

    def lift(self, latent: Tensor) -> Tensor:
        """Turn attended latents `[T, H, C]` into values `[T, H * V]`."""
        _, w_uv = self._by_head(self.weight)
        _, scale = self._by_head(self.scale)
        lifted = multiply_codes_by_head(latent, w_uv.transpose(1, 2), scale, along_k=False)
        return lifted.flatten(1)

    def absorbed_weights(self) -> tuple[Tensor, Tensor]:
        """Refuse: there are no such weights.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError("E4M3UpProjection", ["absorbed weights exist as e4m3 codes alone"])

    def lift_into(self, output: QuantOutput, latent: Tensor) -> None:
        """Lift latents `[T, H, C]` into the first T rows of a fused output."""
        _, w_uv = self._by_head(self.weight)
        _, scale = self._by_head(self.scale)
        output.lift(latent, w_uv.transpose(1, 2), scale)

    def _by_head(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """View a tensor of H * (P + V) rows as those of W_UK [H, P, *] and of W_UV [H, V, *]."""
        dims = self.config
        w_uk, w_uv = rows.unflatten(0, (dims.num_heads, -1)).split(
            (dims.qk_nope_head_dim, dims.v_head_dim), dim=1
        )
        return w_uk, w_uv

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move as any module, but keep scales float32: a cast is for the model's dtype."""
        scale = self.scale
        applied = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.scale = fn(scale.view(torch.int32)).view(torch.float32)
        return applied


def _kind(given: object) -> tuple[torch.dtype | None, tuple[int, ...] | None]:
    return (given.dtype, tuple(given.shape)) if isinstance(given, Tensor) else (None, None)


def _told(given: object) -> str:
    return f"{given.dtype} {list(given.shape)}" if isinstance(given, Tensor) else repr(given)
