"""Greedy draft-verify output equals plain greedy decoding, whatever the drafter does."""

from __future__ import annotations

import itertools

import pytest
import torch

from specmla import ArgumentError, SamplingParams, generate
from tests.e2e.conftest import VOCAB, ScriptedDrafter, make_step, prompts, run


@pytest.fixture(scope="module")
def plain(model):
    return run(model, prompts(6))[0]


def full_pass_greedy(model, prompt: list[int], count: int) -> list[int]:
    """The same continuation without any cache: one full pass a token."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            logits = model.forward_full(torch.tensor([tokens]))[0, -1]
            tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


def oracle(plain):
    """Map a committed sequence to its plain greedy continuation."""
    known = {name: (p[0], plain[name]) for name, p in prompts(6).items()}

    def continuation(tokens: list[int]) -> list[int]:
        for prompt, new in known.values():
            whole = prompt + new
            if len(tokens) <= len(whole) and whole[: len(tokens)] == tokens:
                return whole[len(tokens) :]
        raise AssertionError("the loop left the plain greedy path")

    return continuation


def wrong(token: int) -> int:
    return (token + 1) % VOCAB


def scripts(continuation):
    counter = itertools.count()
    return {
        "all_right": lambda t, k: continuation(t),
        "all_wrong": lambda t, k: [wrong(x) for x in continuation(t)],
        "right_up_to_2": lambda t, k: [
            x if j < 2 else wrong(x) for j, x in enumerate(continuation(t))
        ],
        "alternating": lambda t, k: [
            x if (len(t) + j) % 2 else wrong(x) for j, x in enumerate(continuation(t))
        ],
        "changing_length": lambda t, k: continuation(t)[: next(counter) % (k + 1)],
        "none": lambda t, k: [],
        "outside_the_vocabulary": lambda t, k: [VOCAB + 5, *continuation(t)],
    }


NAMES = list(scripts(lambda t: []))


def test_plain_greedy_equals_full_passes(model, plain):
    for name, (prompt, _) in prompts(6).items():
        assert plain[name] == full_pass_greedy(model, prompt, 24)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("name", NAMES)
def test_greedy_loop_equals_plain(model, plain, name, page_size):
    drafter = ScriptedDrafter(scripts(oracle(plain))[name])
    step = make_step(model, page_size, 800 // page_size)
    tokens, history = run(model, prompts(6), drafter, 4, step)
    assert tokens == plain
    verified = [r for results in history for r in results if not r.is_prompt]
    if name == "all_right":
        assert all(r.num_accepted == r.num_drafts for r in verified)
        assert max(r.num_drafts for r in verified) == 4
    if name in {"all_wrong", "outside_the_vocabulary"}:
        assert all(r.num_accepted == 0 for r in verified)
        assert any(r.num_drafts for r in verified)


def test_positions_move_by_accepted_plus_one(model, plain):
    """Next anchor = old anchor + accepted + 1, and every position is emitted once (BL-37)."""
    drafter = ScriptedDrafter(scripts(oracle(plain))["alternating"])
    _, history = run(model, prompts(6), drafter)
    emitted = dict.fromkeys(prompts(6), 0)
    for results in history:
        for r in results:
            assert len(r.new_tokens) == min(r.num_accepted + 1, 24 - emitted[r.request_id])
            emitted[r.request_id] += len(r.new_tokens)
    assert set(emitted.values()) == {24}


def test_each_request_has_its_own_k(model, plain):
    wanted = {"r0": 0, "r1": 1, "r2": 2, "r3": 6}  # the others get none
    drafter = ScriptedDrafter(scripts(oracle(plain))["all_right"])
    tokens, history = run(model, prompts(6), drafter, wanted)
    assert tokens == plain
    seen = dict.fromkeys(plain, 0)
    for r in itertools.chain(*history):
        seen[r.request_id] = max(seen[r.request_id], r.num_drafts)
    assert seen == {"r0": 0, "r1": 1, "r2": 2, "r3": 6, "r4": 0, "r5": 0}


@pytest.mark.parametrize("place", range(5))
def test_stop_token_inside_the_accepted_run(model, plain, place):
    """Output ends with the stop token, whatever its place in the block (BL-35)."""
    name = "r3"
    prompt = prompts(6)[name][0]
    stop = plain[name][1 + place]
    expected = plain[name][: plain[name].index(stop) + 1]
    batch = {name: (prompt, SamplingParams(max_tokens=24, stop_token_ids=(stop,)))}
    for script in ("all_right", "none"):
        tokens, history = run(model, batch, ScriptedDrafter(scripts(oracle(plain))[script]))
        assert tokens[name] == expected
        assert history[-1][0].finish_reason == "stop"


def test_context_limit_ends_at_exactly_the_limit(model, plain):
    """78 tokens committed, limit 80, K = 4: two more tokens, no row at or past 80 (BL-39)."""
    prompt = torch.arange(77).remainder(VOCAB).tolist()
    step = make_step(model, 16, 5, max_seq_len=80)
    drafter = ScriptedDrafter(lambda t, k: [1, 2, 3, 4])
    batch = {"a": (prompt, SamplingParams())}
    tokens, history = run(model, batch, drafter, 4, step)
    assert len(prompt) + len(tokens["a"]) == 80
    assert history[-1][0].finish_reason == "length"
    assert tokens["a"] == full_pass_greedy(model, prompt, 3)


@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_max_tokens(model, plain, max_tokens):
    drafter = ScriptedDrafter(scripts(oracle(plain))["all_right"])
    tokens, history = run(model, prompts(6, max_tokens), drafter, 4)
    assert tokens == {name: t[:max_tokens] for name, t in plain.items()}
    assert all(r.finish_reason in (None, "length") for r in itertools.chain(*history))


def test_prefix_hit_gives_the_same_tokens(model, plain):
    """A prompt whose pages are still cached skips them and continues all the same."""
    step = make_step(model, 4)
    run(model, prompts(6), None, 4, step)
    name = "r5"
    prompt, sampling = prompts(6)[name]
    assert step.blocks.match(prompt) >= 28
    tokens, _ = run(model, {name: (prompt, sampling)}, None, 4, step)
    assert tokens[name] == plain[name]


def test_requests_joining_late_change_nothing(model, plain):
    """Prompts and verifies share steps: r5 arrives when r0 is under way."""
    batch, step = prompts(6), make_step(model)
    out = {name: [] for name in batch}
    waiting = list(batch)
    with torch.no_grad():
        while waiting or step.active:
            if waiting:
                name = waiting.pop(0)
                step.add(name, *batch[name])
            plan = step.plan()
            hidden = model(plan.token_ids, plan.metadata, step.cache, step.builder.backend)
            logits = model.logits(hidden[plan.logit_rows])
            for r in step.commit(plan, step.verify(plan, logits)):
                out[r.request_id] += r.new_tokens
    assert out == plain


def test_an_error_or_an_early_stop_leaves_nothing_behind(model):
    step = make_step(model)
    bad = prompts(2) | {"bad": ([VOCAB], SamplingParams())}
    with pytest.raises(ArgumentError, match="bad"):
        run(model, bad, None, 4, step)
    assert step.active == ()
    loop = generate(model, step, prompts(3), ScriptedDrafter(lambda t, k: [1] * k))
    for _ in range(3):
        next(loop)
    loop.close()
    assert step.active == ()
    assert step.blocks.num_free == step.blocks.num_pages


def test_other_requests_of_the_step_are_left_alone(model, plain):
    step = make_step(model)
    step.add("mine", [1, 2, 3], SamplingParams())
    tokens: dict[str, list[int]] = {name: [] for name in plain}
    for results in generate(model, step, prompts(6)):
        for r in results:
            tokens[r.request_id] += r.new_tokens
    assert tokens == plain
    assert step.active == ("mine",)
    assert list(step.tokens("mine")) == [1, 2, 3]


def test_unseeded_requests_of_one_prompt_differ(model):
    torch.manual_seed(0)
    batch = {i: ([1, 2, 3], SamplingParams(1.0, max_tokens=20)) for i in range(4)}
    tokens, _ = run(model, batch)
    assert len({tuple(t) for t in tokens.values()}) == 4
