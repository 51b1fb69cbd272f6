"""Prefix caching in batch-invariant models: what is found has the bits of what is computed."""

from __future__ import annotations

import functools
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from specmla.cache.blocks import BlockManager
from specmla.errors import ArgumentError
from specmla.generate import build_step, make_forward
from specmla.invariance import make_batch_invariant
from specmla.models.deepseek import DeepseekForCausalLM
from specmla.verify.proposal import DraftProposal
from specmla.verify.sampling import SamplingParams
from specmla.verify.step import VerifyStep
from tests.models.test_invariant_model import make_model

pytestmark = pytest.mark.usefixtures("dots_by_row")

PAGE = 16
PROMPT = [(7 * i + 3) % 50 for i in range(37)]
"""Two pages and five tokens; its text ends one token after the third page."""
NEW, FEW = 13, 4
"""Tokens after this prompt, and after any other."""


class Served(NamedTuple):
    """Tokens, and logits by position, of requests by name; found tokens of their prompts."""

    tokens: dict[str, list[int]]
    logits: dict[str, dict[int, Tensor]]
    found: dict[str, int]


@functools.cache
def model() -> DeepseekForCausalLM:
    made = make_model()
    make_batch_invariant(made)
    return made


def make_step(*, caching: bool) -> VerifyStep:
    return build_step(model(), num_pages=24, page_size=PAGE, prefix_caching=caching)


@torch.no_grad()
def serve(
    model: DeepseekForCausalLM,
    step: VerifyStep,
    prompts: dict[str, list[int]],
    new: int = FEW,
    truth: dict[str, list[int]] | None = None,
) -> Served:
    """Serve all requests to their ends; drafts are two true tokens and a wrong one, if known."""
    forward, served = make_forward(model, step), Served({}, {}, {})
    for name, prompt in prompts.items():
        served.found[name] = step.add(name, prompt, SamplingParams(max_tokens=new))
    for name in step.active:
        served.tokens[name], served.logits[name] = list(step.tokens(name)), {}
    while step.active:
        plan = step.plan(propose(step, truth))
        logits = forward(plan)
        pieces = logits.split([1 + r.num_drafts for r in plan.requests])
        for result, mine in zip(step.commit(plan, step.verify(plan, logits)), pieces, strict=True):
            tokens = served.tokens[result.request_id]
            true = mine[: len(result.new_tokens)]
            first = len(tokens) - 1
            served.logits[result.request_id] |= {first + i: row for i, row in enumerate(true)}
            tokens.extend(result.new_tokens)
    step.blocks.check_integrity()
    return served


def propose(step: VerifyStep, truth: dict[str, list[int]] | None) -> DraftProposal | None:
    wanted = step.draft_requests(3) if truth is not None else []
    if not wanted:
        return None
    rows = []
    for r in wanted:
        given = truth[r.request_id][len(r.tokens) :][: r.num_drafts]
        given[2:] = [(token + 1) % step.vocab_size for token in given[2:]]
        rows.append([*given, *[-1] * (3 - len(given))])
    counts = tuple(sum(token >= 0 for token in row) for row in rows)
    return DraftProposal(tuple(r.request_id for r in wanted), counts, torch.tensor(rows))


@functools.cache
def alone(prompt: tuple[int, ...], new: int = FEW) -> Served:
    return serve(model(), make_step(caching=False), {"it": list(prompt)}, new)


def assert_as_alone(served: Served, alone: dict[str, Served]) -> None:
    for name, want in alone.items():
        assert served.tokens[name] == want.tokens["it"]
        assert served.logits[name].keys() == want.logits["it"].keys()
        for position, row in served.logits[name].items():
            assert torch.equal(row, want.logits["it"][position]), (name, position)


def test_found_prefixes_give_the_bits_of_computed_ones() -> None:
    """After a request has decoded with drafts: its prompt, its whole text, and one token more than
    two pages; then the text once more, whose pages a prompt has written by now."""
    step, text = make_step(caching=True), alone(tuple(PROMPT), NEW).tokens["it"]
    rounds: list[dict[str, tuple[list[int], int]]] = [
        {"first": (PROMPT, 0)},
        {
            "same": ([*PROMPT, 8], 32),
            "longer": ([*text, 1, 2, 3], 32),  # verifies wrote what follows
            "edge": (PROMPT[:33], 16),  # one token left would be a verify
        },
        {"again": ([*text, 9], 48), "other": ([*PROMPT[:20], 5, 4], 16), "one": ([3], 0)},
    ]
    for requests in rounds:
        new = NEW if "first" in requests else FEW
        prompts = {name: prompt for name, (prompt, _) in requests.items()}
        want = {name: alone(tuple(prompt), new) for name, prompt in prompts.items()}
        truth = {name: each.tokens["it"] for name, each in want.items()}
        served = serve(model(), step, prompts, new, truth)
        assert served.found == {name: found for name, (_, found) in requests.items()}
        assert_as_alone(served, want)


def test_rows_of_verifies_do_differ() -> None:
    """What `prompts_only` is for; should these ever be equal, the test above sees nothing."""
    step, text = make_step(caching=True), alone(tuple(PROMPT), NEW).tokens["it"]
    step.blocks.prompts_only = False
    serve(model(), step, {"first": PROMPT}, NEW)
    served = serve(model(), step, {"longer": [*text, 1, 2, 3]})
    assert served.found == {"longer": 48}
    with pytest.raises(AssertionError):
        assert_as_alone(served, {"longer": alone((*text, 1, 2, 3))})


def test_forks_share_what_their_parent_wrote() -> None:
    """Rows of verifies stay private, and reach the child none the less."""
    step, text = make_step(caching=True), alone(tuple(PROMPT), NEW).tokens["it"]
    forward = make_forward(model(), step)
    step.add("parent", PROMPT, SamplingParams(max_tokens=NEW))
    with torch.no_grad():
        for _ in range(12):
            plan = step.plan()
            step.commit(plan, step.verify(plan, forward(plan)))
    step.fork("parent", "child", SamplingParams(max_tokens=NEW - 12))
    assert serve(model(), step, {}).tokens == {"parent": text, "child": text}
    assert step.add("new", text, SamplingParams(max_tokens=1)) == 32


def test_pages_that_share_rows_of_verifies_are_refused() -> None:
    step = make_step(caching=True)
    parts = {"cache": step.cache, "builder": step.builder, "vocab_size": 50, "max_seq_len": 60}
    with pytest.raises(ArgumentError, match="prefix_caching True and prompts_only False"):
        VerifyStep(blocks=BlockManager(24, PAGE), **parts)
    VerifyStep(blocks=BlockManager(24, PAGE, prefix_caching=False), **parts)
