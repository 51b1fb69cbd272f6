"""Exact losslessness of every rule that claims it: two blocks, every draft shape, TV < 1e-12."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from specmla.verify.accept import LOSSLESS, RULES
from specmla.verify.rules.block import block
from specmla.verify.rules.lossy_relaxed import LossyRelaxed
from specmla.verify.rules.lossy_typical import LossyTypical
from specmla.verify.rules.sample_match import sample_match
from specmla.verify.rules.token_level import token_level
from specmla.verify.sampling import SamplingParams
from specmla.verify.sparse import SparseProbs
from tests.verify.enumeration import (
    Case,
    Model,
    mean_accepted,
    rows_along,
    rule_terms,
    total_variation,
)
from tests.verify.enumeration import block as one_block
from tests.verify.enumeration_cases import (
    all_tokens,
    dense,
    filtered,
    make_case,
    random_model,
)

KINDS = [
    "dense",
    "one-hot",
    "padded-dense",
    "padded-one-hot",
    "equal",
    "half-equal",
    "target-has-zeros",
    "target-has-zeros-one-hot",
    "draft-has-zeros",
    "both-have-zeros",
    "target-greedy",
    "both-greedy",
    "smaller-vocabulary",
    "larger-vocabulary",
    "sparse",
    "sparse-padded",
    "sparse-target-has-zeros",
    "sparse-larger-vocabulary",
    "reduced-vocabulary",
    "sparse-reduced-vocabulary",
    "min-p",
]
SIZES = [(2, 1), (2, 3), (3, 1), (3, 2), (4, 2), (3, 3)]


@pytest.mark.parametrize(("width", "k"), SIZES, ids=[f"W{w}-K{k}" for w, k in SIZES])
@pytest.mark.parametrize("kind", KINDS)
def test_rules_keep_the_target_distribution(kind: str, width: int, k: int) -> None:
    case = make_case(kind, width, k, seed=width + k)
    for name, rule in LOSSLESS.items():
        assert total_variation(case, rule) < 1e-12, name


@pytest.mark.parametrize("name", LOSSLESS)
def test_four_ids_and_three_drafts(name: str) -> None:
    assert total_variation(make_case("padded-dense", 4, 3), LOSSLESS[name]) < 1e-12


def test_cases_are_what_they_say() -> None:
    """The zeros, holes and empty residuals that the cases promise do occur."""
    assert any((t == 0).any() for t in make_case("target-has-zeros", 4, 2).target.tables)
    assert any((t == 0).any() for t in make_case("min-p", 4, 2).target.tables)
    q = make_case("draft-has-zeros", 4, 2).drafter(1, 4).q
    assert isinstance(q, torch.Tensor)
    assert (q == 0).any()
    case = make_case("half-equal", 3, 2)
    q = case.drafter(1, 3).q
    assert isinstance(q, torch.Tensor)
    same = (rows_along(case.target, 1, all_tokens(3, 2).expand(3, -1, 2), 2) == q).all(-1)
    assert same.any()
    assert not same.all()
    assert (make_case("larger-vocabulary", 3, 2).drafter(0, 3).tokens == 3).any()
    sparse = make_case("sparse", 4, 2).drafter(1, 4).q
    assert isinstance(sparse, SparseProbs)
    assert sparse.ids.shape[-1] == 2
    assert (make_case("reduced-vocabulary", 4, 2).drafter(0, 4).tokens > 0).all()


@pytest.mark.parametrize("name", LOSSLESS)
@pytest.mark.parametrize("kind", ["sparse", "sparse-target-has-zeros", "sparse-reduced-vocabulary"])
def test_sparse_terms_are_those_of_the_dense_rows(kind: str, name: str) -> None:
    case = make_case(kind, 4, 2)

    def widened(n: int, width: int):
        drafts = case.drafter(n, width)
        assert isinstance(drafts.q, SparseProbs)
        return drafts._replace(q=drafts.q.dense(width))

    for n in range(3):
        got = rule_terms(case, LOSSLESS[name], n)[1]
        want = rule_terms(case._replace(drafter=widened), LOSSLESS[name], n)[1]
        assert torch.equal(got.accept, want.accept)
        assert torch.equal(got.correction.nan_to_num(), want.correction.nan_to_num())


def flat(p: list[float], depth: int) -> Model:
    """Give a model that ignores its history."""
    row = torch.tensor(p, dtype=torch.float64)
    return Model([row.expand(len(p) ** n, len(p)) for n in range(depth)], len(p))


def toy(p: list[float], q: list[float], k: int) -> Case:
    return Case(flat(p, 2 * (k + 1) + 1), dense(flat(q, 2 * (k + 1) + 1), k), k)


def test_block_verification_accepts_eleven_ninths_where_tokens_alone_give_ten() -> None:
    """Sun et al., example of section 2: p = (1/3, 2/3), q = (2/3, 1/3), two drafts."""
    case = toy([1 / 3, 2 / 3], [2 / 3, 1 / 3], 2)
    assert mean_accepted(case, block) == pytest.approx(float(Fraction(11, 9)), abs=1e-14)
    assert mean_accepted(case, token_level) == pytest.approx(float(Fraction(10, 9)), abs=1e-14)
    assert mean_accepted(case, sample_match) < mean_accepted(case, token_level)


@pytest.mark.parametrize("kind", KINDS)
def test_block_accepts_no_less_than_token_level_and_that_no_less_than_a_match(kind: str) -> None:
    for seed in range(2):
        case = make_case(kind, 3, 2, seed)
        blocks, tokens = mean_accepted(case, block), mean_accepted(case, token_level)
        assert blocks >= tokens - 1e-12
        assert tokens >= mean_accepted(case, sample_match) - 1e-12


def test_block_equals_token_level_for_one_draft() -> None:
    for kind in KINDS[::2]:
        case = make_case(kind, 3, 1, seed=2)
        for n in range(2):
            _, one = rule_terms(case, block, n)
            _, other = rule_terms(case, token_level, n)
            torch.testing.assert_close(one.accept, other.accept, rtol=1e-14, atol=0)
            assert torch.equal(one.correction.nan_to_num(), other.correction.nan_to_num())


def test_block_accepts_all_of_a_draft_that_equals_the_target() -> None:
    """S / (S + 1 - P) is 0/0 there, and must be 1."""
    case = make_case("equal", 3, 3)
    assert mean_accepted(case, block) == pytest.approx(3, abs=1e-12)
    assert (rule_terms(case, block, 1)[1].accept == 1).all()


@pytest.mark.parametrize("name", LOSSLESS)
def test_bl31_marginals(name: str) -> None:
    case = toy([0.5, 0.3, 0.2], [0.2, 0.5, 0.3], 1)
    one, two = one_block(case, LOSSLESS[name], 0)
    marginal = one[0] + two[0].reshape(3, 3).sum(1)
    want = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    torch.testing.assert_close(marginal, want, rtol=0, atol=1e-15)
    accepted = 0.5 * 0.2 + 0.3 * 0.5 + 0.2 * 0.3 if name == "sample_match" else 0.70
    assert two.sum().item() == pytest.approx(accepted, abs=1e-15)


@pytest.mark.parametrize("rule", [RULES["lossy_typical"], RULES["lossy_relaxed"]])
def test_lossy_rules_are_lossy_and_greedy_at_temperature_zero(rule) -> None:
    case = make_case("dense", 3, 2, seed=1)
    assert total_variation(case, rule) > 1e-2
    assert mean_accepted(case, rule) > 0
    greedy = make_case("target-greedy", 3, 2, seed=1)
    assert total_variation(greedy, rule) < 1e-12


def test_lossy_rules_say_so_by_name() -> None:
    assert {n for n in RULES if n not in LOSSLESS} == {n for n in RULES if "lossy" in n}
    for rule in (LossyTypical, LossyRelaxed):
        assert rule.__name__.startswith("Lossy")


def test_lossy_thresholds() -> None:
    """At (1/2, 3/10, 2/10) H is 1.0297, so delta * exp(-H) is 0.107 for 0.3 and 0.357 for 1."""
    p = torch.tensor([[[0.5, 0.3, 0.2]] * 2] * 3, dtype=torch.float64)
    drafts = torch.tensor([[0], [1], [2]])

    def accept(rule) -> list[float]:
        terms = rule(p, drafts, None)
        assert torch.equal(terms.correction, p)
        return terms.accept[:, 0].tolist()

    assert accept(LossyTypical(0.09, 0.3)) == [1, 1, 1]
    assert accept(LossyTypical(1.0, 1.0)) == [1, 0, 0]
    assert accept(LossyTypical(0.25, 1.0)) == [1, 1, 0]
    assert accept(LossyRelaxed(1, 0.6)) == [1, 0, 0]
    assert accept(LossyRelaxed(2, 0.6)) == [1, 1, 0]
    assert accept(LossyRelaxed(3, 0.25)) == [1, 1, 0]
    assert accept(LossyRelaxed(3, 0.0)) == [1, 0, 0]
    nothing = LossyRelaxed(3, 1.0)(p, torch.tensor([[-1], [3], [0]]), None)
    assert nothing.accept[:, 0].tolist() == [0, 0, 1]


@pytest.mark.parametrize("name", LOSSLESS)
def test_per_request_mix_is_each_request_by_itself(name: str) -> None:
    """Greedy, filtered and plain requests with padded drafts in one call."""
    params = [SamplingParams(), SamplingParams(0.8, 3, 0.9), SamplingParams(1.3), SamplingParams()]
    target, draft = random_model(5, 3, 3), random_model(5, 3, 4)
    p = torch.stack([filtered(target, one).tables[2][:3] for one in params])
    q = torch.stack([draft.tables[2][5 * i : 5 * i + 2] for i in range(4)])
    drafts = torch.tensor([[1, 2], [0, -1], [4, 3], [-1, -1]])
    together = LOSSLESS[name](p, drafts, q)
    for i in range(4):
        alone = LOSSLESS[name](p[i : i + 1], drafts[i : i + 1], q[i : i + 1])
        assert torch.equal(together.accept[i], alone.accept[0])
        assert torch.equal(together.correction[i], alone.correction[0])
