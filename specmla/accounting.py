"""What serving a model takes: cache, workspace, scratch and weights, before anything is allocated.

Each figure comes from the function that also sizes the allocation: `CacheLayout` for the pool,
`workspace_rows` for the prefill workspace, `AttentionBackend.scratch` for the plan of a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from specmla.backends.base import AttentionBackend, Requirements
from specmla.backends.select import BACKENDS, backend_for
from specmla.backends.step_size import StepSize
from specmla.buffers import Buffer, total_bytes
from specmla.cache.layout import CacheLayout
from specmla.config import MAX_SIZE, MLAConfig, is_count, read_field
from specmla.errors import SpecMLAError, UnsupportedError, require
from specmla.kernels.launch import Device
from specmla.models.sizes import stored_weight_bytes
from specmla.workspace import workspace_rows

GQA_HEADS = 8
"""Key-value heads of the grouped-query model that is compared with."""


@dataclass(frozen=True)
class ModelSize:
    """What of a model the account depends on.

    Attributes:
        attention: dimensions of its layers.
        num_layers: L.
        weight_bytes: of the checkpoint, or None where its config does not tell.
        unknown: why it does not.
    """

    attention: MLAConfig
    num_layers: int
    weight_bytes: int | None = None
    unknown: str = ""

    @classmethod
    def from_hf(cls, source: Mapping[str, Any]) -> ModelSize:
        """Read a `config.json` dict of any model with latent attention.

        Raises:
            ArgumentError: a dimension or the number of layers is missing or can't be.
        """
        layers = read_field(source, "num_hidden_layers")
        wrong = not is_count(layers) or not 1 <= layers <= MAX_SIZE
        require(
            [f"num_hidden_layers is {layers!r}, accepted are integers >= 1"] if wrong else [],
            "ModelSize.from_hf",
        )
        attention = MLAConfig.from_hf(source)
        try:
            return cls(attention, layers, stored_weight_bytes(source))
        except SpecMLAError as error:
            return cls(attention, layers, None, str(error))


@dataclass(frozen=True)
class Load:
    """What is served at once.

    Attributes:
        context: tokens of each request, new ones included.
        batch: requests.
        query_len: rows of a request in a verify, 1 + K.
        device: that scratch is sized for.

    Raises:
        ArgumentError: lists every field that can't be accepted.
    """

    context: int
    batch: int
    query_len: int
    device: Device

    def __post_init__(self) -> None:
        """Refuse what no step can hold."""
        found = [
            f"{name} is {got}, accepted are integers from 1 to {MAX_SIZE}"
            for name in ("context", "batch", "query_len")
            if not 1 <= (got := getattr(self, name)) <= MAX_SIZE
        ]
        if not found and self.query_len > self.context:
            found.append(
                f"query_len is {self.query_len}, accepted are 1 to {self.context} (context)"
            )
        require(found, "Load")


@dataclass(frozen=True)
class Account:
    """Bytes of serving `load` of `model` in a cache of `layout`.

    Attributes:
        model, layout, load: what is counted.
        scratch: bytes that a backend's plan reserves, by name, of those that serve such a model;
            the one that is preferred comes first.
        refused: reasons of the others, by name.
    """

    model: ModelSize
    layout: CacheLayout
    load: Load
    scratch: Mapping[str, int]
    refused: Mapping[str, tuple[str, ...]]

    @property
    def bytes_per_token(self) -> int:
        """Cache bytes of a token in all layers."""
        return self.model.num_layers * self.layout.bytes_per_row

    @property
    def mha_bytes_per_row(self) -> int:
        """What a token would take in a layer that caches keys and values of all H heads."""
        at = self.model.attention
        return at.num_heads * (at.qk_head_dim + at.v_head_dim) * self.layout.dtype.itemsize

    @property
    def gqa_bytes_per_row(self) -> int:
        """What it would take with 8 key-value heads, keys P and values V wide."""
        at = self.model.attention
        return GQA_HEADS * (at.qk_nope_head_dim + at.v_head_dim) * self.layout.dtype.itemsize

    @property
    def preferred(self) -> str | None:
        """The backend of highest priority that serves such a model."""
        return next(iter(self.scratch), None)

    @property
    def pages_per_request(self) -> int:
        """Pages that hold the context of one request."""
        return self.layout.pages_for(self.load.context)

    def cache_bytes(self, batch: int) -> int:
        """Bytes of a pool for `batch` requests of that context."""
        return self.layout.bytes_per_pool(batch * self.pages_per_request, self.model.num_layers)

    def workspace_bytes(self, batch: int) -> int:
        """Bytes that cached context of prompts is gathered into."""
        rows = workspace_rows(self.load.context, batch, self.layout.page_size)
        return Buffer((rows, self.layout.width), self.layout.dtype).num_bytes

    def scratch_bytes(self, batch: int) -> int:
        """Bytes of scratch of the preferred backend, 0 if none serves such a model."""
        if self.preferred is None:
            return 0
        backend = backend_for(_need(self.model, self.layout), self.preferred)
        return total_bytes(scratch_buffers(backend, self.model, self.layout, self.load, batch))

    def needed_bytes(self, batch: int) -> int:
        """Bytes of everything but the weights."""
        return self.cache_bytes(batch) + self.workspace_bytes(batch) + self.scratch_bytes(batch)

    def fitting(self, memory: int) -> int:
        """Count the requests of that context that fit in `memory` bytes; needs grow with them."""
        low, high = 0, memory // max(1, self.cache_bytes(1))
        while low < high:
            middle = (low + high + 1) // 2
            fits = self.needed_bytes(middle) <= memory
            low, high = (middle, high) if fits else (low, middle - 1)
        return low


def scratch_buffers(
    backend: AttentionBackend, model: ModelSize, layout: CacheLayout, load: Load, batch: int
) -> list[Buffer]:
    """Say what a backend's plan reserves for a verify of `batch` requests.

    Raises:
        UnsupportedError: the backend has no form for it.
    """
    return backend.scratch(
        StepSize(
            device=load.device,
            dtype=layout.dtype,
            num_rows=batch * load.query_len,
            num_requests=batch,
            max_query_len=load.query_len,
            num_heads=model.attention.num_heads,
            kv_lora_rank=model.attention.kv_lora_rank,
            page_size=layout.page_size,
            table_keys=layout.pages_for(load.context) * layout.page_size,
        )
    )


def account(model: ModelSize, layout: CacheLayout, load: Load) -> Account:
    """Count what serving takes; nothing is allocated and no device is needed.

    Args:
        model: whose cache it is.
        layout: of the cache; its width is the model's C + R.
        load: requests, context and device.

    Raises:
        ArgumentError: a layout of another width.
    """
    at = model.attention
    wrong = layout.width != at.cache_width
    require(
        [f"layout.width is {layout.width}, accepted is {at.cache_width}"] if wrong else [],
        "account",
    )
    need = _need(model, layout)
    scratch: dict[str, int] = {}
    refused: dict[str, tuple[str, ...]] = {}
    backends = [backend_for(need, name) for name in BACKENDS]
    for backend in sorted(backends, key=lambda b: -b.capabilities.priority):
        name, found = backend.capabilities.name, backend.declared_problems(need)
        try:
            buffers = [] if found else scratch_buffers(backend, model, layout, load, load.batch)
        except UnsupportedError as error:
            found = list(error.reasons)
        if found:
            refused[name] = tuple(found)
        else:
            scratch[name] = total_bytes(buffers)
    return Account(model, layout, load, scratch, refused)


def _need(model: ModelSize, layout: CacheLayout) -> Requirements:
    at = model.attention
    return Requirements(
        device=torch.device("cuda"),
        dtype=layout.dtype,
        num_heads=at.num_heads,
        kv_lora_rank=at.kv_lora_rank,
        qk_rope_head_dim=at.qk_rope_head_dim,
        page_size=layout.page_size,
        format=layout.format,
    )
