"""A tiny EAGLE-3 head, and its drafts recomputed without any cache."""

from __future__ import annotations

import torch
from torch import Tensor

from drafters.eagle3_config import Eagle3Config
from drafters.eagle3_model import Eagle3Model
from tests.drafters.networks import VOCAB, attention, randomise, target_states


def tiny_eagle3(target, draft_vocab: int = 40) -> Eagle3Model:
    dims = attention(target.config.attention.hidden_size, heads=3)
    model = Eagle3Model(Eagle3Config(dims, 40, VOCAB, draft_vocab, (0, 1, 2)))
    randomise(model, 11)
    ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(5))[:draft_vocab].sort()
    model.d2t.copy_(ids.values - torch.arange(draft_vocab))
    return model.eval()


@torch.no_grad()
def eagle3_logits(target, model, tokens: list[int], drafts: list[int], first: int = 0) -> Tensor:
    """Logits [W] for the draft after `drafts`, -inf for what the head does not know."""
    states = target_states(target, tokens, model.config.target_layer_ids)
    hidden, known = model.fc(states[first : len(tokens) - 1]), tokens[first + 1 :]
    layer = model.layer
    for draft in [*drafts, None]:
        embedded = target.model.embed_tokens(torch.tensor(known))
        angles = model.rotary.at(torch.arange(first, first + len(known)), embedded.dtype)
        joined = layer.joined(embedded, hidden)[None]
        out = layer.finish(hidden, layer.self_attn.forward_full(joined, angles)[0])
        if draft is not None:
            hidden, known = torch.cat((hidden, out[-1:])), [*known, draft]
    full = torch.full((VOCAB,), -torch.inf)
    full[model.target_ids] = model.logits(out[-1])
    return full
