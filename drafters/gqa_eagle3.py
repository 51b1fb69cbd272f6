"""EAGLE-3 with a grouped-query layer as drafter, over its own paged keys and values.

Prompts attend over their own rows alone; everything else gathers what is cached of its requests.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from drafters.eagle3 import MOST_DRAFTS, Eagle3Drafter
from drafters.eagle3_config import check_eagle3
from drafters.gqa_cache import KeyValueCache
from drafters.gqa_config import GQAConfig
from drafters.gqa_eagle3_model import GQAEagle3Model
from drafters.gqa_model import mix_heads
from drafters.state_log import StateLog
from specmla import ArgumentError, SamplingCache, send_arrays

if TYPE_CHECKING:
    from torch import Tensor

    from drafters.eagle3_model import Eagle3Model
    from drafters.sheet import Wanted
    from specmla import Bucket, DeepseekForCausalLM, SamplingParams


class KeyTables(NamedTuple):
    """Tables of a pass over R rows: those of requests with a cache, then whole prompts.

    Attributes:
        along: what the caller sent with them.
        slots: [R], where the rows go.
        positions: [R], counted from the first cached row.
        table: [B, S], slots of the first B requests; what is not written yet is masked by position.
        spread: [B, n], each request's rows, filled up with its last.
        kept: index of every row in `spread`, which undoes it.
        prompts: rows of the others.
    """

    along: Mapping[str, Tensor]
    slots: Tensor
    positions: Tensor
    table: Tensor
    spread: Tensor
    kept: Tensor
    prompts: tuple[int, ...] = ()

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.slots)


class GQAEagle3Drafter(Eagle3Drafter):
    """Drafts chains with one grouped-query head, used again for every depth.

    Args:
        model: the target, which lends its embedding.
        draft: the head, on the same device.
        num_pages, page_size: of the drafter's own pool.
        backend: None: this layer has none.

    Raises:
        ArgumentError: a backend, or a head of another layer.
        CheckpointError: a head made for another target.
    """

    cache: KeyValueCache

    def __init__(
        self,
        model: DeepseekForCausalLM,
        draft: Eagle3Model,
        *,
        num_pages: int,
        page_size: int = 64,
        backend: str | None = None,
    ) -> None:
        found = []
        if not isinstance(draft, GQAEagle3Model):
            found.append(f"draft is a {type(draft).__name__}, accepted is a GQAEagle3Model")
        if backend is not None:
            found.append(f"backend is {backend!r}, accepted is None: no backend is used")
        if found:
            raise ArgumentError(f"{type(self).__name__}: " + "; ".join(found))
        config, weight = draft.config, draft.fc.weight
        check_eagle3(config, model.config, type(self).__name__)
        assert isinstance(config.attention, GQAConfig)
        self.model, self.draft = model, draft
        self.vocab_size, self.hidden_layers = config.vocab_size, config.target_layer_ids
        self.cache = KeyValueCache(
            config.attention,
            1,
            num_pages=num_pages,
            page_size=page_size,
            max_seq_len=model.config.max_position_embeddings + MOST_DRAFTS,
            dtype=weight.dtype,
            device=weight.device,
        )
        self._sampling, self._log = SamplingCache(weight.device), StateLog()

    def capture(self, buckets: Sequence[Bucket], sampling: Sequence[SamplingParams]) -> None:
        """Capture nothing: a pass gathers tables as wide as its longest request."""

    def _first_tables(self, ordered: Sequence[Wanted], along: Mapping[str, array[int]]) -> Any:
        cache, slots, positions = self.cache, array("q"), array("q")
        old = [w for w in ordered if not self._is_new(w)]
        counts = [self._log[w.request_id].num_pending for w in ordered]
        for w in ordered:
            run = self._log[w.request_id]
            start = run.stored - run.first
            slots.extend(cache.slots(w.request_id, start, run.num_known))
            positions.extend(range(start, run.num_known))
        width, spread, kept, first = max(counts[: len(old)], default=0), array("q"), array("q"), 0
        for count in counts[: len(old)]:
            kept.extend(range(len(spread), len(spread) + count))
            last = first + count - 1
            spread.extend([*range(first, last), *[last] * (width - count + 1)])
            first += count
        ends = [self._log[w.request_id].num_known for w in old]
        table = cache.table([w.request_id for w in old], ends) if old else array("q")
        own = {"slots": slots, "positions": positions, "spread": spread, "kept": kept}
        sent = send_arrays({**along, **own, "table": table}, cache.rows.device)
        shape = (len(old), -1) if old else (0, 0)
        return KeyTables(
            sent,
            sent["slots"],
            sent["positions"],
            sent["table"].view(shape),
            sent["spread"].view(shape),
            sent["kept"],
            tuple(counts[len(old) :]),
        )

    def _later_rounds(self, deep: Sequence[Wanted]) -> Iterator[KeyTables]:
        names = [w.request_id for w in deep]
        known = array("q", [self._log[name].num_known for name in names])
        ends = [length + w.drafts - 1 for length, w in zip(known, deep, strict=True)]
        sent = send_arrays(
            {"known": known, "table": self.cache.table(names, ends)}, self.cache.rows.device
        )
        table = sent["table"].view(len(deep), -1)
        for depth in range(1, deep[0].drafts):
            count = sum(w.drafts > depth for w in deep)
            rows = torch.arange(count, device=table.device)
            own = sent["known"][:count] + (depth - 1)
            yield KeyTables({}, table[rows, own], own, table[:count], rows[:, None], rows)

    def _run(self, tokens: Tensor, states: Tensor, tables: KeyTables) -> Tensor:
        draft = self.draft
        assert isinstance(draft, GQAEagle3Model)
        layer, attention = draft.layer, draft.attention
        embedded = self.model.model.embed_tokens(tokens).to(states.dtype)
        angles = draft.rotary.at(tables.positions, states.dtype)
        joined = layer.joined(embedded, states)
        query, (key, value) = attention.query(joined, angles), attention.key_value(joined, angles)
        self.cache.rows.store(0, key.flatten(1), value.flatten(1), tables.slots)
        mixed = [self._over_cache(query, tables)] if len(tables.kept) else []
        end = len(tables.kept)
        for count in tables.prompts:
            start, end = end, end + count
            own_query, own_key, own_value = (x[None, start:end] for x in (query, key, value))
            mixed.append(mix_heads(own_query, own_key, own_value, None)[0])
        return layer.finish(states, attention.o_proj(torch.cat(mixed)))

    def _over_cache(self, query: Tensor, tables: KeyTables) -> Tensor:
        """Attend from the rows of requests with a cache, [R', H * d]."""
        config = self.draft.config.attention
        assert isinstance(config, GQAConfig)
        count, width = tables.table.shape
        places = tables.positions[tables.spread]
        seen = torch.arange(width, device=places.device) <= places[..., None]
        # What no row sees may be unwritten: it is not read, as no weight makes a NaN vanish.
        slots = torch.where(seen[:, -1], tables.table, -1)
        cached = self.cache.rows.gather(0, slots.flatten())
        cached = cached.view(count, width, 2, config.num_kv_heads, config.head_dim)
        mixed = mix_heads(query[tables.spread], cached[:, :, 0], cached[:, :, 1], seen[:, None])
        return mixed.flatten(0, 1)[tables.kept]
