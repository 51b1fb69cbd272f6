"""Token counts held on the device: what a step gets is what the host counts, and little is sent."""

from __future__ import annotations

import random
from array import array

import pytest
import torch
from torch import Tensor

from specmla import SamplingParams
from specmla.staging import send_arrays
from specmla.verify.processors import history as history_module
from specmla.verify.processors.counts import TokenCounts
from specmla.verify.processors.history import HeldHistory
from tests.verify.scripted import make_step, run

CPU = torch.device("cpu")


def counted(prompt: list[int], output: list[int]) -> TokenCounts:
    made = TokenCounts(prompt)
    made.add(output)
    return made


def step_of(history: HeldHistory, counts: list[TokenCounts]) -> tuple[Tensor, Tensor]:
    return history.take(send_arrays(history.changes(counts), CPU))


def check(history: HeldHistory, counts: list[TokenCounts]) -> None:
    """Compare with tables that are written out."""
    found = step_of(history, counts)
    longest = max(len(c.ids) for c in counts)
    for got, name in zip(found, ("ids", "outputs"), strict=True):
        rows = [getattr(c, name) for c in counts]
        want = [list(row) + [row[0]] * (longest - len(row)) for row in rows]
        assert got.tolist() == want


@pytest.mark.parametrize("room", [1 << 22, 1 << 10, 0], ids=["ample", "four-lines", "none"])
@pytest.mark.parametrize("seed", range(4))
def test_any_steps_give_what_the_host_counts(
    seed: int, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests come, go, wait and change places; lines grow, and are given to others."""
    monkeypatch.setattr(history_module, "MAX_CELLS", room)
    rng, history, alive = random.Random(seed), HeldHistory(CPU), []
    for turn in range(60):
        if len(alive) < 2 or rng.random() < 0.3:
            length = rng.choice([1, 3, 40, 300])
            alive.append(TokenCounts(rng.randrange(900) for _ in range(length)))
        if len(alive) > 5 and rng.random() < 0.5:
            alive.pop(rng.randrange(len(alive)))
        for counts in alive:
            if rng.random() < 0.6:
                counts.add(rng.randrange(900) for _ in range(rng.randint(1, 6)))
        counts = rng.sample(alive, rng.randint(1, min(len(alive), 6)))
        if turn % 7 == 3:
            history.changes(counts[::-1])  # a step that is refused afterwards
        check(history, counts)
        del counts  # nobody else holds a request that has gone


def test_only_changes_are_sent() -> None:
    history = HeldHistory(CPU)
    first, second = counted(list(range(500)), [3, 3]), counted([7], [])
    check(history, [first, second])
    first.add([3, 600, 601])
    sent = history.changes([second, first])
    assert len(sent["history_whole"]) == 0
    assert sorted(sent["changed_token"]) == [3, 600, 601]
    assert sorted(sent["changed_output"]) == [1, 1, 3]
    assert sum(map(len, sent.values())) == 3 * 3 + 2 * 2
    check(history, [second, first])
    assert sum(map(len, history.changes([first, second]).values())) == 4


def test_what_was_not_sent_is_given_again() -> None:
    history, counts = HeldHistory(CPU), counted([1, 2], [2])
    assert history.changes([counts])["history_whole"] == array("q", [1, 2, 0, 1])
    assert history.changes([counts])["history_whole"] == array("q", [1, 2, 0, 1])
    check(history, [counts])
    counts.add([5])
    assert history.changes([counts])["changed_token"] == array("q", [5])
    check(history, [counts])


def test_requests_that_have_gone_leave_their_lines() -> None:
    history = HeldHistory(CPU)
    for turn in range(20):
        check(history, [counted([turn], [turn]), counted([turn, 1], [])])
    assert history._cells.shape[1] == 2


def test_a_step_holds_the_counts_of_its_requests() -> None:
    """Through plan and commit, forks and names that come back: as without anything held."""
    params = SamplingParams(max_tokens=50, frequency_penalty=1.5, presence_penalty=0.5)

    def play(forgets: bool) -> list[tuple[int, ...]]:
        step, out = make_step(), []
        step.add("a", [1, 2, 3], params)
        for turn in range(12):
            if forgets:
                step._history = HeldHistory(CPU)
            if turn == 3:
                step.fork("a", "b", params)
            if turn == 6:
                step.remove("a")
                step.add("a", [9, 9], params)
            drafts = {"a": [4, 5]} if turn not in (0, 6) else None
            out += [r.new_tokens for r in run(step, drafts).values()]
        return out

    assert play(False) == play(True)
