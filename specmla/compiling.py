"""A cache and a backend that a layer can be compiled with: their work is done by operators."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from specmla import ops
from specmla.backends.base import AttentionBackend, AttentionOutput, Requirements
from specmla.backends.step_size import StepSize
from specmla.buffers import Buffer
from specmla.cache.latent import LatentCache
from specmla.errors import ArgumentError, UnsupportedError
from specmla.metadata import PrefillPart, VerifyPart


def as_operators(
    cache: LatentCache, backend: AttentionBackend, *, token: bool = False
) -> tuple[LatentCache, AttentionBackend]:
    """Wrap cache and backend such that a layer compiles with `fullgraph=True`.

    Steps must be built with the backend given back. Those without prompts and extends of the MHA
    path compile; others raise while they are traced, and run uncompiled as ever.

    Args:
        cache: whose memory is used. backend: attends.
        token: keep the pool out of the graph, ordered by an empty tensor. For compilers that copy
            what an operator writes (`aot_eager` does; Inductor writes in place).

    Raises:
        UnsupportedError: one of them is wrapped already, or the backend has a query form.
    """
    if backend.query_form is not None:
        reasons = [f"query_form is {backend.query_form}, accepted is None"]
        raise UnsupportedError("as_operators", reasons)
    wrapped = isinstance(cache, OperatorCache), isinstance(backend, OperatorBackend)
    if any(wrapped):
        reasons = [f"cache and backend are wrapped: {wrapped}, accepted are plain ones"]
        raise UnsupportedError("as_operators", reasons)
    operators = OperatorCache(cache, token=token)
    return operators, OperatorBackend(backend, operators)


class OperatorCache(LatentCache):
    """The same memory; `store` is an operator."""

    def __init__(self, cache: LatentCache, *, token: bool) -> None:
        # A cache does not change after it is made, so both may hold the same state.
        self.__dict__.update(cache.__dict__)
        self.token, self.key, self._plain = token, ops.make_key(cache), cache

    def store(self, layer: int, kv_latent: Tensor, k_rope: Tensor, slots: Tensor) -> Tensor:
        """Write rows, see `LatentCache.store`; gives the token if there is one, else the pages."""
        if self.token:
            given: Tensor = torch.ops.specmla.store_token(kv_latent, k_rope, slots, self.key, layer)
            return given
        pool = self.layer(layer)
        torch.ops.specmla.store(pool, kv_latent, k_rope, slots, self.key)
        return pool

    def gather(self, layer: int, slots: Tensor, out: Tensor | None = None) -> Tensor:
        """Read rows, see `LatentCache.gather`.

        Raises:
            ArgumentError: while a graph is compiled, which would not see what was stored.
        """
        _refuse_prompts()
        return super().gather(layer, slots, out)


@dataclasses.dataclass(frozen=True, eq=False)
class OperatorPlan:
    """What the operators attend with; `key` stands for it.

    Attributes:
        backend: attends.
        part: as that backend planned it.
        key: [1] int64 on the CPU.
    """

    backend: AttentionBackend
    part: VerifyPart
    key: Tensor = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", ops.make_key(self))

    def attend(
        self, q_latent: Tensor, q_rope: Tensor, latent_cache: Tensor, softmax_scale: float
    ) -> tuple[Tensor, Tensor]:
        """Give out [T, H, C] and lse [T, H] of `AttentionBackend.forward_mqa`, contiguous."""
        out, lse = self.backend.forward_mqa(
            q_latent, q_rope, latent_cache, self.part, softmax_scale=softmax_scale
        )
        return out.contiguous(), lse.contiguous()


class OperatorBackend(AttentionBackend):
    """The same attention over latents as an operator; what it declares is the backend's."""

    def __init__(self, backend: AttentionBackend, cache: OperatorCache) -> None:
        self.backend, self.cache_key, self.token = backend, cache.key, cache.token
        self.capabilities = backend.capabilities
        self.batch_invariant, self.cache_format = backend.batch_invariant, backend.cache_format
        self.folds_prompts = backend.folds_prompts
        self._cache = cache  # keeps the key's object alive

    def problems(self, need: Requirements) -> list[str]:
        """List why the backend can't serve `need`."""
        return self.backend.problems(need)

    def unavailable(self) -> list[str]:
        """List why the backend can't run here."""
        return self.backend.unavailable()

    def plan(self, part: VerifyPart, **sizes: Any) -> VerifyPart:
        """Prepare a step, see `AttentionBackend.plan`."""
        earlier = part.plan.part.plan if isinstance(part.plan, OperatorPlan) else part.plan
        inner = self.backend.plan(dataclasses.replace(part, plan=earlier), **sizes)
        return dataclasses.replace(part, plan=OperatorPlan(self.backend, inner))

    def scratch(self, size: StepSize) -> list[Buffer]:
        """Say what the backend's plan reserves."""
        return self.backend.scratch(size)

    def forward_mqa(
        self,
        q_latent: Tensor,
        q_rope: Tensor,
        latent_cache: Tensor,
        part: VerifyPart,
        *,
        softmax_scale: float,
    ) -> AttentionOutput:
        """Attend by the operator, see `AttentionBackend.forward_mqa`.

        `latent_cache` is what `OperatorCache.store` gave.
        """
        key = part.plan.key
        if self.token:
            out, lse = torch.ops.specmla.attend_token(
                q_latent, q_rope, latent_cache, self.cache_key, key, softmax_scale
            )
        else:
            out, lse = torch.ops.specmla.attend(q_latent, q_rope, latent_cache, key, softmax_scale)
        return AttentionOutput(out, lse)

    def forward_mha(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        part: PrefillPart,
        *,
        softmax_scale: float,
        causal: bool = True,
    ) -> AttentionOutput:
        """Attend prompts, see `AttentionBackend.forward_mha`; not while compiling.

        Raises:
            ArgumentError: while a graph is compiled.
        """
        _refuse_prompts()
        return self.backend.forward_mha(
            query, key, value, part, softmax_scale=softmax_scale, causal=causal
        )

    def attend_keys(self, *given: Any, **options: Any) -> AttentionOutput:
        """Attend prompts, see `AttentionBackend.attend_keys`; not while compiling.

        Raises:
            ArgumentError: while a graph is compiled.
        """
        _refuse_prompts()
        return self.backend.attend_keys(*given, **options)

    def merge_states(self, held: AttentionOutput, got: AttentionOutput) -> None:
        """Merge as the backend does."""
        self.backend.merge_states(held, got)

    def fold_mha(self, *given: Any, **scale: Any) -> None:
        """Carry prompt rows on, see `AttentionBackend.fold_mha`."""
        self.backend.fold_mha(*given, **scale)


def _refuse_prompts() -> None:
    if torch.compiler.is_compiling():
        raise ArgumentError("a compiled layer: the step has prompt rows, accepted are verify rows")
