"""The forms of the acceptance kernels that are compiled ahead of time for every architecture."""

from __future__ import annotations

from typing import Any

from specmla.kernels.accept import BLOCK, RULES, SLOTS
from specmla.kernels.accept_draw import accept_draw_kernel
from specmla.kernels.accept_mass import accept_mass_kernel
from specmla.kernels.accept_rows import accept_rows_kernel
from specmla.kernels.accept_stats import accept_stats_kernel
from specmla.kernels.filter_collect import filter_collect_kernel
from specmla.kernels.filter_cut import filter_cut_kernel
from specmla.kernels.filter_hist import filter_hist_kernel

CHUNKS, WIDTH = 32, 8
"""Of 129,280 ids, and of up to 6 drafts."""

_WIDE = {"table_ptr", "drafts_ptr", "cut_ptr", "seed_ptr", "position_ptr", "top_k_ptr", "next_ptr"}
_WHOLE = {"part_top_ptr", "wrong_ptr", "hist_ptr", "found_id_ptr", "number_ptr"}

Variant = tuple[Any, dict[str, str], dict[str, int], dict[str, Any]]


def aot_variants() -> list[Variant]:
    """List kernel, signature, constexprs and launch options: the widest form of each kernel for
    bfloat16 first, then narrower ones and other logits."""
    block, both = {"BLOCK": BLOCK}, {"FILTER": 1, "DENSE": 1}
    level, whole, match = ({"RULE": n, "WIDTH": WIDTH} for n in RULES.values())
    search = block | {"SLOTS": SLOTS, "CHUNKS": CHUNKS}
    chunks = block | {"CHUNKS": CHUNKS}
    forms: list[tuple[Any, dict[str, int], int, str]] = [
        (accept_stats_kernel, block, 4, "bf16"),
        (accept_rows_kernel, {"CHUNKS": CHUNKS}, 1, "bf16"),
        (accept_mass_kernel, block | whole | both, 4, "bf16"),
        (accept_draw_kernel, chunks | whole | both, 8, "bf16"),
        (filter_hist_kernel, block, 4, "bf16"),
        (filter_collect_kernel, search, 4, "bf16"),
        (filter_cut_kernel, search, 4, "bf16"),
        (accept_mass_kernel, block | level | both, 4, "fp32"),
        (accept_draw_kernel, chunks | level | both, 8, "fp32"),
        (accept_draw_kernel, chunks | level | {"FILTER": 0, "DENSE": 0}, 8, "fp16"),
        (accept_draw_kernel, chunks | match | {"FILTER": 1, "DENSE": 0}, 8, "fp32"),
        (accept_stats_kernel, block, 4, "fp32"),
    ]
    return [_variant(*form) for form in forms]


def _variant(kernel: Any, constants: dict[str, int], warps: int, logits: str) -> Variant:
    kinds = {}
    for name in kernel.arg_names:
        if name in constants:
            kinds[name] = "constexpr"
        elif name == "logits_ptr":
            kinds[name] = f"*{logits}"
        elif name.endswith("_ptr"):
            wide = name in _WIDE or (name == "out_ptr" and kernel is accept_draw_kernel)
            kinds[name] = "*i64" if wide else "*i32" if name in _WHOLE else "*fp32"
        else:
            kinds[name] = "i32"
    return kernel, kinds, constants, {"num_warps": warps, "enable_fp_fusion": False}
