"""Dimensions, scale and rotary settings as checkpoints spell them."""

from __future__ import annotations

import dataclasses
import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest

from specmla.config import MLAConfig, YarnScaling
from specmla.errors import ArgumentError

V3: dict[str, Any] = {
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "max_position_embeddings": 163840,
}
YARN: dict[str, Any] = {
    "type": "yarn",
    "factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 4096,
}


def v3(**changed: Any) -> MLAConfig:
    return MLAConfig.from_hf(V3 | changed)


@pytest.mark.parametrize(
    ("scaling", "scale", "rotary"),
    [
        (YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}, 0.114721, 1.0),
        (YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, 0.135234, 1.0),
        (None, 0.072169, 1.0),
        # Without mscale_all_dim the scores keep their scale and cos and sin take m(1).
        (YARN, 0.072169, 1.368888),
        (YARN | {"mscale": 1.0, "mscale_all_dim": 0.0}, 0.072169, 1.368888),
        (YARN | {"mscale": 1.0, "mscale_all_dim": 0.707}, 0.114721, 1.368888 / 1.260804),
        (YARN | {"mscale_all_dim": 1.0}, 0.135234, 1.368888),
        (YARN | {"attention_factor": 0.5}, 0.072169, 0.5),
        (YARN | {"factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}, 0.072169, 1.0),
    ],
)
def test_softmax_scale_and_rotary_factor(
    scaling: dict[str, Any] | None, scale: float, rotary: float
) -> None:
    config = v3(rope_scaling=scaling)
    assert config.softmax_scale == pytest.approx(scale, abs=5e-7)
    factor = config.rope_scaling.rotary_factor if config.rope_scaling else 1.0
    assert factor == pytest.approx(rotary, abs=1e-6)


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_scaling": YARN, "rope_theta": 5e4},
        {"rope_scaling": {**YARN, "rope_type": "yarn"}, "rope_theta": 5e4},
        {"rope_parameters": {**YARN, "rope_type": "yarn", "rope_theta": 5e4}, "rope_theta": None},
        {"rope_parameters": {**YARN, "rope_theta": 5e4}, "rope_theta": 1e4},
        {"rope_scaling": {**YARN, "beta_fast": None, "beta_slow": None}, "rope_theta": 5e4},
        {"rope_scaling": {**YARN, "factor": None}, "rope_theta": 5e4},
    ],
)
@pytest.mark.parametrize("kind", [dict, SimpleNamespace])
def test_from_hf_reads_every_spelling(spelling: dict[str, Any], kind: type) -> None:
    config = MLAConfig.from_hf(kind(**(V3 | spelling)))
    assert config == MLAConfig(
        hidden_size=7168,
        num_heads=128,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        q_lora_rank=1536,
        rope_theta=5e4,
        rope_scaling=YarnScaling(40, 4096),
    )


def test_from_hf_defaults() -> None:
    config = MLAConfig.from_hf(
        {k: v for k, v in V3.items() if k not in ("rope_theta", "q_lora_rank")}
    )
    assert (config.q_lora_rank, config.rope_theta, config.rope_scaling) == (None, 10000.0, None)
    assert (config.rope_interleave, config.attention_bias, config.rms_norm_eps) == (
        True,
        False,
        1e-6,
    )
    assert v3(rope_parameters={"rope_type": "default", "rope_theta": 7e3}).rope_theta == 7e3
    assert v3(rope_interleave=False).rope_interleave is False
    assert v3(q_lora_rank=None).q_lora_rank is None
    unsaid = {k: v for k, v in YARN.items() if k != "original_max_position_embeddings"}
    yarn = v3(rope_scaling=unsaid).rope_scaling
    assert yarn is not None
    assert yarn.original_max_position_embeddings == 163840


def test_dims_of_every_family() -> None:
    for rank, rope, v, heads, bottleneck in itertools.product(
        (128, 256, 512), (0, 32, 64), (96, 256), (12, 20, 40, 128), (None, 768)
    ):
        config = v3(
            kv_lora_rank=rank,
            qk_rope_head_dim=rope,
            v_head_dim=v,
            num_attention_heads=heads,
            q_lora_rank=bottleneck,
        )
        assert (config.cache_width, config.qk_head_dim) == (rank + rope, 128 + rope)
        assert config.softmax_scale == (128 + rope) ** -0.5


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        v3().num_heads = 3  # type: ignore[misc]


def test_all_reasons_at_once() -> None:
    with pytest.raises(ArgumentError) as raised:
        MLAConfig(0, True, 512, -1, 33, 2.5, q_lora_rank=0, rope_theta=math.inf, rms_norm_eps=0.0)  # type: ignore[arg-type]
    message = str(raised.value)
    for text in (
        "hidden_size is 0",
        "num_heads is True",
        "qk_nope_head_dim is -1",
        "v_head_dim is 2.5",
        "q_lora_rank is 0",
        "qk_rope_head_dim is 33, accepted are even integers >= 0",
        "rope_theta is inf",
        "rms_norm_eps is 0.0",
    ):
        assert text in message
    assert "kv_lora_rank" not in message


def test_missing_dims_are_named_together() -> None:
    with pytest.raises(ArgumentError, match=r"kv_lora_rank is missing; v_head_dim is missing$"):
        MLAConfig.from_hf({k: v for k, v in V3.items() if k not in ("kv_lora_rank", "v_head_dim")})


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"type": "linear", "factor": 2.0}, "rope_type is 'linear', accepted are"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ("yarn", "the rotary settings are 'yarn'"),
        (YARN | {"factor": -1}, "factor is -1"),
        (YARN | {"factor": "40"}, "factor is '40'"),
        (YARN | {"mscale": -0.1}, "mscale is -0.1"),
        (YARN | {"mscale_all_dim": math.nan}, "mscale_all_dim is nan"),
        (YARN | {"original_max_position_embeddings": 0}, "original_max_position_embeddings is 0"),
    ],
)
def test_bad_rotary_settings(rope: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        v3(rope_scaling=rope)
