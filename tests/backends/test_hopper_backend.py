"""What the Hopper backend declares and refuses, without a device."""

from __future__ import annotations

import pytest
import torch

from specmla.backends.base import Requirements
from specmla.backends.hopper import HopperBackend
from specmla.backends.select import get_backend
from specmla.errors import ArgumentError, UnsupportedError
from specmla.testing import make_case


def need(**changes: object) -> Requirements:
    wanted: dict[str, object] = {
        "device": torch.device("cuda"),
        "dtype": torch.bfloat16,
        "num_heads": 16,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "page_size": 64,
    }
    return Requirements(**(wanted | changes))  # type: ignore[arg-type]


def test_it_is_found_by_name() -> None:
    assert isinstance(get_backend("hopper"), HopperBackend)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"device": torch.device("cpu")}, "device is 'cpu'"),
        ({"dtype": torch.float32}, "dtype is torch.float32"),
        ({"kv_lora_rank": 256}, "kv_lora_rank is 256"),
        ({"qk_rope_head_dim": 32}, "qk_rope_head_dim is 32"),
        ({"page_size": 48}, "page_size is 48"),
        ({"page_size": 8}, "page_size is 8"),
    ],
)
def test_refusals_name_value_and_what_is_accepted(changes: dict[str, object], word: str) -> None:
    with pytest.raises(UnsupportedError, match=word):
        HopperBackend().check(need(**changes))


@pytest.mark.parametrize("page_size", [16, 32, 64, 128, 192])
def test_page_sizes_it_serves(page_size: int) -> None:
    found = HopperBackend().problems(need(page_size=page_size))
    assert not any(text.startswith("page_size") for text in found)


def test_all_reasons_come_at_once() -> None:
    case = make_case("1q2s65", num_heads=4, kv_lora_rank=64, rope_dim=16, page_size=48)
    part = case.tables()
    with pytest.raises(ArgumentError) as raised:
        HopperBackend().forward_mqa(
            case.q_latent, case.q_rope, case.latent_cache, part, softmax_scale=0.0
        )
    for word in ("C and R are 64 and 16", "dtype is", "page_size is 48", "softmax_scale", "plan"):
        assert word in str(raised.value)
