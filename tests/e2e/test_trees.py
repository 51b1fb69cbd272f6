"""The loop with trees of drafts: greedy equals plain decoding, sampled has the target's law."""

from __future__ import annotations

import itertools
import random
from collections.abc import Hashable, Sequence

import pytest
import torch

from specmla import ArgumentError, DraftProposal, DraftRequest, SamplingParams, build_step
from specmla.testing import relative_error
from tests.e2e.conftest import VOCAB, ScriptedDrafter, make_step, prompts, run

Nodes = list[tuple[int, int]]  # (token, parent), the anchor is -1


class TreeDrafter:
    """Proposes the nodes that a function of (tokens so far, most nodes, most levels) says; None
    in place of parents where it gives a plain list of tokens."""

    def __init__(self, script, vocab_size: int = VOCAB) -> None:
        self.script, self.vocab_size = script, vocab_size
        self.seen = []

    def propose(self, requests: Sequence[DraftRequest]) -> DraftProposal:
        found = [self.script(list(r.tokens), r.num_nodes, r.num_drafts) for r in requests]
        rows = [[n[0] if isinstance(n, tuple) else n for n in nodes] for nodes in found]
        parents = tuple(
            [n[1] for n in nodes] if nodes and isinstance(nodes[0], tuple) else None
            for nodes in found
        )
        width = max((len(row) for row in rows), default=0)
        padded = [row + [-1] * (width - len(row)) for row in rows]
        return DraftProposal(
            tuple(r.request_id for r in requests),
            tuple(len(row) for row in rows),
            torch.tensor(padded, dtype=torch.int64).view(len(rows), width),
            parents=parents,
        )

    def observe(self, results, hidden=None) -> None:
        self.seen += results

    def reset(self, request_id: Hashable) -> None:
        pass


@pytest.fixture(scope="module")
def plain(model):
    return run(model, prompts(6))[0]


def oracle(plain):
    """Map a committed sequence to its plain greedy continuation."""
    known = [p[0] + plain[name] for name, p in prompts(6).items()]

    def continuation(tokens: list[int]) -> list[int]:
        whole = next(w for w in known if w[: len(tokens)] == tokens)
        return whole[len(tokens) :]

    return continuation


def hidden_path(continuation, seed: int, width: int = 3):
    """Hide the right path, up to a random depth, in a random tree in a random node order."""
    rng = random.Random(seed)

    def script(tokens: list[int], num_nodes: int, num_levels: int) -> Nodes:
        right = continuation(tokens)[:num_levels]
        count = rng.randint(0, num_nodes if num_levels else 0)
        if rng.random() < 0.2:
            return right[:count]  # a chain
        depth = rng.randint(0, min(count, len(right)))
        nodes: Nodes = [(right[i], i - 1) for i in range(depth)]
        levels = list(range(1, depth + 1))
        taken = {(parent, token) for token, parent in nodes}
        while len(nodes) < count:
            parent = rng.randrange(-1, len(nodes))
            level = 1 + (levels[parent] if parent >= 0 else 0)
            token = rng.randrange(VOCAB)
            if level <= num_levels and (parent, token) not in taken:
                taken.add((parent, token))
                nodes.append((token, parent))
                levels.append(level)
        order = rng.sample(range(len(nodes)), len(nodes))
        place = {node: at for at, node in enumerate(order)} | {-1: -1}
        return [(nodes[node][0], place[nodes[node][1]]) for node in order]

    return script


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("seed", range(3))
def test_greedy_loop_with_random_trees_equals_plain(model, plain, page_size, seed):
    drafter = TreeDrafter(hidden_path(oracle(plain), seed))
    step = make_step(model, page_size, 1600 // page_size)
    tokens, history = run(model, prompts(6), drafter, 12, step)
    assert tokens == plain
    results = list(itertools.chain(*history))
    trees = [r for r in results if r.path is not None]
    assert any(r.num_accepted >= 4 for r in trees)
    assert any(r.num_accepted == 0 for r in trees)
    assert any(list(r.path) != sorted(r.path) for r in trees)  # rows had to cross
    assert any(r.path is None and r.num_drafts for r in results)  # chains beside them
    for r in trees:
        assert len(r.path) == r.num_accepted <= r.num_levels <= r.num_drafts


def test_trees_near_the_limits_are_cut(model, plain):
    """Levels end with max_tokens, rows with the context, whatever a drafter proposes."""
    step = make_step(model, 16, 30, max_seq_len=40)

    def wide(tokens: list[int], num_nodes: int, num_levels: int) -> Nodes:
        return [(1, i - 1) for i in range(20)] + [(2, i - 1) for i in range(20)]

    batch = {"a": (prompts(6)["r4"][0], SamplingParams())}
    tokens, history = run(model, batch, TreeDrafter(wide), 63, step)
    assert len(batch["a"][0]) + len(tokens["a"]) == 40
    assert tokens["a"][:23] == plain["r4"][:23]
    seen = [r.num_drafts for results in history for r in results]
    assert max(seen) == 40 - 18  # one token follows the prompt of 17; rows fill the context
    assert history[-1][0].finish_reason == "length"


@pytest.mark.parametrize("place", range(4))
def test_stop_token_inside_an_accepted_path(model, plain, place):
    name = "r3"
    prompt = prompts(6)[name][0]
    stop = plain[name][1 + place]
    expected = plain[name][: plain[name].index(stop) + 1]
    batch = {name: (prompt, SamplingParams(max_tokens=24, stop_token_ids=(stop,)))}
    continuation = oracle(plain)

    def script(tokens: list[int], num_nodes: int, num_levels: int) -> Nodes:
        right = continuation(tokens)[:6]
        n = len(right)  # backwards: the deepest node first
        return [(right[n - 1 - i], i + 1 if i + 1 < n else -1) for i in range(n)] + [(0, -1)]

    tokens, history = run(model, batch, TreeDrafter(script), 12)
    assert tokens[name] == expected
    assert history[-1][0].finish_reason == "stop"


def test_finished_paths_leave_true_pages_behind(model, plain):
    """Pages that a tree request leaves to the prefix cache serve the next prompt."""
    step = make_step(model, 4)
    run(model, prompts(6), TreeDrafter(hidden_path(oracle(plain), 5)), 12, step)
    whole = prompts(6)["r5"][0] + plain["r5"]
    assert step.blocks.match(whole) >= 48
    batch = {"again": (whole[:50], SamplingParams(max_tokens=4))}
    tokens, _ = run(model, batch, None, 4, step)
    assert tokens["again"] == plain["r5"][20:24]


def test_a_backend_without_trees_refuses_them_with_the_reason(model):
    pytest.importorskip("triton")
    step = build_step(model, num_pages=50, page_size=16, backend="rows")
    drafter = TreeDrafter(lambda t, n, levels: [(1, -1), (2, -1)])
    with pytest.raises(ArgumentError, match=r"mask is 'tree'.*'rows' accepts"):
        run(model, prompts(2), drafter, 4, step)
    assert step.active == ()
    assert step.blocks.num_free == step.blocks.num_pages


def test_a_rule_without_a_tree_form_refuses_them(model):
    step = make_step(model, rule="lossy_typical")
    drafter = TreeDrafter(lambda t, n, levels: [(1, -1), (2, -1)])
    with pytest.raises(ArgumentError, match=r"holds trees.*token_level"):
        run(model, prompts(2), drafter, 4, step)
    tokens, _ = run(model, prompts(2), ScriptedDrafter(lambda t, k: [1] * k), 4, step)
    assert all(len(t) == 24 for t in tokens.values())


SAMPLED = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 5},
]


def mixed_batch() -> dict:
    """Greedy and sampled requests side by side."""
    made = prompts(6)
    for i, name in enumerate(list(made)):
        if i % 2:
            made[name] = (made[name][0], SamplingParams(**SAMPLED[i // 2], seed=i, max_tokens=24))
    return made


@pytest.mark.parametrize("rule", ["token_level", "block", "sample_match"])
def test_chains_beside_trees_get_the_same_tokens(model, rule):
    """Whether a batch mate brings a tree changes nothing; greedy requests stay plain."""
    batch = mixed_batch()
    plain_tokens, _ = run(model, batch, None, 4, make_step(model, rule=rule))
    names = list(batch)

    def script_for(trees: bool):
        def script(tokens: list[int], num_nodes: int, num_levels: int):
            mine = next(n for n in names if tokens[: len(batch[n][0])] == batch[n][0])
            guess = [(7 * len(tokens) + j) % VOCAB for j in range(5)]
            if mine in ("r4", "r5") and trees:
                return [(guess[0], -1), (guess[1], -1), (guess[2], 0), (guess[3], 1)]
            return guess[:num_levels]

        return script

    def common(trees: bool):
        step = make_step(model, rule=rule)
        return run(model, batch, TreeDrafter(script_for(trees)), 5, step)[0]

    without, beside = common(False), common(True)
    for name in names[:4]:
        assert without[name] == beside[name]
    for name in ("r0", "r2", "r4"):
        assert beside[name] == plain_tokens[name]
    if rule == "sample_match":  # the seed alone decides, whatever is drafted
        assert without == beside == plain_tokens


def test_hidden_states_of_accepted_paths_are_those_of_a_full_pass(model, plain):
    """Rows that a drafter hears of follow the path, whatever order the nodes stood in."""

    class Listener(TreeDrafter):
        hidden_layers = (0, -1)  # after the first layer, and the final states

        def __init__(self, script) -> None:
            super().__init__(script)
            self.tokens = {name: list(p[0]) for name, p in prompts(6).items()}
            self.rows = 0

        def observe(self, results, hidden=None) -> None:
            super().observe(results)
            parts = hidden.states.split(list(hidden.counts))
            for r, start, got in zip(results, hidden.starts, parts, strict=True):
                self.tokens[r.request_id] += r.new_tokens
                with torch.no_grad():
                    full = model.model.forward_full(torch.tensor([self.tokens[r.request_id]]))[0]
                assert start + len(got) == len(full) - 1
                width = full.shape[1]
                # float32 rounds alike in both shapes; another row is as far off as it is long.
                assert relative_error(got[:, width:], full[start:-1]) < 1e-4
                self.rows += len(got) if r.path else 0

    listener = Listener(hidden_path(oracle(plain), 7))
    assert run(model, prompts(6), listener, 12)[0] == plain
    assert listener.rows > 40


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU tests/gpu covers this")
def test_interpreted_kernels_serve_trees_like_the_reference(model, plain):
    """Attention by the packed kernel; chains and nothing beside trees, pages of 16."""
    pytest.importorskip("triton")
    batch = {
        name: (tokens, SamplingParams(max_tokens=8))
        for name, (tokens, _) in prompts(4).items()
        if name != "r0"
    }
    step = build_step(model, num_pages=30, page_size=16, backend="triton")
    for layer in range(model.config.num_layers):
        step.cache.layer(layer).fill_(float("nan"))
    drafter = TreeDrafter(hidden_path(oracle(plain), 2))
    tokens, history = run(model, batch, drafter, 7, step)
    assert tokens == {name: plain[name][:8] for name in batch}
    assert any(r.path and list(r.path) != sorted(r.path) for h in history for r in h)
