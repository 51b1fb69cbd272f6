"""What a backend declares of itself, and what of a caller's needs that leaves out."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specmla.backends.graph_support import GraphSupport as GraphSupport
from specmla.backends.requirements import Requirements
from specmla.mask import DraftMask
from specmla.query import QueryLenSupport
from specmla.score_forms import score_problems


@dataclass(frozen=True)
class Capabilities:
    """What a backend serves; the support table of the README is printed from these.

    Attributes:
        name: the word that selects it.
        query_len_support: rows a request may bring to one call. A SINGLE_ONLY backend serves a
            verify through the row tables of the metadata.
        masks: relations among the new rows that it computes.
        dtypes: of query and cache (the same for both).
        device_types: torch device types; the first is its home, where it is preferred.
        page_size_multiple: page sizes are multiples of this.
        ranks: accepted kv_lora_rank values, or None for any.
        rope_dims: accepted qk_rope_head_dim values, or None for any.
        min_capability: least CUDA compute capability, or None.
        architectures: GPUs that it is made for, as launch tables name them; empty for any.
        max_heads: most query heads, or None for any number.
        padded_heads: heads that it computes whatever the model has, the surplus dropped; None:
            those of the model.
        gives_lse: rows come with their LSE, natural log in float32, so that shards can be merged.
        graphs: verifies that can be captured in a CUDA graph; prompts never are.
        priority: higher is preferred by `select_backend`.
        batch_invariant: the constructor takes it, and then a row's bits depend on its own query and
            keys alone.
        formats: quantised cache formats that the constructor takes, by name, beside plain rows.
        fp8_query: those of them with which it takes a `query_form` too.
        reorder_batch_threshold: most rows of an extend that the absorbed path serves faster than
            up-projection; `BatchRules` raises it to the rows of a verify.
        summary: one line for people.
    """

    name: str
    query_len_support: QueryLenSupport
    masks: frozenset[DraftMask]
    dtypes: tuple[torch.dtype, ...]
    device_types: tuple[str, ...]
    page_size_multiple: int = 1
    ranks: tuple[int, ...] | None = None
    rope_dims: tuple[int, ...] | None = None
    min_capability: tuple[int, int] | None = None
    architectures: tuple[str, ...] = ()
    max_heads: int | None = None
    padded_heads: int | None = None
    gives_lse: bool = True
    graphs: GraphSupport = GraphSupport.NEVER
    priority: int = 0
    batch_invariant: bool = False
    formats: tuple[str, ...] = ()
    fp8_query: tuple[str, ...] = ()
    reorder_batch_threshold: int = 1
    summary: str = ""


def size_problems(has: Capabilities, need: Requirements) -> list[str]:
    """List what of dtype, heads, pages and dims is not declared."""
    found = []
    if need.dtype not in has.dtypes:
        found.append(f"dtype is {need.dtype}, accepted are {[str(d) for d in has.dtypes]}")
    if need.num_heads < 1 or (has.max_heads is not None and need.num_heads > has.max_heads):
        accepted = "values >= 1" if has.max_heads is None else f"1 to {has.max_heads}"
        found.append(f"num_heads is {need.num_heads}, accepted are {accepted}")
    if need.page_size < 1 or need.page_size % has.page_size_multiple:
        found.append(
            f"page_size is {need.page_size}, accepted are multiples of {has.page_size_multiple}"
        )
    for label, got, accepted_dims in (
        ("kv_lora_rank", need.kv_lora_rank, has.ranks),
        ("qk_rope_head_dim", need.qk_rope_head_dim, has.rope_dims),
    ):
        if accepted_dims is not None and got not in accepted_dims:
            found.append(f"{label} is {got}, accepted are {list(accepted_dims)}")
    return found


def form_problems(has: Capabilities, need: Requirements) -> list[str]:
    """List what of masks, query lengths, LSE, graphs and forms of scores is not declared."""
    found, missing = [], sorted(m.value for m in need.masks - has.masks)
    if missing:
        served = sorted(m.value for m in has.masks)
        found.append(f"masks {missing} are not served, accepted are {served}")
    wide = [QueryLenSupport.SINGLE_ONLY, QueryLenSupport.UNIFORM, QueryLenSupport.VARLEN]
    adapter = has.query_len_support is QueryLenSupport.SINGLE_ONLY  # rows serve any shape
    if not adapter and wide.index(need.query_len_support) > wide.index(has.query_len_support):
        found.append(
            f"query_len_support {need.query_len_support.value!r} is needed, "
            f"{has.query_len_support.value!r} is served"
        )
    if need.lse and not has.gives_lse:
        found.append("lse is needed, accepted is False: rows come without")
    if not has.graphs.covers(need.graphs):
        found.append(f"graphs {need.graphs.value!r} are needed, accepted is {has.graphs.value!r}")
    return found + score_problems(
        alibi=need.alibi,
        sliding_window=need.sliding_window,
        logits_soft_cap=need.logits_soft_cap,
        sinks=need.sinks,
    )
