"""Time and peak memory of one layer's prompt over cached context: in one pass, and in chunks.

A prompt of a few new rows attends to more and more cached context. In one pass all of its keys are
up-projected at once; in chunks through a workspace, as many as that has rows. Gather,
up-projection, attention and merge are timed together; projections of the new rows are left out.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specmla.backends.base import AttentionBackend, Requirements
from specmla.backends.select import select_backend
from specmla.bench.timing import host_us
from specmla.cache.latent import LatentCache
from specmla.config import MLAConfig
from specmla.layer import MLAAttention
from specmla.metadata import PrefillPart
from specmla.testing import PromptCase, make_prompt_case, relative_error
from specmla.workspace import PrefillWorkspace

ONE_PASS, CHUNKS = "one pass", "chunks"


@dataclass(frozen=True)
class PrefillOptions:
    """What all contexts share.

    Attributes:
        dims: of the layer.
        rows: new rows of the prompt.
        workspace_rows: of the workspaces to measure, largest first or not.
        page_size, backend, dtype, device, reps: as elsewhere; the best backend if None.
    """

    dims: MLAConfig
    rows: int
    workspace_rows: tuple[int, ...]
    page_size: int
    backend: str | None
    dtype: torch.dtype
    device: torch.device
    reps: int


@torch.no_grad()
def measure_context(context: int, options: PrefillOptions) -> list[dict[str, Any]]:
    """Give a row for one pass and one for each workspace that the keys don't fit into.

    Args:
        context: cached tokens before the new rows.
        options: the rest.

    Raises:
        UnsupportedError: the backend can't serve the layer here.
    """
    dims, device, case = options.dims, options.device, _case(context, options)
    backend, layer = _backend(options), MLAAttention(dims).to(device, options.dtype)
    query = torch.cat((case.q_nope, case.base.q_rope), dim=-1)
    cache = LatentCache.from_pool([case.base.latent_cache])
    shared = {
        "context": context,
        "rows": options.rows,
        "heads": dims.num_heads,
        "dtype": str(options.dtype).removeprefix("torch."),
        "device": device.type,
        "backend": backend.capabilities.name,
    }
    run = partial(_run, layer, query, cache, backend)
    one_pass = {"form": ONE_PASS, "workspace_rows": None, "chunks": 0}
    forms = [(shared | one_pass, case.part(backend))]
    for size in options.workspace_rows:
        workspace = PrefillWorkspace(dims.cache_width, options.page_size, options.dtype, device)
        workspace.claim(size)
        workspace.lock()
        part = case.part(backend, workspace)
        if part.context:
            # What goes with the new rows is not counted.
            held = {"workspace_rows": workspace.num_rows, "chunks": len(part.context)}
            forms.append((shared | {"form": CHUNKS} | held, part))
    return _measure_forms(run, forms, options)


def _measure_forms(
    run: partial[Tensor], forms: list[tuple[dict[str, Any], PrefillPart]], options: PrefillOptions
) -> list[dict[str, Any]]:
    """Complete the rows: memory and results one after the other, times in turns.

    A chip at work lowers its clock: what is timed last would come off worst.
    """
    rows: list[dict[str, Any]] = []
    able: list[int] = []
    exact: Tensor | None = None
    for row, part in forms:
        peak, got = _try(run, part, options.device)
        if got is not None:
            able.append(len(rows))
        rows.append(row | {"us": None, "peak_bytes": peak})
        if row["form"] == ONE_PASS:
            exact = got
        else:
            compared = None if got is None or exact is None else relative_error(got, exact.double())
            rows[-1]["rel_diff"] = compared
        del got
    times: dict[int, list[float]] = {i: [] for i in able}
    for _ in range(options.reps):
        for i in able:
            times[i].append(host_us(partial(run, forms[i][1]), options.device, reps=1))
    for i in able:
        rows[i]["us"] = statistics.median(times[i])
    for row in rows[1:]:
        both = row["us"] is not None and rows[0]["us"] is not None
        row["ratio"] = row["us"] / rows[0]["us"] if both else None
    return rows


def _case(context: int, options: PrefillOptions) -> PromptCase:
    dims = options.dims
    return make_prompt_case(
        [(options.rows, context + options.rows)],
        nope_dim=dims.qk_nope_head_dim,
        v_dim=dims.v_head_dim,
        num_heads=dims.num_heads,
        kv_lora_rank=dims.kv_lora_rank,
        rope_dim=dims.qk_rope_head_dim,
        page_size=options.page_size,
        dtype=options.dtype,
        device=options.device,
        spare_pages=0,
    )


def prefill_lines(rows: Sequence[dict[str, Any]]) -> str:
    """Format the rows for people."""
    head = f"{'context':>8} {'form':9} {'workspace':>9} {'chunks':>6} {'ms':>10} {'ratio':>6}"
    lines = [f"{head} {'peak MiB':>9}"]
    for r in rows:
        ratio = r.get("ratio")
        lines.append(
            f"{r['context']:8} {r['form']:9} {r['workspace_rows'] or '-':>9} {r['chunks']:6} "
            + (f"{r['us'] / 1e3:10.3f} " if r["us"] is not None else f"{'no room':>10} ")
            + (f"{ratio:6.3f} " if ratio is not None else f"{'-':>6} ")
            + (f"{r['peak_bytes'] / 2**20:9.1f}" if r["peak_bytes"] is not None else f"{'-':>9}")
        )
    return "\n".join(lines)


def _backend(options: PrefillOptions) -> AttentionBackend:
    dims = options.dims
    need = Requirements(
        device=options.device,
        dtype=options.dtype,
        num_heads=dims.num_heads,
        kv_lora_rank=dims.kv_lora_rank,
        qk_rope_head_dim=dims.qk_rope_head_dim,
        page_size=options.page_size,
    )
    return select_backend(need, options.backend)


def _run(
    layer: MLAAttention,
    query: Tensor,
    cache: LatentCache,
    backend: AttentionBackend,
    part: PrefillPart,
) -> Tensor:
    return layer.forward_mha(query, partial(cache.gather, 0), part, backend)


def _try(
    run: partial[Tensor], part: PrefillPart, device: torch.device
) -> tuple[int | None, Tensor | None]:
    """Give the memory that a call takes beyond inputs and result, and the result; None: no room."""
    try:
        run(part)  # kernels are compiled here
        return _peak(run, part, device)
    except torch.cuda.OutOfMemoryError:
        torch.cuda.empty_cache()
        return None, None


def _peak(
    run: partial[Tensor], part: PrefillPart, device: torch.device
) -> tuple[int | None, Tensor]:
    if device.type != "cuda":
        return None, run(part)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    got = run(part)
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before - got.nbytes, got
