"""What the Triton launchers rely on, checked on the host before anything is allocated."""

from __future__ import annotations

import torch
from torch import Tensor

from specmla.kernels.launch import describe_device, launch_table
from specmla.kernels.plan import PiecePlan
from specmla.metadata import PrefillPart, VerifyPart

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of query and cache."""

RANKS = (16, 32, 64, 128, 256, 512)
"""kv_lora_rank values: one accumulator tile, a power of two."""

ROPE_DIMS = (0, 16, 32, 64, 128)
"""qk_rope_head_dim values."""

PAGE_MULTIPLE = 16
"""Pages hold a multiple of this many tokens."""


def device_problems(device: torch.device, dtype: torch.dtype, interpreted: bool) -> list[str]:
    """List why Triton can't compile or interpret for `device`."""
    found = []
    if device.type == "cpu":
        if not interpreted:
            found.append("device is 'cpu': Triton runs there only under TRITON_INTERPRET=1")
        elif dtype is torch.bfloat16:
            found.append(
                "dtype is torch.bfloat16: Triton's interpreter multiplies it wrongly "
                "(triton-lang/triton#11584), accepted under it are float16 and float32"
            )
    elif device.type == "cuda" and torch.cuda.is_available():
        arch = describe_device(device).arch
        if arch not in launch_table():
            found.append(f"architecture is {arch}, accepted are {sorted(launch_table())}")
    return found


def entry_problems(kernel: str, arch: str, itemsize: int) -> list[str]:
    """List why a kernel can't be launched on an architecture of the table: it has no entry."""
    kernels = launch_table().get(arch, {})
    if not kernels or any(entry.itemsize == itemsize for entry in kernels.get(kernel, ())):
        return []
    return [f"kernel {kernel!r} has no launch entry for {arch} and {itemsize} bytes an element"]


def mqa_problems(
    q_latent: Tensor,
    q_rope: Tensor,
    latent_cache: Tensor,
    part: VerifyPart,
    row_bytes: int | None = None,
) -> list[str]:
    """List every shape, dtype, stride or plan that `forward_mqa` can't take.

    With `row_bytes` the cache is [N, G, row_bytes], and its dtype is the caller's to check.
    """
    found = [
        f"{name} has no axes, accepted are three"
        for name, t in (("q_latent", q_latent), ("q_rope", q_rope), ("latent_cache", latent_cache))
        if t.dim() == 0
    ]
    if found:
        return found
    rank, rope = q_latent.shape[-1], q_rope.shape[-1]
    if q_latent.dim() != 3 or q_latent.shape[0] != part.num_rows or rank not in RANKS:
        found.append(
            f"q_latent is {tuple(q_latent.shape)}, accepted is [T={part.num_rows}, H, C] with C "
            f"in {list(RANKS)}"
        )
    if q_rope.dim() != 3 or q_rope.shape[:2] != q_latent.shape[:2] or rope not in ROPE_DIMS:
        found.append(
            f"q_rope is {tuple(q_rope.shape)}, accepted is {tuple(q_latent.shape[:2])} + R with R "
            f"in {list(ROPE_DIMS)}"
        )
    width = row_bytes or rank + rope
    if latent_cache.dim() != 3 or latent_cache.shape[1:] != (part.page_size, width):
        found.append(
            f"latent_cache is {tuple(latent_cache.shape)}, accepted is [N, G={part.page_size}, "
            f"{'bytes' if row_bytes else 'C + R'}={width}]"
        )
    elif latent_cache.stride()[1:] != (width, 1):
        found.append(
            f"latent_cache has strides {latent_cache.stride()}, accepted are rows contiguous in a "
            f"page: (any, {width}, 1)"
        )
    elif latent_cache.shape[0] < part.num_pages:
        found.append(
            f"latent_cache has {latent_cache.shape[0]} pages, accepted are {part.num_pages} or "
            "more: the block table was checked against that many"
        )
    if part.page_size % PAGE_MULTIPLE:
        found.append(f"page_size is {part.page_size}, accepted are multiples of {PAGE_MULTIPLE}")
    if row_bytes:
        return found + _tensor_problems(q_latent=q_latent, q_rope=q_rope)
    return found + _tensor_problems(q_latent=q_latent, q_rope=q_rope, latent_cache=latent_cache)


def plan_problems(plan: object, q_latent: Tensor) -> list[str]:
    """List why a part's plan does not fit the query (another backend's, other heads or dtype)."""
    if not isinstance(plan, PiecePlan):
        return [f"part.plan is {type(plan).__name__}, accepted is what this backend's plan() gives"]
    made = plan.shape
    expected, got = (made.rows, made.heads, made.rank), tuple(q_latent.shape)
    found = []
    if got != expected:
        found.append(f"part.plan was made for [T, H, C] = {expected}, the query is {got}")
    if made.itemsize != q_latent.element_size():
        found.append(
            f"part.plan was made for elements of {made.itemsize} bytes, the query's have "
            f"{q_latent.element_size()}"
        )
    if plan.pieces.device != q_latent.device:
        found.append(f"part.plan is on {plan.pieces.device}, the query on {q_latent.device}")
    return found


def mha_problems(
    query: Tensor, key: Tensor, value: Tensor, part: PrefillPart, rope: Tensor | None = None
) -> list[str]:
    """List every shape, dtype or stride that `forward_mha` can't take, or `attend_keys`."""
    rows, keys = sum(part.query_lens), sum(part.seq_lens)
    found = []
    if query.dim() != 3 or query.shape[0] != rows or not 1 <= query.shape[2] <= 256:
        found.append(
            f"query is {tuple(query.shape)}, accepted is [T={rows}, H, P + R] with "
            "P + R in 1 .. 256"
        )
    apart = {} if rope is None else {"rope": rope}
    if rope is not None and (rope.dim() != 2 or rope.shape[0] != keys):
        found.append(f"rope is {tuple(rope.shape)}, accepted is [S={keys}, R]")
    width = query.shape[-1] - (0 if rope is None else rope.shape[-1])
    accepted = (keys, *query.shape[1:-1], width)
    if key.shape != accepted:
        found.append(f"key is {tuple(key.shape)}, accepted is {accepted}")
    if value.dim() != 3 or value.shape[:2] != key.shape[:2] or not 1 <= value.shape[2] <= 256:
        found.append(
            f"value is {tuple(value.shape)}, accepted is {tuple(key.shape[:2])} + V with V in "
            "1 .. 256"
        )
    return found + _tensor_problems(query=query, key=key, value=value, **apart)


def held_problems(
    query: Tensor, value: Tensor, held: tuple[Tensor, Tensor] | None, in_place: bool
) -> list[str]:
    """List what is wrong with the state that `attend_keys` merges with."""
    if held is None:
        return ["in_place is True without held, accepted is False"] if in_place else []
    found, rows = [], tuple(query.shape[:2])
    for name, t, shape in zip(
        ("held.out", "held.lse"), held, ((*rows, value.shape[-1]), rows), strict=True
    ):
        if t.shape != shape or t.dtype != torch.float32 or (t.numel() and t.stride(-1) != 1):
            found.append(
                f"{name} is {tuple(t.shape)} of {t.dtype} with strides {t.stride()}, accepted is "
                f"{shape} of torch.float32 with a last stride of 1"
            )
        if t.device != query.device:
            found.append(f"{name} is on {t.device}, the query on {query.device}")
    return found


def _tensor_problems(**tensors: Tensor) -> list[str]:
    found = []
    dtypes = {t.dtype for t in tensors.values()}
    if len(dtypes) > 1 or not dtypes <= set(DTYPES):
        got = {name: str(t.dtype) for name, t in tensors.items()}
        found.append(f"dtypes are {got}, accepted is one of {[str(d) for d in DTYPES]}")
    if len({t.device for t in tensors.values()}) > 1:
        got = {name: str(t.device) for name, t in tensors.items()}
        found.append(f"devices are {got}, accepted is one device")
    for name, t in tensors.items():
        if t.numel() and t.stride(-1) != 1:
            found.append(f"{name} has strides {t.stride()}, accepted is a last stride of 1")
    return found
