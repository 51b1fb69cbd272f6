"""The contract between layer and attention backend, and what a backend declares of itself."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specmla.backends.format_reasons import form_reasons, format_reasons, name_reasons
from specmla.backends.requirements import Requirements as Requirements
from specmla.backends.running import PromptFolding
from specmla.backends.step_size import StepSize
from specmla.buffers import Buffer
from specmla.cache.formats.base import CacheFormat
from specmla.cache.formats.plain import quantised
from specmla.errors import UnsupportedError
from specmla.mask import DraftMask
from specmla.metadata import PrefillPart, VerifyPart
from specmla.query import QueryLenSupport
from specmla.query_form import Fp8Query


class AttentionOutput(NamedTuple):
    """out: [T, H, C] latents (`forward_mqa`) or [T, H, V] values (`forward_mha`), in the model's
    dtype. lse: [T, H] float32, natural log. A row that saw no key: out exactly 0, lse exactly -inf.
    """

    out: Tensor
    lse: Tensor


@dataclass(frozen=True)
class Capabilities:
    """What a backend serves; the support table of the README is printed from these.

    Attributes:
        name: the word that selects it.
        query_len_support: rows a request may bring to one call. A SINGLE_ONLY backend serves a
            verify through the row tables of the metadata.
        masks: relations among the new rows that it computes.
        dtypes: of query and cache (the same for both).
        device_types: torch device types; the first is its home, where it is preferred.
        page_size_multiple: page sizes are multiples of this.
        ranks: accepted kv_lora_rank values, or None for any.
        rope_dims: accepted qk_rope_head_dim values, or None for any.
        min_capability: least CUDA compute capability, or None.
        priority: higher is preferred by `select_backend`.
        batch_invariant: the constructor takes it, and then a row's bits depend on its own query and
            keys alone.
        formats: quantised cache formats that the constructor takes, by name, beside plain rows.
        fp8_query: those of them with which it takes a `query_form` too.
        reorder_batch_threshold: most rows of an extend that the absorbed path serves faster than
            up-projection; `BatchRules` raises it to the rows of a verify.
        summary: one line for people.
    """

    name: str
    query_len_support: QueryLenSupport
    masks: frozenset[DraftMask]
    dtypes: tuple[torch.dtype, ...]
    device_types: tuple[str, ...]
    page_size_multiple: int = 1
    ranks: tuple[int, ...] | None = None
    rope_dims: tuple[int, ...] | None = None
    min_capability: tuple[int, int] | None = None
    priority: int = 0
    batch_invariant: bool = False
    formats: tuple[str, ...] = ()
    fp8_query: tuple[str, ...] = ()
    reorder_batch_threshold: int = 1
    summary: str = ""


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
        has, found = self.capabilities, []
        if need.dtype not in has.dtypes:
            found.append(f"dtype is {need.dtype}, accepted are {[str(d) for d in has.dtypes]}")
        if need.num_heads < 1:
            found.append(f"num_heads is {need.num_heads}, accepted are values >= 1")
        if need.page_size < 1 or need.page_size % has.page_size_multiple:
            found.append(
                f"page_size is {need.page_size}, accepted are multiples of {has.page_size_multiple}"
            )
        for label, got, accepted in (
            ("kv_lora_rank", need.kv_lora_rank, has.ranks),
            ("qk_rope_head_dim", need.qk_rope_head_dim, has.rope_dims),
        ):
            if accepted is not None and got not in accepted:
                found.append(f"{label} is {got}, accepted are {list(accepted)}")
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
        missing = sorted(m.value for m in need.masks - has.masks)
        if missing:
            served = sorted(m.value for m in has.masks)
            found.append(f"masks {missing} are not served, accepted are {served}")
        wide = [QueryLenSupport.SINGLE_ONLY, QueryLenSupport.UNIFORM, QueryLenSupport.VARLEN]
        adapter = has.query_len_support is QueryLenSupport.SINGLE_ONLY  # rows serve any shape
        if not adapter and wide.index(need.query_len_support) > wide.index(has.query_len_support):
            found.append(
                f"query_len_support {need.query_len_support.value!r} is needed, "
                f"{has.query_len_support.value!r} is served"
            )
        return found

    def _capability_problems(self, device: torch.device) -> list[str]:
        least = self.capabilities.min_capability
        if least is None or device.type != "cuda" or not torch.cuda.is_available():
            return []
        got = torch.cuda.get_device_capability(device)
        if got >= least:
            return []
        return [f"compute capability is {got[0]}.{got[1]}, accepted is {least[0]}.{least[1]} on"]

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
