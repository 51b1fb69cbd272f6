"""What no constructor takes: each refuses by argument, by value and by what is accepted."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from drafters import NgramDrafter
from specmla import (
    ArgumentError,
    BatchRules,
    BatchTableBudget,
    BlockManager,
    CacheLayout,
    DeepseekConfig,
    FixedHeads,
    Fp8Query,
    Gate,
    LatentCache,
    MetadataBuilder,
    MLAConfig,
    PrefillWorkspace,
    Requirements,
    SurvivalThreshold,
    ThroughputStop,
    cache_format,
    choose_backend,
    get_backend,
    workspace_rows,
)

SIZES = (-1, 1.5, math.nan, math.inf, "3", None, True, 2**31, 2**100, [3])
REALS = (-1.0, math.nan, math.inf, "0.5", None, [1], 1j)
OTHERS = (5, "x", [], object())
MLA = {
    "hidden_size": 64,
    "num_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}
NEED = {
    "device": torch.device("cpu"),
    "dtype": torch.float32,
    "num_heads": 4,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "page_size": 4,
}


class Case(NamedTuple):
    """A constructor, arguments that it takes, and by name what it must refuse."""

    make: Callable[..., Any]
    good: dict[str, Any]
    bad: dict[str, tuple[Any, ...]]


def chosen(backend: Any) -> Any:
    return choose_backend(Requirements(**NEED), backend)


CASES = {
    "BlockManager": Case(
        BlockManager,
        {"num_pages": 2, "page_size": 4},
        dict.fromkeys(("num_pages", "page_size", "lookahead"), SIZES),
    ),
    "LatentCache": Case(
        LatentCache,
        {
            "num_layers": 1,
            "num_pages": 2,
            "page_size": 4,
            "width": 48,
            "dtype": torch.float32,
            "device": "cpu",
        },
        dict.fromkeys(("num_layers", "num_pages", "page_size", "width"), SIZES)
        | {"dtype": (None, "float32", torch.int8), "format": OTHERS},
    ),
    "CacheLayout": Case(
        CacheLayout,
        {"width": 48, "dtype": torch.float32, "page_size": 4},
        {"width": SIZES, "page_size": SIZES},
    ),
    "cache_format": Case(
        lambda kv_lora_rank, qk_rope_head_dim: cache_format("fp8", kv_lora_rank, qk_rope_head_dim),
        {"kv_lora_rank": 32, "qk_rope_head_dim": 16},
        {"kv_lora_rank": SIZES, "qk_rope_head_dim": SIZES},
    ),
    "MetadataBuilder": Case(
        MetadataBuilder,
        {
            "backend": get_backend("reference"),
            "page_size": 4,
            "num_pages": 2,
            "num_heads": 4,
            "kv_lora_rank": 32,
            "device": "cpu",
            "max_seq_len": 8,
        },
        dict.fromkeys(("page_size", "num_pages", "num_heads", "kv_lora_rank", "max_seq_len"), SIZES)
        | {"backend": (None, *OTHERS), "dtype": (None, "float32")},
    ),
    "PrefillWorkspace": Case(
        PrefillWorkspace,
        {"width": 48, "page_size": 4, "dtype": torch.float32, "device": "cpu"},
        {"width": SIZES, "page_size": SIZES, "dtype": (None, "float32", torch.int8)},
    ),
    "workspace_rows": Case(
        workspace_rows,
        {"max_model_len": 8, "max_num_seqs": 2, "page_size": 4},
        dict.fromkeys(("max_model_len", "max_num_seqs", "page_size"), SIZES),
    ),
    "BatchRules": Case(BatchRules, {}, {"num_speculative_tokens": SIZES}),
    "Requirements": Case(
        Requirements,
        NEED,
        dict.fromkeys(("num_heads", "page_size", "kv_lora_rank"), (1.5, "3", None, True, [3]))
        | {"device": ("cpu", None), "dtype": ("float32", None)},
    ),
    "choose_backend": Case(chosen, {"backend": None}, {"backend": (5, b"reference", ["triton"])}),
    "get_backend": Case(get_backend, {"name": "reference"}, {"name": (None, ["triton"])}),
    "FixedHeads": Case(
        FixedHeads,
        {"backend": get_backend("reference"), "num_heads": 8},
        {"backend": (None, *OTHERS), "num_heads": SIZES},
    ),
    "Fp8Query": Case(Fp8Query, {"scale": 1.0}, {"scale": REALS}),
    "Gate": Case(
        Gate,
        {"rule": SurvivalThreshold(0.5), "num_requests": 2, "device": "cpu"},
        {"rule": (None, *OTHERS), "num_requests": SIZES},
    ),
    "SurvivalThreshold": Case(SurvivalThreshold, {"least": 0.5}, {"least": REALS}),
    "ThroughputStop": Case(
        ThroughputStop,
        {"steps_per_s": [1.0]},
        {"steps_per_s": (5, None, "ab", ["a"], [None], [[1]], {1.0}, [math.nan], [])},
    ),
    "BatchTableBudget": Case(BatchTableBudget, {"table": {1: 2}}, {"table": (None, *OTHERS, {})}),
    "MLAConfig": Case(
        MLAConfig, MLA, {"rope_scaling": (*OTHERS, {}), "rope_interleave": (5, "no", None)}
    ),
    "DeepseekConfig": Case(
        DeepseekConfig,
        {
            "attention": MLAConfig(**MLA),
            "num_layers": 1,
            "vocab_size": 8,
            "intermediate_size": 8,
            "max_position_embeddings": 8,
        },
        {"attention": (None, *OTHERS), "num_layers": SIZES},
    ),
    "NgramDrafter": Case(
        NgramDrafter,
        {"vocab_size": 8},
        {"vocab_size": (0, 1.5, "3", None), "prompt_lookup_max": (0, 1.5, "3", None)},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_taken_is_made(name):
    made = CASES[name]
    made.make(**made.good)


@pytest.mark.parametrize(
    ("name", "argument"),
    [(n, argument) for n, case in CASES.items() for argument in case.bad],
)
def test_what_is_not_is_refused_by_name(name, argument):
    case = CASES[name]
    for value in case.bad[argument]:
        with pytest.raises(ArgumentError) as caught:
            case.make(**(case.good | {argument: value}))
        text = str(caught.value)
        named = "backend" if name == "get_backend" else argument
        assert re.search(rf"\b{named}\b", text), (value, text)
        assert "accepted" in text, (value, text)


def test_all_that_is_wrong_is_listed_at_once():
    with pytest.raises(ArgumentError) as caught:
        MetadataBuilder(
            backend=None,
            page_size=1.5,
            num_pages="2",
            num_heads=True,
            kv_lora_rank=0,
            device="cpu",
            max_seq_len=-8,
            dtype="float32",
        )
    wrong = ("page_size is 1.5", "num_pages is '2'", "num_heads is True", "kv_lora_rank is 0")
    for part in (*wrong, "max_seq_len is -8", "dtype is 'float32'", "backend is None"):
        assert part in str(caught.value)


@pytest.mark.parametrize("name", [[], {}, None, 7], ids=repr)
def test_names_that_are_none_are_unknown(name):
    from tests.verify.test_step import make_step

    step = make_step()
    for call in (step.tokens, step.remove, lambda n: step.plan(None, [n])):
        with pytest.raises(ArgumentError, match="request_id"):
            call(name)
    with pytest.raises(ArgumentError, match="request_id"):
        step.draft_requests(1, [name])
