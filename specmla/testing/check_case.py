"""One case of `check_backend`: its spec, its name and what is asked of it."""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass

import torch

from specmla.backends.base import Requirements
from specmla.mask import DraftMask
from specmla.query import QueryLenSupport
from specmla.testing.batch import parse_batch
from specmla.testing.case import CaseSpec


class Check(enum.Enum):
    """What is asked of a case besides the right result."""

    REPEATS = "repeated runs give the same bits"
    DECODES = "each row equals a decode of its length"
    LAYERS = "a plan serves all layers"
    FILLS = "what must not matter does not matter to the bit"
    LEAK = "the last row's key does not reach the rows before it"


@dataclass(frozen=True)
class CheckCase:
    """One hostile case and what is asked of it.

    Attributes:
        name: short and unique; `check_backend(only=...)` looks for it.
        spec: what `make_case` builds.
        checks: beyond the comparison with the oracle.
        far: put the pages so far into a large pool that 32-bit offsets would wrap.
    """

    name: str
    spec: CaseSpec
    checks: frozenset[Check] = frozenset()
    far: bool = False

    def need(self) -> Requirements:
        """Give what the case asks of a backend."""
        spec = self.spec
        lens = {q for q, _ in spec_lens(spec)}
        return Requirements(
            device=torch.device(spec.device),
            dtype=spec.dtype,
            num_heads=spec.num_heads,
            kv_lora_rank=spec.kv_lora_rank,
            qk_rope_head_dim=spec.rope_dim,
            page_size=spec.page_size,
            masks=frozenset({spec.mask}),
            query_len_support=QueryLenSupport.VARLEN if len(lens) > 1 else QueryLenSupport.UNIFORM,
            format=spec.cache_format,
        )

    def __repr__(self) -> str:
        """Write the call of `make_case` that builds it."""
        given = [
            f"{f.name}={_write(getattr(self.spec, f.name))}"
            for f in dataclasses.fields(CaseSpec)
            if f.name != "batch" and repr(getattr(self.spec, f.name)) != repr(f.default)
        ]
        return f"make_case({', '.join([repr(spec_lens(self.spec)), *given])})"


def spec_lens(spec: CaseSpec) -> list[tuple[int, int]]:
    """Give (query_len, seq_len) of a case's requests."""
    return [
        (q, s) for q, s in (parse_batch(spec.batch) if isinstance(spec.batch, str) else spec.batch)
    ]


def _write(value: object) -> str:
    """Write a value as code that gives it back."""
    if isinstance(value, DraftMask):
        return str(value)
    return repr(str(value)) if isinstance(value, torch.device) else repr(value)
