"""How large a step is, as far as a backend's scratch depends on it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specmla.kernels.launch import Device, describe_device
from specmla.metadata import VerifyPart


@dataclass(frozen=True)
class StepSize:
    """Bounds of one verify step; no length is among them.

    Attributes:
        device: architecture and SMs.
        dtype: of query and cache.
        num_rows, num_requests, max_query_len: T, B, and the most rows of one request.
        num_heads, kv_lora_rank: H, C.
        page_size: G.
        table_keys: keys of a request that the block table has room for, M * G.
    """

    device: Device
    dtype: torch.dtype
    num_rows: int
    num_requests: int
    max_query_len: int
    num_heads: int
    kv_lora_rank: int
    page_size: int
    table_keys: int

    @classmethod
    def of(
        cls, part: VerifyPart, num_heads: int, kv_lora_rank: int, dtype: torch.dtype
    ) -> StepSize:
        """Measure a step's verify rows; nothing is read from the device."""
        return cls(
            device=describe_device(part.seq_lens.device),
            dtype=dtype,
            num_rows=part.num_rows,
            num_requests=part.num_requests,
            max_query_len=part.max_query_len,
            num_heads=num_heads,
            kv_lora_rank=kv_lora_rank,
            page_size=part.page_size,
            table_keys=part.block_table.shape[1] * part.page_size,
        )
