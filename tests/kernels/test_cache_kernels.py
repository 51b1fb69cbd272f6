"""Store, gather and move kernels: bit-equal to their torch twins, and compiled ahead of time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import hypothesis.strategies as st
import torch
from hypothesis import given, settings

from specmla.cache import rows
from specmla.kernels import (
    gather,
    gather_fp8,
    gather_nvfp4,
    move,
    store,
    store_fp8,
    store_nvfp4,
    store_projected,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROOT = Path(__file__).parents[2]
DTYPES = [torch.float32, torch.float16]  # the interpreter's exact ones; bfloat16 in tests/gpu


def poisoned(
    num_pages: int, page_size: int, width: int, gap: int, dtype: torch.dtype
) -> torch.Tensor:
    """A pool of NaN whose page stride is `gap` elements more than a page."""
    whole = torch.full(
        (num_pages, page_size * width + gap), float("nan"), dtype=dtype, device=DEVICE
    )
    return whole[:, : page_size * width].unflatten(1, (page_size, width))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int16 if tensor.element_size() == 2 else torch.int32)


@st.composite
def pools(draw: st.DrawFn) -> tuple[int, int, int, int, int, torch.dtype]:
    """num_pages, page_size, C, R, gap, dtype."""
    return (
        draw(st.integers(1, 9)),
        draw(st.sampled_from([1, 2, 5, 16, 48, 64])),
        draw(st.sampled_from([1, 24, 64, 100, 128])),
        draw(st.sampled_from([0, 1, 8, 32])),
        draw(st.sampled_from([0, 0, 7, 64])),
        draw(st.sampled_from(DTYPES)),
    )


@given(pool=pools(), data=st.data())
@settings(max_examples=40, deadline=None)
def test_kernels_are_bit_equal_to_their_twins(
    pool: tuple[int, int, int, int, int, torch.dtype], data: st.DataObject
) -> None:
    num_pages, page_size, rank, rope, gap, dtype = pool
    num_slots, width = num_pages * page_size, rank + rope
    count = data.draw(st.integers(0, min(num_slots, 80)), label="rows")
    torch.manual_seed(data.draw(st.integers(0, 1000), label="seed"))
    slots = torch.randperm(num_slots)[:count].to(DEVICE)
    slots[torch.rand(count, device=DEVICE) < 0.2] = -1
    fused = torch.randn(count, width + 3, device=DEVICE).to(dtype)
    latent, rotated = fused[:, :rank], fused[:, rank:width]
    ours, twin = (poisoned(num_pages, page_size, width, gap, dtype) for _ in range(2))
    store.store_rows(ours, latent, rotated, slots)
    rows.store_rows(twin, latent, rotated, slots)
    assert torch.equal(bits(ours), bits(twin))
    again = torch.cat([slots, slots.flip(0)])
    assert torch.equal(bits(gather.gather_rows(ours, again)), bits(rows.gather_rows(twin, again)))
    targets = torch.randperm(num_slots)[:count].to(DEVICE)
    targets[torch.rand(count, device=DEVICE) < 0.1] = -1
    move.move_rows(move.LayerTable.of([ours]), slots, targets)
    rows.move_rows([twin], slots, targets)
    assert torch.equal(bits(ours), bits(twin))
    pages = torch.randperm(num_pages)[: num_pages // 2 * 2].view(2, -1).to(DEVICE)
    move.copy_pages(move.LayerTable.of([ours]), pages[0], pages[1])
    rows.copy_pages([twin], pages[0], pages[1])
    assert torch.equal(bits(ours), bits(twin))


def test_payload_bits_survive() -> None:
    """Copies, not arithmetic: NaN payloads, infinities, -0 and subnormals keep their bits."""
    pattern = torch.arange(-(2**15), 2**15, 13, dtype=torch.int32)[:5000].to(torch.int16)
    values = pattern.view(torch.float16).view(50, 100).to(DEVICE)
    pool = torch.zeros(13, 4, 100, dtype=torch.float16, device=DEVICE)
    slots = torch.randperm(52)[:50].to(DEVICE)
    store.store_rows(pool, values[:, :60], values[:, 60:], slots)
    assert torch.equal(bits(gather.gather_rows(pool, slots)), bits(values))
    move.move_rows(move.LayerTable.of([pool]), slots, slots.roll(7))
    assert torch.equal(bits(gather.gather_rows(pool, slots.roll(7))), bits(values))


def test_layer_table_measures_any_memory() -> None:
    one = torch.zeros(4, 6, 8, 16)
    table = move.LayerTable.of(one.unbind(0))
    assert table.offsets.tolist() == [0, 768, 1536, 2304]
    assert table.align == 16
    inner = torch.zeros(6, 3, 8, 3)
    table = move.LayerTable.of([inner[:, i] for i in (2, 0, 1)])
    assert table.offsets.tolist() == [0, -48, -24]
    assert table.align == 8
    odd = torch.zeros(100)
    table = move.LayerTable.of([odd[:8].view(2, 2, 2), odd[9:17].view(2, 2, 2)])
    assert (table.offsets.tolist(), table.align) == ([0, 9], 1)


COMPILE = r"""
import json, re, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from specmla.kernels import gather, gather_fp8, move, store, store_fp8, store_projected
from specmla.kernels import gather_nvfp4, store_nvfp4

names = {"sm_90": GPUTarget("cuda", 90, 32), "gfx942": GPUTarget("hip", "gfx942", 64)}
names |= {"sm_80": GPUTarget("cuda", 80, 32), "sm_100": GPUTarget("cuda", 100, 32)}
report = []
for module in (
    store, gather, move, store_fp8, gather_fp8, store_projected, store_nvfp4, gather_nvfp4
):
    for kernel, signature, constexprs, options in module.aot_variants():
        source = ASTSource(kernel, signature, constexprs)
        for name in sys.argv[1:]:
            built = triton.compile(source, target=names[name], options=dict(options))
            text = built.asm["ptx" if "sm_" in name else "amdgcn"]
            # BL-03: every stride is widened before it is multiplied by a page, a row or a token.
            uses = [line for line in built.asm["ttir"].splitlines() if re.search(r"%stride_", line)]
            narrow = [line for line in uses if "tt.func" not in line and "to i64" not in line]
            report.append(
                {
                    "kernel": f"{kernel.__name__} for {name}",
                    "shared": built.metadata.shared,
                    "size": len(text),
                    "stack": name.startswith("sm_") and ".local" in text,
                    "strides": len(uses) - 1,
                    "narrow": narrow,
                }
            )
print(json.dumps([triton.__version__, report]))
"""


def test_variants_compile_ahead_of_time(tmp_path: Path) -> None:
    """In a process of its own: this one may have decorated the kernels for the interpreter."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", COMPILE, "sm_90", "gfx942"]
    run = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    _, report = json.loads(run.stdout.splitlines()[-1])
    modules = (store, gather, move, store_fp8, gather_fp8, store_projected)
    modules += (store_nvfp4, gather_nvfp4)
    assert len(report) == 2 * sum(len(m.aot_variants()) for m in modules)
    for built in report:
        assert built["size"] > 500, built
        assert built["shared"] <= 16 * 1024, built  # only to change the layout of a tile
        assert not built["stack"], built
        assert built["strides"] >= 1, built
        assert not built["narrow"], built
