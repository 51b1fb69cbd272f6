"""e4m3 queries: their codes, what attends to them, and who refuses them."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from specmla.backends.base import Requirements
from specmla.backends.fixed_heads import FixedHeads
from specmla.backends.reference import ReferenceBackend
from specmla.backends.rows import RowsBackend
from specmla.backends.select import BACKENDS, get_backend, select_backend
from specmla.backends.triton import TritonBackend
from specmla.cache import LatentCache, cache_format
from specmla.cache.codes import code_scale, gather_codes
from specmla.compiling import as_operators
from specmla.errors import ArgumentError, UnsupportedError
from specmla.query_form import CODES, Fp8Query
from specmla.testing import make_case
from specmla.testing.case import VerifyCase
from specmla.testing.oracle import assert_matches_oracle
from specmla.testing.poison import PoisonedMemory
from tests.mixed_batch import LAYER, MIXED, Absorbing, Batch

pytest.importorskip("triton")

C, R, G = 128, 16, 16
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16]
if DEVICE == "cuda":
    DTYPES.append(torch.bfloat16)
FORM = Fp8Query(2.0**-5)


def values(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(*shape, device=DEVICE) * 3).to(dtype)


def codes_of(query: Tensor) -> list[int]:
    return query.contiguous().view(torch.uint8).flatten().tolist()


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_codes_of_known_values(impl: str) -> None:
    """BL-47: 256 to 448 are codes of their own, what is larger is 448, never NaN."""
    given = [257.0, 272.0, 300.0, 304.0, 336.0, 400.0, 431.0, 440.0, 449.0, 1000.0]
    want = [256.0, 256.0, 288.0, 320.0, 320.0, 384.0, 416.0, 448.0, 448.0, 448.0]
    special = torch.tensor([[[torch.inf, -torch.inf, torch.nan, 0.0]]], device=DEVICE)
    for scale in (1.0, 0.5, 3 * 2.0**-7):
        latent = torch.tensor([[given, [-x for x in given]]], device=DEVICE) * scale
        rope = special.expand(1, 2, 4)
        got, rotated = Fp8Query(scale).quantise(latent, rope, impl)
        assert got.dtype is rotated.dtype is CODES
        assert got.float().tolist() == [[want, [-x for x in want]]]
        assert codes_of(rotated) == [0x7E, 0xFE, 0x7F, 0] * 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rope", [0, 16, 40])
@pytest.mark.parametrize("scale", [1.0, 3 * 2.0**-7])
def test_the_kernel_is_bit_equal_to_torch(dtype: torch.dtype, rope: int, scale: float) -> None:
    torch.manual_seed(rope)
    heads_first = values(5, 7, C, dtype=dtype).transpose(0, 1)  # as bmm leaves it
    wide = values(7, 5, rope + 9, dtype=dtype)
    form = Fp8Query(scale)
    for latent, rotated in (
        (heads_first, wide[..., 9:]),
        (values(7, 5, C, dtype=dtype), values(rope, 5, 7, dtype=dtype).permute(2, 1, 0)),
        (values(0, 5, C, dtype=dtype), wide[:0, :, 9:]),
    ):
        kernel, twin = (form.quantise(latent, rotated, impl) for impl in ("triton", "torch"))
        for one, other in zip(kernel, twin, strict=True):
            assert one.shape == other.shape
            assert codes_of(one) == codes_of(other)
        joined = latent.shape[0] * 5 * (C + rope)
        assert kernel[0].untyped_storage().nbytes() == joined


@pytest.mark.parametrize("scale", [0.0, -1.0, torch.inf, torch.nan, 1e-45, 0.1])
def test_bad_scales_are_refused(scale: float) -> None:
    with pytest.raises(ArgumentError, match=r"scale is .*, accepted are float32 values > 0"):
        Fp8Query(scale)


def coded(name: str, batch: Any, **options: Any) -> tuple[VerifyCase, VerifyCase]:
    """A case with queries of codes, and the one whose queries are what these codes mean."""
    dtype = options.get("dtype", torch.float32)
    scale = 3 * 2.0**-8 if name.endswith("-scaled") else 1.0
    format = cache_format(name.split("-")[0], C, R, dtype=dtype, k_scale=scale)
    usual = {"kv_lora_rank": C, "rope_dim": R, "page_size": G, "num_heads": 4, "device": DEVICE}
    case = make_case(batch, **(usual | options), cache_format=format)
    latent, rope = FORM.quantise(case.q_latent, case.q_rope)
    meant = [(q.to(dtype) * FORM.scale) for q in (latent, rope)]
    return (
        dataclasses.replace(case, q_latent=latent, q_rope=rope),
        dataclasses.replace(case, q_latent=meant[0], q_rope=meant[1]),
    )


RAGGED = [(4, 40), (1, 17), (0, 0), (3, 3), (2, 66), (0, 9), (4, 2)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [4, 12])
@pytest.mark.parametrize("name", ["fp8", "fp8-scaled"])
def test_triton_attends_to_what_the_codes_mean(name: str, heads: int, dtype: torch.dtype) -> None:
    case, meant = coded(name, RAGGED, num_heads=heads, dtype=dtype, page_gap=12)
    backend = TritonBackend(cache_format=case.spec.cache_format, query_form=FORM)
    with PoisonedMemory():
        got = case.attend(backend)
    assert_matches_oracle(got, meant, meant.tables())


def test_codes_over_pieces_of_keys() -> None:
    case, meant = coded("fp8-scaled", [(3, 130), (1, 5)], query_layout="heads_first")
    pieces = TritonBackend(3, cache_format=case.spec.cache_format, query_form=FORM)
    assert_matches_oracle(case.attend(pieces), meant, meant.tables())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "name", ["fp8", "fp8-scaled", "fp8_ds_mla", "fp8_per_token_head", "nvfp4_ds_mla"]
)
def test_reference_attends_to_what_the_codes_mean(name: str, dtype: torch.dtype) -> None:
    case, meant = coded(name, RAGGED, dtype=dtype)
    backend = ReferenceBackend(case.spec.cache_format, FORM)
    assert_matches_oracle(case.attend(backend), meant, meant.tables())
    nothing, _ = coded(name, [(0, 0)], dtype=dtype)
    assert nothing.attend(backend).out.dtype is dtype


# Surplus heads hold any bits, NaN codes among them; what comes of them is dropped.
@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_fixed_heads_pass_codes_on() -> None:
    case, meant = coded("fp8-scaled", [(3, 30), (1, 9)])
    inner = TritonBackend(cache_format=case.spec.cache_format, query_form=FORM)
    assert_matches_oracle(case.attend(FixedHeads(inner, 16)), meant, meant.tables())


def need(format: Any, form: Fp8Query | None) -> Requirements:
    return Requirements(
        torch.device(DEVICE), torch.float32, 4, C, R, G, format=format, query_form=form
    )


def test_the_form_is_a_declared_capability() -> None:
    fp8 = cache_format("fp8", C, R, dtype=torch.float32)
    rows = cache_format("fp8_ds_mla", C, R, dtype=torch.float32)
    for name in ("triton", "reference"):
        backend = select_backend(need(fp8, FORM), name)
        assert backend.query_form == FORM
        assert get_backend(name, cache_format=fp8, query_form=FORM).query_form == FORM
        # One built for codes is not given numbers, nor codes of another scale.
        for form in (None, Fp8Query()):
            wrong = backend.problems(need(fp8, form))
            assert any("accepted by this one is Fp8Query(scale=0.03125)" in text for text in wrong)
    served = {
        (name, text)
        for name, make in BACKENDS.items()
        for format, text in ((fp8, "fp8"), (rows, "ds_mla"), (None, "plain"))
        if not any("query_form" in why for why in make().make().problems(need(format, FORM)))
    }
    assert served == set()  # none that was not built for it
    with pytest.raises(UnsupportedError, match=r"query_form is .* over 'fp8_ds_mla', accepted is"):
        select_backend(need(rows, FORM), "triton")
    for name in ("rows", "hopper", "flashmla"):
        with pytest.raises(UnsupportedError, match=r"query_form is .*, accepted is None"):
            get_backend(name, cache_format=fp8, query_form=FORM)
    with pytest.raises(ArgumentError, match=r"over 'plain rows', accepted is one over \['fp8'\]"):
        TritonBackend(query_form=FORM)
    with pytest.raises(ArgumentError, match=r"over 'plain rows', accepted is one over"):
        ReferenceBackend(query_form=FORM)
    with pytest.raises(ArgumentError, match=r"over 'fp8', accepted is None"):
        RowsBackend(cache_format=fp8, query_form=FORM)


def test_other_queries_are_refused() -> None:
    case, meant = coded("fp8", [(2, 20)])
    format = case.spec.cache_format
    for backend in (
        TritonBackend(cache_format=format, query_form=FORM),
        ReferenceBackend(format, FORM),
    ):
        with pytest.raises(ArgumentError, match=r"q_latent is torch.float32 .*q_rope is torch.flo"):
            meant.attend(backend)
    for backend in (TritonBackend(cache_format=format), ReferenceBackend(format)):
        with pytest.raises(ArgumentError, match="dtypes are"):
            case.attend(backend)
    cache = LatentCache(1, 2, G, C + R, torch.float32, DEVICE, format=format)
    with pytest.raises(UnsupportedError, match=r"query_form is Fp8Query.*, accepted is None"):
        as_operators(cache, ReferenceBackend(format, FORM))


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("scale", [1.0, 3 * 2.0**-9])
def test_codes_are_gathered_as_they_are(impl: str, scale: float) -> None:
    format = cache_format("fp8", C, R, dtype=torch.float32, k_scale=scale)
    cache = LatentCache(2, 5, G, C + R, torch.float32, DEVICE, impl, format)
    cache.layer(1).copy_(torch.randint(0, 127, cache.layer(1).shape))
    slots = torch.tensor([79, -1, 3, 3, 40], device=DEVICE)
    memory = torch.full((4, C + R), 7.0, dtype=torch.float16, device=DEVICE)
    got = gather_codes(cache, 1, slots, memory)
    assert got.data_ptr() == memory.data_ptr()
    assert (memory.view(-1)[5 * (C + R) // 2 :] == 7.0).all()
    assert codes_of(got) == codes_of(gather_codes(cache, 1, slots))
    assert code_scale(cache) == scale
    assert torch.equal(got.float() * scale, cache.gather(1, slots))
    with pytest.raises(ArgumentError, match=r"memory has 72 bytes.*accepted are 720 or more"):
        gather_codes(cache, 1, slots, memory[0, :36])
    strided = torch.empty(2 * memory.numel(), dtype=memory.dtype, device=DEVICE)[::2]
    with pytest.raises(ArgumentError, match=r"strides \(2,\).*accepted are 720 or more, contig"):
        gather_codes(cache, 1, slots, strided)
    other = cache_format("fp8_ds_mla", C, R, dtype=torch.float32)
    rows = LatentCache(2, 5, G, C + R, torch.float32, DEVICE, impl, other)
    with pytest.raises(ArgumentError, match="format is 'fp8_ds_mla', accepted is 'fp8'"):
        gather_codes(rows, 1, slots)
    assert code_scale(rows) is None


class AbsorbingCodes(Absorbing):
    """Of codes."""

    def __init__(self, format: Any) -> None:
        super().__init__(format, Fp8Query(2.0**-4))


@pytest.mark.parametrize("workspace_rows", [None, 32])
@pytest.mark.parametrize("name", ["fp8", "fp8_ds_mla", "nvfp4_ds_mla"])
def test_a_layer_with_codes_errs_like_their_rounding(
    name: str, workspace_rows: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts, which are not quantised: equal but for float32 rounding; verifies: within 2^-4."""
    calls = []

    def counted(*args: Any) -> Tensor:
        calls.append(args)
        return gather_codes(*args)

    monkeypatch.setattr("specmla.cache.codes.gather_codes", counted)
    scale = {"k_scale": 3 * 2.0**-8} if name == "fp8" else {}
    made = cache_format(name, 128, 32, dtype=torch.float32, **scale)
    plain, with_codes = (
        Batch(
            MIXED, 16, layer=copy.deepcopy(LAYER).float(), backend=backend, cache_format=made,
            workspace_rows=workspace_rows,
        )
        for backend in (Absorbing(made), AbsorbingCodes(made))
    )  # fmt: skip
    everyone = range(len(MIXED))
    step = with_codes.builder.build(with_codes.requests)
    verifies = set(step.order[: len(step.verify.query_lens)])
    worst = 0.0
    for i, (got, want) in enumerate(
        zip(with_codes.run(everyone), plain.run(everyone), strict=True)
    ):
        error = float((got - want).abs().max()) if got.numel() else 0.0
        if i in verifies:
            worst = max(worst, error)
        else:
            assert error < 2e-5, i
    assert 1e-3 < worst < 0.5, "queries are quantised, and not badly"
    assert bool(calls) == (name == "fp8")
