"""Compile the Hopper kernel and its merge ahead of time and report what they need.

Run in a process of its own, with the Triton to test first on the path:

    python tests/kernels/hopper_aot_runner.py REPORT.json

Writes {"triton", "built": [{"label", "shared", "stack"}]}.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from specmla.kernels.hopper.kernel import hopper_kernel
from specmla.kernels.hopper.launch import MERGE_REGISTERS, REGISTERS
from specmla.kernels.hopper.layouts import COPY
from specmla.kernels.merge import WARPS, merge_kernel

CASES: tuple[dict[str, Any], ...] = (
    {"H": 16, "G": 64, "RUN": 0, "WINDOW": False, "TREE": False, "dtype": "bf16"},
    {"H": 128, "G": 64, "RUN": 32, "WINDOW": False, "TREE": True, "dtype": "bf16"},
    {"H": 20, "G": 16, "RUN": 0, "WINDOW": True, "TREE": True, "dtype": "fp16"},
)


def signature(case: dict[str, Any]) -> dict[str, str]:
    dtype, lines = case["dtype"], min(case["G"], 64)
    named = dict.fromkeys(hopper_kernel.arg_names, "*i32")
    named |= dict.fromkeys(("out_ptr", "q_latent_ptr", "q_rope_ptr"), f"*{dtype}")
    named |= dict.fromkeys(("lse_ptr", "part_ptr", "part_stat_ptr"), "*fp32")
    named |= {name: "i32" for name in named if name.startswith("stride_")}
    named |= {"scale_log2": "fp32", "tree_bits_ptr": "*i64" if case["TREE"] else "*i32"}
    named["descriptor"] = f"tensordesc<{dtype}[1,{lines},64],{COPY.value!r}>"
    return named | dict.fromkeys(("H", "G", "RUN", "WINDOW", "TREE"), "constexpr")


def compile_case(case: dict[str, Any]) -> dict[str, Any]:
    names = hopper_kernel.arg_names
    constants = {(names.index(k),): v for k, v in case.items() if k != "dtype"}
    aligned = (
        "out_ptr",
        "part_",
        "q_latent_ptr",
        "q_rope_ptr",
        "stride_latent",
        "stride_rope",
    )
    attrs = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n.startswith(aligned)}
    source = GluonASTSource(hopper_kernel, signature(case), constants, attrs)
    return {"label": str(case)} | measure(source, {"num_warps": 4, "maxnreg": REGISTERS})


def compile_merge(dtype: str, invariant: bool) -> dict[str, Any]:
    named = dict.fromkeys(merge_kernel.arg_names, "*fp32")
    named |= {"merge_ptr": "*i32", "out_ptr": f"*{dtype}", "INVARIANT": "constexpr"}
    attrs = {(i,): [["tt.divisibility", 16]] for i in (0, 1, 3, 4)}
    source = GluonASTSource(merge_kernel, named, {(5,): invariant}, attrs)
    return {"label": f"merge {dtype} {invariant}"} | measure(
        source, {"num_warps": WARPS, "maxnreg": MERGE_REGISTERS}
    )


def measure(source: GluonASTSource, options: dict[str, Any]) -> dict[str, Any]:
    options = options | {"enable_fp_fusion": False}
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(built.asm["cubin"])
        cubin.flush()
        usage = subprocess.run(
            [str(tool), "--dump-resource-usage", cubin.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    stack = re.search(r"STACK:(\d+)", usage)
    assert stack is not None
    return {"shared": built.metadata.shared, "stack": int(stack.group(1))}


if __name__ == "__main__":
    found = [compile_case(case) for case in CASES] + [
        compile_merge(dtype, invariant)
        for dtype, invariant in (("bf16", False), ("bf16", True), ("fp16", False))
    ]
    Path(sys.argv[1]).write_text(json.dumps({"triton": triton.__version__, "built": found}))
