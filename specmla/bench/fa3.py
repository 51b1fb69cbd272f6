"""FlashAttention-3 with split head widths (rope as key, latent as value) as a provider.

The library is vLLM's build of it. Its `fwd` takes q = rope part [T, H, R], q_v = latent part
[T, H, C], k and v = the two column slices of the cache [N, G, 1, R] and [N, G, 1, C], and row
starts, lengths and page table as int32; it gives out [T, H, C] and lse [H, T]. What it calls
scheduler metadata is its plan: the split of every request, made on the device once a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from specmla.backends.base import AttentionOutput, Requirements
from specmla.bench.peers import PeerLibrary, lse_or_nan, shape_problems
from specmla.mask import DraftMask
from specmla.metadata import VerifyPart
from specmla.testing import VerifyCase, make_verify_part

PAGE_MULTIPLE = 16
NUM_SPLITS = 0
"""The library chooses."""

UNUSED = dict.fromkeys(
    [
        "k_new",
        "v_new",
        "out",
        "cu_seqlens_k",
        "cu_seqlens_k_new",
        "seqused_q",
        "kv_batch_idx",
        "leftpad_k",
        "rotary_cos",
        "rotary_sin",
        "seqlens_rotary",
        "q_descale",
        "k_descale",
        "v_descale",
        "pack_gqa",
        "s_aux",
        "cp_tot_seqused_k",
    ]
)
"""Arguments of `fwd` for what this attention does not have; the operator has no defaults."""


@dataclass(frozen=True)
class FA3Plan:
    """The step's tables and what the library made of them."""

    part: VerifyPart
    metadata: Tensor


class FA3Provider:
    """Attends by FlashAttention-3, if its library was given or is installed."""

    name = "fa3"
    checks_lse = False
    schedule_attends = False

    def __init__(self, file: Path | None = None) -> None:
        self.library = PeerLibrary(
            option="--fa3",
            package="vllm",
            member="vllm_flash_attn/_vllm_fa3_C.abi3.so",
            namespace="_vllm_fa3_C",
            file=file,
        )

    def missing(self) -> list[str]:
        """Ask the library."""
        return self.library.missing()

    def problems(self, need: Requirements) -> list[str]:
        """List what it can't serve; ragged queries are no problem."""
        shape = shape_problems(
            need,
            page_sizes=f"multiples of {PAGE_MULTIPLE}",
            serves_page=need.page_size % PAGE_MULTIPLE == 0,
        )
        return [*self.missing(), *shape]

    def note(self, case: VerifyCase) -> str | None:
        """Have nothing to add: it serves what it is given as it is."""
        return None

    def plan(self, case: VerifyCase) -> FA3Plan:
        """Write the tables and let the library split them."""
        part = make_verify_part(
            case.requests,
            case.spec.mask,
            page_size=case.spec.page_size,
            device=case.spec.device,
            unused_cell=0,
        )
        return FA3Plan(part, self._metadata(case, part))

    def schedule(self, case: VerifyCase, plan: FA3Plan) -> None:
        """Make the metadata again."""
        self._metadata(case, plan.part)

    def run(self, case: VerifyCase, latent_cache: Tensor, plan: FA3Plan) -> AttentionOutput:
        """Attend: out [T, H, C] and LSE [H, T]."""
        attend: Callable[..., list[Tensor]] = self.library.operator("fwd")
        rank, part = case.spec.kv_lora_rank, plan.part
        cache = latent_cache.unsqueeze(2)
        out, lse, *_ = attend(
            q=case.q_rope,
            k=cache[..., rank:],
            v=cache[..., :rank],
            q_v=case.q_latent,
            cu_seqlens_q=part.query_start,
            seqused_k=part.seq_lens,
            max_seqlen_q=part.max_query_len,
            max_seqlen_k=part.max_seq_len,
            page_table=part.block_table,
            softmax_scale=case.softmax_scale,
            scheduler_metadata=plan.metadata,
            softcap=0.0,
            is_rotary_interleaved=True,
            cp_world_size=1,
            cp_rank=0,
            **_shared(case),
            **UNUSED,
        )
        return AttentionOutput(out, lse)

    def result(self, got: AttentionOutput, plan: FA3Plan) -> AttentionOutput:
        """Give the LSE as [T, H]."""
        rows, heads, _ = got.out.shape
        return AttentionOutput(got.out, lse_or_nan(got.lse, (heads, rows)).transpose(0, 1))

    def _metadata(self, case: VerifyCase, part: VerifyPart) -> Tensor:
        make: Callable[..., Tensor] = self.library.operator("get_scheduler_metadata")
        return make(
            batch_size=part.num_requests,
            max_seqlen_q=part.max_query_len,
            max_seqlen_k=part.max_seq_len,
            num_heads=case.spec.num_heads,
            num_heads_k=1,
            headdim=case.spec.rope_dim,
            headdim_v=case.spec.kv_lora_rank,
            qkv_dtype=case.spec.dtype,
            seqused_k=part.seq_lens,
            cu_seqlens_q=part.query_start,
            cu_seqlens_k=None,
            cu_seqlens_k_new=None,
            seqused_q=None,
            leftpad_k=None,
            page_size=case.spec.page_size,
            max_seqlen_k_new=0,
            has_softcap=False,
            pack_gqa=None,
            **_shared(case),
        )


def _shared(case: VerifyCase) -> dict[str, Any]:
    """Give what plan and call must agree on: the mask and who chooses the splits."""
    return {
        "is_causal": case.spec.mask is DraftMask.CAUSAL,
        "window_size_left": -1,
        "window_size_right": -1,
        "num_splits": NUM_SPLITS,
        "sm_margin": 0,
    }
