"""The paged latent cache of all layers: store, gather and move rows by slot.

Slot s is row s % G of page s // G. Slot -1 means "no row": nothing is stored, zeros are read. What
unused rows hold is undefined and influences nothing. Rows are plain numbers or, with a
`CacheFormat`, bytes: `store` quantises, `gather` dequantises, `move` and `copy_pages` copy bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specmla.cache.formats.base import CacheFormat
from specmla.cache.formats.plain import quantised
from specmla.cache.layout import CacheLayout, format_problems, layout_problems
from specmla.cache.operations import cache_operations
from specmla.cache.pool import Impl, default_impl, impl_problems, pool_bytes, pool_problems
from specmla.errors import count_problems, require


class LatentCache:
    """Holds A = C + R numbers for each token and layer, in pages of G tokens.

    One allocation `[L, N, G, A]`, or `[L, N, G, bytes]` uint8 in a quantised format, serves all
    layers; `from_pool` takes an engine's views instead.
    Slots on the CPU are checked against the pool before anything is written. Slots on a GPU can't
    be read without waiting for it: there a slot outside the pool is skipped (stored nowhere, read
    as zeros), and two rows stored at one slot leave one of them.

    Args:
        num_layers: L. num_pages: N. page_size: G, any value >= 1. width: A.
        dtype: bfloat16, float16, float32, or float64 for tests; that of the rows stored and read.
        device: where the pool lies.
        impl: "triton" (kernels; never waits for the device) or "torch" (waits on a GPU). None
            means "triton" on CUDA devices and "torch" elsewhere.
        format: how rows lie in memory, of the same width and dtype; None or a plain one for numbers
            in `dtype`.

    Raises:
        ArgumentError: names every argument that can't be accepted; nothing was allocated.
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device | str,
        impl: Impl | None = None,
        format: CacheFormat | None = None,
    ) -> None:
        device = torch.device(device)
        found = layout_problems(width, dtype, page_size) + format_problems(format, width, dtype)
        found += count_problems({"num_layers": num_layers, "num_pages": num_pages})
        found += impl_problems(impl, device, format)
        require(found, "LatentCache")
        layout = CacheLayout(width, dtype, page_size, format)
        # A cache made under inference_mode may be written outside of it.
        with torch.inference_mode(False):
            pool = layout.pool(num_pages, num_layers).empty(device)
        self._adopt(pool.unbind(0), impl, format)

    @classmethod
    def from_pool(
        cls, views: Sequence[Tensor], impl: Impl | None = None, format: CacheFormat | None = None
    ) -> LatentCache:
        """Use an engine's memory: one `[N, G, A]` view a layer, rows contiguous inside a page.

        The page stride may exceed G * A (gaps between pages, layers interleaved) and is the same
        for all layers. In a quantised format the views are bytes, `[N, G, bytes]` uint8; "fp8"
        takes float8_e4m3fn views too.

        Raises:
            ArgumentError: lists everything that the views disagree on or that no kernel can read.
        """
        views = pool_bytes(views, format)
        require(pool_problems(views, format), "LatentCache.from_pool")
        require(impl_problems(impl, views[0].device, format), "LatentCache.from_pool")
        cache = cls.__new__(cls)
        cache._adopt(tuple(views), impl, format)
        return cache

    def _adopt(
        self, layers: Sequence[Tensor], impl: Impl | None, format: CacheFormat | None
    ) -> None:
        first = layers[0]
        self.format = quantised(format)
        self.num_pages, self.page_size, columns = first.shape
        self.width = self.format.width if self.format else columns
        self.dtype, self.device = self.format.dtype if self.format else first.dtype, first.device
        self.layout = CacheLayout(self.width, self.dtype, self.page_size, self.format)
        self.num_layers, self.num_slots = len(layers), self.num_pages * self.page_size
        self.impl: Impl = impl or default_impl(self.device)
        self._layers = tuple(layers)
        operations = cache_operations(self._layers, self.impl, self.format)
        self._store, self._gather, self._move, self._copy = operations

    def layer(self, index: int) -> Tensor:
        """View the pages [N, G, A] of one layer, [N, G, bytes] uint8 in a quantised format.

        The page stride may exceed that of G rows.
        """
        if not 0 <= index < self.num_layers:
            require([f"index is {index}, accepted are 0 .. {self.num_layers - 1}"], "layer")
        return self._layers[index]

    def store(self, layer: int, kv_latent: Tensor, k_rope: Tensor, slots: Tensor) -> Tensor:
        """Write one row for each new token; rows with slot -1 are skipped.

        Args:
            layer: 0 .. L - 1.
            kv_latent: [T, C], the cache's dtype, any strides.
            k_rope: [T, R], likewise; R may be 0. C + R = A.
            slots: [T] int64.

        Returns:
            The pages of the layer, to be read after this.

        Raises:
            ArgumentError: shapes, dtypes, devices or (on the CPU) slots that can't be accepted;
                nothing was written.
        """
        pool = self.layer(layer)
        self.store_into(pool, kv_latent, k_rope, slots)
        return pool

    def store_into(self, pool: Tensor, kv_latent: Tensor, k_rope: Tensor, slots: Tensor) -> None:
        """Do what `store` does, in pages that are given: those of a layer, or their like."""
        found = self.slot_problems("slots", slots)
        for name, part in (("kv_latent", kv_latent), ("k_rope", k_rope)):
            if part.dim() != 2 or part.shape[0] != slots.numel():
                found.append(
                    f"{name} has shape {tuple(part.shape)}, accepted is [T={slots.numel()}, ...]"
                )
            if part.dtype != self.dtype or part.device != self.device:
                found.append(
                    f"{name} is {part.dtype} on {part.device}, accepted is {self.dtype} on "
                    f"{self.device}"
                )
        if not found and self.format and kv_latent.shape[1] != self.format.kv_lora_rank:
            found.append(
                f"kv_latent is {kv_latent.shape[1]} wide, accepted is {self.format.kv_lora_rank}"
            )
        if not found and kv_latent.shape[1] + k_rope.shape[1] != self.width:
            found.append(
                f"kv_latent is {kv_latent.shape[1]} and k_rope {k_rope.shape[1]} wide, accepted is "
                f"a sum of {self.width}"
            )
        if found:
            require(found, "LatentCache.store")
        self._store(pool, kv_latent, k_rope, slots)

    def gather(self, layer: int, slots: Tensor, out: Tensor | None = None) -> Tensor:
        """Read rows [n, A] at `slots` [n] int64; slot -1 gives zeros.

        Args:
            layer: 0 .. L - 1.
            slots: [n] int64.
            out: [n, A] contiguous, the cache's dtype, to read into instead of new memory.

        Raises:
            ArgumentError: slots of another shape, dtype or device, or (on the CPU) outside; an
                `out` that can't take the rows.
        """
        pool = self.layer(layer)
        found = self.slot_problems("slots", slots)
        if out is not None:
            found += self._out_problems(out, slots.numel())
        if found:
            require(found, "LatentCache.gather")
        return self._gather(pool, slots, out)

    def move(self, src_slots: Tensor, dst_slots: Tensor) -> None:
        """Copy rows `src_slots` [n] to `dst_slots` [n], int64, in all layers.

        All rows are read before one is written, so both may overlap (0, 2, 3 to 0, 1, 2). Pairs
        with a -1 are skipped. No slot may occur twice among the destinations.

        Raises:
            ArgumentError: slots of another shape, dtype or device, or (on the CPU) outside.
        """
        found = self.slot_problems("src_slots", src_slots)
        found += self.slot_problems("dst_slots", dst_slots)
        if src_slots.shape != dst_slots.shape:
            found.append(
                f"src_slots has shape {tuple(src_slots.shape)}, dst_slots "
                f"{tuple(dst_slots.shape)}; accepted are equal ones"
            )
        if found:
            require(found, "LatentCache.move")
        if src_slots.numel():
            self._move(src_slots, dst_slots)

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole pages (source, destination) in all layers: what copy-on-write asks for.

        Raises:
            ArgumentError: pages outside the pool, a destination that occurs twice or is a source.
        """
        sources, targets = {p[0] for p in pairs}, {p[1] for p in pairs}
        found = [
            f"pages {pair} of pairs must lie in 0 .. {self.num_pages - 1}"
            for pair in pairs
            if not all(0 <= page < self.num_pages for page in pair)
        ]
        if len(targets) < len(pairs):
            found.append(f"pairs {list(pairs)} hold a destination twice")
        if sources & targets:
            found.append(f"pages {sorted(sources & targets)} are both source and destination")
        require(found, "LatentCache.copy_pages")
        if not pairs:
            return
        pages = torch.tensor(list(zip(*pairs, strict=True)), dtype=torch.int64)
        if self.device.type == "cuda":
            pages = pages.pin_memory().to(self.device, non_blocking=True)
        self._copy(*pages.unbind(0))

    def slot_problems(self, name: str, slots: Tensor) -> list[str]:
        """List why `slots` can't be slots; on a GPU their values are not looked at."""
        found = []
        if slots.dim() != 1:
            found.append(f"{name} has shape {tuple(slots.shape)}, accepted is one dimension")
        if slots.dtype != torch.int64 or slots.device != self.device:
            found.append(
                f"{name} is {slots.dtype} on {slots.device}, accepted is torch.int64 on "
                f"{self.device}"
            )
        elif slots.device.type == "cpu" and slots.numel():
            low, high = (int(x) for x in torch.aminmax(slots))
            if low < -1 or high >= self.num_slots:
                found.append(
                    f"{name} go from {low} to {high}, accepted are -1 .. {self.num_slots - 1}"
                )
        return found

    def _out_problems(self, out: Tensor, num_rows: int) -> list[str]:
        is_like = (out.dtype, out.device) == (self.dtype, self.device)
        if is_like and out.shape == (num_rows, self.width) and out.is_contiguous():
            return []
        return [
            f"out is {tuple(out.shape)}, strides {out.stride()}, {out.dtype} on {out.device}; "
            f"accepted is {(num_rows, self.width)}, contiguous, {self.dtype} on {self.device}"
        ]
