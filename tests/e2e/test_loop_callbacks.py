"""What a loop does with drafters that look empty, or fail in a callback."""

from __future__ import annotations

import pytest
import torch

from specmla import ArgumentError, LatentCache, SamplingParams, build_step, generate
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


GOOD = {"a": ([1, 2], SamplingParams(max_tokens=2))}


@LOOPS
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"prompts": 5}, "prompts is 5, accepted is a mapping"),
        (
            {"prompts": {"a": 5, "b": ([1],)}},
            r"prompts\['a'\] is 5, .*prompts\['b'\] is \(\[1\],\)",
        ),
        ({"drafter": object()}, r"drafter is <.*> without \['vocab_size', 'propose', "),
        ({"drafter": []}, r"drafter is \[\] without"),
        ({"num_speculative_tokens": "x"}, r"holds \['x'\], accepted are integers"),
        ({"num_speculative_tokens": {"a": -1}}, r"holds \[-1\], accepted are integers"),
    ],
    ids=["prompts", "pairs", "drafter", "empty drafter", "drafts", "drafts by name"],
)
def test_other_arguments_are_refused_before_a_request_is_added(model, overlap, changed, message):
    step = make_step(model)
    with pytest.raises(ArgumentError, match=message):
        list(generate(model, step, **({"prompts": GOOD, "overlap": overlap} | changed)))
    assert step.active == ()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_draft_layers": -1}, "num_draft_layers is -1, accepted are integers >= 0"),
        ({"num_draft_layers": 1.5, "rule": "x"}, "num_draft_layers is 1.5.*rule is 'x'"),
        ({"num_pages": "8"}, "num_pages is '8', accepted are integers >= 1"),
        ({"page_size": 4.0}, "page_size is 4.0, accepted are integers"),
        ({"max_seq_len": 2**40}, "max_seq_len is 1099511627776"),
        ({"backend": 5}, "backend is 5, accepted are"),
    ],
    ids=["layers", "rule", "pages", "page size", "context", "backend"],
)
def test_what_no_step_can_be_built_of(model, changed, message, monkeypatch):
    monkeypatch.setattr(LatentCache, "_adopt", None)  # nothing is allocated before
    with pytest.raises(ArgumentError, match=message):
        build_step(model, **({"num_pages": 8, "page_size": 4} | changed))


def test_a_model_of_another_kind_is_refused(model):
    with pytest.raises(ArgumentError, match=r"model is .*Linear.*accepted is a specmla\.models"):
        build_step(torch.nn.Linear(2, 2), num_pages=8)
