"""The MTP module against the one of transformers, with the same weights."""

from __future__ import annotations

import pytest
import torch

from specmla import MTPModule
from tests.models.conftest import CASES, make_pair

V3 = [name for name, (version, _) in CASES.items() if version == "V3"]


@pytest.mark.parametrize("name", V3)
def test_the_module_is_that_of_transformers(name, tmp_path):
    layers = pytest.importorskip("transformers.modeling_layers")
    pair = make_pair(name, tmp_path, torch.float32)
    decoder, config = pair.theirs.model, pair.theirs.config
    kind, norm = type(decoder.layers[-1]), type(decoder.norm)
    torch.manual_seed(3)
    theirs = layers.MtpLayer(config, kind, norm, config.num_hidden_layers - 1).eval()
    with torch.no_grad():
        for key, weight in theirs.state_dict().items():
            if "norm" in key:
                weight.uniform_(0.5, 1.5)
            elif weight.is_floating_point():
                weight.normal_(std=0.2)
    ours = MTPModule(pair.config).eval()
    renamed = {
        key.replace("mtp_block.", "").replace("post_norm", "shared_head.norm"): weight
        for key, weight in theirs.state_dict().items()
    }
    expected = ours.state_dict()
    if set(renamed) != set(expected):  # transformers keeps experts in stacked tensors
        pytest.skip("the last layer has experts, which transformers stores otherwise")
    ours.load_state_dict(renamed)
    tokens = torch.randint(config.vocab_size, (1, 19))
    hidden = torch.randn(1, 18, config.hidden_size)
    positions = torch.arange(18)
    embedded = pair.ours.model.embed_tokens(tokens[:, 1:])
    zeroed = embedded.clone()
    zeroed[:, 0] = 0.0
    causal = torch.full((18, 18), -torch.inf).triu(1)[None, None]
    with torch.no_grad():
        want = theirs(
            zeroed,
            hidden,
            position_embeddings=decoder.rotary_emb(zeroed, position_ids=positions[None]),
            attention_mask=causal,
            position_ids=positions[None],
            cache=None,
        )
        angles = pair.ours.model.rotary.at(positions, torch.float32)
        got = ours.normed(ours.forward_full(ours.fuse(embedded, hidden, positions), angles))
    torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)
