"""Block drafters of grouped-query attention, with their own paged cache of keys and values.

A cached row is [keys | values] of one token. A pass gathers the context rows of every request and
attends densely over them and the block: no kernel of ours is needed, and none is used.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from drafters.block import BlockDrafter
from drafters.block_config import check_target
from drafters.block_model import pair_problems
from drafters.dspark import DSparkDrafter
from drafters.gqa_cache import KeyValueCache
from drafters.gqa_config import GQAConfig
from drafters.gqa_model import GQABlockModel
from drafters.state_log import StateLog
from specmla import ArgumentError, SamplingCache, send_arrays

if TYPE_CHECKING:
    from torch import Tensor

    from drafters.block_model import BlockDraftModel
    from drafters.sheet import Wanted
    from specmla import Bucket, DeepseekForCausalLM, SamplingParams


class _Sent(NamedTuple):
    """Tables of a pass: new context rows' `slots` and `positions`, `tokens` and `anchors` [B],
    `table` [B * S] slots of all context, -1 after a request's end, and `lengths` [B]."""

    along: Mapping[str, Tensor]


class GQABlockDrafter(BlockDrafter):
    """Runs blocks of grouped-query layers, see `BlockDrafter`.

    Args:
        model: the target, which lends embedding and head.
        draft: the block network, on the same device.
        num_pages, page_size: of the drafter's own pool, in tokens of context.
        backend: None: these layers have none.

    Raises:
        ArgumentError: a backend, or a network of other layers.
        CheckpointError: a network made for another target.
    """

    def __init__(
        self,
        model: DeepseekForCausalLM,
        draft: BlockDraftModel,
        *,
        num_pages: int,
        page_size: int = 64,
        backend: str | None = None,
    ) -> None:
        found = pair_problems(model, draft, GQABlockModel)
        if backend is not None:
            found.append(f"backend is {backend!r}, accepted is None: no backend is used")
        if found:
            raise ArgumentError(f"{type(self).__name__}: " + "; ".join(found))
        config = draft.config
        check_target(config, model.config, type(self).__name__)
        assert isinstance(config.attention, GQAConfig)
        weight = draft.fc.weight
        self.model, self.draft = model, draft
        self.vocab_size, self.hidden_layers = model.config.vocab_size, config.target_layer_ids
        self.cache = KeyValueCache(
            config.attention,
            config.num_layers,
            num_pages=num_pages,
            page_size=page_size,
            max_seq_len=model.config.max_position_embeddings + config.block_size,
            dtype=weight.dtype,
            device=weight.device,
        )
        self._sampling, self._log = SamplingCache(weight.device), StateLog()

    def capture(self, buckets: Sequence[Bucket], sampling: Sequence[SamplingParams]) -> None:
        """Capture nothing: a pass gathers tables as wide as its longest request."""

    def _build(self, wanted: Sequence[Wanted]) -> Any:
        """Send all tables of a pass in one copy."""
        cache, slots, positions = self.cache, array("q"), array("q")
        assert isinstance(cache, KeyValueCache)
        lengths = array("q")
        for w in wanted:
            run = self._log[w.request_id]
            start, end = run.stored - run.first, run.num_known
            slots.extend(cache.slots(w.request_id, start, end))
            positions.extend(range(start, end))
            lengths.append(end)
        along = {
            "slots": slots,
            "positions": positions,
            "tokens": array("q", [w.request.tokens[-1] for w in wanted]),
            "anchors": array("q", [len(w.request.tokens) - 1 for w in wanted]),
            "table": cache.table([w.request_id for w in wanted], lengths),
            "lengths": lengths,
        }
        return _Sent(send_arrays(along, cache.rows.device))

    def _store_context(self, wanted: Sequence[Wanted], metadata: Any) -> None:
        draft, sent = self.draft, metadata.along
        assert isinstance(draft, GQABlockModel)
        states = self._log.take(w.request_id for w in wanted)
        context = draft.context(states.to(self.cache.rows.dtype))
        angles = draft.rotary.at(sent["positions"], context.dtype)
        for index in range(draft.config.num_layers):
            key, value = draft.layer(index).self_attn.key_value(context, angles)
            self.cache.rows.store(index, key.flatten(1), value.flatten(1), sent["slots"])

    def _run(self, metadata: Any) -> Tensor:
        """Run [anchor, mask ...] of every request; states of the rows that predict, [B, ., D]."""
        draft, sent = self.draft, metadata.along
        assert isinstance(draft, GQABlockModel)
        config, lengths, rows = draft.config, sent["lengths"], self.cache.rows
        dims = config.attention
        assert isinstance(dims, GQAConfig)
        size, count = config.block_size, len(lengths)
        tokens = sent["tokens"][:, None].repeat(1, size)
        tokens[:, 1:] = config.mask_token_id
        x = self.model.model.embed_tokens(tokens).to(rows.dtype)
        place = torch.arange(size, device=lengths.device)
        angles = draft.rotary.at(lengths[:, None] + place, x.dtype)
        longest = len(sent["table"]) // count
        seen = torch.arange(longest, device=lengths.device) < lengths[:, None]
        mask = torch.nn.functional.pad(seen, (0, size), value=True)[:, None, None]
        heads = (2, dims.num_kv_heads, dims.head_dim)
        for index in range(config.num_layers):
            cached = rows.gather(index, sent["table"]).view(count, longest, *heads)
            x = draft.layer(index)(x, angles, (cached[:, :, 0], cached[:, :, 1]), mask)
        hidden: Tensor = draft.norm(x).to(self.model.model.embed_tokens.weight.dtype)
        return hidden if config.sample_from_anchor else hidden[:, 1:]


class GQADFlashDrafter(GQABlockDrafter):
    """Draws every position of a block from its own marginal."""


class GQADSparkDrafter(DSparkDrafter, GQABlockDrafter):
    """Draws a block position by position through the Markov head, see `DSparkDrafter`."""
