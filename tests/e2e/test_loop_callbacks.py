"""What a loop does with drafters that look empty, or fail in a callback."""

from __future__ import annotations

import pytest

from specmla import SamplingParams, generate
from tests.e2e.conftest import ScriptedDrafter, make_step, prompts
from tests.e2e.conftest import model as model

LOOPS = pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])


class Memory(ScriptedDrafter):
    """Keeps names until they are reset; its length is how many there are, at first none."""

    drafts_ahead = True

    def __init__(self, fails_after: int = 10**9) -> None:
        super().__init__(lambda tokens, k: [1] * k)
        self.names: set = set()
        self.left = fails_after

    def __len__(self) -> int:
        return len(self.names)

    def propose(self, requests):
        self.names |= {r.request_id for r in requests}
        return super().propose(requests)

    def observe(self, results, hidden=None) -> None:
        super().observe(results, hidden)
        self.left -= any(r.finish_reason for r in results)
        if self.left < 0:
            raise RuntimeError("broken")

    def reset(self, request_id) -> None:
        self.names.discard(request_id)


@LOOPS
def test_a_drafter_of_length_zero_drafts(model, overlap):
    drafter, step = Memory(), make_step(model)
    results = [
        r for rs in generate(model, step, prompts(3), drafter, 3, overlap=overlap) for r in rs
    ]
    assert max(r.num_drafts for r in results) == 3
    assert drafter.names == set()


@LOOPS
def test_who_ended_in_a_step_that_a_drafter_failed_to_observe_is_reset(model, overlap):
    """Its name is free again: a drafter that still knew it would go on from another text."""
    drafter, step = Memory(fails_after=0), make_step(model)
    batch = {i: ([1, 2, i], SamplingParams(max_tokens=4 + 4 * i)) for i in range(3)}
    with pytest.raises(RuntimeError, match="broken"):
        list(generate(model, step, batch, drafter, 3, overlap=overlap))
    assert drafter.names == set()
    assert step.active == ()
    assert step.blocks.num_free == step.blocks.num_pages
