"""Processors, constraints and log-probabilities through `VerifyStep`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from specmla import NumericsError, SamplingParams
from tests.verify.scripted import W, make_step, model, run


def continuation(params: SamplingParams, drafts: list[int], rule: str, count: int = 8) -> list[int]:
    """Generate with the same drafts proposed in every step."""
    step, out = make_step(rule), []
    step.add("a", [1, 2, 3], params)
    while len(out) < count:
        anchored = bool(step.draft_requests(len(drafts)))
        out += run(step, {"a": drafts} if anchored and drafts else None)["a"].new_tokens
    return out[:count]


GREEDY = [
    SamplingParams(),
    SamplingParams(repetition_penalty=3.0),
    SamplingParams(presence_penalty=2.0, frequency_penalty=1.0),
    SamplingParams(banned_token_ids=tuple(range(8)), logit_bias=((9, 3.0),)),
    SamplingParams(min_tokens=5, stop_token_ids=tuple(range(12))),
]


@pytest.mark.parametrize("rule", ["token_level", "block", "sample_match"])
@pytest.mark.parametrize("params", GREEDY, ids=["none", "repetition", "counts", "bans", "min"])
def test_greedy_continuation_does_not_depend_on_drafts(params: SamplingParams, rule: str) -> None:
    count = 5 if params.min_tokens else 8
    plain = continuation(params, [], rule, count)
    right = continuation(params, plain[1:3], rule, count)
    wrong = continuation(params, [9, 9, 10], rule, count)
    assert right == wrong == plain
    if params != SamplingParams():
        assert plain != continuation(SamplingParams(), [], rule, count)


def test_sample_match_with_penalties_does_not_depend_on_drafts() -> None:
    params = SamplingParams(1.0, top_k=8, seed=5, min_p=0.01, frequency_penalty=1.5)
    plain = continuation(params, [], "sample_match", 12)
    for drafts in ([3], plain[1:4], [7, 7, 7, 7]):
        assert continuation(params, drafts, "sample_match", 12) == plain


class Brackets:
    """Allows 1 and 2 to open and close up to two levels; keeps account of what it was told."""

    def __init__(self) -> None:
        self.level, self.heard, self.asked = 0, [], []

    def masks(self, drafts: Sequence[int]) -> Tensor:
        self.asked.append(list(drafts))
        rows, level = [], self.level
        for draft in [*drafts, None]:
            row = torch.zeros(W, dtype=torch.bool)
            row[1], row[2] = level < 2, level > 0
            rows.append(row)
            if draft is None or not row[draft]:
                break
            level += 1 if draft == 1 else -1
        return torch.stack(rows)

    def advance(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.level += 1 if token == 1 else -1
            assert 0 <= self.level <= 2
        self.heard += tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", ["token_level", "block", "sample_match"])
def test_constraint_hears_of_emitted_tokens_only(rule: str, temperature: float) -> None:
    step, brackets = make_step(rule), Brackets()
    step.add("a", [1, 2, 3], SamplingParams(temperature, seed=3), brackets)
    step.add("b", [4, 5], SamplingParams(temperature, seed=4))
    emitted: list[int] = []
    emitted += run(step)["a"].new_tokens
    accepted = 0
    for turn in range(20):
        drafts = [[1, 1, 1], [2, 1, 2], [1, 2, 1], [9, 1, 1], [2, 2, W + 1]][turn % 5]
        results = run(step, {"b": [3, 4], "a": drafts})
        emitted += results["a"].new_tokens
        accepted += results["a"].num_accepted
        assert brackets.heard == emitted
        assert brackets.asked[-1] == [d for d in drafts if d < W]
    assert accepted > 3
    assert set(emitted) == {1, 2}


class FalsyBrackets(Brackets):
    def __len__(self) -> int:
        return 0


def test_constraint_that_is_falsy_holds_all_the_same() -> None:
    step, brackets = make_step(), FalsyBrackets()
    step.add("a", [1, 2, 3], SamplingParams(), brackets)
    emitted = [*run(step)["a"].new_tokens]
    for turn in range(6):
        emitted += run(step, {"a": [1, 1, 2] if turn % 2 else [2, 1, 2]})["a"].new_tokens
    assert [len(drafts) for drafts in brackets.asked] == [0] + [3] * 6
    assert set(emitted) == {1, 2}


def test_constraint_that_allows_nothing_loses_nothing() -> None:
    class Nothing(Brackets):
        def masks(self, drafts: Sequence[int]) -> Tensor:
            return torch.zeros(1, W, dtype=torch.bool)

    step = make_step()
    step.add("a", [1, 2], SamplingParams(), Nothing())
    with pytest.raises(NumericsError):
        run(step)
    assert step.tokens("a").tolist() == [1, 2]
    assert step.blocks.length("a") == 0


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_logprobs_of_emitted_tokens(temperature: float) -> None:
    step = make_step()
    common = {"temperature": temperature, "seed": 8, "frequency_penalty": 0.5}
    step.add("raw", [1, 2], SamplingParams(logprobs="raw", **common))
    step.add("none", [1, 2], SamplingParams(**common))
    step.add("drawn", [1, 2], SamplingParams(logprobs="processed", **common))
    done: dict[str, list[int]] = {name: [] for name in ("raw", "none", "drawn")}
    for turn in range(6):
        drafts = {name: [3, 4] for name in done} if turn else None
        for name, result in run(step, drafts).items():
            before = [1, 2, *done[name]]
            done[name] += result.new_tokens
            if name == "none":
                assert result.logprobs is None
                continue
            assert result.logprobs is not None
            assert len(result.logprobs) == len(result.new_tokens)
            for token, got in zip(result.new_tokens, result.logprobs, strict=True):
                logits = model(before).double()
                if name == "drawn":
                    logits -= 0.5 * torch.tensor([before[2:].count(t) for t in range(W)])
                    logits = logits / (temperature or 1e-9)
                want = torch.log_softmax(logits, -1)[token].item()
                assert got == pytest.approx(want, abs=1e-5)
                before.append(token)


def test_logprobs_end_with_the_stop_token() -> None:
    step = make_step()
    best = int(model([1, 2]).argmax())
    step.add("a", [1, 2], SamplingParams(logprobs="raw"))
    run(step)
    second = int(model([1, 2, best]).argmax())
    third = int(model([1, 2, best, second]).argmax())
    step.add("b", [1, 2], SamplingParams(logprobs="raw", stop_token_ids=(second,)))
    run(step, {})
    result = run(step, {"b": [second, third]})["b"]
    assert result.new_tokens == (second,)
    assert result.finish_reason == "stop"
    assert result.logprobs is not None
    assert len(result.logprobs) == 1
    assert math.isfinite(result.logprobs[0])
