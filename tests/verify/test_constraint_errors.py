"""A constraint that raises while a step is committed: nothing is half committed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from specmla import ConstraintError, SamplingParams, VerifyStep
from tests.verify.scripted import make_step, run
from tests.verify.test_step_processors import Brackets


class Breaking(Brackets):
    """Raises when it hears of a step after its `calls` first ones."""

    def __init__(self, calls: int, error: BaseException) -> None:
        super().__init__()
        self.calls, self.error = calls, error

    def advance(self, tokens: Sequence[int]) -> None:
        self.calls -= 1
        if self.calls < 0:
            raise self.error
        super().advance(tokens)


def state_of(step: VerifyStep) -> dict[object, tuple[list[int], int, list[int]]]:
    """Give tokens, length and pages of all requests."""
    return {
        name: (
            list(step.tokens(name)),
            step.blocks.length(name),
            list(step.blocks.block_ids(name)),
        )
        for name in step.active
    }


def started_with(breaking: Breaking) -> tuple[VerifyStep, Brackets, Brackets]:
    """Give requests before and after the one that breaks, with and without constraints."""
    step, early, late = make_step(), Brackets(), Brackets()
    step.add("plain", [1, 2, 3], SamplingParams(max_tokens=40, repetition_penalty=1.5))
    step.add("early", [1, 2, 3], SamplingParams(max_tokens=40), early)
    step.add("bad", [1, 2, 3], SamplingParams(max_tokens=40), breaking)
    step.add("late", [1, 2, 3], SamplingParams(max_tokens=40), late)
    return step, early, late


DRAFTS = {"plain": [1] * 9, "early": [1, 2] * 4, "bad": [1, 2] * 4, "late": [1, 2] * 4}


def test_constraint_that_raises_cancels_the_step() -> None:
    step, early, late = started_with(Breaking(1, KeyError("no such state")))
    run(step)
    before, free, heard = state_of(step), step.blocks.num_free, list(late.heard)
    with pytest.raises(ConstraintError, match=r"request 'bad' raised KeyError") as caught:
        run(step, DRAFTS)
    assert (caught.value.request_id, caught.value.told) == ("bad", ("early",))
    assert isinstance(caught.value.__cause__, KeyError)
    assert (state_of(step), step.blocks.num_free, late.heard) == (before, free, heard)
    step.blocks.check_integrity()
    assert len(early.heard) > 1, "ahead of its request"
    for name in ("bad", "early"):  # as the error says: out, or in again with what was committed
        tokens = step.tokens(name)
        step.remove(name)
        step.add(f"{name} again", tokens, SamplingParams(max_tokens=40), Brackets())
    twin = started_with(Breaking(9, KeyError()))[0]
    run(twin)
    expected, results = run(twin, DRAFTS), run(step, {k: DRAFTS[k] for k in ("plain", "late")})
    assert [results[k] for k in ("plain", "late")] == [expected[k] for k in ("plain", "late")]
    assert late.heard == heard + list(results["late"].new_tokens)


def test_interrupt_in_a_constraint_cancels_the_step() -> None:
    step = started_with(Breaking(1, KeyboardInterrupt()))[0]
    run(step)
    before, free = state_of(step), step.blocks.num_free
    with pytest.raises(KeyboardInterrupt):
        run(step, DRAFTS)
    assert (state_of(step), step.blocks.num_free) == (before, free)
    step.drop(step.active)
    assert step.blocks.num_free == step.blocks.num_pages
