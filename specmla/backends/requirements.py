"""What a caller needs of a backend."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

import torch

from specmla.backends.graph_support import GraphSupport
from specmla.cache.formats.base import CacheFormat
from specmla.errors import kind_problem, require
from specmla.mask import DraftMask
from specmla.query import QueryLenSupport
from specmla.query_form import Fp8Query


def form_kinds(forms: Mapping[str, object]) -> list[str]:
    """List which of these, by argument, are no formats of rows and no form of queries, nor None."""
    found = []
    for name, form in forms.items():
        if form is not None:
            kind = Fp8Query if name == "query_form" else CacheFormat
            found += kind_problem(name, form, kind)
    return found


@dataclass(frozen=True)
class Requirements:
    """What a caller needs of a backend, for `AttentionBackend.problems` and `select_backend`.

    `dtype` is that of the model: of queries, unless they have a form, and of attended rows. What
    other models do to scores (`alibi` slopes, a `sliding_window`, a `logits_soft_cap`, `sinks`) is
    asked for here to be refused by name.
    """

    device: torch.device
    dtype: torch.dtype
    num_heads: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    page_size: int
    masks: frozenset[DraftMask] = frozenset({DraftMask.CAUSAL})
    query_len_support: QueryLenSupport = QueryLenSupport.SINGLE_ONLY
    batch_invariant: bool = False
    format: CacheFormat | None = None  # of the cache; None or plain for rows in `dtype`
    query_form: Fp8Query | None = None  # of absorbed queries; None for numbers in `dtype`
    lse: bool = False  # whether shards are merged
    graphs: GraphSupport = GraphSupport.NEVER  # verifies to be captured
    alibi: bool = False
    sliding_window: int | None = None
    logits_soft_cap: float | None = None
    sinks: bool = False

    def __post_init__(self) -> None:
        """Refuse what can't be compared with what backends declare.

        Raises:
            ArgumentError: sizes that are no integers, no device, no dtype, names in the place of
                formats, masks or supports; all are listed.
        """
        names = ("num_heads", "kv_lora_rank", "qk_rope_head_dim", "page_size")
        sizes = {name: getattr(self, name) for name in names}
        wrong = {n: v for n, v in sizes.items() if not isinstance(v, int) or isinstance(v, bool)}
        found = [f"{name} is {value!r}, accepted are integers" for name, value in wrong.items()]
        found += kind_problem("device", self.device, torch.device)
        found += kind_problem("dtype", self.dtype, torch.dtype)
        if not isinstance(self.masks, Set) or not all(isinstance(m, DraftMask) for m in self.masks):
            found.append(f"masks is {self.masks!r}, accepted are sets of {list(DraftMask)}")
        found += kind_problem("query_len_support", self.query_len_support, QueryLenSupport)
        found += kind_problem("graphs", self.graphs, GraphSupport)
        found += form_kinds({"format": self.format, "query_form": self.query_form})
        require(found, "Requirements")
