"""The contract between layer and attention backend, and what a backend declares of itself."""

from __future__ import annotations

import abc
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specmla.backends.capabilities import Capabilities as Capabilities
from specmla.backends.capabilities import GraphSupport as GraphSupport
from specmla.backends.capabilities import form_problems, size_problems
from specmla.backends.format_reasons import form_reasons, format_reasons, name_reasons
from specmla.backends.requirements import Requirements as Requirements
from specmla.backends.running import PromptFolding
from specmla.backends.step_size import StepSize
from specmla.buffers import Buffer
from specmla.cache.formats.base import CacheFormat
from specmla.cache.formats.plain import quantised
from specmla.errors import UnsupportedError
from specmla.kernels.launch import describe_device
from specmla.lse_merge import merged_states
from specmla.metadata import PrefillPart, VerifyPart
from specmla.prompt_keys import PromptKeys
from specmla.query_form import Fp8Query


class AttentionOutput(NamedTuple):
    """out: [T, H, C] latents (`forward_mqa`) or [T, H, V] values (`forward_mha`), in the model's
    dtype. lse: [T, H] float32, natural log. A row that saw no key: out exactly 0, lse exactly -inf.
    """

    out: Tensor
    lse: Tensor


class AttentionBackend(PromptFolding, abc.ABC):
    """Attends; projections, absorption and the lift belong to the layer.

    An implementation sets `capabilities`, which everything is checked against, and both forwards:
    prompts and verifies share a step. `specmla.testing` has the cases to check it with.
    """

    capabilities: Capabilities
    batch_invariant: bool = False
    """Whether this one was built so."""
    cache_format: CacheFormat | None = None
    """Quantised format that this one was built for; None for plain rows."""
    query_form: Fp8Query | None = None
    """Form of absorbed queries that this one was built for; None for numbers."""

    def problems(self, need: Requirements) -> list[str]:
        """List every reason why this backend can't serve `need`; empty if it can."""
        has, found = self.capabilities, self.unavailable()
        if need.device.type not in has.device_types:
            found.append(f"device is {need.device.type!r}, accepted are {list(has.device_types)}")
        found += self._capability_problems(need.device)
        return found + self.declared_problems(need)

    def declared_problems(self, need: Requirements) -> list[str]:
        """List the reasons that hold on any machine: what `capabilities` do not declare."""
        has = self.capabilities
        found = size_problems(has, need)
        if need.batch_invariant and not self.batch_invariant:
            way = (
                "one built with batch_invariant=True" if has.batch_invariant else "another backend"
            )
            found.append(f"batch_invariant is needed, accepted is {way}")
        found += format_reasons(need, has.formats, self.cache_format)
        if need.query_form != self.query_form:
            found += form_reasons(need.query_form, need.format, has.fp8_query) or [
                f"query_form is {need.query_form}, accepted by this one is {self.query_form}"
            ]
        return found + form_problems(has, need)

    def _capability_problems(self, device: torch.device) -> list[str]:
        has = self.capabilities
        if device.type != "cuda" or not torch.cuda.is_available():
            return []
        got, least = torch.cuda.get_device_capability(device), has.min_capability
        if least is not None and got < least:
            return [
                f"compute capability is {got[0]}.{got[1]}, accepted is {least[0]}.{least[1]} on"
            ]
        if has.architectures and (arch := describe_device(device).arch) not in has.architectures:
            return [f"architecture is {arch}, accepted are {list(has.architectures)}"]
        return []

    @classmethod
    def make(
        cls,
        *,
        batch_invariant: bool = False,
        cache_format: CacheFormat | None = None,
        query_form: Fp8Query | None = None,
    ) -> AttentionBackend:
        """Build the backend with its usual settings, batch-invariant or for formats.

        Raises:
            UnsupportedError: it has no batch-invariant results or does not read the formats.
        """
        has, packed = cls.capabilities, quantised(cache_format)
        options: dict[str, Any] = {"batch_invariant": True} if batch_invariant else {}
        reasons = name_reasons(packed, has.formats)
        reasons += form_reasons(query_form, packed, has.fp8_query)
        if batch_invariant and not has.batch_invariant:
            reasons.append("batch_invariant is True, accepted is False")
        if reasons:
            raise UnsupportedError(f"backend {has.name!r}", reasons)
        forms = {"cache_format": packed, "query_form": query_form}
        return cls(**options, **{name: form for name, form in forms.items() if form is not None})

    def check(self, need: Requirements) -> None:
        """Raise `UnsupportedError` with all reasons unless this backend can serve `need`."""
        found = self.problems(need)
        if found:
            raise UnsupportedError(f"backend {self.capabilities.name!r}", found)

    def unavailable(self) -> list[str]:
        """List why this backend can't run on this machine at all (a missing package, no GPU)."""
        return []

    def plan(
        self,
        part: VerifyPart,
        *,
        num_heads: int,
        kv_lora_rank: int,
        dtype: torch.dtype = torch.bfloat16,
    ) -> VerifyPart:
        """Prepare what all layers of a step share; gives `part` back, its `plan` filled in.

        Args:
            part: the verify rows.
            num_heads: H. kv_lora_rank: C. dtype: that of query and cache.
        """
        return part

    def scratch(self, size: StepSize) -> list[Buffer]:
        """Say what `plan` reserves for a step of that size: the very buffers that it allocates.

        Raises:
            UnsupportedError: there is no form for such a device.
        """
        return []

    @abc.abstractmethod
    def forward_mqa(
        self,
        q_latent: Tensor,
        q_rope: Tensor,
        latent_cache: Tensor,
        part: VerifyPart,
        *,
        softmax_scale: float,
    ) -> AttentionOutput:
        """Attend absorbed queries over the paged latent rows, all heads on the one KV head.

        Args:
            q_latent: [T, H, C], any strides with the last one 1.
            q_rope: [T, H, R], likewise; R may be 0. Both e4m3 if the backend has a `query_form`.
            latent_cache: [N, G, C + R], rows contiguous, page stride taken from the tensor; rows of
                bytes [N, G, bytes] uint8 if the backend was built for a quantised `cache_format`.
            part: the verify rows.
            softmax_scale: (P + R)^-0.5, times YaRN's factor; never taken from a width.

        Returns:
            Latents [T, H, C] (before W_UV) and their LSE.
        """

    @abc.abstractmethod
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
        """Attend prompt rows over up-projected keys, packed request by request.

        Args:
            query: [T, H, P + R]. key: [sum of S, H, P + R]. value: [sum of S, H, V], V may differ.
            part: row and key starts.
            softmax_scale: as in `forward_mqa`.
            causal: bottom-right aligned if true; else every row sees all keys of its request.
        """

    def attend_keys(
        self,
        query: Tensor,
        keys: PromptKeys,
        part: PrefillPart,
        *,
        softmax_scale: float,
        causal: bool = True,
        held: AttentionOutput | None = None,
        in_place: bool = False,
    ) -> AttentionOutput:
        """Attend as `forward_mha` does over keys as they are, and merge into what is held.

        If not overridden: by `forward_mha` over joined keys, and `merge_states`.

        Args:
            query: [T, H, P + R].
            keys: of all requests, packed.
            part, softmax_scale, causal: as in `forward_mha`.
            held: what the rows have seen so far, see `merge_states`; undefined afterwards.
            in_place: write the result to `held` and give that back.

        Returns:
            Values and LSE over both, in the dtype of the query if not in place.
        """
        key, scale = keys.joined(), softmax_scale
        got = self.forward_mha(query, key, keys.value, part, softmax_scale=scale, causal=causal)
        if held is None:
            return got
        self.merge_states(held, got)
        return held if in_place else AttentionOutput(held.out.to(query.dtype), held.lse)

    def merge_states(self, held: AttentionOutput, got: AttentionOutput) -> None:
        """Merge attention over further keys into `held`, in place; torch if not overridden.

        Args:
            held: values [T, H, V] float32 (float64 of a float64 query) and LSE, written.
            got: the same rows over other keys, values in any dtype; see `merged_states`.
        """
        out, lse = merged_states(*held, *got)
        held.out.copy_(out)
        held.lse.copy_(lse)
