"""A grammar that allows nothing after its end, with drafts that reach there and beyond."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from specmla import DraftProposal, NumericsError, SamplingParams, VerifyStep
from specmla.kernels.prims import INTERPRETED
from tests.verify import scripted
from tests.verify.scripted import W, model, run
from tests.verify.test_fused import make_step

RULES = ["token_level", "block", "sample_match"]
END = 9
WORDS = ((3, 4, END), (3, 5, 4, END), (6, END), (6, 3, 7))


class Words:
    """Allows the words above and nothing after them; the last one ends without an end token."""

    def __init__(self) -> None:
        self.heard: list[int] = []

    def masks(self, drafts: Sequence[int]) -> Tensor:
        rows = torch.zeros(len(drafts) + 1, W, dtype=torch.bool)
        for j, word in itertools.product(range(len(rows)), WORDS):
            before = (*self.heard, *drafts[:j])
            if word[: len(before)] == before and len(word) > len(before):
                rows[j, word[len(before)]] = True
        return rows

    def advance(self, tokens: Sequence[int]) -> None:
        self.heard += tokens


def decode(step: VerifyStep, params: SamplingParams, drafts: list[list[int]]) -> tuple[int, ...]:
    """Give what request a emits beside another one, until it ends or there is nothing to emit."""
    words = Words()
    step.add("a", [1, 2], params, words)
    step.add("b", [2, 1], SamplingParams())
    for one in [[], *drafts, *[[]] * 6]:
        try:
            if run(step, {"a": one, "b": [1]} if one else None)["a"].finish_reason:
                break
        except NumericsError:  # nothing is allowed and the word had no end
            break
    step.blocks.check_integrity()
    return tuple(words.heard)


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", RULES)
def test_drafts_change_no_word(rule: str, temperature: float, impl: str) -> None:
    if impl == "triton" and not INTERPRETED:
        pytest.skip("the scripted step lives on the CPU, where Triton only interprets")
    seen = set()
    for seed in range(5 if impl == "torch" else 1):
        params = SamplingParams(temperature, seed=seed, stop_token_ids=(END,), logprobs="raw")
        plain = decode(make_step(rule, impl), params, [])
        assert plain in WORDS
        seen.add(plain)
        # With the word itself as drafts every rule accepts at least what plain decoding emits.
        ahead = [[*plain[1:], 8][:length] for length in (1, 2, 3, 4)]
        for drafts in ahead if temperature == 0 or rule == "sample_match" else []:
            assert decode(make_step(rule, impl), params, [drafts]) == plain
        wrong = [[END, END], [5, END, 4], [4, END, 3], [3, 7, 1]]
        for drafts in [*ahead, *wrong] if impl == "torch" else [ahead[3], wrong[1]]:
            assert decode(make_step(rule, impl), params, [drafts]) in WORDS
    assert len(seen) > 1 or temperature == 0 or impl == "triton"


def test_a_word_without_an_end_is_emitted_whole_then_nothing_follows() -> None:
    step, words = scripted.make_step(), Words()
    bias = ((6, 50.0), (3, 40.0))
    step.add("a", [1, 2], SamplingParams(logit_bias=bias, logprobs="raw"), words)
    assert run(step)["a"].new_tokens == (6,)
    got = run(step, {"a": [3, 7, 5, 5]})["a"]
    assert got.new_tokens == (3, 7)
    assert got.num_accepted == 1
    want = [
        torch.log_softmax(model(h), -1)[t].item() for h, t in (([1, 2, 6], 3), ([1, 2, 6, 3], 7))
    ]
    assert got.logprobs == pytest.approx(want, abs=1e-5)
    with pytest.raises(NumericsError):
        run(step)
    assert words.heard == [6, 3, 7]


def test_a_dead_end_that_is_not_taken_stops_nobody() -> None:
    class Either(Words):
        def masks(self, drafts: Sequence[int]) -> Tensor:
            rows = torch.ones(len(drafts) + 1, W, dtype=torch.bool)
            for j in range(1, len(rows)):
                rows[j] = 5 not in drafts[:j]
            return rows

    step = scripted.make_step()
    step.add("a", [1, 2], SamplingParams(logit_bias=((5, -50.0),)), Either())
    first = run(step)["a"].new_tokens
    assert len(run(step, {"a": [5, 3]})["a"].new_tokens) == len(first) == 1


def test_stop_tokens_banned_by_min_tokens_are_a_dead_end_too() -> None:
    step = scripted.make_step()
    params = SamplingParams(stop_token_ids=(END,), min_tokens=9, logit_bias=((6, -50.0),))
    step.add("a", [1, 2], params, Words())
    step.add("b", [1, 2], SamplingParams())
    run(step)
    # Only END may follow 6, and may not yet: out of reach, since 3 came first.
    got = run(step, {"a": [6, END], "b": [1]})
    assert got["a"].new_tokens[0] in (4, 5)


def test_beside_a_tree_the_path_ends_as_well() -> None:
    step = scripted.make_step()
    step.add("a", [1, 2], SamplingParams(logit_bias=((6, 50.0),)), Words())
    step.add("b", [2, 1], SamplingParams())
    run(step)
    tokens = torch.tensor([[3, 7, 1], [1, 2, 3]])
    plan = step.plan(DraftProposal(("a", "b"), (3, 3), tokens, parents=(None, (-1, -1, 0))))
    logits = torch.stack([model([row]) for row in range(8)])
    logits[1, 3] = 50.0
    logits[5:] = logits[4]
    order = [r.request_id for r in plan.requests]
    assert order == ["a", "b"]
    results = step.commit(plan, step.verify(plan, logits))
    assert results[0].new_tokens == (3, 7)
    assert results[0].num_accepted == 1
    step.blocks.check_integrity()
