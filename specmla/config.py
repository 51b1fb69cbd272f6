"""Dimensions of one MLA layer, frozen, read once from a Hugging Face config.

Sources: DeepSeek-V2 (arXiv 2405.04434, section 2.1) for MLA; YaRN (arXiv 2309.00071) for the
rotary scaling and the temperature m(s) = 0.1 s ln(factor) + 1.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specmla.errors import ArgumentError, count_problems, require
from specmla.score_forms import config_problems

MAX_SIZE = 2**31 - 1
"""Largest count or size of a model; tables hold them in int32."""


def read_field(source: Mapping[str, Any] | object, name: str, default: Any = None) -> Any:
    """Read `name` from a mapping or an object; a missing or null field gives `default`."""
    found = source.get(name) if isinstance(source, Mapping) else getattr(source, name, None)
    return default if found is None else found


def read_flag(source: Mapping[str, Any] | object, name: str, default: bool) -> bool:
    """Read true or false; the string "false" is neither."""
    found = read_field(source, name, default)
    require([] if isinstance(found, bool) else [f"is {found!r}, accepted are true, false"], name)
    return bool(found)


def read_number(source: Mapping[str, Any] | object, name: str, default: float) -> float:
    """Read a finite number."""
    found = read_field(source, name, default)
    require([] if is_finite(found) else [f"is {found!r}, accepted are finite numbers"], name)
    return float(found)


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN rotary scaling.

    Attributes:
        factor: context extension.
        original_max_position_embeddings: tokens of context before the extension.
        beta_fast, beta_slow: rotations over the original context between which the ramp runs.
        mscale, mscale_all_dim: temperature coefficients; None where the checkpoint has none.
        attention_factor: factor of cos and sin given outright, in place of the two mscales.
        truncate: round the ends of the ramp to whole dimensions.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        reasons = [
            f"{name} is {value!r}, accepted are finite numbers > 0"
            for name, value in (
                ("factor", self.factor),
                ("original_max_position_embeddings", self.original_max_position_embeddings),
                ("beta_fast", self.beta_fast),
                ("beta_slow", self.beta_slow),
            )
            if not is_finite(value) or value <= 0
        ]
        reasons += [
            f"{name} is {value!r}, accepted are None and finite numbers >= 0"
            for name, value in (
                ("mscale", self.mscale),
                ("mscale_all_dim", self.mscale_all_dim),
                ("attention_factor", self.attention_factor),
            )
            if value is not None and (not is_finite(value) or value < 0)
        ]
        require(reasons, "YarnScaling")

    def temperature(self, mscale: float) -> float:
        """Give m(mscale) = 0.1 mscale ln(factor) + 1, or 1 where the context is not extended."""
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0

    @property
    def softmax_factor(self) -> float:
        """What multiplies the softmax scale: m(mscale_all_dim) squared, 1 if that is not set."""
        return self.temperature(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    @property
    def rotary_factor(self) -> float:
        """What multiplies cos and sin: m(mscale) / m(mscale_all_dim) if both are set, else m(1)."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self.temperature(self.mscale) / self.temperature(self.mscale_all_dim)
        return self.temperature(1.0)


@dataclass(frozen=True, slots=True)
class MLAConfig:
    """Dimensions of an MLA layer; letters as everywhere: H, C, P, R, V, D = hidden_size.

    Attributes:
        hidden_size: D.
        num_heads: H.
        kv_lora_rank: C, width of the cached latent.
        qk_nope_head_dim: P, query and key width without position.
        qk_rope_head_dim: R, rotated width, shared by all heads; even, 0 for none.
        v_head_dim: V, may differ from P.
        q_lora_rank: width of the query bottleneck, None for a plain `q_proj`.
        rope_theta: base of the rotary frequencies.
        rope_scaling: YaRN, or None.
        rms_norm_eps: of the decoder's norms (the two norms inside the layer have their own).
        rope_interleave: the weights produce rotary pairs (0, 1), (2, 3), ...; else (i, i + R / 2).
        attention_bias: bias in q_a_proj, kv_a_proj_with_mqa and o_proj.
    """

    hidden_size: int
    num_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None
    rope_theta: float = 10000.0
    rope_scaling: YarnScaling | None = None
    rms_norm_eps: float = 1e-6
    rope_interleave: bool = True
    attention_bias: bool = False

    def __post_init__(self) -> None:
        reasons = integer_problems(self, 1, "hidden_size", "num_heads", "kv_lora_rank")
        reasons += integer_problems(self, 1, "qk_nope_head_dim", "v_head_dim")
        if self.q_lora_rank is not None:
            reasons += integer_problems(self, 1, "q_lora_rank")
        rope = self.qk_rope_head_dim
        if not is_count(rope) or not 0 <= rope <= MAX_SIZE or rope % 2:
            reasons.append(f"qk_rope_head_dim is {rope!r}, accepted are even integers >= 0")
        if not isinstance(self.rope_scaling, YarnScaling | None):
            reasons.append(f"rope_scaling is {self.rope_scaling!r}, accepted are YarnScaling, None")
        for name in ("rope_interleave", "attention_bias"):
            if not isinstance(flag := getattr(self, name), bool):
                reasons.append(f"{name} is {flag!r}, accepted are True and False")
        if not is_finite(self.rope_theta) or self.rope_theta <= 1:
            reasons.append(f"rope_theta is {self.rope_theta!r}, accepted are finite numbers > 1")
        if not is_finite(self.rms_norm_eps) or self.rms_norm_eps <= 0:
            reasons.append(
                f"rms_norm_eps is {self.rms_norm_eps!r}, accepted are finite numbers > 0"
            )
        require(reasons, "MLAConfig")

    @property
    def qk_head_dim(self) -> int:
        """P + R, width of a query or key of one head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cache_width(self) -> int:
        """A = C + R, width of a cached row."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """(P + R)^-0.5, times YaRN's m(mscale_all_dim)^2; absorption does not change it."""
        factor = self.rope_scaling.softmax_factor if self.rope_scaling else 1.0
        return float(self.qk_head_dim**-0.5 * factor)

    @classmethod
    def from_hf(cls, source: Mapping[str, Any] | object) -> MLAConfig:
        """Read a `config.json` dict or a transformers config object, of any age (`read_rope`).

        Raises:
            ArgumentError: a dimension is missing, or a value can't be served; all are listed.
        """
        same = ("hidden_size", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        names = {name: name for name in same} | {"num_attention_heads": "num_heads"}
        dims = {ours: read_field(source, theirs) for theirs, ours in names.items()}
        missing = [f"{theirs} is missing" for theirs, ours in names.items() if dims[ours] is None]
        require(missing + config_problems(source), "MLAConfig.from_hf")
        theta, scaling = read_rope(source, "MLAConfig.from_hf")
        return cls(
            **dims,
            q_lora_rank=read_field(source, "q_lora_rank"),
            rope_theta=theta,
            rope_scaling=scaling,
            rms_norm_eps=read_field(source, "rms_norm_eps", 1e-6),
            rope_interleave=read_flag(source, "rope_interleave", True),
            attention_bias=read_flag(source, "attention_bias", False),
        )


def read_rope(
    source: Mapping[str, Any] | object, where: str = "read_rope"
) -> tuple[float, YarnScaling | None]:
    """Read theta and scaling from `rope_parameters` (new) or `rope_theta` and `rope_scaling`.

    Raises:
        ArgumentError: another scaling than YaRN, numbers that are none; all are named.
    """
    rope = read_field(source, "rope_parameters") or read_field(source, "rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise ArgumentError(f"{where}: the rotary settings are {rope!r}, accepted is a dict")
    theta = read_number(rope, "rope_theta", read_field(source, "rope_theta", 10000.0))
    kind = read_field(rope, "rope_type", read_field(rope, "type", "default"))
    reasons = []
    if kind not in ("default", "yarn"):
        reasons.append(f"rope_type is {kind!r}, accepted are 'default' and 'yarn'")
    rotated = read_field(rope, "partial_rotary_factor", 1.0)
    if rotated != 1.0:
        reasons.append(f"partial_rotary_factor is {rotated!r}, accepted is 1.0")
    require(reasons, where)
    if kind == "default":
        return theta, None
    longest = read_field(source, "max_position_embeddings")
    original = read_field(rope, "original_max_position_embeddings", longest)
    can_divide = is_finite(longest) and is_finite(original) and original
    factor = read_field(rope, "factor", longest / original if can_divide else None)
    return theta, YarnScaling(
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=read_field(rope, "beta_fast") or 32.0,
        beta_slow=read_field(rope, "beta_slow") or 1.0,
        mscale=read_field(rope, "mscale"),
        mscale_all_dim=read_field(rope, "mscale_all_dim"),
        attention_factor=read_field(rope, "attention_factor"),
        truncate=read_flag(rope, "truncate", True),
    )


def is_count(value: object) -> bool:
    """Tell whether `value` is an integer (a bool is not)."""
    return isinstance(value, int) and not isinstance(value, bool)


def integer_problems(config: object, least: int, *names: str) -> list[str]:
    """List the fields `names` that are not integers of at least `least`."""
    return count_problems({name: getattr(config, name) for name in names}, least)


def is_finite(value: object) -> bool:
    """Tell whether `value` is a number that a float can hold (a bool, NaN or infinity is not)."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and -sys.float_info.max <= value <= sys.float_info.max  # type: ignore[operator]
