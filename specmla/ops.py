"""Store, attend and lift as operators of `torch.library`: what a compiled graph calls.

`store` declares that it writes the pool and `attend` takes the pool itself, so their order is a
data dependency and the pool needs no copy. `store_token` and `attend_token` are the same with the
pool out of the graph: there nothing but the token, an empty tensor that the one returns and the
other takes, says that a layer's rows are stored and before they are read.

`lift` is a layer's second product of latents, in the memory that the eager layer gives it.

An operator takes tensors and numbers. The cache and the planned step, which are Python objects, are
passed as keys: one-element int64 tensors on the CPU, whose value is no part of a compiled graph, so
that one graph serves all steps. A key lives as long as its object.

`define` and `impl` add about a microsecond to a call, where `custom_op` would add fifteen (CPU).
"""

from __future__ import annotations

import itertools
from typing import Protocol, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.library import Library, register_fake

from specmla.errors import ArgumentError


class Stores(Protocol):
    """A cache, as the operators need it."""

    def layer(self, index: int) -> Tensor:
        """View the pages of a layer."""

    def store_into(self, pool: Tensor, kv_latent: Tensor, k_rope: Tensor, slots: Tensor) -> None:
        """Write rows into the pages of one layer."""


class Attends(Protocol):
    """A planned step, as the operators need it."""

    def attend(
        self, q_latent: Tensor, q_rope: Tensor, latent_cache: Tensor, softmax_scale: float
    ) -> tuple[Tensor, Tensor]:
        """Give out [T, H, C] and lse [T, H], contiguous and in memory of their own."""


_OBJECTS: WeakValueDictionary[int, object] = WeakValueDictionary()
_NUMBERS = itertools.count(1)


def make_key(of: object) -> Tensor:
    """Give a key [1] int64 for an object that the caller keeps alive."""
    number = next(_NUMBERS)
    _OBJECTS[number] = of
    return torch.tensor([number], dtype=torch.int64, device="cpu")


def _find(key: Tensor) -> object:
    number = int(key)
    found = _OBJECTS.get(number)
    if found is None:
        raise ArgumentError(
            f"specmla operators: key {number} has no object, accepted are keys of caches and steps "
            "that still exist"
        )
    return found


def _store(
    pool: Tensor, kv_latent: Tensor, k_rope: Tensor, slots: Tensor, cache_key: Tensor
) -> None:
    cast("Stores", _find(cache_key)).store_into(pool, kv_latent, k_rope, slots)


def _attend(
    q_latent: Tensor, q_rope: Tensor, pool: Tensor, step_key: Tensor, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    return cast("Attends", _find(step_key)).attend(q_latent, q_rope, pool, softmax_scale)


def _store_token(
    kv_latent: Tensor, k_rope: Tensor, slots: Tensor, cache_key: Tensor, layer: int
) -> Tensor:
    cache = cast("Stores", _find(cache_key))
    cache.store_into(cache.layer(layer), kv_latent, k_rope, slots)
    return _token(kv_latent, k_rope, slots, cache_key, layer)


def _attend_token(
    q_latent: Tensor,
    q_rope: Tensor,
    token: Tensor,
    cache_key: Tensor,
    step_key: Tensor,
    softmax_scale: float,
) -> tuple[Tensor, Tensor]:
    pool = cast("Stores", _find(cache_key)).layer(token.shape[0])
    return _attend(q_latent, q_rope, pool, step_key, softmax_scale)


def lift_heads(latent: Tensor, w_uv_t: Tensor) -> Tensor:
    """Multiply latents `[T, H, C]` by `[H, C, V]` to `[T, H * V]`.

    The product goes to its place at once, head by head between the others, which saves a copy of
    the values. As operator `lift` in compiled graphs, whose compilers take no such output: another
    product would round otherwise on some CPUs.
    """
    heads, _, width = w_uv_t.shape
    values = latent.new_empty(len(latent), heads, width)
    torch.bmm(latent.transpose(0, 1), w_uv_t, out=values.transpose(0, 1))
    return values.flatten(1)


def _lifted(latent: Tensor, w_uv_t: Tensor) -> Tensor:
    """Give what `lift_heads` returns, by shape."""
    return latent.new_empty(latent.shape[0], w_uv_t.shape[0] * w_uv_t.shape[2])


def _nothing(*_: object) -> None:
    """Stand for an operator that returns nothing."""


def _token(kv_latent: Tensor, *rest: object) -> Tensor:
    """Make the token [layer, 0]: no values, its shape says which layer."""
    return kv_latent.new_empty((cast("int", rest[-1]), 0))


def _state(q_latent: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    """Give what attention returns, by shape."""
    return q_latent.new_empty(q_latent.shape), q_latent.new_empty(
        q_latent.shape[:2], dtype=torch.float32
    )


_LIBRARY = Library("specmla", "DEF")
for _schema, _implementation, _fake in (
    (
        "store(Tensor(a!) pool, Tensor kv_latent, Tensor k_rope, Tensor slots, Tensor cache_key)"
        " -> ()",
        _store,
        _nothing,
    ),
    (
        "attend(Tensor q_latent, Tensor q_rope, Tensor pool, Tensor step_key, float softmax_scale)"
        " -> (Tensor, Tensor)",
        _attend,
        _state,
    ),
    (
        "store_token(Tensor kv_latent, Tensor k_rope, Tensor slots, Tensor cache_key, SymInt layer)"
        " -> Tensor",
        _store_token,
        _token,
    ),
    (
        "attend_token(Tensor q_latent, Tensor q_rope, Tensor token, Tensor cache_key, "
        "Tensor step_key, float softmax_scale) -> (Tensor, Tensor)",
        _attend_token,
        _state,
    ),
    ("lift(Tensor latent, Tensor w_uv_t) -> Tensor", lift_heads, _lifted),
):
    _name = _LIBRARY.define(_schema)
    _LIBRARY.impl(_name, _implementation, "CompositeExplicitAutograd")
    register_fake(f"specmla::{_name}", _fake, lib=_LIBRARY)
