"""Processors: every row equals what plain decoding would have applied at that place."""

from __future__ import annotations

import math
from dataclasses import dataclass

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from specmla.errors import ArgumentError
from specmla.verify.params import SamplingParams
from specmla.verify.processors.apply import RowHistory, apply_processors, chain_history
from specmla.verify.processors.constraint import Drafted, TokenConstraint
from specmla.verify.processors.counts import TokenCounts
from specmla.verify.processors.tables import any_processor, build_tables

W = 12


@dataclass
class State:
    """What the tables need of a request."""

    sampling: SamplingParams
    prompt: list[int]
    output: list[int]
    constraint: TokenConstraint | None = None

    def __post_init__(self) -> None:
        self.counts = None
        if self.sampling.has_penalties:
            self.counts = TokenCounts(self.prompt)
            self.counts.add(self.output)

    @property
    def num_output(self) -> int:
        return len(self.output)


def plain(row: list[float], state: State, drafts: list[int]) -> list[float]:
    """Say in plain Python what the row after `drafts` becomes."""
    params, output = state.sampling, state.output + drafts
    out = list(row)
    for token in range(len(row)):
        if token in state.prompt or token in output:
            r = params.repetition_penalty
            out[token] = out[token] / r if out[token] > 0 else out[token] * r
        out[token] -= params.frequency_penalty * output.count(token)
        out[token] -= params.presence_penalty * (token in output)
        out[token] += sum(value for at, value in params.logit_bias if at == token)
        early = len(output) < params.min_tokens and token in params.stop_token_ids
        if token in params.banned_token_ids or early:
            out[token] = -math.inf
    return out


def process(
    logits: Tensor, states: list[State], drafts: Tensor, history: RowHistory | None = None
) -> Tensor:
    host = [Drafted.chain([t for t in row if t >= 0]) for row in drafts.tolist()]
    tables = build_tables(states, host, drafts.shape[1] + 1, logits.shape[2], torch.device("cpu"))
    return apply_processors(logits, tables, history or chain_history(drafts))


PARAMS = [
    SamplingParams(repetition_penalty=1.7),
    SamplingParams(repetition_penalty=0.6, presence_penalty=0.4),
    SamplingParams(presence_penalty=-0.5, frequency_penalty=0.9),
    SamplingParams(frequency_penalty=-0.3),
    SamplingParams(1.0),
    SamplingParams(min_tokens=4, stop_token_ids=(3, 5)),
    SamplingParams(banned_token_ids=(0, 7), logit_bias=((7, 2.0), (3, -1.5), (3, 0.25))),
    SamplingParams(
        repetition_penalty=1.2,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        min_tokens=3,
        stop_token_ids=(2,),
        banned_token_ids=(9,),
        logit_bias=((2, 5.0), (1, 1.0)),
    ),
]
tokens = st.integers(0, W - 1)


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[State], Tensor]:
    count = draw(st.integers(1, 4))
    states = [
        State(
            draw(st.sampled_from(PARAMS)),
            draw(st.lists(tokens, min_size=1, max_size=6)),
            draw(st.lists(tokens, max_size=6)),
        )
        for _ in range(count)
    ]
    k = draw(st.integers(0, 3))
    rows = []
    for _ in range(count):
        row = draw(st.lists(tokens, max_size=k))
        rows.append(row + [-1] * (k - len(row)))
    return states, torch.tensor(rows, dtype=torch.int64).view(count, k)


@hypothesis.given(steps(), st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
@hypothesis.settings(max_examples=120)
def test_each_row_sees_its_own_history(
    step: tuple[list[State], Tensor], dtype: torch.dtype
) -> None:
    states, drafts = step
    b, k = drafts.shape
    generator = torch.Generator().manual_seed(b + 7 * k)
    logits = (torch.randn(b, k + 1, W, generator=generator, dtype=torch.float64) * 3).to(dtype)
    kept = logits.clone()
    got = process(logits, states, drafts)
    assert torch.equal(logits, kept)
    assert got.dtype == (torch.float64 if dtype is torch.float64 else torch.float32)
    for i, state in enumerate(states):
        made = [t for t in drafts[i].tolist() if t >= 0]
        for j in range(len(made) + 1):
            want = torch.tensor(plain(logits[i, j].tolist(), state, made[:j]), dtype=torch.float64)
            torch.testing.assert_close(got[i, j].double(), want, rtol=1e-6, atol=1e-6)


def test_one_penalty_for_all_rows_is_caught() -> None:
    """The fault seen elsewhere: rows of a step share the history of its first row."""
    state = State(SamplingParams(frequency_penalty=1.0), [1], [2])
    drafts = torch.tensor([[4, 4]])
    got = process(torch.zeros(1, 3, W), [state], drafts)
    assert got[0, :, 4].tolist() == [0.0, -1.0, -2.0]
    assert got[0, :, 2].tolist() == [-1.0, -1.0, -1.0]
    assert got[0, :, 1].tolist() == [0.0, 0.0, 0.0]


def test_min_tokens_counts_tokens_not_steps() -> None:
    state = State(SamplingParams(min_tokens=3, stop_token_ids=(5,)), [1], [2])
    got = process(torch.zeros(1, 4, W), [state], torch.tensor([[4, 4, 4]]))
    assert got[0, :, 5].tolist() == [-math.inf, -math.inf, 0.0, 0.0]


def test_branches_of_a_tree_see_their_own_path() -> None:
    """Rows 1 and 2 are siblings, row 3 the child of 2."""
    drafts = torch.tensor([[6, 7, 8]])
    sees = torch.tensor([[[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 1, 1]]], dtype=torch.bool)
    history = RowHistory(drafts, sees, torch.tensor([[0, 1, 1, 2]]))
    params = SamplingParams(presence_penalty=1.0, min_tokens=2, stop_token_ids=(0,))
    got = process(torch.zeros(1, 4, W), [State(params, [1], [])], drafts, history)
    assert (got[0, :, 6:9] == -1).tolist() == [
        [False, False, False],
        [True, False, False],
        [False, True, False],
        [False, True, True],
    ]
    assert torch.isinf(got[0, :, 0]).tolist() == [True, True, True, False]


def test_ids_outside_the_vocabulary_are_no_history() -> None:
    state = State(SamplingParams(presence_penalty=1.0), [1], [])
    got = process(torch.zeros(1, 3, W), [state], torch.tensor([[W + 3, -1]]))
    assert (got == 0).all()


def test_nan_under_a_ban_still_shows() -> None:
    logits = torch.zeros(1, 1, W)
    logits[0, 0, 7] = math.nan
    got = process(logits, [State(PARAMS[6], [1], [])], torch.empty(1, 0, dtype=torch.int64))
    assert torch.isnan(got[0, 0, 7])
    mask = Only([[t for t in range(W) if t != 7]])
    state = State(SamplingParams(), [1], [], mask)
    got = process(logits, [state], torch.empty(1, 0, dtype=torch.int64))
    assert torch.isnan(got[0, 0, 7])


def test_nobody_asks_for_anything() -> None:
    assert not any_processor([State(SamplingParams(0.7, 5, 0.9, min_p=0.1), [1], [])])
    late = State(SamplingParams(min_tokens=2, stop_token_ids=(3,)), [1], [4, 4])
    assert not any_processor([late])
    for params in [*PARAMS[:4], *PARAMS[5:]]:
        assert any_processor([State(params, [1], [])])
    assert any_processor([State(SamplingParams(), [1], [], Only([[1]]))])


class Only:
    """Allows given tokens in each row."""

    def __init__(self, rows: list[list[int]]) -> None:
        self.rows = rows

    def masks(self, drafts: object) -> Tensor:
        out = torch.zeros(len(self.rows), W, dtype=torch.bool)
        for row, allowed in enumerate(self.rows):
            out[row, allowed] = True
        return out

    def advance(self, tokens: object) -> None:
        raise AssertionError("nothing was emitted")


def test_constraint_masks_its_own_rows() -> None:
    states = [
        State(SamplingParams(), [1], []),
        State(SamplingParams(), [1], [], Only([[2, 3], [4]])),
        State(SamplingParams(), [1], [], Only([[5]])),
    ]
    drafts = torch.tensor([[1, 1], [2, 2], [7, 7]])
    got = process(torch.zeros(3, 3, W), states, drafts)
    assert (got[0] == 0).all()
    assert (got[1, 0] == 0).nonzero().flatten().tolist() == [2, 3]
    assert (got[1, 1] == 0).nonzero().flatten().tolist() == [4]
    assert (got[1, 2] == 0).all()  # behind a draft that is not allowed: out of reach
    assert (got[2, 0] == 0).nonzero().flatten().tolist() == [5]


class Broken(Only):
    def __init__(self, given: object) -> None:
        self.given = given

    def masks(self, drafts: object) -> Tensor:
        return self.given  # type: ignore[return-value]


@pytest.mark.parametrize(
    "given",
    [
        None,
        torch.ones(1, W),
        torch.ones(1, W + 1, dtype=torch.bool),
        torch.ones(0, W, dtype=torch.bool),
        torch.ones(3, W, dtype=torch.bool),
        torch.ones(W, dtype=torch.bool),
    ],
    ids=["none", "float", "wide", "empty", "long", "flat"],
)
def test_masks_that_do_not_fit_are_refused(given: object) -> None:
    state = State(SamplingParams(), [1], [], Broken(given))
    with pytest.raises(ArgumentError, match=r"masks of Broken are .* \[1 to 2, 12\]"):
        build_tables([state], [Drafted.chain([4])], 2, W, torch.device("cpu"))
