"""Whatever an engine does to a step, requests give what they give alone (see `engine`)."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from specmla import DeepseekForCausalLM
from tests.e2e.conftest import model as model
from tests.e2e.engine import FAULTS, Engine


@pytest.fixture(scope="module")
def wide(model) -> DeepseekForCausalLM:
    """The model in float64: rows of any shape of step are equal to about 1e-14."""
    made = DeepseekForCausalLM(model.config)
    made.load_state_dict(model.state_dict())
    return made.double().eval()


CAPTURED = pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])


@CAPTURED
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**20), temperature=st.sampled_from([0.0, 0.8]))
def test_requests_give_what_they_give_alone(wide, captured, seed, temperature):
    engine = Engine(wide, seed, temperature, captured=captured)
    for _ in range(30):
        engine.act()
    engine.end()


@CAPTURED
def test_histories_do_what_they_are_for(wide, captured):
    """Every fault, full pools, forks, preemptions and paths that cross: all of it happens."""
    wanted = {*FAULTS, "forks", "preempted", "pool full", "paths", "accepted", "finished"}
    missing = set(wanted)
    for seed in range(40):
        engine = Engine(wide, seed, 0.8, captured=captured)
        for _ in range(60):
            engine.act()
        engine.end()
        missing -= {what for what in wanted if engine.seen[what]}
        if not missing:
            break
    assert missing == set()


def test_a_preempted_request_that_forgets_its_output_is_noticed(wide, monkeypatch):
    engine = Engine(wide, 3, 0.8, captured=False)
    real = engine.step.add

    def forgetful(name, prompt, params, constraint=None, output=()):
        return real(name, [*prompt, *output], params, constraint)

    monkeypatch.setattr(engine.step, "add", forgetful)
    with pytest.raises(AssertionError):
        live(engine)


def live(engine: Engine) -> None:
    """Run a history that is long enough for anything wrong to be noticed."""
    for _ in range(400):
        engine.act()
