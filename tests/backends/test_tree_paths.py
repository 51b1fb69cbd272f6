"""A tree attended in one pass gives each path what a chain of it gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specmla.backends.base import AttentionBackend, AttentionOutput
from specmla.backends.fixed_heads import FixedHeads
from specmla.backends.reference import ReferenceBackend
from specmla.backends.requirements import Requirements
from specmla.backends.select import BACKENDS, get_backend
from specmla.cache import cache_format
from specmla.mask import DraftMask
from specmla.testing import assert_matches_oracle, make_case
from tests.tree_paths import assert_paths_are_chains, chains_of

SMALL: dict[str, Any] = {"kv_lora_rank": 32, "rope_dim": 16, "page_size": 4, "page_gap": 8}
BATCHES = {
    "ragged": [(1, 1), (5, 9), (0, 6), (12, 40), (7, 7)],
    "one-request": [(20, 33)],
    "widest": [(64, 70)],
}


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_reference(name: str, dtype: torch.dtype) -> None:
    case = make_case(BATCHES[name], num_heads=3, mask=DraftMask.TREE, dtype=dtype, **SMALL)
    assert assert_paths_are_chains(case, ReferenceBackend()) > 1


@pytest.mark.parametrize("name", ["fp8", "fp8_ds_mla", "fp8_per_token_head", "nvfp4_ds_mla"])
def test_quantised_rows_move_as_they_are(name: str) -> None:
    """A path's bytes at the front are what a chain would have stored."""
    form = cache_format(name, 128, 32, dtype=torch.bfloat16)
    options = {"kv_lora_rank": 128, "rope_dim": 32, "page_size": 16, "dtype": torch.bfloat16}
    batch = [(5, 9), (0, 6), (7, 30)]
    case = make_case(batch, num_heads=3, mask=DraftMask.TREE, cache_format=form, **options)
    assert assert_paths_are_chains(case, ReferenceBackend(form)) > 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU tests/gpu covers this")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_interpreted_triton(dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    from specmla.backends.triton import TritonBackend

    batch = [(1, 1), (5, 9), (0, 6), (9, 40)]
    options = SMALL | {"page_size": 16}
    case = make_case(batch, num_heads=3, mask=DraftMask.TREE, dtype=dtype, **options)
    assert assert_paths_are_chains(case, TritonBackend()) > 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU tests/gpu covers this")
def test_interpreted_triton_batch_invariant() -> None:
    pytest.importorskip("triton")
    from specmla.backends.triton import TritonBackend

    options = SMALL | {"page_size": 16, "mask": DraftMask.TREE, "dtype": torch.float32}
    case = make_case([(5, 9), (7, 40)], num_heads=3, **options)
    assert assert_paths_are_chains(case, TritonBackend(batch_invariant=True)) > 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU tests/gpu covers this")
@pytest.mark.parametrize("name", ["fp8", "fp8_ds_mla", "fp8_per_token_head"])
def test_interpreted_triton_over_quantised_rows(name: str) -> None:
    pytest.importorskip("triton")
    from specmla.backends.triton import TritonBackend

    form = cache_format(name, 128, 32, dtype=torch.float32)
    options = {"kv_lora_rank": 128, "rope_dim": 32, "page_size": 16, "dtype": torch.float32}
    batch = [(5, 9), (4, 20)]
    case = make_case(batch, num_heads=3, mask=DraftMask.TREE, cache_format=form, **options)
    assert assert_paths_are_chains(case, TritonBackend(cache_format=form)) > 1


def test_padded_heads() -> None:
    """Three heads inside a backend of eight, whose buffers hold what earlier calls left."""
    backend = FixedHeads(ReferenceBackend(), 8)
    for name in BATCHES:
        case = make_case(BATCHES[name], num_heads=3, mask=DraftMask.TREE, **SMALL)
        assert assert_paths_are_chains(case, backend) > 1


def test_every_backend_compares_or_refuses_trees() -> None:
    """A new backend that declares trees belongs into these tests, here or in tests/gpu."""
    pytest.importorskip("triton")
    declared = {name for name, make in BACKENDS.items() if DraftMask.TREE in masks_of(make())}
    assert declared == {"reference", "triton", "hopper"}
    need = Requirements(
        device=torch.device("cuda"),
        dtype=torch.bfloat16,
        num_heads=16,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        page_size=64,
        masks=frozenset({DraftMask.TREE}),
    )
    for name in set(BACKENDS) - declared:
        assert get_backend(name).declared_problems(need)[0].startswith("masks ['tree']"), name


def masks_of(backend: type[AttentionBackend]) -> frozenset[DraftMask]:
    return backend.capabilities.masks


class _Shifted(AttentionBackend):
    """Gives rows of a tree each other's results, as a wrong node order would."""

    capabilities = ReferenceBackend.capabilities
    _inner = ReferenceBackend()

    def plan(self, part, **options):  # type: ignore[no-untyped-def]
        return self._inner.plan(part, **options)

    def forward_mha(self, *args, **options):  # type: ignore[no-untyped-def]
        return self._inner.forward_mha(*args, **options)

    def forward_mqa(self, *args, **options):  # type: ignore[no-untyped-def]
        got = self._inner.forward_mqa(*args, **options)
        return AttentionOutput(got.out.roll(1, 0), got.lse.roll(1, 0))


def test_the_comparison_can_fail() -> None:
    case = make_case([(6, 9)], num_heads=3, mask=DraftMask.TREE, **SMALL)
    with pytest.raises(AssertionError):
        assert_paths_are_chains(case, _Shifted())
    got = case.attend(ReferenceBackend())
    rows, chain = next(iter(chains_of(case)))
    wrong = AttentionOutput(got.out[rows].flip(0), got.lse[rows].flip(0))
    assert len(rows) > 1
    with pytest.raises(AssertionError):
        assert_matches_oracle(wrong, chain, chain.tables())
