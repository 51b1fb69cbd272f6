"""What is timed: the library's backends by name, each behind the same three calls."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from specmla.backends.base import AttentionBackend, AttentionOutput, Requirements
from specmla.backends.select import get_backend
from specmla.builder import MetadataBuilder
from specmla.metadata import VerifyPart
from specmla.testing import VerifyCase


class Provider(Protocol):
    """One implementation of the verify attention; on a GPU, `run` is captured in a CUDA graph."""

    name: str

    def problems(self, need: Requirements) -> list[str]:
        """List every reason why it can't serve `need` here; empty if it can."""
        ...

    def plan(self, case: VerifyCase) -> Any:
        """Prepare what all layers of a step share, from the host's list of requests."""
        ...

    def run(self, case: VerifyCase, latent_cache: Tensor, plan: Any) -> AttentionOutput:
        """Attend over `latent_cache`: out [T, H, C] and natural-log LSE [T, H]."""
        ...


class BackendProvider:
    """A backend of the library, planned by its own metadata builder."""

    def __init__(self, backend: AttentionBackend) -> None:
        self.backend = backend
        self.name = backend.capabilities.name

    def problems(self, need: Requirements) -> list[str]:
        """Ask the backend."""
        return self.backend.problems(need)

    def plan(self, case: VerifyCase) -> VerifyPart:
        """Build a step's metadata; it holds the backend's plan.

        Raises:
            ArgumentError: the backend does not take such requests.
        """
        spec = case.spec
        builder = MetadataBuilder(
            backend=self.backend,
            page_size=spec.page_size,
            num_pages=case.latent_cache.shape[0],
            num_heads=spec.num_heads,
            kv_lora_rank=spec.kv_lora_rank,
            device=spec.device,
            max_seq_len=max(r.seq_len for r in case.requests),
            dtype=spec.dtype,
        )
        part = builder.build(case.requests, spec.mask).verify
        assert part is not None
        return part

    def run(self, case: VerifyCase, latent_cache: Tensor, plan: Any) -> AttentionOutput:
        """Call `forward_mqa`."""
        return self.backend.forward_mqa(
            case.q_latent, case.q_rope, latent_cache, plan, softmax_scale=case.softmax_scale
        )


def get_provider(name: str) -> Provider:
    """Make the provider of that name, whether or not it can run here.

    Raises:
        ArgumentError: an unknown name; the message lists the accepted ones.
    """
    return BackendProvider(get_backend(name))
