"""Routed experts by kernel: equal to the loop within its error, whatever the routing."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from specmla.errors import ArgumentError
from specmla.invariance import make_batch_invariant
from specmla.kernels import experts
from specmla.models.grouped_experts import GroupedExperts, group_experts
from specmla.models.moe import DeepseekMoE, MoEConfig
from specmla.testing import assert_within_budget

pytestmark = pytest.mark.usefixtures("dots_by_row")

DTYPES = [torch.float32, torch.float16]  # the interpreter's exact ones


def make_layer(num_experts: int, per_token: int, inner: int, hidden: int = 40) -> DeepseekMoE:
    torch.manual_seed(num_experts)
    layer = DeepseekMoE(hidden, MoEConfig(num_experts, per_token, inner, n_shared_experts=1))
    for weight in layer.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return layer.requires_grad_(False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_experts", "per_token", "inner", "num_rows"),
    [(4, 2, 24, 1), (8, 3, 70, 37), (3, 3, 16, 5), (64, 2, 8, 20), (2, 1, 130, 150), (5, 2, 24, 0)],
)
def test_grouped_experts_err_like_the_loop(num_experts, per_token, inner, num_rows, dtype, device):
    layer = make_layer(num_experts, per_token, inner)
    exact_layer = copy.deepcopy(layer).double().to(device)
    layer = layer.to(device, dtype)
    exact_layer.load_state_dict(layer.state_dict())
    rows = torch.randn(num_rows, 40, device=device).to(dtype)
    weights, chosen = layer.gate(rows)
    plain = layer._routed(rows, weights, chosen)
    exact = exact_layer._routed(rows.double(), weights.double(), chosen)
    assert group_experts(layer) == 1
    got = layer.grouped(rows, weights, chosen)
    assert got.dtype is dtype
    if num_rows:
        assert_within_budget(got, exact, plain)
    else:
        assert got.shape == (0, 40)


def routed_as(chosen: Tensor, num_experts: int) -> None:
    """Every pair is in one tile of its expert, and no tile has another's."""
    tiles = experts.make_tiles(chosen, num_experts)
    ordered = chosen.sort(stable=True).values
    seen = torch.zeros_like(chosen)
    for expert, first, rows in zip(*(t.tolist() for t in tiles[:3]), strict=True):
        assert 0 <= rows <= tiles.block
        assert (ordered[first : first + rows] == expert).all() or not rows
        seen[first : first + rows] += 1
    assert (seen == 1).all()


@pytest.mark.parametrize("num_experts", [1, 3, 256])
@pytest.mark.parametrize("num_pairs", [1, 15, 16, 17, 300])
def test_tiles_hold_every_pair_once(num_pairs: int, num_experts: int) -> None:
    torch.manual_seed(num_pairs)
    routed_as(torch.randint(num_experts, (num_pairs,)), num_experts)
    routed_as(torch.full((num_pairs,), num_experts - 1), num_experts)
    routed_as(torch.arange(num_pairs) % num_experts, num_experts)


def test_rows_do_not_depend_on_their_mates(device):
    """A row of a padded step has the bits that it has in any other of that block."""
    layer = make_layer(6, 2, 24).to(device)
    group_experts(layer)
    rows = torch.randn(30, 40, device=device)
    rows[11:] *= 1e3
    weights, chosen = layer.gate(rows)  # of all rows: a GPU's linear layers depend on their number
    together = layer.grouped(rows, weights, chosen)
    alone = layer.grouped(rows[:11], weights[:11], chosen[:11])
    assert torch.equal(together[:11], alone)
    rows[11:] = float("nan")
    assert torch.equal(layer.grouped(rows, weights, chosen)[:11], alone)


def test_weights_may_be_written_but_not_moved(device):
    layer = make_layer(4, 2, 24).to(device)
    group_experts(layer)
    rows = torch.randn(3, 40, device=device)
    layer.experts[2].down_proj.weight.mul_(2.0)
    weights, chosen = layer.gate(rows)
    loop = layer._routed(rows, weights, chosen)
    assert torch.allclose(layer.grouped(rows, weights, chosen), loop, atol=1e-4)
    for moved in (copy.deepcopy(layer), layer):
        for expert in moved.experts:
            expert.up_proj.weight.data = expert.up_proj.weight.data.clone()
        with pytest.raises(ArgumentError, match="have moved"):
            moved(rows)


def test_weights_that_can_not_be_taken_are_refused(device):
    layer = make_layer(4, 2, 24).to(device)
    with pytest.raises(ArgumentError, match=r"accepted are contiguous ones of .*float32"):
        group_experts(copy.deepcopy(layer).double())
    layer.experts[1].up_proj.weight.data = layer.experts[1].up_proj.weight.data.half()
    with pytest.raises(ArgumentError, match="2 forms of weights"):
        GroupedExperts(list(layer.experts))


ROUTINGS = {
    "greedy": {},
    "groups": {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1},
    "bias": {
        "topk_method": "noaux_tc", "scoring_func": "sigmoid", "n_group": 4, "topk_group": 2,
        "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    },
}  # fmt: skip
CASES = [("greedy", torch.float16), ("groups", torch.float32), ("bias", torch.float32)]


def invariant_layer(routing: str, dtype: torch.dtype, device: torch.device) -> DeepseekMoE:
    """Two of the eight experts have equal scores; 32 columns: see `test_invariant_model`."""
    torch.manual_seed(8)
    config = MoEConfig(8, 3, 32, n_shared_experts=1, **ROUTINGS[routing])
    layer = DeepseekMoE(40, config).requires_grad_(False)
    for weight in layer.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    layer.gate.weight[3] = layer.gate.weight[1]
    if routing == "bias":
        layer.gate.e_score_correction_bias.normal_(std=0.1)
        layer.gate.e_score_correction_bias[3] = layer.gate.e_score_correction_bias[1]
    layer = layer.to(device, dtype)
    make_batch_invariant(layer)
    return layer


@pytest.mark.parametrize("grouped", [True, False], ids=["grouped", "loop"])
@pytest.mark.parametrize(("routing", "dtype"), CASES, ids=str)
def test_bits_of_a_row_are_its_own(
    routing: str, dtype: torch.dtype, grouped: bool, device: torch.device
) -> None:
    """The tiles of the plain form change between 1 row and 90."""
    layer = invariant_layer(routing, dtype, device)
    if grouped:
        group_experts(layer)
    rows = torch.randn(90, 40, device=device).to(dtype)
    whole = layer(rows)
    assert whole.isfinite().all()
    for part in (slice(89, 90), slice(40, 57), slice(3, 86)):
        assert torch.equal(layer(rows[part].clone()), whole[part])
    order = torch.randperm(90, device=device)
    assert torch.equal(layer(rows[order]), whole[order])
    if grouped:
        rows[50:] = torch.nan
        assert torch.equal(layer(rows)[:50], whole[:50])


@pytest.mark.parametrize(("routing", "dtype"), CASES, ids=str)
def test_invariant_layers_err_like_plain_ones(
    routing: str, dtype: torch.dtype, device: torch.device
) -> None:
    layer = invariant_layer(routing, dtype, device)
    layer.gate.weight[3].add_(1)  # no two scores are equal, so that all choose alike
    plain, rows = copy.deepcopy(layer), torch.randn(40, 40, device=device).to(dtype)
    for part in plain.modules():
        vars(part).pop("batch_invariant", None)
    wide = copy.deepcopy(plain).double()
    group_experts(layer)
    weights, chosen = layer.gate(rows)
    assert torch.equal(chosen, plain.gate(rows)[1])
    assert_within_budget(weights, wide.gate(rows.double())[0], plain.gate(rows)[0])
    exact = wide._routed(rows.double(), weights.double(), chosen)
    by_loop = plain._routed(rows, weights, chosen)
    for run in (layer.grouped, layer._routed):
        got = run(rows, weights, chosen, batch_invariant=True)
        assert got.dtype is dtype
        assert_within_budget(got, exact, by_loop)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_of_equal_scores_the_first_experts_are_chosen(routing: str, device: torch.device) -> None:
    layer = invariant_layer(routing, torch.float32, device)
    layer.gate.weight.zero_()
    if routing == "bias":
        layer.gate.e_score_correction_bias.zero_()
    _, chosen = layer.gate(torch.randn(5, 40, device=device))
    assert chosen.tolist() == [[0, 1, 2]] * 5


def test_one_form_of_tiles_for_any_number_of_rows(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    seen, launch = [], experts.EXPERTS.launch
    monkeypatch.setattr(
        experts.EXPERTS, "launch", lambda *a, **named: (seen.append(named), launch(*a, **named))
    )
    layer = invariant_layer("greedy", torch.float32, device)
    group_experts(layer)
    for rows in (1, 3, 100):
        layer(torch.randn(rows, 40, device=device))
    assert len({named["BLOCK_M"] for named in seen}) == 1
    weights, chosen = layer.gate(torch.randn(100, 40, device=device))
    layer.grouped(torch.randn(1, 40, device=device), weights[:1], chosen[:1])
    layer.grouped(torch.randn(100, 40, device=device), weights, chosen)
    assert len({named["BLOCK_M"] for named in seen[-4:]}) == 2  # the plain form has two
