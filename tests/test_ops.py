"""The operators by themselves: opcheck, what they write, keys, strides, checks."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from specmla import ops
from specmla.backends.base import AttentionOutput
from specmla.backends.reference import ReferenceBackend
from specmla.cache.latent import LatentCache
from specmla.compiling import OperatorBackend, OperatorCache
from specmla.errors import ArgumentError
from specmla.metadata import VerifyPart
from specmla.testing import check_backend
from tests.test_compiling import Paged, make_paged
from tests.test_layer import VERIFY


def planned(paged: Paged) -> VerifyPart:
    metadata = paged.metadata((0, VERIFY, 3), (1, VERIFY, 5))
    assert metadata.verify is not None
    return metadata.verify


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck_store(dtype: torch.dtype) -> None:
    paged = make_paged(dtype, token=False)
    paged.cache.layer(1).zero_()
    latent, rope = torch.randn(6, 160).to(dtype).split((128, 32), dim=1)
    slots = torch.tensor([5, -1, 17, 222, 0, -1])
    rows = latent, rope, slots, paged.cache.key
    torch.library.opcheck(torch.ops.specmla.store.default, (paged.cache.layer(1), *rows))
    torch.library.opcheck(torch.ops.specmla.store_token.default, (*rows, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck_attend(dtype: torch.dtype) -> None:
    paged = make_paged(dtype, token=False)
    paged.cache.layer(1).normal_()
    part = planned(paged)
    key = part.plan.key
    q_latent = torch.randn(12, 8, 128).to(dtype).transpose(0, 1)
    q_rope = torch.randn(8, 12, 48).to(dtype)[..., 16:]
    query = q_latent, q_rope
    torch.library.opcheck(
        torch.ops.specmla.attend.default, (*query, paged.cache.layer(1), key, 0.1)
    )
    token = torch.empty(1, 0, dtype=dtype)
    torch.library.opcheck(
        torch.ops.specmla.attend_token.default, (*query, token, paged.cache.key, key, 0.1)
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_heads", [1, 4])
def test_opcheck_lift(dtype: torch.dtype, num_heads: int) -> None:
    """Between rows, heads and latents lie others, as a backend and a weight may have them."""
    latent = torch.randn(7, num_heads + 1, 32).to(dtype)[:, 1:]
    w_uv_t = torch.randn(num_heads, 28, 32).to(dtype)[:, 12:].transpose(1, 2)
    torch.library.opcheck(torch.ops.specmla.lift.default, (latent, w_uv_t))
    assert torch.equal(torch.ops.specmla.lift(latent, w_uv_t), ops.lift_heads(latent, w_uv_t))
    assert torch.ops.specmla.lift(latent[:0], w_uv_t).shape == (0, num_heads * 16)


@pytest.mark.parametrize("token", [False, True])
def test_no_rows(token: bool) -> None:
    """By hand: opcheck can't copy empty tensors."""
    paged = make_paged(torch.float32, token)
    stored = paged.cache.store(1, torch.empty(0, 128), torch.empty(0, 32), torch.empty(0).long())
    assert paged.cache.layer(1).isnan().all()
    metadata = paged.metadata((0, VERIFY, 0), (1, VERIFY, 0))
    query = torch.empty(0, 12, 128), torch.empty(0, 12, 32)
    got = paged.builder.backend.forward_mqa(*query, stored, metadata.verify, softmax_scale=0.1)
    assert got.out.shape == (0, 12, 128)
    assert got.lse.shape == (0, 12)


def test_schemas_say_what_is_written() -> None:
    written = {
        name: [a.name for a in getattr(torch.ops.specmla, name).default._schema.arguments
               if a.alias_info is not None and a.alias_info.is_write]
        for name in ("store", "attend", "store_token", "attend_token")
    }  # fmt: skip
    assert written == {"store": ["pool"], "attend": [], "store_token": [], "attend_token": []}


def test_keys_end_with_their_objects() -> None:
    paged = make_paged(torch.float32, token=False)
    part = planned(paged)
    key = part.plan.key
    query = torch.randn(8, 12, 128), torch.randn(8, 12, 32), paged.cache.layer(1)
    paged.cache.layer(1).zero_()
    torch.ops.specmla.attend(*query, key, 0.1)
    del part
    gc.collect()
    with pytest.raises(ArgumentError, match=rf"key {int(key)} has no object, accepted are keys"):
        torch.ops.specmla.attend(*query, key, 0.1)
    with pytest.raises(ArgumentError, match="key -3 has no object"):
        torch.ops.specmla.attend(*query, torch.tensor([-3]), 0.1)
    assert int(ops.make_key(paged)) > int(key)  # numbers are not used again


def test_operators_check_what_they_are_given() -> None:
    paged = make_paged(torch.float32, token=False)
    rows = torch.randn(1, 128), torch.randn(1, 32)
    with pytest.raises(ArgumentError, match=r"slots go from 224 to 224, accepted are -1 .. 223"):
        paged.cache.store(1, *rows, torch.tensor([224]))
    with pytest.raises(ArgumentError, match=r"kv_latent is torch.float64"):
        paged.cache.store(1, rows[0].double(), rows[1], torch.tensor([0]))
    assert paged.cache.layer(1).isnan().all()


class Transposed(ReferenceBackend):
    """Gives its results by head."""

    def forward_mqa(self, *args: Any, **options: Any) -> AttentionOutput:
        out, lse = super().forward_mqa(*args, **options)
        return AttentionOutput(out.transpose(0, 1).contiguous().transpose(0, 1), lse.T.clone().T)


def test_results_have_the_strides_that_were_traced() -> None:
    paged = make_paged(torch.float32, token=False)
    paged.cache.layer(1).normal_()
    part = planned(paged)
    part.plan.__dict__["backend"] = Transposed()
    query = torch.randn(8, 12, 128), torch.randn(8, 12, 32), paged.cache.layer(1)
    torch.library.opcheck(torch.ops.specmla.attend.default, (*query, part.plan.key, 0.1))


@pytest.mark.slow
def test_check_backend() -> None:
    """Every case of the backend, through the operator."""
    cache = OperatorCache(LatentCache(1, 1, 16, 160, torch.float32, "cpu"), token=False)
    report = check_backend(OperatorBackend(ReferenceBackend(), cache), device="cpu")
    report.raise_if_failed()
    assert report.num_run > 30
