"""Timing in turns, with a clock that the test owns."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from specmla.bench import rounds
from specmla.bench.rounds import Pass, make_pass, time_rounds

CPU = torch.device("cpu")


class Clock:
    """Moves only when a pass moves it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.order: list[str] = []

    def pass_of(self, name: str, seconds: Callable[[int], float], calls: int = 1) -> Pass:
        def launch() -> None:
            self.order.append(name)
            self.now += seconds(self.order.count(name))

        return Pass(launch, calls)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(rounds.time, "perf_counter", lambda: made.now)
    return made


def test_providers_take_turns_and_the_first_round_is_not_counted(clock: Clock) -> None:
    passes = {
        "a": clock.pass_of("a", lambda n: 9.0 if n == 1 else 4e-6, calls=2),
        "b": clock.pass_of("b", lambda n: 9.0 if n == 1 else 5e-6),
    }
    found = time_rounds(passes, CPU, least=3, most=9)
    assert clock.order == ["a", "b"] * 4
    assert found["a"].timing.us == pytest.approx(2.0)
    assert found["b"].timing.us == pytest.approx(5.0)
    assert (found["a"].passes, found["a"].calls) == (3, 2)


def test_goes_on_while_one_of_them_is_unsteady(clock: Clock) -> None:
    passes = {
        "still": clock.pass_of("still", lambda n: 1e-6),
        "wild": clock.pass_of("wild", lambda n: 1e-6 * (1 + n % 3)),
    }
    found = time_rounds(passes, CPU, least=3, most=12)
    assert found["wild"].passes == 12
    assert found["still"].passes == 12
    assert found["wild"].timing.us == pytest.approx(2.0)


def test_outliers_do_not_keep_it_going(clock: Clock) -> None:
    passes = {"a": clock.pass_of("a", lambda n: 1e-3 if n == 3 else 1e-6)}
    found = time_rounds(passes, CPU, least=5, most=20)
    assert found["a"].passes == 5
    assert found["a"].timing.us == pytest.approx(1.0)


def test_pass_runs_all_its_calls() -> None:
    seen: list[int] = []
    made = make_pass([lambda i=i: seen.append(i) for i in range(3)], CPU)  # type: ignore[misc]
    made.launch()
    assert seen == [0, 1, 2]
    assert made.calls == 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, torch sees none")
def test_copy_on_the_gpu_takes_its_time() -> None:
    device = torch.device("cuda")
    source = torch.zeros(1 << 28, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    passes = {name: make_pass([lambda: target.copy_(source)] * 4, device) for name in "ab"}
    found = time_rounds(passes, device)
    assert found["a"].timing.us == pytest.approx(found["b"].timing.us, rel=0.1)
    assert 20 < found["a"].timing.us < 2000
