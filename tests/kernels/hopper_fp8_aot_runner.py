"""Compile the Hopper form over e4m3 caches ahead of time and report what it needs.

Called as `hopper_fp8_aot_runner.py`, whose report it writes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import triton
from hopper_aot_runner import measure
from triton.experimental.gluon._runtime import GluonASTSource

from specmla.kernels.hopper.small_fp8.kernel import REGISTERS, small_fp8_kernel
from specmla.kernels.hopper.small_fp8.layouts import CODES_3D, WIDTH

PLAIN = {"H": 16, "G": 64, "WINDOW": False, "TREE": False}
HARD = {"H": 20, "G": 16, "WINDOW": True, "TREE": True}
CASES: tuple[tuple[dict[str, Any], str], ...] = (
    (PLAIN | {"N": 16}, "bf16"),
    (HARD | {"N": 32}, "fp16"),
)


def compile_case(case: dict[str, Any], dtype: str) -> dict[str, Any]:
    names, lines = small_fp8_kernel.arg_names, min(case["G"], 64)
    types = dict.fromkeys(names, "*i32")
    types |= dict.fromkeys(("out_ptr", "q_latent_ptr", "q_rope_ptr"), f"*{dtype}")
    types |= dict.fromkeys(("lse_ptr", "part_ptr", "part_stat_ptr"), "*fp32")
    types |= {name: "i32" for name in names if name.startswith("stride_")}
    types |= dict.fromkeys(("scale_log2", "sum_scale", "max_shift"), "fp32")
    types["tree_bits_ptr"] = "*i64" if case["TREE"] else "*i32"
    types["descriptor"] = f"tensordesc<u8[1,{lines},{WIDTH.value}],{CODES_3D.value!r}>"
    types |= dict.fromkeys(case, "constexpr")
    constants = {(names.index(k),): v for k, v in case.items()}
    aligned = ("out_ptr", "part_", "q_latent_ptr", "q_rope_ptr", "stride_latent", "stride_rope")
    attrs = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n.startswith(aligned)}
    source = GluonASTSource(small_fp8_kernel, types, constants, attrs)
    options = {"num_warps": 4, "maxnreg": REGISTERS}
    return {"label": f"small fp8 {case} {dtype}"} | measure(source, options)


if __name__ == "__main__":
    found = [compile_case(case, dtype) for case, dtype in CASES]
    Path(sys.argv[1]).write_text(json.dumps({"triton": triton.__version__, "built": found}))
