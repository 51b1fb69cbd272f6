"""The forms of the acceptance kernels that are compiled ahead of time for every architecture."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from specmla.kernels import (
    accept_draw,
    accept_mass,
    accept_rows,
    accept_stats,
    accept_walk,
    filter_rows,
)
from specmla.kernels.accept import BLOCK, RULES, SLOTS
from specmla.kernels.accept_tree import BLOCK as WALKED
from specmla.kernels.filter_groups import GROUP
from specmla.kernels.filter_held import FEW, TILE

CHUNKS, WIDTH, TREE = 32, 8, 64
"""Of 129,280 ids, of up to 6 drafts, and of the largest trees."""

SMALL = {"CHUNKS": 1, "BLOCK": 128, "SLOTS": 128, "FEW": 128 // FEW}
"""Of up to 128 ids."""

_WIDE = {"table_ptr", "drafts_ptr", "cut_ptr", "seed_ptr", "position_ptr", "top_k_ptr", "next_ptr"}
_WIDE |= {"parent_ptr", "rank_ptr", "depth_ptr", "end_ptr"}
_WHOLE = {"part_top_ptr", "wrong_ptr", "found_id_ptr", "number_ptr", "group_ptr"}

_FILTERED = {"top_k_ptr", "top_p_ptr", "min_p_ptr", "group_max_ptr", "group_sum_ptr"}
_FILTERED |= {"found_ptr", "found_id_ptr", "number_ptr"}

Variant = tuple[Any, dict[str, str], dict[str, Any], dict[str, Any]]


def aot_variants() -> list[Variant]:
    """List kernel, signature, constexprs and launch options: the widest form of each kernel for
    bfloat16 first, then narrower ones and other logits."""
    held = {"SLOTS": SLOTS, "FEW": SLOTS // FEW}
    block, stats = {"BLOCK": BLOCK} | held, {"BLOCK": BLOCK, "GROUP": GROUP}
    filtered, both = {"FILTER": 1}, {"FILTER": 1, "DENSE": 1}
    level, whole, match = ({"RULE": n, "WIDTH": WIDTH} for n in RULES.values())
    chunks = block | {"CHUNKS": CHUNKS}
    search = chunks | {"GROUP": GROUP, "TILE": TILE}
    bf16, fp32 = {"FINE": 16}, {"FINE": 0, "TILE": TILE // 2}
    walked = {"BLOCK": WALKED, "CHUNKS": CHUNKS * BLOCK // WALKED, "WIDTH": TREE}
    walked |= held
    forms: list[tuple[ModuleType, dict[str, int], str]] = [
        (accept_stats, stats | filtered, "bf16"),
        (accept_rows, {"CHUNKS": CHUNKS}, "bf16"),
        (accept_mass, block | whole | filtered, "bf16"),
        (accept_draw, chunks | whole | both, "bf16"),
        (filter_rows, search | bf16, "bf16"),
        (accept_mass, block | level | filtered, "fp32"),
        (accept_draw, chunks | level | both, "fp32"),
        (accept_draw, chunks | level | {"FILTER": 0, "DENSE": 0}, "fp16"),
        (accept_draw, chunks | match | {"FILTER": 1, "DENSE": 0}, "fp32"),
        (accept_stats, stats | filtered, "fp32"),
        (accept_stats, stats | {"FILTER": 0}, "bf16"),
        (filter_rows, search | fp32, "fp32"),
        (filter_rows, search | fp32 | SMALL, "fp32"),
        (accept_walk, walked | {"RULE": 0} | both, "bf16"),
        (accept_walk, walked | {"RULE": 0, "DENSE": 0, "FILTER": 0}, "fp16"),
        (accept_walk, walked | {"RULE": 2, "DENSE": 0, "FILTER": 1}, "fp32"),
    ]
    return [_variant(*form) for form in forms]


def _absent(names: Sequence[str], constants: dict[str, Any]) -> list[str]:
    """List the tensors that launches of such a form leave out."""
    found = [] if constants.get("FILTER", 1) else [n for n in names if n in _FILTERED]
    return found + ([] if constants.get("DENSE", 1) else ["q_ptr"])


def _variant(module: ModuleType, constants: dict[str, Any], logits: str) -> Variant:
    kernel = getattr(module, f"{module.__name__.rpartition('.')[2]}_kernel")
    kinds = {}
    constants = constants | dict.fromkeys(_absent(kernel.arg_names, constants))
    for name in kernel.arg_names:
        if name in constants:
            kinds[name] = "constexpr"
        elif name == "logits_ptr":
            kinds[name] = f"*{logits}"
        elif name.endswith("_ptr"):
            wide = name in _WIDE or (name == "out_ptr" and module in (accept_draw, accept_walk))
            kinds[name] = "*i64" if wide else "*i32" if name in _WHOLE else "*fp32"
        else:
            kinds[name] = "i32"
    options = {"num_warps": module.NUM_WARPS, "enable_fp_fusion": False}
    return kernel, kinds, constants, options | getattr(module, "OPTIONS", {})
