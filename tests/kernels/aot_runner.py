"""Compile kernels ahead of time, without a device, and report what each needs.

Run in a process of its own, with the Triton to test first on the path:

    python tests/kernels/aot_runner.py REPORT.json [--spilling]

Writes a list of {"label", "arch", "shared", "stack", "error"}: bytes of shared memory, bytes of
stack (spilled registers included), and the compiler's message where it failed.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from specmla.kernels import (
    expert_sum,
    experts,
    gather,
    gather_fp8,
    gather_nvfp4,
    lift,
    matmul,
    merge_states,
    move,
    norm,
    quantise_query,
    store,
    store_fp8,
    store_nvfp4,
    store_projected,
)
from specmla.kernels.combine import COLUMN_CHUNK, FEW_PIECES, PIECE_CHUNK, combine_kernel
from specmla.kernels.fold import fold_kernel
from specmla.kernels.head_widths import key_parts, value_pad
from specmla.kernels.launch import FP_FUSION, LaunchEntry, launch_table
from specmla.kernels.packed import packed_kernel
from specmla.kernels.pieces import pieces_kernel
from specmla.kernels.plan import LEAST_RUN, PIECE_STEPS, lane_options
from specmla.kernels.prefill import prefill_kernel
from specmla.kernels.rows import rows_kernel

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}

DTYPES = {2: ("bf16", "fp16"), 4: ("fp32",)}

KERNELS = {
    "packed": packed_kernel,
    "packed_fp8": packed_kernel,
    "rows": rows_kernel,
    "prefill": prefill_kernel,
    "fold": fold_kernel,
    "combine": combine_kernel,
    "pieces": pieces_kernel,
}

CACHE_MODULES = {"store": store, "gather": gather, "move": move}
FLOATS = {"lse_ptr", "partial_ptr", "partial_lse_ptr", "acc_ptr", "max_ptr", "sum_ptr"}
FLOATS |= {"prior_ptr", "prior_lse_ptr"}
ELEMENTS = {"out_ptr", "q_latent_ptr", "q_rope_ptr", "cache_ptr", "q_ptr", "k_ptr", "v_ptr"}
ELEMENTS |= {"rope_ptr"}
PLAIN_ROWS = {"row_scale": None, "GROUP": -1, "SCALES": 0, "ROPE": 0}
FP8_ROWS: list[dict[str, Any]] = [
    {"ROW": 576, "GROUP": 0},
    {"ROW": 656, "GROUP": 128, "SCALES": 512, "ROPE": 528, "row_scale": None},
    {"ROW": 584, "GROUP": 576, "SCALES": 576, "row_scale": None},
]
"""Rows of each e4m3 format for DeepSeek."""
CACHE_MODULES |= {"store_fp8": store_fp8, "gather_fp8": gather_fp8}
CACHE_MODULES |= {"store_nvfp4": store_nvfp4, "gather_nvfp4": gather_nvfp4}
CACHE_MODULES |= {"quantise_query": quantise_query, "lift": lift}
CACHE_MODULES |= {"store_projected": store_projected, "experts": experts}
CACHE_MODULES |= {"expert_sum": expert_sum, "merge_states": merge_states}
CACHE_MODULES |= {"norm": norm, "matmul": matmul}
BY_ARCH = {"matmul"}
"""Modules whose variants differ between architectures."""


class Job(NamedTuple):
    """One compilation: a kernel, its constants and how it is launched."""

    kernel: str
    arch: str
    dtype: str
    constants: dict[str, Any]
    num_warps: int
    num_stages: int

    @property
    def label(self) -> str:
        shown = {k: v for k, v in self.constants.items() if not k.endswith("_ptr")}
        return (
            f"{self.kernel} {self.arch} {self.dtype} w{self.num_warps} s{self.num_stages} {shown}"
        )


def attention_jobs(kernel: str, arch: str, entry: LaunchEntry) -> list[Job]:
    """Both dtypes of an entry, one of them in the plainest form and one with every mask.

    The last shapes (page 16, other dims, both dtypes with every mask) are compiled for sm_90 only:
    they change addresses and trip counts, not what an architecture can hold, and all of them on all
    architectures would take a quarter of an hour.
    """
    big, small = max(64, entry.page_multiple), max(16, entry.page_multiple)
    forms = [(big, 512, 64, False), (small, 512, 64, True)]
    dtypes = DTYPES[entry.itemsize]
    pairs = [(dtype, form) for dtype, form in zip(dtypes, forms, strict=False)]
    if arch == "sm_90" and entry.itemsize == 2:
        pairs += [(dtypes[1], forms[0]), (dtypes[0], forms[1])]
        pairs += [(dtypes[0], (big, 256, 32, True)), (dtypes[0], (big, 512, 0, True))]
    jobs = []
    for dtype, (page, rank, rope, masks) in pairs:
        constants: dict[str, Any] = {"H": 16, "C": rank, "R": rope, "G": page}
        if not masks:
            constants |= {"row_start_ptr": None, "tree_bits_ptr": None}
        if kernel != "rows":
            constants |= PLAIN_ROWS | {"ROW": rank + rope}
            constants |= {"BLOCK_M": entry.block_m, "BLOCK_N": entry.block_n}
            constants |= {"STAGES": entry.num_stages, "BRANCHED": entry.branched}
        else:
            constants.pop("tree_bits_ptr", None)
            constants |= {"BLOCK_H": entry.block_m, "BLOCK_N": entry.block_n}
        jobs.append(Job(kernel, arch, dtype, constants, entry.num_warps, entry.num_stages))
    return jobs


def fp8_jobs(arch: str, entry: LaunchEntry) -> list[Job]:
    """Both dtypes of an entry for rows of each e4m3 format."""
    jobs = []
    for job in attention_jobs("packed_fp8", arch, entry)[:2]:
        for row in FP8_ROWS:
            constants = job.constants | row
            if "row_scale" not in row:
                del constants["row_scale"]
            jobs.append(job._replace(constants=constants))
    return jobs


def prefill_jobs(kernel: str, arch: str, entry: LaunchEntry) -> list[Job]:
    """The widest heads that an entry is meant for: DeepSeek's 192/128, or 256/256.

    Prompts over joined keys alone, and over keys apart (where they may be) merged with a state.
    """
    width, value = (192, 128) if entry.max_rows == 192 else (256, 256)
    main, rest = key_parts(width)
    constants = {"D": width, "D_MAIN": main, "D_REST": rest, "V": value}
    constants |= {"V_PAD": value_pad(value)}
    constants |= {"BLOCK_M": entry.block_m, "BLOCK_N": entry.block_n}
    alone = {"rope_ptr": None, "prior_ptr": None, "prior_lse_ptr": None}
    forms = [alone] if kernel == "prefill" else [{"H": 16}]
    if kernel == "prefill":
        forms.append({} if rest else {"rope_ptr": None})
    dtypes = DTYPES[entry.itemsize]
    pairs = [(dtype, forms[0]) for dtype in dtypes] + [(dtypes[0], form) for form in forms[1:]]
    return [
        Job(kernel, arch, dtype, constants | form, entry.num_warps, entry.num_stages)
        for dtype, form in pairs
    ]


def combine_jobs(arch: str) -> list[Job]:
    """Both forms and the one of batch-invariant results, tiles of 16 and 64 rows."""
    jobs = []
    for few, block_m in ((FEW_PIECES, 64), (0, 64), (FEW_PIECES, 16)):
        constants = {"C": 512, "BLOCK_M": block_m, "FEW": few}
        constants |= {"CHUNK": PIECE_CHUNK, "COLUMNS": COLUMN_CHUNK}
        jobs += [Job("combine", arch, dtype, constants, 4, 1) for dtype in DTYPES[2]]
    return jobs


def plan_jobs(arch: str) -> list[Job]:
    """The plan of few and of many requests, and by each rule."""
    jobs = []
    rules = [(0, 0), (16, 0), (0, 4)]
    shapes = [(lanes, rules[0]) for lanes in (2, 256, 1024)] + [(64, rule) for rule in rules]
    for lanes, (run, pieces) in shapes:
        options = lane_options(lanes)
        constants: dict[str, Any] = {"H": 16, "BLOCK_M": 64, "BLOCK_N": 64, "RESIDENT": 132}
        constants |= {"FIXED": PIECE_STEPS, "LEAST_RUN": LEAST_RUN, "RUN": run, "PIECES": pieces}
        num_warps = options.pop("num_warps")
        jobs.append(Job("pieces", arch, "fp32", constants | options, num_warps, 1))
    return jobs


class CacheJob(NamedTuple):
    """One variant of a cache kernel, as its module lists it."""

    module: str
    variant: int
    arch: str


def variants(module: Any, name: str, arch: str) -> list[Any]:
    """Give what a module lists for an architecture."""
    listed: list[Any] = module.aot_variants(arch) if name in BY_ARCH else module.aot_variants()
    return listed


def cache_jobs(arch: str) -> list[CacheJob]:
    """Every variant of store, gather and move, plain and quantised."""
    return [
        CacheJob(name, i, arch)
        for name, module in CACHE_MODULES.items()
        for i in range(len(variants(module, name, arch)))
    ]


def all_jobs() -> list[Job | CacheJob]:
    """Every kernel with every entry of the launch table."""
    jobs: list[Job | CacheJob] = []
    for arch in TARGETS:
        for kernel, entries in launch_table()[arch].items():
            for entry in entries:
                if kernel in ("prefill", "fold"):
                    jobs += prefill_jobs(kernel, arch, entry)
                elif kernel == "packed_fp8":
                    jobs += fp8_jobs(arch, entry)
                else:
                    jobs += attention_jobs(kernel, arch, entry)
        jobs += combine_jobs(arch) + plan_jobs(arch) + cache_jobs(arch)
    return jobs


def spilling_job() -> Job:
    """A tile that can't fit: 64 rows of 512 float32 on four warps need 256 registers a thread."""
    entry = LaunchEntry(64, 64, 64, num_warps=4, num_stages=1)
    return attention_jobs("packed", "sm_90", entry)[0]


def argument_type(name: str, job: Job) -> str:
    """Triton's type of a kernel argument, as a launch would give it."""
    if name in job.constants:
        return "constexpr"
    if name == "cache_ptr" and job.kernel == "packed_fp8":
        return "*u8"
    if name in FLOATS:
        return "*fp32"
    if name in ELEMENTS:
        return f"*{job.dtype}"
    if name == "tree_bits_ptr":
        return "*i64"
    return "*i32" if name.endswith("_ptr") else "fp32" if "scale" in name else "i32"


def is_aligned(name: str, kind: str) -> bool:
    """Whether a launch finds the argument divisible by 16: rows and their strides are."""
    if kind == "constexpr" or "lse" in name or kind in ("*i32", "*i64"):
        return False
    return kind.startswith("*") or (name.startswith("stride") and name != "stride_table")


def alignment(kernel: Any, kinds: dict[str, str], name: str) -> dict[Any, Any]:
    """Give aligned arguments where copies that are not change what a kernel needs."""
    at = {n: (i,) for i, n in enumerate(kernel.arg_names)}
    wanted = [n for n, kind in kinds.items() if name in BY_ARCH and is_aligned(n, kind)]
    return {at[n]: [["tt.divisibility", 16]] for n in wanted}


def compile_job(job: Job | CacheJob) -> dict[str, Any]:
    """Compile and measure; a failure becomes part of the report."""
    if isinstance(job, CacheJob):
        variant = variants(CACHE_MODULES[job.module], job.module, job.arch)[job.variant]
        kernel, signature, constants, options = variant
        label = f"{job.module} {job.arch} variant {job.variant}"
        source = ASTSource(kernel, signature, constants, alignment(kernel, signature, job.module))
        return measure(label, job.arch, source, dict(options))
    kernel = KERNELS[job.kernel]
    kinds = {name: argument_type(name, job) for name in kernel.arg_names}
    at = {name: (i,) for i, name in enumerate(kernel.arg_names)}
    aligned = {at[n]: [["tt.divisibility", 16]] for n, kind in kinds.items() if is_aligned(n, kind)}
    source = ASTSource(kernel, kinds, {at[n]: v for n, v in job.constants.items()}, aligned)
    options = {
        "num_warps": job.num_warps,
        "num_stages": job.num_stages,
        "enable_fp_fusion": FP_FUSION,
    }
    return measure(job.label, job.arch, source, options)


def measure(label: str, arch: str, source: ASTSource, options: dict[str, Any]) -> dict[str, Any]:
    """Compile for an architecture; give its shared memory and stack, or the error."""
    report: dict[str, Any] = {"label": label, "arch": arch, "error": None}
    try:
        built = triton.compile(source, target=TARGETS[arch], options=options)
    except Exception as problem:
        return report | {"error": f"{type(problem).__name__}: {str(problem)[:400]}"}
    is_nvidia = TARGETS[arch].backend == "cuda"
    stack = cubin_stack(built.asm["cubin"]) if is_nvidia else scratch_bytes(built.asm["amdgcn"])
    return report | {"shared": built.metadata.shared, "stack": stack}


def cubin_stack(cubin: bytes) -> int:
    """Bytes of stack and local memory a thread, from the tool that ships with Triton."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        run = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        )
    return sum(int(n) for n in re.findall(r"(?:STACK|LOCAL):(\d+)", run.stdout))


def scratch_bytes(assembly: str) -> int:
    """Bytes of scratch memory a work item."""
    return sum(int(n) for n in re.findall(r"\.private_segment_fixed_size:\s*(\d+)", assembly))


def main(report: str, *flags: str) -> None:
    """Compile everything in two processes and write the report."""
    jobs: list[Job | CacheJob] = [spilling_job()] if "--spilling" in flags else all_jobs()
    with ProcessPoolExecutor(2) as pool:
        Path(report).write_text(json.dumps(list(pool.map(compile_job, jobs))))


if __name__ == "__main__":
    main(*sys.argv[1:])
