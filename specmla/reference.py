"""The specification: MLA decode attention in plain torch, twice, and the merge of its states.

Letters: B requests, T packed rows, S cached tokens of a request, H heads, C kv_lora_rank, R rope,
P nope, V v_head_dim, N pages, G tokens a page, A = C + R.

For row t and head h of a request whose cached row s is (c_s [C], r_s [R]):

    expanded:  k_s = w_uk_t[h] c_s [P],   v_s = c_s w_uv[h] [V]
               score_s = scale * (q_nope . k_s + q_rope . r_s),     out = sum_s p_s v_s
    absorbed:  q_latent = q_nope w_uk_t[h] [C]
               score_s = scale * (q_latent . c_s + q_rope . r_s),   out = sum_s p_s c_s

with p = softmax(score) over the keys that the row sees. `out_absorbed w_uv[h] = out_expanded`
(DeepSeek-V2, arXiv 2405.04434, section 2.1). The two functions share no code but the look-up of a
request's cached rows, so that their agreement is evidence. Both compute in the dtype of the query.
Everything is a loop over requests: to be read, not to be fast.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specmla.backends.base import AttentionOutput
from specmla.lse_merge import merged_states
from specmla.metadata import VerifyPart


def absorbed_mqa(
    q_latent: Tensor,
    q_rope: Tensor,
    latent_cache: Tensor,
    part: VerifyPart,
    *,
    softmax_scale: float,
) -> AttentionOutput:
    """Attend absorbed queries over the cached rows, all heads on the one KV head.

    Args:
        q_latent: [T, H, C]; its dtype is the one computed in.
        q_rope: [T, H, R]. R may be 0.
        latent_cache: [N, G, C + R], any dtype and page stride.
        part: which keys each row sees; `plan` is not looked at.
        softmax_scale: (P + R)^-0.5, times YaRN's factor.

    Returns:
        out [T, H, C] in the dtype of the query; lse [T, H] float32, natural log. A row without
        keys: 0 and -inf.
    """
    q_THA = torch.cat([q_latent, q_rope.to(q_latent)], dim=-1)
    out_THC = torch.zeros(q_latent.shape, dtype=q_latent.dtype, device=q_latent.device)
    wide = torch.promote_types(q_latent.dtype, torch.float32)
    lse_TH = torch.full(q_latent.shape[:2], -torch.inf, dtype=wide, device=q_latent.device)
    starts = part.query_start.tolist()
    for request in range(part.num_requests):
        rows = slice(starts[request], starts[request + 1])
        sees_QS = _visible_keys(part, request, rows)
        if not sees_QS.any():
            continue
        kv_SA = _cached_rows(latent_cache, part, request).to(q_latent)
        kv_SA = kv_SA.masked_fill(~sees_QS.any(0)[:, None], 0.0)
        score_QHS = torch.einsum("qha,sa->qhs", q_THA[rows], kv_SA) * softmax_scale
        score_QHS = score_QHS.masked_fill(~sees_QS[:, None, :], -torch.inf)
        lse_QH = score_QHS.to(wide).logsumexp(-1)
        p_QHS = score_QHS.softmax(-1).masked_fill(lse_QH[..., None] == -torch.inf, 0.0)
        out_THC[rows] = torch.einsum("qhs,sc->qhc", p_QHS, kv_SA[:, : q_latent.shape[-1]])
        lse_TH[rows] = lse_QH
    return AttentionOutput(out_THC, lse_TH.float())


def expanded_mha(
    q_nope: Tensor,
    q_rope: Tensor,
    latent_cache: Tensor,
    part: VerifyPart,
    *,
    w_uk_t: Tensor,
    w_uv: Tensor,
    softmax_scale: float,
) -> AttentionOutput:
    """Attend with keys and values projected up from the latents, one row and head at a time.

    Args:
        q_nope: [T, H, P]; its dtype is the one computed in. q_rope: [T, H, R]. R may be 0.
        latent_cache: [N, G, C + R], any dtype and page stride.
        part: which keys each row sees; `plan` is not looked at.
        w_uk_t: [H, P, C], keys' up-projection. w_uv: [H, C, V], values' up-projection.
        softmax_scale: (P + R)^-0.5, times YaRN's factor.

    Returns:
        out [T, H, V] in the dtype of the query; lse [T, H] float32, natural log. A row without
        keys: 0 and -inf.
    """
    num_rows, num_heads, _ = q_nope.shape
    rank = w_uk_t.shape[-1]
    out_THV = q_nope.new_zeros(num_rows, num_heads, w_uv.shape[-1])
    lse_TH = q_nope.new_full((num_rows, num_heads), -torch.inf)
    starts = part.query_start.tolist()
    for request in range(part.num_requests):
        cached_SA = _cached_rows(latent_cache, part, request).to(q_nope)
        for row in range(starts[request], starts[request + 1]):
            keys = _keys_of_row(part, request, row)
            if not keys:
                continue
            c_SC, r_SR = cached_SA[keys].split([rank, cached_SA.shape[1] - rank], dim=1)
            for head in range(num_heads):
                k_SP = c_SC @ w_uk_t[head].to(q_nope).T
                v_SV = c_SC @ w_uv[head].to(q_nope)
                score_S = k_SP @ q_nope[row, head] + r_SR @ q_rope[row, head].to(q_nope)
                score_S = score_S * softmax_scale
                weight_S = (score_S - score_S.max()).exp()
                out_THV[row, head] = (weight_S / weight_S.sum()) @ v_SV
                lse_TH[row, head] = score_S.max() + weight_S.sum().log()
    return AttentionOutput(out_THV, lse_TH.float())


def merge_attention_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> AttentionOutput:
    """Combine attention over two disjoint sets of keys, see `specmla.lse_merge.merged_states`.

    Args:
        out_a: [T, H, D]. lse_a: [T, H]. out_b, lse_b: likewise.

    Raises:
        ArgumentError: shapes that do not agree.
    """
    return AttentionOutput(*merged_states(out_a, lse_a, out_b, lse_b))


def _cached_rows(latent_cache: Tensor, part: VerifyPart, request: int) -> Tensor:
    """Gather a request's rows [S, A]; cells past its pages are not read."""
    seq_len = max(0, int(part.seq_lens[request]))
    num_pages = -(-seq_len // part.page_size)
    pages = part.block_table[request, :num_pages].long()
    return latent_cache[pages].flatten(0, 1)[:seq_len]


def _visible_keys(part: VerifyPart, request: int, rows: slice) -> Tensor:
    """Which keys each row of a request sees: [Q, S] bool."""
    seq_len, query_len = max(0, int(part.seq_lens[request])), rows.stop - rows.start
    key_S = torch.arange(seq_len, device=part.row_extent.device)
    sees = key_S < part.row_extent[rows, None]
    if part.row_start is not None:
        sees &= key_S >= part.row_start[rows, None]
    if part.tree_bits is not None:
        node_S = key_S - (seq_len - query_len)
        bit = (part.tree_bits[rows, None] >> node_S.clamp(0, 63)) & 1
        sees &= (node_S < 0) | (bit == 1)
    return sees


def _keys_of_row(part: VerifyPart, request: int, row: int) -> list[int]:
    """Which keys a packed row of a request sees, one by one."""
    seq_len, query_len = int(part.seq_lens[request]), part.query_lens[request]
    start = 0 if part.row_start is None else int(part.row_start[row])
    keys = range(start, min(seq_len, int(part.row_extent[row])))
    if part.tree_bits is None:
        return list(keys)
    word, prefix = int(part.tree_bits[row]) & (2**64 - 1), seq_len - query_len
    return [key for key in keys if key < prefix or word >> (key - prefix) & 1]
