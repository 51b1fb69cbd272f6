"""Acceptance: terms by hand, decisions against a plain loop, draws, seeds, vocabulary sizes."""

from __future__ import annotations

import math

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from specmla.errors import ArgumentError, ArgumentTypeError
from specmla.verify.accept import RULES, Acceptance, RuleTerms, decide, greedy, token_level
from specmla.verify.draw import draw, sample
from specmla.verify.sampling import SamplingBatch, SamplingParams, processed_probs
from specmla.verify.streams import Stream, step_uniforms, uniforms
from specmla.verify.vocab import check_vocab, pad_vocab

LEAST, MOST = 2.0**-53, 1 - 2.0**-53  # the ends of the streams
P31 = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
Q31 = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def one_hot(ids: Tensor, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.nn.functional.one_hot(ids, width).to(dtype)


def random_rows(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.softmax(torch.randn(*shape, generator=generator, dtype=dtype) * 2, -1)


# The two lists of drafts of BL-29: a hole in the middle, nothing but holes.
DRAFTS29 = torch.tensor([[5, -1, 7], [-1, -1, -1]])
TARGET29 = torch.tensor([[5, 15, 15, 15]] * 2)


@pytest.mark.parametrize("u", [LEAST, 0.5, MOST])
@pytest.mark.parametrize("with_q", [False, True])
def test_bl29_placeholder_ends_the_run(u: float, with_q: bool) -> None:
    p = one_hot(TARGET29, 16)
    # The drafter left NaN where it proposed nothing.
    q = one_hot(DRAFTS29.clamp(min=0), 16).masked_fill((DRAFTS29 < 0)[..., None], math.nan)
    terms = token_level(p, DRAFTS29, q if with_q else None)
    sampled = decide(terms, DRAFTS29, torch.full((2, 3), u, dtype=torch.float64), f64(u, u))
    for got in (sampled, greedy(TARGET29, DRAFTS29)):
        assert got.tokens.tolist() == [[5, 15, -1, -1], [5, -1, -1, -1]]
        assert got.num_accepted.tolist() == [1, 0]
        assert got.next_token.tolist() == [15, 5]
        assert not got.flagged.any()


def test_bl29_token_after_a_placeholder_comes_from_the_full_row() -> None:
    p = random_rows(1, 3, 8, seed=1)
    q = random_rows(1, 2, 8, seed=2)
    drafts = torch.tensor([[3, -1]])
    for given in (q, None):
        terms = token_level(p, drafts, given)
        assert torch.equal(terms.correction[:, 1:], p[:, 1:])
        assert terms.accept[0, 1] == 0
    assert token_level(p, torch.tensor([[-7, 0]]), q).accept[0, 0] == 0


def test_bl31_terms() -> None:
    drafts = torch.tensor([[0], [1], [2]])
    p, q = P31.expand(3, 2, 3), Q31.expand(3, 1, 3).clone()
    kept = q.clone()
    terms = token_level(p, drafts, q)
    torch.testing.assert_close(terms.accept[:, 0], f64(1.0, 0.6, 2 / 3), rtol=1e-15, atol=0)
    torch.testing.assert_close(
        terms.correction[:, 0], f64(0.3, 0, 0).expand(3, 3), rtol=1e-15, atol=0
    )
    assert (terms.correction[:, 0, 1:] == 0).all()  # after a rejection the token is always 0
    assert torch.equal(terms.correction[:, 1], p[:, 1])
    assert torch.equal(q, kept)
    assert (Q31 * terms.accept[:, 0]).sum().item() == pytest.approx(0.70, abs=1e-15)
    without_q = token_level(p, drafts).accept[:, 0]
    assert (Q31 * without_q).sum().item() == pytest.approx(0.31, abs=1e-15)


def test_bl31_sampled() -> None:
    n = 200_000
    seed, position = torch.zeros(n, dtype=torch.int64), torch.arange(n)
    row = torch.zeros(1, dtype=torch.int64)
    drafts = sample(Q31.expand(n, 3), uniforms(seed, position, row, Stream.DRAFT)[:, 0])[:, None]
    terms = token_level(P31.expand(n, 2, 3), drafts, Q31.expand(n, 1, 3))
    u = step_uniforms(seed, position, 1)
    got = decide(terms, drafts, u.accept, u.correction)
    rejected = got.num_accepted == 0
    assert (got.next_token[rejected] == 0).all()
    assert abs(got.num_accepted.double().mean().item() - 0.70) < 5 * math.sqrt(0.21 / n)
    first = got.tokens[:, 0].bincount(minlength=3)
    assert chi_square(first, P31) < 2 + 5 * math.sqrt(4)


def test_bl31_rows_keep_their_own_q_when_permuted() -> None:
    p, q = random_rows(6, 4, 9, seed=3), random_rows(6, 3, 9, seed=4)
    drafts = torch.randint(9, (6, 3), generator=torch.Generator().manual_seed(5))
    order = torch.tensor([3, 1, 5, 0, 2, 4])
    straight, moved = token_level(p, drafts, q), token_level(p[order], drafts[order], q[order])
    assert torch.equal(straight.accept[order], moved.accept)
    assert torch.equal(straight.correction[order], moved.correction)


def test_bl33_draft_outside_the_kept_set_is_always_rejected() -> None:
    logits = torch.tensor([0.40, 0.22, 0.18, 0.06, 0.05, 0.05, 0.04]).log()
    batch = SamplingBatch.build([SamplingParams(1.0, 4, 0.83)], "cpu")
    p = processed_probs(logits.expand(1, 2, 7), batch).probs
    for token in (3, 4, 5, 6):
        drafts = torch.tensor([[token]])
        for q in (None, random_rows(1, 1, 7, seed=token, dtype=torch.float32)):
            terms = token_level(p, drafts, q)
            assert terms.accept.item() == 0
            for u in (LEAST, 0.5, MOST):
                got = decide(terms, drafts, f64(0.0)[None], f64(u))
                assert got.num_accepted.item() == 0
                assert got.next_token.item() < 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_empty_residual_falls_back_to_p(dtype: torch.dtype) -> None:
    p = random_rows(4, 2, 50, seed=6, dtype=dtype)
    drafts = torch.tensor([[0], [49], [7], [20]])
    equal = token_level(p, drafts, p[:, :1].clone())
    assert (equal.accept == 1).all()
    assert torch.equal(equal.correction, p)
    assert equal.accept.dtype == token_level(p, drafts).accept.dtype == torch.float64
    # Rounding may leave q above p everywhere: a rejection is then possible, NaN is not.
    above = token_level(p, drafts, p[:, :1] * (1 + 1e-6))
    assert (above.accept < 1).all()
    assert torch.equal(above.correction, p)
    certain = token_level(one_hot(drafts.expand(4, 2), 50, dtype), drafts)
    assert (certain.accept == 1).all()
    assert not certain.correction.isnan().any()


def test_q_of_zero_for_a_drafted_id_is_a_rejection() -> None:
    p = P31.expand(1, 2, 3)
    terms = token_level(p, torch.tensor([[1]]), f64(0.5, 0.0, 0.5)[None, None])
    assert terms.accept.item() == 0
    torch.testing.assert_close(terms.correction[0, 0], f64(0, 0.3, 0))
    exhausted = token_level(p, torch.tensor([[1]]), torch.zeros(1, 1, 3).double())
    assert exhausted.accept.item() == 0
    assert torch.equal(exhausted.correction, p)


def test_ratio_survives_the_ends_of_float32() -> None:
    tiny = torch.finfo(torch.float32).smallest_normal / 2**20
    p = torch.tensor([[[1.0, tiny], [1.0, 0.0]]])
    drafts = torch.tensor([[1]])
    assert token_level(p, drafts, torch.tensor([[[1.0, tiny]]])).accept.item() == 1
    assert token_level(p, drafts, torch.tensor([[[0.5, 0.5]]])).accept.item() == 2 * tiny
    assert token_level(p.flip(-1), drafts, torch.tensor([[[1.0, tiny]]])).accept.item() == 1


def test_q_that_is_not_a_number_is_flagged_not_drawn() -> None:
    p = P31.expand(2, 2, 3)
    q = torch.stack([torch.full((1, 3), math.nan).double(), Q31[None]])
    drafts = torch.tensor([[1], [0]])
    got = decide(token_level(p, drafts, q), drafts, f64(0.5, 0.5)[:, None], f64(0.9, 0.9))
    assert got.flagged.tolist() == [True, False]
    assert got.tokens.tolist() == [[0, -1], [0, 2]]


def test_no_drafts_at_all_is_plain_sampling() -> None:
    p = random_rows(7, 1, 20, seed=8, dtype=torch.float32)
    u = step_uniforms(torch.arange(7), torch.arange(7) + 40, 0)
    nothing = torch.empty(7, 0, dtype=torch.int64)
    got = decide(token_level(p, nothing), nothing, u.accept, u.correction)
    assert torch.equal(got.next_token, sample(p[:, 0], u.correction))
    assert got.num_accepted.tolist() == [0] * 7
    assert torch.equal(got.tokens, got.next_token[:, None])
    argmax = p[:, 0].argmax(-1)
    assert torch.equal(greedy(argmax[:, None], nothing).tokens, argmax[:, None])


def slow_decide(terms: RuleTerms, drafts: Tensor, accept_u: Tensor, u: Tensor) -> list[list[int]]:
    """Say in plain Python what a step emits."""
    emitted = []
    for b in range(drafts.shape[0]):
        out: list[int] = []
        for j in range(drafts.shape[1]):
            if not accept_u[b, j].item() < terms.accept[b, j].item():
                break
            out.append(int(drafts[b, j]))
        weights = terms.correction[b, len(out)].tolist()
        left = u[b].item() * math.fsum(weights)
        for token, weight in enumerate(weights):
            left -= weight
            if left < 0:
                out.append(token)
                break
        emitted.append(out)
    return emitted


@hypothesis.given(
    b=st.integers(1, 5), k=st.integers(0, 5), width=st.integers(2, 12), seed=st.integers(0, 2**20)
)
def test_decide_equals_a_plain_loop(b: int, k: int, width: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    p, q = random_rows(b, k + 1, width, seed=seed), random_rows(b, k, width, seed=seed + 1)
    drafts = torch.randint(-1, width + 1, (b, k), generator=generator)
    accept_u = torch.rand(b, k, generator=generator, dtype=torch.float64)
    u = torch.rand(b, generator=generator, dtype=torch.float64)
    for given in (q, None):
        terms = token_level(p, drafts, given)
        assert terms.accept.dtype == torch.float64
        assert ((terms.accept >= 0) & (terms.accept <= 1)).all()
        got = decide(terms, drafts, accept_u, u)
        want = slow_decide(terms, drafts, accept_u, u)
        assert [
            row[: n + 1]
            for row, n in zip(got.tokens.tolist(), got.num_accepted.tolist(), strict=True)
        ] == want
        assert (got.tokens[torch.arange(k + 1) > got.num_accepted[:, None]] == -1).all()
        assert got.next_token.tolist() == [row[-1] for row in want]
        assert not got.flagged.any()


@hypothesis.given(
    b=st.integers(1, 6), k=st.integers(0, 5), width=st.integers(1, 4), seed=st.integers(0, 2**20)
)
def test_greedy_equals_token_level_with_one_hot_p(b: int, k: int, width: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(width, (b, k + 1), generator=generator)
    drafts = torch.randint(-1, width + 1, (b, k), generator=generator)
    q = random_rows(b, k, width, seed=seed)
    u = step_uniforms(torch.arange(b), torch.full((b,), seed), k)
    want = greedy(target, drafts)
    assert want.tokens.dtype == want.num_accepted.dtype == torch.int64
    for given in (None, q):
        terms = token_level(one_hot(target, width, torch.float64), drafts, given)
        got = decide(terms, drafts, u.accept, u.correction)
        for name in Acceptance._fields:
            assert torch.equal(getattr(got, name), getattr(want, name)), name


# Drawing.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [1, 2, 3, 1000, 129_280])
def test_draw_never_returns_a_weight_of_zero(width: int, dtype: torch.dtype) -> None:
    rows = random_rows(6, width, seed=width, dtype=dtype)
    rows[1, : width // 2] = 0
    rows[2, width // 2 + 1 :] = 0
    rows[3] = 0
    rows[3, width // 2] = 1e-30
    rows[4, ::2] = 1e-38
    rows[5] = rows[5] * (torch.arange(width) % 3 == 0)
    for u in (0.0, LEAST, 1e-12, 0.25, 0.5, 0.75, 1 - 1e-12, MOST, 1.0):
        got = draw(rows, torch.full((6,), u, dtype=torch.float64))
        assert not got.flagged.any()
        assert (rows.gather(1, got.token[:, None]) > 0).all(), u
    positive = rows[2].nonzero()
    assert draw(rows[2:3], f64(LEAST)).token.item() == positive[0].item()
    assert draw(rows[2:3], f64(MOST)).token.item() <= positive[-1].item()


def test_draw_inverts_the_cumulative_sum() -> None:
    rows = random_rows(3, 500, seed=11)
    n = 4001
    u = (torch.arange(n).double() + 0.5) / n
    for row in rows:
        got = draw(row.expand(n, 500), u).token
        assert torch.equal(got, torch.searchsorted(row.cumsum(0), u * row.sum(), right=True))
        assert (got.diff() >= 0).all()
    quarters = torch.tensor([[1.0, 0.0, 2.0, 0.0, 1.0]]).expand(4, 5)
    edges = f64(0.25 - LEAST, 0.25, 0.75 - LEAST, 0.75)
    assert draw(quarters, edges).token.tolist() == [0, 2, 2, 4]
    assert draw(quarters * 1e-20, edges).token.tolist() == [0, 2, 2, 4]


def test_draw_does_not_raise_small_weights() -> None:
    tail = torch.full((1, 129_280), 1e-16)
    tail[0, 0] = 1  # all others together weigh 1.3e-11
    assert draw(tail, f64(1 - 1e-9)).token.item() == 0


def test_draw_matches_the_weights() -> None:
    n, p = 300_000, random_rows(40, seed=12)
    u = uniforms(torch.zeros(n).long(), torch.arange(n), torch.zeros(1).long(), Stream.CORRECTION)
    counts = sample(p.float().expand(n, 40), u[:, 0]).bincount(minlength=40)
    assert chi_square(counts, p) < 39 + 5 * math.sqrt(2 * 39)


@pytest.mark.parametrize("bad", [0.0, math.nan, math.inf])
def test_draw_flags_rows_without_a_distribution(bad: float) -> None:
    rows = torch.zeros(3, 4)
    rows[1, 2] = bad
    rows[2, 3] = 0.5
    got = draw(rows, f64(0.9, 0.9, 0.9))
    assert got.flagged.tolist() == [True, True, False]
    assert got.token.tolist() == [0, 0, 3]


# Whole steps: batch mates, frequencies, noise.


def run_step(logits: Tensor, params: list[SamplingParams], position: Tensor, k: int) -> Acceptance:
    """Draft from noisy logits, verify, decide."""
    batch = SamplingBatch.build(params, logits.device)
    p = processed_probs(logits, batch).probs
    q = processed_probs(logits[:, :k].flip(-1) * 0.3 + logits[:, :k], batch).probs
    u = uniforms(batch.seeds, position, torch.arange(k, device=logits.device), Stream.DRAFT)
    drafts = sample(q.reshape(-1, q.shape[-1]), u.flatten()).view(-1, k)
    step = step_uniforms(batch.seeds, position, k)
    return decide(token_level(p, drafts, q), drafts, step.accept, step.correction)


def mixed_batch(width: int) -> tuple[Tensor, list[SamplingParams], Tensor]:
    generator = torch.Generator().manual_seed(13)
    logits = torch.randn(7, 5, width, generator=generator) * 3
    params = [
        SamplingParams(0.8, 50, 0.95, seed=7),
        SamplingParams(seed=7),
        SamplingParams(1.0, seed=2**62 + 1),
        SamplingParams(1.0, top_p=0.5, seed=0),
        SamplingParams(2.0, 3, seed=9),
        SamplingParams(1.0, seed=7),
        SamplingParams(1e-38, seed=1),
    ]
    return logits, params, torch.tensor([5, 5, 70_000, 12, 0, 6, 3])


@pytest.mark.parametrize("width", [7, 1003, 4096])
def test_a_request_gets_the_same_tokens_alone_and_in_any_batch(width: int) -> None:
    logits, params, position = mixed_batch(width)
    together = run_step(logits, params, position, 4)
    assert 0 < together.num_accepted.sum() < 28
    order = [4, 0, 6, 2, 5, 1, 3]
    moved = run_step(logits[order], [params[i] for i in order], position[order], 4)
    assert torch.equal(moved.tokens, together.tokens[order])
    for b in range(7):
        alone = run_step(logits[b : b + 1], params[b : b + 1], position[b : b + 1], 4)
        assert torch.equal(alone.tokens[0], together.tokens[b]), b


def chi_square(counts: Tensor, p: Tensor) -> float:
    want = p.double() * counts.sum()
    assert (want >= 5).all()
    return ((counts - want) ** 2 / want).sum().item()


def markov_outputs(n: int, accept_stream: Stream) -> tuple[Tensor, Tensor]:
    """Run blocks for n seeds until each has 3 tokens; give counts and chances of the outputs."""
    width, k, length = 3, 2, 3
    p_of = 0.7 * random_rows(width, width, seed=21) + 0.1
    q_of = 0.7 * random_rows(width, width, seed=22) + 0.1
    seed, rows = torch.arange(n), torch.arange(n)
    text = torch.zeros(n, 1 + length + k + 1, dtype=torch.int64)
    size = torch.ones(n, dtype=torch.int64)
    while (size <= length).any():
        anchor, position = text.gather(1, size[:, None] - 1)[:, 0], size - 1
        chain, q = [anchor], []
        for u in uniforms(seed, position, torch.arange(k), Stream.DRAFT).unbind(1):
            q.append(q_of[chain[-1]])
            chain.append(sample(q[-1], u))
        drafts = torch.stack(chain[1:], 1)
        terms = token_level(p_of[torch.stack(chain, 1)], drafts, torch.stack(q, 1))
        accept_u = uniforms(seed, position, torch.arange(k), accept_stream)
        correction_u = uniforms(seed, position, torch.zeros(1).long(), Stream.CORRECTION)[:, 0]
        got = decide(terms, drafts, accept_u, correction_u)
        live = size <= length
        for j in range(k + 1):
            fits = live & (j <= got.num_accepted)
            text[rows[fits], size[fits] + j] = got.tokens[fits, j]
        size = torch.where(live, size + got.num_accepted + 1, size)
    index = (text[:, 1] * width + text[:, 2]) * width + text[:, 3]
    chance = (p_of[0][:, None] * p_of).unsqueeze(2) * p_of[None]
    return index.bincount(minlength=width**length), chance.flatten()


def test_outputs_of_consecutive_blocks_match_the_target() -> None:
    counts, chance = markov_outputs(100_000, Stream.ACCEPT)
    assert chi_square(counts, chance) < 26 + 5 * math.sqrt(2 * 26)


def test_noise_shared_by_draft_and_acceptance_is_caught() -> None:
    counts, chance = markov_outputs(100_000, Stream.DRAFT)
    assert chi_square(counts, chance) > 26 + 100 * math.sqrt(2 * 26)


# Vocabulary sizes (BL-51) and refusals.


def test_bl51_sizes_that_differ_are_refused_unless_allowed() -> None:
    for draft, target in ((151_936, 152_064), (40, 32), (32, 40)):
        with pytest.raises(ArgumentError, match=f"{draft} ids, the target {target};.*allow"):
            check_vocab(draft, target)
        check_vocab(draft, target, allow_mismatch=True)
        with pytest.raises(ArgumentError, match="allow_mismatch"):
            pad_vocab(torch.zeros(1, 1, draft), target)
    check_vocab(32, 32)
    with pytest.raises(ArgumentError, match="draft_size=0"):
        check_vocab(0, 32, allow_mismatch=True)
    with pytest.raises(ArgumentError, match=r"accepted is \[B, K, W\]"):
        pad_vocab(torch.zeros(2, 5), 5)


def test_bl51_padding_adds_zeros_or_cuts() -> None:
    q = random_rows(2, 3, 40, seed=31)
    wide = pad_vocab(q, 64, allow_mismatch=True)
    assert torch.equal(wide[..., :40], q)
    assert (wide[..., 40:] == 0).all()
    assert torch.equal(pad_vocab(q, 32, allow_mismatch=True), q[..., :32])
    assert torch.equal(pad_vocab(q, 40), q)


@pytest.mark.parametrize("outside", [32, 35, 39, 2**31 - 1, 2**62])
def test_bl51_ids_beyond_the_target_are_rejected_before_any_look_up(outside: int) -> None:
    p = random_rows(1, 3, 32, seed=32)
    q = pad_vocab(random_rows(1, 2, 40, seed=33), 32, allow_mismatch=True)
    drafts = torch.tensor([[4, outside]])
    terms = token_level(p, drafts, q)
    assert terms.accept[0, 1] == 0
    torch.testing.assert_close(terms.correction[0, 1], (p[0, 1] - q[0, 1]).clamp(min=0))
    assert torch.equal(token_level(p, drafts).correction[0, 1], p[0, 1])
    got = decide(terms, drafts, f64(LEAST, LEAST)[None], f64(0.5))
    assert got.num_accepted.item() <= 1
    assert got.tokens.max() < 32
    assert greedy(torch.tensor([[4, 31, 31]]), drafts).tokens.tolist() == [[4, 31, -1]]


def test_rules_refuse_what_does_not_fit() -> None:
    p, drafts = torch.zeros(2, 4, 8), torch.zeros(2, 3, dtype=torch.int64)
    for rule in RULES.values():
        with pytest.raises(ArgumentError, match=r"p has shape \(2, 4, 8\), drafts \(2, 2\)"):
            rule(p, drafts[:, :2], None)
        with pytest.raises(ArgumentError, match=r"q has shape \(2, 3, 9\).*pad_vocab"):
            rule(p, drafts, torch.zeros(2, 3, 9))
        with pytest.raises(ArgumentTypeError, match=r"torch\.int32"):
            rule(p, drafts.int(), None)
    with pytest.raises(ArgumentError, match=r"accepted is \(2, 4\)"):
        greedy(torch.zeros(2, 3, dtype=torch.int64), drafts)
    with pytest.raises(ArgumentError, match="W > 0"):
        draw(torch.zeros(2, 0), f64(0.5, 0.5))
    with pytest.raises(ArgumentError, match="u has shape"):
        draw(torch.zeros(2, 3), f64(0.5))


@pytest.mark.gpu
def test_cuda_decides_without_a_sync_and_as_the_cpu_does() -> None:
    logits, params, position = mixed_batch(4096)
    there = logits.cuda(), position.cuda()
    run_step(there[0], params, there[1], 4)  # first calls may initialise libraries
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = run_step(there[0], params, there[1], 4)
        nothing = run_step(there[0], [SamplingParams()] * 7, there[1], 4)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    # Softmax rounds differently there; at these fixed draws no token hangs on it.
    assert torch.equal(got.tokens.cpu(), run_step(logits, params, position, 4).tokens)
    assert not nothing.flagged.any()


@pytest.mark.gpu
def test_cuda_draws_the_very_tokens_of_the_cpu() -> None:
    rows = random_rows(64, 129_280, seed=41, dtype=torch.float32)
    u = uniforms(torch.arange(64), torch.arange(64), torch.zeros(1).long(), Stream.CORRECTION)
    here = sample(rows, u[:, 0])
    assert torch.equal(here, sample(rows.cuda(), u[:, 0].cuda()).cpu())
    assert torch.equal(here[:1], sample(rows[:1].cuda(), u[:1, 0].cuda()).cpu())
