"""Every backend gives the same greedy tokens, drafted or not; Triton runs interpreted here."""

from __future__ import annotations

import pytest
import torch

from specmla import build_step
from tests.e2e.conftest import ScriptedDrafter, prompts, run

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU tests/gpu covers this")


@pytest.mark.parametrize("backend", ["triton", "rows"])
def test_interpreted_backends_follow_the_reference(model, backend):
    batch = {name: pair for name, pair in prompts(4, max_tokens=6).items() if name != "r0"}
    plain, _ = run(model, batch)
    known = {name: batch[name][0] + plain[name] for name in batch}

    def half_right(tokens: list[int], k: int) -> list[int]:
        whole = next(w for w in known.values() if w[: len(tokens)] == tokens)
        rest = whole[len(tokens) :]
        return rest[:1] + [0] * (k - 1) if len(tokens) % 2 else rest

    for drafter in (None, ScriptedDrafter(half_right)):
        step = build_step(model, num_pages=30, page_size=16, backend=backend)
        for layer in range(model.config.num_layers):
            step.cache.layer(layer).fill_(float("nan"))
        tokens, history = run(model, batch, drafter, 3, step)
        assert tokens == plain
    assert any(r.num_accepted for results in history for r in results)
