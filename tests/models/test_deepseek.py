"""The decoder against transformers, both in float64: every way to serve a sequence, same logits."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from specmla.config import MLAConfig
from specmla.metadata import RequestKind
from specmla.models.config import DeepseekConfig
from specmla.rope import rotary_frequencies
from specmla.testing.budget import relative_error

pytest.importorskip("transformers")
VERIFY, PROMPT = RequestKind.VERIFY, RequestKind.PROMPT
# Sums of a few hundred products through three layers in float64 stay orders of magnitude below;
# float32 anywhere on the way is orders of magnitude above.
EXACT = {"rtol": 0.0, "atol": 1e-10}


def draw(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(97) for _ in range(length)]


def same(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, **EXACT)


def test_forward_full(pair: Any) -> None:
    ids = torch.tensor([draw(23, 1), draw(23, 2)])
    with torch.no_grad():
        same(pair.ours.forward_full(ids), pair.oracle(ids))


def test_prompts_of_different_length(pair: Any, new_session: Any) -> None:
    texts = [draw(length, length) for length in (17, 1, 6)]
    logits = new_session(pair.ours, 3).step(*((r, PROMPT, t) for r, t in enumerate(texts)))
    for got, text in zip(logits, texts, strict=True):
        same(got, pair.oracle(text))


def test_prompt_in_chunks(pair: Any, new_session: Any) -> None:
    text = draw(19, 3)
    session = new_session(pair.ours, 1)
    got = [session.step((0, PROMPT, text[a:b]))[0] for a, b in ((0, 7), (7, 8), (8, 19))]
    same(torch.cat(got), pair.oracle(text))


def test_decode_step_by_step(pair: Any, new_session: Any) -> None:
    texts = [draw(20, 4), draw(13, 5)]
    session = new_session(pair.ours, 2)
    first = session.step((0, PROMPT, texts[0][:10]), (1, PROMPT, texts[1][:3]))
    steps = [
        session.step((0, VERIFY, texts[0][10 + i : 11 + i]), (1, VERIFY, texts[1][3 + i : 4 + i]))
        for i in range(10)
    ]
    for r in range(2):
        same(torch.cat([first[r], *(s[r] for s in steps)]), pair.oracle(texts[r]))


def test_verify_rows_see_their_drafts(pair: Any, new_session: Any) -> None:
    """Rows of one, four and zero tokens in one call, each causal among its own."""
    texts = [draw(9, 6), draw(12, 7), draw(5, 8)]
    session = new_session(pair.ours, 3)
    session.step(*((r, PROMPT, t[:5]) for r, t in enumerate(texts)))
    got = session.step((0, VERIFY, texts[0][5:6]), (1, VERIFY, texts[1][5:9]), (2, VERIFY, []))
    same(got[0], pair.oracle(texts[0][:6])[5:])
    same(got[1], pair.oracle(texts[1][:9])[5:])
    assert got[2].shape == (0, 97)


def test_roll_back(pair: Any, new_session: Any) -> None:
    """Rejected drafts leave rows behind that later steps overwrite or never read."""
    text, wrong = draw(21, 9), draw(4, 10)
    session = new_session(pair.ours, 1)
    session.step((0, PROMPT, text[:6]))
    at = 6
    for accepted in (0, 2, 3, 1):
        drafts = [*text[at + 1 : at + 1 + accepted], *wrong[accepted:3]]
        got = session.step((0, VERIFY, [text[at], *drafts]))[0]
        same(got[: accepted + 1], pair.oracle(text[: at + accepted + 1])[at:])
        session.lens[0] -= 3 - accepted
        at += 1 + accepted
    assert session.lens[0] == at


def test_prompts_and_verifies_in_one_step(pair: Any, new_session: Any) -> None:
    texts = [draw(length, 20 + length) for length in (11, 8, 14, 9)]
    session = new_session(pair.ours, 4)
    session.step((1, PROMPT, texts[1][:4]), (3, PROMPT, texts[3][:8]))
    got = session.step(
        (0, PROMPT, texts[0]),
        (1, VERIFY, texts[1][4:8]),
        (2, PROMPT, texts[2]),
        (3, VERIFY, texts[3][8:9]),
    )
    for r, skipped in enumerate((0, 4, 0, 8)):
        same(got[r], pair.oracle(texts[r])[skipped:])


def test_float32_errs_no_more_than_transformers(tmp_path: Any, new_pair: Any) -> None:
    """Budget: twice the error that transformers makes in float32, for another summation order."""
    ids = torch.tensor([draw(23, 1)])
    for name in ("v2-lite", "v3-yarn-bias"):
        single = new_pair(name, tmp_path / f"{name}-32", torch.float32)
        exact = single.ours.double()
        with torch.no_grad():
            want = exact.forward_full(ids)
            got = exact.float().forward_full(ids)
        assert relative_error(got, want) <= 2 * relative_error(single.oracle(ids), want)


def test_gradients_reach_every_weight(pair: Any) -> None:
    model = pair.ours.requires_grad_(True)
    try:
        logits = model.forward_full(torch.tensor([draw(40, 11)]))
        logits.logsumexp(-1).sum().backward()
        unreached = {n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()}
    finally:
        model.zero_grad(set_to_none=True)
        model.requires_grad_(False)
    # An expert that no token chose has none; which ones is up to the draw.
    assert not {name for name in unreached if ".experts." not in name}


def test_config_reads_objects_and_files_alike(pair: Any) -> None:
    assert DeepseekConfig.from_hf(pair.theirs.config) == pair.config
    assert DeepseekConfig.from_hf(pair.theirs.config.to_dict()) == pair.config
    assert DeepseekConfig.from_hf(pair.config.to_hf()) == pair.config


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize(("dim", "context", "fast"), [(64, 4096, 32.0), (32, 8192, 16.0)])
def test_yarn_frequencies(
    widened: Any, dim: int, context: int, fast: float, truncate: bool
) -> None:
    """At published sizes, where both ends of the ramp lie inside the rotated dimensions."""
    from transformers import DeepseekV3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_type": "yarn", "factor": 40.0, "beta_fast": fast, "truncate": truncate}
    rope |= {"original_max_position_embeddings": context, "rope_theta": 10000.0}
    config = DeepseekV3Config(rope_parameters=rope, qk_rope_head_dim=dim)
    with widened():
        want, factor = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    ours = MLAConfig.from_hf(config)
    assert ours.rope_scaling is not None
    same(rotary_frequencies(dim, ours.rope_theta, ours.rope_scaling), want)
    assert ours.rope_scaling.rotary_factor == pytest.approx(factor, rel=1e-12)


def test_no_gradients_are_kept_while_serving(pair: Any, new_session: Any) -> None:
    model = pair.ours.requires_grad_(True)
    try:
        session = new_session(model, 1)
        logits = session.step((0, PROMPT, draw(5, 12)))[0]
        assert not session.cache.layer(0).requires_grad
    finally:
        model.requires_grad_(False)
    assert logits.isfinite().all()
