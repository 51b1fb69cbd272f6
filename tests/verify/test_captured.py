"""Captured steps: replays equal eager steps, what was not captured is refused by name.

On a CPU a replay calls the captured function again over the same buffers; with real graphs the
same is run in tests/gpu/test_graphs_gpu.py.
"""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from specmla import ArgumentError, DraftProposal, NumericsError, PoolFullError, SamplingParams
from specmla.bucket import Bucket
from specmla.verify.captured import CapturedStep
from specmla.verify.sparse import SparseProbs
from tests.e2e.conftest import VOCAB, make_step
from tests.e2e.conftest import model as model

GREEDY = SamplingParams(max_tokens=40)
SAMPLED = SamplingParams(temperature=0.8, seed=3, max_tokens=40)
FILTERED = SamplingParams(temperature=0.8, top_k=9, top_p=0.9, seed=4, max_tokens=40)
KINDS = {"greedy": GREEDY, "sampled": SAMPLED, "filtered": FILTERED}


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def forward_of(model, step):
    def forward(plan):
        hidden = model(plan.token_ids, plan.metadata, step.cache, step.builder.backend)
        return model.logits(hidden[plan.logit_rows])

    return forward


def started(model, kinds, **options):
    """A step whose requests, one a kind, have their prompts behind them."""
    step = make_step(model, **options)
    for i, sampling in enumerate(kinds):
        step.add(i, [(7 * i + j) % VOCAB for j in range(3 + 6 * i)], sampling)
    plan = step.plan()
    step.commit(plan, step.verify(plan, forward_of(model, step)(plan)))
    return step


def propose(step, counts, seed: int, *, has_probs: bool = False) -> DraftProposal:
    names = [n for n in step.active if n in counts]
    rng = torch.Generator().manual_seed(seed)
    width = max(counts[n] for n in names)
    tokens = torch.randint(VOCAB, (len(names), width), generator=rng)
    probs = torch.full((len(names), width, VOCAB), 1 / VOCAB) if has_probs else None
    return DraftProposal(tuple(names), tuple(counts[n] for n in names), tokens, probs)


@pytest.mark.parametrize("has_probs", [False, True])
@pytest.mark.parametrize("kind", [*KINDS, "mixed"])
def test_replays_equal_eager_steps(model, kind, has_probs):
    """Ragged batches that shrink and grow: the same tokens, drafts, flags and cache rows."""
    kinds = [KINDS[k] for k in (KINDS if kind == "mixed" else [kind] * 3)]
    ours, plain = started(model, kinds), started(model, kinds)
    forward = forward_of(model, plain)
    graphs = CapturedStep(
        ours,
        forward_of(model, ours),
        [Bucket(4, 4), Bucket(2, 3), Bucket(1, 1)],
        sampling=kinds,
        draft_probs=None,
    )
    rng = random.Random(0)
    for turn in range(7):
        names = rng.sample(range(3), rng.randint(1, 3))
        counts = {n: rng.randint(0, 3) for n in names}
        proposal = propose(plain, counts, turn, has_probs=has_probs)
        plan = plain.plan(proposal, names)
        expected = plain.commit(plan, plain.verify(plan, forward(plan)))
        verdict = graphs.run(propose(ours, counts, turn, has_probs=has_probs), names)
        assert ours.commit(verdict.plan, verdict) == expected
        for name in range(3):
            assert list(ours.tokens(name)) == list(plain.tokens(name))
            assert torch.allclose(rows_of(ours, name), rows_of(plain, name), atol=1e-5)
    ours.blocks.check_integrity()


def rows_of(step, name) -> torch.Tensor:
    pages, size = step.blocks.block_ids(name), step.blocks.page_size
    at = [pages[i // size] * size + i % size for i in range(step.blocks.length(name))]
    return torch.cat([step.cache.gather(i, torch.tensor(at)) for i in range(step.cache.num_layers)])


def test_a_replay_writes_its_own_slots_alone(model):  # BL-18, BL-26
    """Whatever is no new row of the step has the bits it had: dummy pages, other requests'."""
    step = started(model, [GREEDY] * 4)
    before_capture = pool_of(step)
    graphs = CapturedStep(step, forward_of(model, step), [Bucket(4, 3)])
    assert torch.equal(pool_of(step), before_capture), "a capture writes nothing"
    for turn, names in enumerate([[0, 1], [2], [0, 3]]):
        before = pool_of(step)
        plan = graphs.plan(propose(step, dict.fromkeys(names, 2), turn), names)
        slots = plan.metadata.slot_mapping
        assert int((slots >= 0).sum()) == 3 * len(names)
        step.commit(plan, graphs.verify(plan))
        after, mine = pool_of(step), slots[slots >= 0]
        assert not torch.equal(after[:, mine], before[:, mine])
        before[:, mine] = after[:, mine]
        assert torch.equal(after, before)


def pool_of(step) -> torch.Tensor:
    """The bits of all rows [L, N * G, A]; NaN is nobody's row yet."""
    layers = [step.cache.layer(i).flatten(0, 1) for i in range(step.cache.num_layers)]
    return torch.stack(layers).view(torch.int32)


def test_padding_never_reaches_a_verdict(model):
    """NaN in every hidden row that no request brings, and in logits of absent requests."""
    ours, plain = started(model, [GREEDY, SAMPLED]), started(model, [GREEDY, SAMPLED])
    forward = forward_of(model, plain)

    def poisoned(plan):
        hidden = model(plan.token_ids, plan.metadata, ours.cache, ours.builder.backend)
        hidden[plan.metadata.slot_mapping < 0] = float("nan")
        return model.logits(hidden[plan.logit_rows])

    graphs = CapturedStep(ours, poisoned, [Bucket(5, 5)], sampling=[GREEDY, SAMPLED])
    for turn in range(3):
        counts = {0: 1, 1: 2 + turn % 2}
        plan = plain.plan(propose(plain, counts, turn))
        expected = plain.commit(plan, plain.verify(plan, forward(plan)))
        verdict = graphs.run(propose(ours, counts, turn))
        assert len(verdict.host) == 2
        assert ours.commit(verdict.plan, verdict) == expected


def test_nan_logits_of_a_request_raise_in_commit(model):
    step = started(model, [GREEDY, GREEDY])
    real, wrong = forward_of(model, step), []

    def forward(plan):
        logits = real(plan)
        logits[wrong] = float("nan")
        return logits

    graphs = CapturedStep(step, forward, [Bucket(2, 3)])
    wrong.append(4)
    verdict = graphs.run(propose(step, {0: 2, 1: 2}, 0))
    with pytest.raises(NumericsError, match=r"requests \[1\]"):
        step.commit(verdict.plan, verdict)
    step.blocks.check_integrity()
    wrong.clear()
    verdict = graphs.run(propose(step, {0: 2, 1: 2}, 0))
    assert len(step.commit(verdict.plan, verdict)) == 2


def refused(graphs, message, *args):
    step = graphs.step
    free, lengths = step.blocks.num_free, [step.blocks.length(n) for n in step.active]
    with pytest.raises(ArgumentError, match=message):
        graphs.plan(*args)
    assert (free, lengths) == (step.blocks.num_free, [step.blocks.length(n) for n in step.active])


def test_what_was_not_captured_is_refused_before_anything_is_reserved(model):
    step = started(model, [GREEDY, SAMPLED])
    graphs = CapturedStep(step, forward_of(model, step), [Bucket(1, 3, ragged=False), Bucket(2, 2)])
    refused(
        graphs, r"query_len=3.*query_len is \[4\], captured is 3", propose(step, {0: 3}, 0), [0]
    )
    both = r"there are 2 requests, captured are 1.*query_len is \[3\], captured is 1 to 2"
    step.fork(0, "twin", GREEDY)
    refused(graphs, both, propose(step, {0: 2, "twin": 0}, 0), [0, "twin"])
    refused(
        graphs,
        "the sampling is all_greedy=False.*captured: all_greedy=True",
        propose(step, {1: 1}, 0),
        [1],
    )
    step.add("new", [1, 2, 3], GREEDY)
    refused(graphs, r"requests \['new'\] are prompts", None, ["new"])
    plan = graphs.plan(propose(step, {0: 2}, 0), [0])
    with pytest.raises(ArgumentError, match="neither committed nor cancelled"):
        graphs.plan(None, [0])
    step.cancel(plan)
    with pytest.raises(ArgumentError, match="not the one that this object planned last"):
        graphs.verify(step.plan(None, [0]))


@pytest.mark.parametrize("eager", [False, True])
def test_a_refused_plan_leaves_the_open_one_as_it_is(model, eager):
    """Plan twice, as by mistake: the first plan is replayed as if the second had not been."""
    ours, plain = started(model, [GREEDY]), started(model, [GREEDY])
    forward = forward_of(model, plain)
    graphs = CapturedStep(ours, forward_of(model, ours), [Bucket(2, 2)], eager=eager)
    for turn in range(4):
        plan = plain.plan(propose(plain, {0: 1}, turn))
        expected = plain.commit(plan, plain.verify(plan, forward(plan)))
        plan = graphs.plan(propose(ours, {0: 1}, turn))
        for again in (propose(ours, {0: 1}, 9), None):
            with pytest.raises(ArgumentError, match="neither committed nor cancelled"):
                graphs.plan(again)
        assert ours.commit(plan, graphs.verify(plan)) == expected


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("kind", ["captured", "own tensors"])
def test_a_plan_that_is_not_open_is_not_run(model, kind, eager):
    """Its pages may be another request's: not one row is written."""
    step = started(model, [GREEDY])
    calls, real = [], forward_of(model, step)

    def forward(plan):
        calls.append(plan)
        return real(plan)

    graphs = CapturedStep(step, forward, [Bucket(1, 5)], eager=eager)
    made = graphs if kind == "captured" else step
    cancelled = made.plan(propose(step, {0: 4}, 0))
    step.cancel(cancelled)
    committed = made.plan(propose(step, {0: 4}, 0))
    step.commit(committed, step.verify(committed, real(committed)))
    step.remove(0)
    step.add("next", [9, 8, 7, 6, 5, 4, 3, 2, 1], GREEDY)
    calls.clear()
    before = pool_of(step)
    for plan in (cancelled, committed, None):
        with pytest.raises(ArgumentError, match=r"not the step planned last.*no step is open"):
            graphs.verify(plan)
    open_plan = step.plan()
    for plan in (cancelled, committed, None):
        with pytest.raises(ArgumentError, match=r"not the step planned last.*another one is open"):
            graphs.verify(plan)
    assert not calls
    assert torch.equal(pool_of(step), before)
    step.commit(open_plan, step.verify(open_plan, real(open_plan)))


def test_trees_are_refused(model):
    step = started(model, [GREEDY])
    graphs = CapturedStep(step, forward_of(model, step), [Bucket(1, 4)])
    tree = DraftProposal((0,), (3,), torch.tensor([[1, 2, 3]]), parents=((-1, -1, 0),))
    refused(graphs, r"requests \[0\] bring trees", tree)
    chain = DraftProposal((0,), (3,), torch.tensor([[1, 2, 3]]), parents=((-1, 0, 1),))
    verdict = graphs.run(chain)
    assert verdict.plan.drafts.tolist() == [[1, 2, 3]]
    step.commit(verdict.plan, verdict)


def test_draft_probs_of_another_dtype_are_refused(model):
    step = started(model, [SAMPLED])
    graphs = CapturedStep(
        step, forward_of(model, step), [Bucket(1, 3)], sampling=[SAMPLED], draft_probs=True
    )
    proposal = propose(step, {0: 2}, 0, has_probs=True)
    wide = DraftProposal(
        proposal.request_ids, proposal.counts, proposal.tokens, proposal.probs.double()
    )
    refused(graphs, "draft probs are torch.float64", wide)
    bare = propose(step, {0: 2}, 0)
    refused(graphs, "draft_probs=False; captured: .*draft_probs=True", bare)
    verdict = graphs.run()  # no draft: no distribution is missed
    step.commit(verdict.plan, verdict)


def test_sparse_draft_probs_are_those_of_their_dense_rows(model):
    """Two ids a draft, of which the second may lie outside the vocabulary."""
    ours, plain = started(model, [SAMPLED] * 2), started(model, [SAMPLED] * 2)
    graphs = CapturedStep(
        ours, forward_of(model, ours), [Bucket(3, 4)], sampling=[SAMPLED], draft_probs=True
    )
    for turn in range(4):
        proposals = []
        for step in (plain, ours):
            bare = propose(step, {0: 3, 1: 2}, turn)
            ids = torch.stack([bare.tokens, (bare.tokens + 5) % VOCAB], dim=-1)
            probs = torch.tensor([0.75, 0.25]).expand(ids.shape)
            proposals.append(dataclasses.replace(bare, probs=SparseProbs(ids, probs.clone())))
        plan = plain.plan(proposals[0])
        expected = plain.commit(plan, plain.verify(plan, forward_of(model, plain)(plan)))
        verdict = graphs.run(proposals[1])
        assert ours.commit(verdict.plan, verdict) == expected


def test_penalties_that_were_not_captured_are_refused_and_run_eagerly_on_request(model):
    params = SamplingParams(max_tokens=40, repetition_penalty=1.5)
    step = started(model, [params])
    forward = forward_of(model, step)
    graphs = CapturedStep(step, forward, [Bucket(1, 4)], sampling=[GREEDY])
    refused(graphs, "has_processors=True", propose(step, {0: 2}, 0))
    verdict = CapturedStep(step, forward, [Bucket(1, 4)], eager=True).run()
    assert len(step.commit(verdict.plan, verdict)) == 1


def test_eager_runs_what_was_not_captured_and_only_that(model):
    ours, plain = started(model, [GREEDY]), started(model, [GREEDY])
    calls = []
    real = forward_of(model, ours)

    def forward(plan):
        calls.append(plan.token_ids.shape[0])
        return real(plan)

    graphs = CapturedStep(ours, forward, [Bucket(1, 3)], eager=True)
    calls.clear()
    for counts, names in (({0: 1}, [0]), ({0: 4}, [0, "new"]), ({0: 2}, [0])):
        if "new" in names:
            for step in (ours, plain):
                step.add("new", [5, 6, 7, 8], GREEDY)
        proposal = propose(plain, counts, 0)
        expected_plan = plain.plan(proposal, names)
        expected = plain.commit(
            expected_plan, plain.verify(expected_plan, forward_of(model, plain)(expected_plan))
        )
        verdict = graphs.run(propose(ours, counts, 0), names)
        assert ours.commit(verdict.plan, verdict) == expected
    # Only the step with the prompt, of 5 rows of the verify and 4 of the prompt, was eager; the
    # others called it through the replay, with all rows of the bucket.
    assert calls == [3, 9, 3]


def test_a_failing_forward_cancels_the_step(model):
    step = started(model, [GREEDY])
    real, broken = forward_of(model, step), []

    def forward(plan):
        if broken:
            raise OSError("out of luck")
        return real(plan)

    graphs = CapturedStep(step, forward, [Bucket(1, 3)])
    broken.append(True)
    with pytest.raises(OSError, match="out of luck"):
        graphs.run(propose(step, {0: 2}, 0))
    broken.clear()
    step.blocks.check_integrity()
    verdict = graphs.run(propose(step, {0: 2}, 0))
    step.commit(verdict.plan, verdict)


def test_a_full_pool_reserves_nothing(model):
    step = started(model, [GREEDY, GREEDY], num_pages=6)
    graphs = CapturedStep(step, forward_of(model, step), [Bucket(2, 16)])
    free = step.blocks.num_free
    with pytest.raises(PoolFullError):
        graphs.run(propose(step, {0: 15, 1: 15}, 0))
    assert step.blocks.num_free == free
    verdict = graphs.run(propose(step, {0: 1, 1: 1}, 0))
    step.commit(verdict.plan, verdict)


def test_a_capture_needs_something_to_capture(model):
    step = started(model, [GREEDY])
    with pytest.raises(ArgumentError, match=r"buckets is empty.*sampling is empty"):
        CapturedStep(step, forward_of(model, step), [], sampling=[])
    with pytest.raises(ArgumentError, match=r"logits has shape .*accepted is \[R, W\]"):
        CapturedStep(step, lambda plan: torch.zeros(1, VOCAB), [Bucket(2, 2)])


def test_hidden_states_of_the_rows_come_along(model):
    step = started(model, [GREEDY, GREEDY])

    def forward(plan):
        hidden = model(plan.token_ids, plan.metadata, step.cache, step.builder.backend)
        return model.logits(hidden[plan.logit_rows]), hidden

    graphs = CapturedStep(step, forward, [Bucket(3, 3)])
    plan = graphs.plan(propose(step, {0: 1, 1: 2}, 0))
    verdict = graphs.verify(plan)
    assert plan.metadata.query_start == (0, 3, 6)
    assert graphs.states.shape == (9, 48)
    logits = model.logits(graphs.states[plan.logit_rows])
    assert torch.equal(step.verify(plan, logits).host, verdict.host)
    step.commit(plan, verdict)


@pytest.mark.parametrize(
    "params", [SamplingParams(1.0, seed=1), SamplingParams(0.0, presence_penalty=0.5)]
)
def test_a_padded_plan_is_judged_by_its_own_step_alone(model, params):
    step = started(model, [params, params])
    graphs = CapturedStep(step, forward_of(model, step), [Bucket(3, 3)], sampling=[params])
    plan = graphs.plan(propose(step, {0: 1, 1: 2}, 0))
    logits = torch.zeros(9, VOCAB)
    with pytest.raises(ArgumentError, match=r"captured step of 3 requests and has 2.*Captured"):
        step.verify(plan, logits)
    step.commit(plan, graphs.verify(plan))
