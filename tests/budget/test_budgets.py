"""Budgets: what they choose, that they recover and forget, and that the loop asks them in time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from drafters import DraftModelDrafter, NgramDrafter
from specmla import ArgumentError, RequestResult
from specmla.budget.base import Budget, BudgetRequest, chosen_counts
from specmla.budget.batch_table import BatchTableBudget
from specmla.budget.fixed import FixedBudget
from specmla.budget.history import HistoryBudget
from specmla.decode import draft_requests
from tests.e2e.conftest import VOCAB, make_step, prompts, run
from tests.e2e.conftest import model as model


def asked(*names: str) -> list[BudgetRequest]:
    return [BudgetRequest(name, 10, 100) for name in names]


def result(name: str, drafts: int, accepted: int) -> RequestResult:
    return RequestResult(name, (1,) * (accepted + 1), drafts, accepted, None)


def test_fixed_counts() -> None:
    assert FixedBudget(3).counts(asked("a", "b")) == [3, 3]
    assert FixedBudget({"b": 2}).counts(asked("a", "b")) == [0, 2]
    assert (FixedBudget(3).max_drafts, FixedBudget({"b": 2}).max_drafts) == (3, 2)
    for bad in (-1, 1.5, {"a": -2}):
        with pytest.raises(ArgumentError, match="num_drafts holds"):
            FixedBudget(bad)  # type: ignore[arg-type]


def test_table_takes_the_smallest_size_that_holds_the_batch() -> None:
    budget = BatchTableBudget({32: 2, 1: 6, 64: 0, 8: 4})
    for size, want in ((1, 6), (2, 4), (8, 4), (9, 2), (32, 2), (33, 0), (500, 0)):
        assert budget.counts(asked(*map(str, range(size)))) == [want] * size
    assert budget.max_drafts == 6
    for bad in ({}, {0: 1}, {1: -1}):
        with pytest.raises(ArgumentError, match="table"):
            BatchTableBudget(bad)


def best_by_hand(a: float, cost: float, most: int) -> int:
    rates = [sum(a**i for i in range(k + 1)) / (1 + cost * k) for k in range(1, most + 1)]
    return 1 + rates.index(max(rates))


def test_history_maximises_tokens_for_the_time_of_a_step() -> None:
    budget = HistoryBudget(8, draft_cost=0.15, prior=0.7)
    assert budget.counts(asked("new")) == [best_by_hand(0.7, 0.15, 8)]
    for _ in range(60):
        budget.observe([result("good", 8, 8), result("bad", 4, 0), result("half", 1, 1)])
        budget.observe([result("half", 1, 0)])
    assert budget.acceptance("good") == pytest.approx(1, abs=1e-2)
    assert budget.acceptance("bad") == pytest.approx(0, abs=1e-2)
    assert budget.acceptance("half") == pytest.approx(0.5, abs=0.05)
    want = [8, 1, best_by_hand(budget.acceptance("half"), 0.15, 8)]
    assert budget.counts(asked("good", "bad", "half")) == want


def test_history_counts_tests_not_drafts() -> None:
    """Of 6 drafts of which 2 stand, three were tested: those behind the refused one say nothing."""
    budget = HistoryBudget(8, decay=1.0)
    before = budget.acceptance("a") * 2
    budget.observe([result("a", 6, 2), result("a", 3, 3)])
    assert budget.acceptance("a") == pytest.approx((before + 5) / (2 + 6))
    prompt = RequestResult("a", (1,), 0, 0, None, is_prompt=True)
    budget.observe([prompt, result("a", 0, 0)])
    assert budget.acceptance("a") == pytest.approx((before + 5) / (2 + 6))
    budget.reset("a")
    budget.reset("never seen")
    assert budget.acceptance("a") == pytest.approx(0.7)


def test_history_recovers() -> None:
    budget = HistoryBudget(6)
    for _ in range(40):
        budget.observe([result("a", 1, 0)])
    assert budget.counts(asked("a")) == [1]
    for _ in range(40):
        budget.observe([result("a", 1, 1)])
    assert budget.counts(asked("a")) == [6]


def test_history_refuses_all_at_once() -> None:
    with pytest.raises(ArgumentError) as caught:
        HistoryBudget(2, min_drafts=3, draft_cost=-1, decay=2, prior=-1)
    for name in ("min_drafts", "draft_cost", "decay", "prior"):
        assert name in str(caught.value)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_drafts": 2.5},
        {"max_drafts": "4"},
        {"min_drafts": 0.5},
        {"decay": "1"},
        {"prior": None},
    ],
    ids=str,
)
def test_history_takes_integers_and_numbers(wrong) -> None:
    name = next(iter(wrong))
    with pytest.raises(
        ArgumentError, match=f"HistoryBudget: {name} is {next(iter(wrong.values()))!r}"
    ):
        HistoryBudget(**{"max_drafts": 4, **wrong})


class Fixed(HistoryBudget):
    def __init__(self, given: object) -> None:
        super().__init__(4)
        self.given = given

    def counts(self, requests: Sequence[BudgetRequest]) -> list[int]:
        return self.given  # type: ignore[return-value]


@pytest.mark.parametrize("given", [[1], [1, 2, 3], [1, -1], [1, 2.0], ["1", "2"], None, 2])
def test_counts_that_do_not_fit_are_refused_by_name(given: object) -> None:
    with pytest.raises(ArgumentError, match=r"counts of Fixed are .* for 2 requests, accepted is"):
        chosen_counts(Fixed(given), asked("a", "b"))
    assert chosen_counts(Fixed((3, np.int64(0))), asked("a", "b")) == [3, 0]


def test_loop_names_a_budget_that_miscounts(model) -> None:
    with pytest.raises(ArgumentError, match="counts of Fixed are"):
        run(model, prompts(3, 6), NgramDrafter(VOCAB, prompt_lookup_min=1), Fixed([1] * 7))


class Watched(HistoryBudget):
    """Notes in which order it is called."""

    def __init__(self) -> None:
        super().__init__(5)
        self.log: list[str] = []

    def counts(self, requests: Sequence[BudgetRequest]) -> list[int]:
        self.log.append("counts")
        return [(r.num_tokens + len(self.log)) % 6 for r in requests]

    def observe(self, results: Sequence[RequestResult]) -> None:
        self.log.append("observe")
        super().observe(results)

    def reset(self, request_id: object) -> None:
        self.log.append("reset")
        super().reset(request_id)  # type: ignore[arg-type]


def test_loop_asks_before_it_drafts(model, monkeypatch) -> None:
    plain, _ = run(model, prompts(3, 6))
    budget = Watched()
    assert isinstance(budget, Budget)
    drafter = DraftModelDrafter(model, num_pages=200, page_size=4)
    real = drafter.propose
    counts = []

    def propose(requests):
        budget.log.append("propose")
        counts.extend(r.num_drafts for r in requests)
        return real(requests)

    monkeypatch.setattr(drafter, "propose", propose)
    tokens, _ = run(model, prompts(3, 6), drafter, budget)
    assert tokens == plain
    log = [entry for entry in budget.log if entry != "reset"]
    assert log[:3] == ["counts", "propose", "observe"]
    assert log == ["counts", "propose", "observe"] * (len(log) // 3)
    assert budget.log.count("reset") == 3
    assert len(set(counts)) > 2


@pytest.mark.parametrize("budget", [HistoryBudget(4), BatchTableBudget({1: 4, 2: 1, 3: 0})])
def test_greedy_continuation_is_that_of_plain_decoding(model, budget: Budget) -> None:
    plain, _ = run(model, prompts(3, 9))
    tokens, _ = run(model, prompts(3, 9), NgramDrafter(VOCAB, prompt_lookup_min=1), budget)
    assert tokens == plain


def test_budget_keeps_to_what_a_request_may_emit(model) -> None:
    step = make_step(model)
    for name, (prompt, sampling) in prompts(2, 3).items():
        step.add(name, prompt, sampling)
    wanted = draft_requests(step, HistoryBudget(4), ["r0", "r1"])
    # A prompt of two tokens has no anchor yet; one of one token may emit three.
    assert [(r.request_id, r.num_drafts) for r in wanted] == [("r0", 2)]
