"""Processors: one documented rule, bit-equal rows wherever they stand, and defective logits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from specmla.errors import ArgumentError, ArgumentTypeError
from specmla.verify import sampling
from specmla.verify.sampling import SamplingBatch, SamplingParams, processed_probs, row_top

# Probabilities whose sequential top-k 4, top-p 0.83 keeps three ids, on the original row four.
BL33 = torch.tensor([0.40, 0.22, 0.18, 0.06, 0.05, 0.05, 0.04], dtype=torch.float64)


def probs_of(logits: Tensor, *params: SamplingParams) -> Tensor:
    """Process one row per request."""
    return processed_probs(logits[:, None], SamplingBatch.build(params, "cpu")).probs[:, 0]


def slow_probs(logits: Tensor, params: SamplingParams) -> Tensor:
    """Say the documented rule in plain Python, in float64."""
    x = logits.double().tolist()
    if params.temperature == 0:
        return torch.eye(len(x), dtype=torch.float64)[x.index(max(x))]
    scaled = [(v - max(x)) / params.temperature for v in x]
    by_rank = sorted(range(len(x)), key=lambda i: (-scaled[i], i))
    if params.top_k:
        by_rank = by_rank[: params.top_k]
    weight = {i: math.exp(scaled[i]) for i in by_rank}
    mass, total, kept = 0.0, sum(weight.values()), []
    for i in by_rank:
        if mass / total >= params.top_p:
            break
        kept.append(i)
        mass += weight[i]
    total = sum(weight[i] for i in kept)
    return torch.tensor(
        [weight[i] / total if i in kept else 0.0 for i in range(len(x))], dtype=torch.float64
    )


@pytest.mark.parametrize("top_k", [0, 1, 3, 17, 100])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3, 1e-60])
@pytest.mark.parametrize("temperature", [0.0, 0.25, 1.0, 7.5])
def test_processed_probs_follows_the_documented_rule(
    temperature: float, top_p: float, top_k: int
) -> None:
    params = SamplingParams(temperature, top_k, top_p)
    logits = torch.randn(6, 17, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    got = probs_of(logits, *[params] * 6)
    want = torch.stack([slow_probs(row, params) for row in logits])
    assert got.dtype == torch.float64
    # The temperatures are exact in float32, so only a few float64 roundings remain.
    torch.testing.assert_close(got, want, rtol=1e-14, atol=0)


def test_bl33_top_p_acts_on_the_row_renormalised_after_top_k() -> None:
    got = probs_of(BL33.log()[None], SamplingParams(1.0, 4, 0.83))[0]
    want = torch.tensor([0.5, 0.275, 0.225, 0, 0, 0, 0], dtype=torch.float64)
    torch.testing.assert_close(got, want, rtol=1e-14, atol=0)
    # The other rule, top-p on the original row, would keep a fourth id: 0.40 + 0.22 + 0.18 < 0.83.
    original = probs_of(BL33.log()[None], SamplingParams(1.0, 0, 0.83))[0]
    assert int((original > 0).sum()) == 4


def test_bl33_rows_are_bit_equal_in_verify_and_in_plain_sampling() -> None:
    generator = torch.Generator().manual_seed(1)
    params = [
        SamplingParams(0.7, 40, 0.9),
        SamplingParams(),
        SamplingParams(1.3),
        SamplingParams(1.0, top_p=0.5),
    ]
    logits = torch.randn(4, 5, 1003, generator=generator) * 4
    together = processed_probs(logits, SamplingBatch.build(params, "cpu")).probs
    assert together.dtype == torch.float32
    for b, one in enumerate(params):
        alone = SamplingBatch.build([one], "cpu")
        for j in range(5):
            row = processed_probs(logits[b : b + 1, j : j + 1], alone).probs[0, 0]
            assert torch.equal(row, together[b, j]), (b, j)


def test_packed_rows_follow_row_request() -> None:
    params = [SamplingParams(0.5), SamplingParams(2.0, 3), SamplingParams()]
    batch = SamplingBatch.build(params, "cpu")
    logits = torch.randn(5, 9, generator=torch.Generator().manual_seed(2))
    owner = torch.tensor([2, 0, 0, 1, 0])
    packed = processed_probs(logits, batch, owner)
    assert packed.probs.shape == (5, 9)
    assert packed.flagged.shape == (5,)
    for t, b in enumerate(owner.tolist()):
        assert torch.equal(packed.probs[t], probs_of(logits[t : t + 1], params[b])[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_logits_give_float32_and_are_left_alone(dtype: torch.dtype) -> None:
    logits = torch.randn(3, 1, 33, generator=torch.Generator().manual_seed(4)).to(dtype)
    # A vocabulary-sharded head hands over a strided view.
    wide = torch.full((3, 1, 40), math.nan, dtype=dtype)
    wide[..., :33] = logits
    params = [SamplingParams(), SamplingParams(1.0), SamplingParams(0.3, 5)]
    batch = SamplingBatch.build(params, "cpu")
    got = processed_probs(wide[..., :33], batch).probs
    assert got.dtype == torch.float32
    assert torch.equal(got, processed_probs(logits.float(), batch).probs)
    assert torch.equal(wide[..., :33], logits)


def test_bl34_zero_temperature_is_argmax_without_division() -> None:
    logits = torch.tensor([[-3.0, 5.0, 5.0, -1.0], [0.0, -9.0, -8.0, -7.0]])
    greedy = SamplingParams()
    want = torch.tensor([[0.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]])
    assert torch.equal(probs_of(logits, greedy, greedy), want)  # lowest id among equals
    mixed = probs_of(logits, greedy, SamplingParams(1.0))
    assert torch.equal(mixed[0], want[0])
    torch.testing.assert_close(mixed[1], torch.softmax(logits[1], -1))
    filtered = probs_of(logits, SamplingParams(0.0, 2, 0.1), SamplingParams(1.0, 2))
    assert torch.equal(filtered[0], want[0])


def test_all_greedy_batch_computes_no_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> Tensor:
        raise AssertionError("softmax or sort in an all-greedy batch")

    batch = SamplingBatch.build([SamplingParams(0.0, 2, 0.5)] * 2, "cpu")
    assert batch.all_greedy
    assert not batch.any_filter
    monkeypatch.setattr(sampling.torch, "softmax", refuse)
    monkeypatch.setattr(sampling.torch, "sort", refuse)
    got = processed_probs(torch.tensor([[[1.0, 2.0]], [[4.0, 3.0]]]), batch).probs
    assert torch.equal(got, torch.tensor([[[0.0, 1.0]], [[1.0, 0.0]]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bl34_tiny_temperature_is_stable(dtype: torch.dtype) -> None:
    logits = torch.tensor([[2.0, 4.0, 3.0]], dtype=dtype)
    want = torch.tensor([[0.0, 1.0, 0.0]], dtype=dtype)
    for temperature in (1e-38, 1e-45, 1e-300):
        assert torch.equal(probs_of(logits, SamplingParams(temperature)), want)
        assert torch.equal(probs_of(logits, SamplingParams(temperature, 2, 0.9)), want)


def test_bl34_mixed_temperatures_do_not_touch_each_other() -> None:
    logits = torch.tensor([2.0, 4.0, 3.0]).expand(4, 3)
    temperatures = [0.0, 1e-38, 1.0, 3e38]
    together = probs_of(logits, *map(SamplingParams, temperatures))
    for b, temperature in enumerate(temperatures):
        assert torch.equal(together[b], probs_of(logits[:1], SamplingParams(temperature))[0])
    torch.testing.assert_close(together[3], torch.full((3,), 1 / 3))


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(1.0), SamplingParams(1.0, 2)])
@pytest.mark.parametrize(
    "row",
    [[-3.0, math.nan, -1.0], [-math.inf] * 3, [0.0, math.inf, 1.0], [math.nan, -math.inf, 1.0]],
    ids=["nan", "nothing-finite", "inf", "nan-and-inf"],
)
def test_bl34_defective_rows_are_flagged(row: list[float], params: SamplingParams) -> None:
    good = [0.5, -math.inf, 1.0]
    logits = torch.tensor([[row, good], [good, row]])
    batch = SamplingBatch.build([params, SamplingParams(1.0)], "cpu")
    got = processed_probs(logits, batch)
    assert got.flagged.tolist() == [[True, False], [False, True]]
    placeholder = torch.tensor([1.0, 0.0, 0.0])
    assert torch.equal(got.probs[0, 0], placeholder)
    assert torch.equal(got.probs[1, 1], placeholder)
    clean = processed_probs(torch.tensor([[good, good], [good, good]]), batch)
    assert not clean.flagged.any()
    assert torch.equal(got.probs[0, 1], clean.probs[0, 1])
    assert torch.equal(got.probs[1, 0], clean.probs[1, 0])
    top = row_top(logits)
    assert torch.equal(top.flagged, got.flagged)
    assert top.token.tolist() == [[0, 2], [2, 0]]


@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(0.7), SamplingParams(1, 2, 0.5)]
)
def test_bl34_single_finite_logit_wins(params: SamplingParams) -> None:
    logits = torch.full((1, 5), -math.inf)
    logits[0, 3] = -2.5
    batch = SamplingBatch.build([params], "cpu")
    got = processed_probs(logits[:, None], batch)
    assert not got.flagged.any()
    assert got.probs[0, 0].tolist() == [0, 0, 0, 1, 0]


def test_ties_at_the_edge_keep_the_lowest_ids() -> None:
    logits = torch.tensor([[1.0, 3.0, 1.0, 1.0, 1.0]])
    assert (probs_of(logits, SamplingParams(1.0, 3))[0] > 0).tolist() == [
        True,
        True,
        True,
        False,
        False,
    ]
    flat = torch.zeros(1, 4)
    half = probs_of(flat, SamplingParams(1.0, top_p=0.5))[0]
    assert half.tolist() == [0.5, 0.5, 0.0, 0.0]  # a mass of exactly top_p is enough
    assert probs_of(flat, SamplingParams(1.0, 1))[0].tolist() == [1.0, 0.0, 0.0, 0.0]


def test_wide_rows_sum_their_mass_exactly() -> None:
    """A float32 running sum over a real vocabulary is off by many ids of a flat row."""
    width = 129_280
    got = probs_of(torch.zeros(1, width), SamplingParams(1.0, top_p=0.50001))[0]
    kept = math.ceil(torch.tensor(0.50001).item() * width)
    assert (got > 0).tolist() == [i < kept for i in range(width)]
    tied = probs_of(torch.zeros(1, width), SamplingParams(1.0, 1000))[0]
    assert (tied > 0).tolist() == [i < 1000 for i in range(width)]


@pytest.mark.gpu
def test_cuda_breaks_ties_as_the_cpu_does() -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randint(0, 6, (8, 1, 129_280), generator=generator).bfloat16()
    params = [SamplingParams(), *[SamplingParams(1.0, 30_000 + i) for i in range(7)]]
    here = processed_probs(logits, SamplingBatch.build(params, "cpu")).probs
    there = processed_probs(logits.cuda(), SamplingBatch.build(params, "cuda")).probs
    assert torch.equal(here > 0, there.cpu() > 0)
    torch.testing.assert_close(here, there.cpu(), rtol=1e-5, atol=0)


def test_batch_holds_what_was_asked() -> None:
    params = [SamplingParams(0.5, 7, 0.25, seed=2**63 - 1), SamplingParams(seed=12)]
    batch = SamplingBatch.build(params, "cpu")
    assert batch.temperature.tolist() == [0.5, 0.0]
    assert batch.top_k.tolist() == [7, 0]
    assert batch.top_p.tolist() == [0.25, 1.0]
    assert batch.seeds.tolist() == [2**63 - 1, 12]
    assert (batch.temperature.dtype, batch.top_p.dtype) == (torch.float32, torch.float32)
    assert (batch.top_k.dtype, batch.seeds.dtype) == (torch.int64, torch.int64)
    assert (batch.all_greedy, batch.any_filter) == (False, True)
    assert not SamplingBatch.build([SamplingParams(1.0), SamplingParams(0.0, 5)], "cpu").any_filter
    empty = SamplingBatch.build([], "cpu")
    assert processed_probs(torch.zeros(0, 3, 8), empty).probs.shape == (0, 3, 8)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", 1e39),
        ("temperature", True),
        ("temperature", "1"),
        ("top_k", -1),
        ("top_k", 2**31),
        ("top_k", 1.5),
        ("top_p", 0.0),
        ("top_p", 1.0001),
        ("top_p", math.nan),
        ("seed", -1),
        ("seed", 2**63),
        ("seed", 0.5),
        ("max_tokens", 0),
        ("max_tokens", 2.0),
        ("stop_token_ids", [3]),
        ("stop_token_ids", (-1,)),
        ("min_tokens", 2**63),
        ("repetition_penalty", 1e-40),
        ("repetition_penalty", 3e38),
        ("frequency_penalty", -3.4e38),
        ("presence_penalty", -3e38),
    ],
)
def test_params_refuse_and_name_what_cannot_be(field: str, value: Any) -> None:
    with pytest.raises(ArgumentError, match=rf"{field}=.*accepted is"):
        SamplingParams(**{field: value})


def test_params_list_all_reasons_at_once() -> None:
    with pytest.raises(ArgumentError) as caught:
        SamplingParams(-1.0, -1, 0.0, -1, 0, (-1,))
    for field in ("temperature", "top_k", "top_p", "seed", "max_tokens", "stop_token_ids"):
        assert f"{field}=" in str(caught.value)


@pytest.mark.parametrize("bias", [((3, 3e38), (3, 3e38)), ((3, 9e23), (3, 9e23)), ((3, -3e38),)])
def test_biases_of_an_id_are_refused_by_their_sum(bias: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(
        ArgumentError, match=r"logit_bias adds \{3: .*accepted is -1e\+24 to 1e\+24"
    ):
        SamplingParams(logit_bias=bias)
    SamplingParams(logit_bias=((3, 9e23), (3, -9e23), (4, 9e23)))


@pytest.mark.parametrize("name", ["typical_p", "guidance_scale", "bad_words"])
def test_bl33_options_that_are_not_honoured_do_not_exist(name: str) -> None:
    with pytest.raises(TypeError, match=name):
        SamplingParams(**{name: 0.1})  # type: ignore[arg-type]


def test_processor_params_list_all_reasons_at_once() -> None:
    bad = {
        "min_p": 1.5,
        "repetition_penalty": 0.0,
        "presence_penalty": math.inf,
        "frequency_penalty": math.nan,
        "min_tokens": -1,
        "banned_token_ids": (-1,),
        "logit_bias": ((3, math.inf),),
        "logprobs": "all",
    }
    with pytest.raises(ArgumentError) as caught:
        SamplingParams(**bad)  # type: ignore[arg-type]
    for name in bad:
        assert f"{name}=" in str(caught.value)


@pytest.mark.parametrize("min_p", [0.0, 0.05, 0.5, 1.0])
def test_min_p_keeps_what_is_near_the_likeliest(min_p: float) -> None:
    logits = torch.randn(4, 33, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    got = probs_of(logits, *[SamplingParams(0.7, min_p=min_p)] * 4)
    plain = torch.softmax(logits / torch.tensor(0.7).double(), -1)
    least = torch.tensor(min_p).double() * plain.amax(-1, keepdim=True)
    kept = torch.where(plain >= least, plain, 0.0)
    torch.testing.assert_close(got, kept / kept.sum(-1, keepdim=True), rtol=1e-13, atol=0)
    assert (got > 0).sum() < got.numel() or min_p == 0


def test_top_p_acts_on_what_min_p_leaves() -> None:
    """0.9 of the whole row would keep four ids, 0.9 of the three that min-p leaves keeps two."""
    logits = torch.tensor([0.55, 0.25, 0.07, 0.06, 0.04, 0.03], dtype=torch.float64).log()

    def kept(**more: float) -> int:
        return int((probs_of(logits[None], SamplingParams(1.0, **more)) > 0).sum())  # type: ignore[arg-type]

    assert (kept(top_p=0.9), kept(min_p=0.12), kept(top_p=0.9, min_p=0.12)) == (4, 3, 2)
    assert kept(top_k=2, min_p=0.12) == 2


def test_min_p_of_one_request_leaves_the_others_alone() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(9)) * 3
    params = [SamplingParams(1.0), SamplingParams(0.8, min_p=0.3), SamplingParams()]
    got = probs_of(logits, *params)
    for i, one in enumerate(params):
        assert torch.equal(got[i], probs_of(logits[i : i + 1], one)[0])


def test_params_are_frozen_and_hashable() -> None:
    params = SamplingParams(1.0, stop_token_ids=(1, 2))
    with pytest.raises(AttributeError):
        params.temperature = 0.0  # type: ignore[misc]
    assert hash(params) == hash(SamplingParams(1.0, stop_token_ids=(1, 2)))


def test_processed_probs_refuses_what_does_not_fit() -> None:
    batch = SamplingBatch.build([SamplingParams(1.0)] * 2, "cpu")
    with pytest.raises(ArgumentError, match=r"accepted is \[2, Q, W\]"):
        processed_probs(torch.zeros(3, 1, 8), batch)
    with pytest.raises(ArgumentError, match=r"\[T, W\] and \[T\]"):
        processed_probs(torch.zeros(3, 8), batch, torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ArgumentError, match="must not be empty"):
        processed_probs(torch.zeros(2, 1, 0), batch)
    with pytest.raises(ArgumentTypeError, match=r"torch\.int64"):
        processed_probs(torch.zeros(2, 1, 8, dtype=torch.int64), batch)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_what_a_gpu_does_without_looking_gives_the_same_bits(dtype, monkeypatch) -> None:
    """Greedy, plain and filtered requests; rows with NaN, infinities, ties and one finite id."""
    params = [
        SamplingParams(),
        SamplingParams(0.7),
        SamplingParams(1e-38),
        SamplingParams(1.3, top_k=3, top_p=0.8),
        SamplingParams(0.9, min_p=0.1),
    ]
    logits = torch.randn(5, 6, 17, generator=torch.Generator().manual_seed(4)).to(dtype) * 4
    logits[:, 1, 3], logits[:, 2, 5], logits[:, 3] = torch.nan, torch.inf, -torch.inf
    logits[:, 4], logits[:, 4, 9] = -torch.inf, 1.0
    logits[:, 5, 2] = logits[:, 5, 11] = logits[:, 5].amax(-1) + 1
    for chosen in ([0, 1, 2, 3, 4], [1, 2], [1, 4], [0, 1]):
        batch = SamplingBatch.build([params[i] for i in chosen], "cpu")
        looked = processed_probs(logits[chosen], batch)
        with monkeypatch.context() as patch:
            patch.setattr(sampling, "_may_look", lambda rows: False)
            blind = processed_probs(logits[chosen], batch)
        assert torch.equal(looked.flagged, blind.flagged)
        assert torch.equal(looked.flagged, torch.tensor([[0, 1, 1, 1, 0, 0]] * len(chosen)).bool())
        assert torch.equal(looked.probs, blind.probs)
        assert blind.probs.isfinite().all()
