"""What is timed, by name: the library's backends and other projects' kernels, behind one face."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from specmla.backends.base import AttentionBackend, AttentionOutput, Requirements
from specmla.backends.select import BACKENDS, get_backend
from specmla.bench.fa3 import FA3Provider
from specmla.bench.flashmla import FlashMLAProvider
from specmla.bench.peers import PeerFiles
from specmla.builder import MetadataBuilder
from specmla.cache.formats.base import CacheFormat
from specmla.errors import ArgumentError
from specmla.metadata import VerifyPart
from specmla.testing import VerifyCase


class Provider(Protocol):
    """One implementation of the verify attention; on a GPU, `run` is captured in a CUDA graph."""

    @property
    def name(self) -> str:
        """The word that selects it."""
        ...

    @property
    def checks_lse(self) -> bool:
        """Whether a wrong LSE is a wrong result; where false, it is only noted."""
        ...

    @property
    def schedule_attends(self) -> bool:
        """Whether `schedule` does the work of `run` as well."""
        ...

    def missing(self) -> list[str]:
        """Say why it isn't there on this machine at all; empty if it is."""
        ...

    def problems(self, need: Requirements) -> list[str]:
        """List every reason why it can't serve `need` here, `missing` included."""
        ...

    def note(self, case: VerifyCase) -> str | None:
        """Say what a reader of its figure must know."""
        ...

    def plan(self, case: VerifyCase) -> Any:
        """Prepare what all layers of a step share, from the host's list of requests."""
        ...

    def schedule(self, case: VerifyCase, plan: Any) -> None:
        """Do again what the device's plan of a step costs beyond its tables."""
        ...

    def run(self, case: VerifyCase, latent_cache: Tensor, plan: Any) -> AttentionOutput:
        """Attend over `latent_cache`; this is what is timed."""
        ...

    def result(self, got: AttentionOutput, plan: Any) -> AttentionOutput:
        """Bring what `run` gave into our form: out [T, H, C] and natural-log LSE [T, H]."""
        ...


class BackendProvider:
    """A backend of the library, planned by its own metadata builder."""

    checks_lse = True
    schedule_attends = False

    def __init__(self, backend: AttentionBackend) -> None:
        self.backend = backend
        self.name = backend.capabilities.name

    def missing(self) -> list[str]:
        """Ask the backend."""
        return self.backend.unavailable()

    def problems(self, need: Requirements) -> list[str]:
        """Ask the backend."""
        return self.backend.problems(need)

    def note(self, case: VerifyCase) -> str | None:
        """Have nothing to add."""
        return None

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

    def schedule(self, case: VerifyCase, plan: VerifyPart) -> None:
        """Let the backend plan the step's tables again."""
        self.backend.plan(
            plan,
            num_heads=case.spec.num_heads,
            kv_lora_rank=case.spec.kv_lora_rank,
            dtype=case.spec.dtype,
        )

    def run(self, case: VerifyCase, latent_cache: Tensor, plan: Any) -> AttentionOutput:
        """Call `forward_mqa`."""
        return self.backend.forward_mqa(
            case.q_latent, case.q_rope, latent_cache, plan, softmax_scale=case.softmax_scale
        )

    def result(self, got: AttentionOutput, plan: Any) -> AttentionOutput:
        """Give it back: it is in our form."""
        return got


def get_provider(
    name: str, files: PeerFiles | None = None, cache_format: CacheFormat | None = None
) -> Provider:
    """Make the provider of that name, whether or not it can run here.

    Args:
        name: a backend's, "flashmla" or "fa3".
        files: libraries of the latter two; what isn't given is looked for in installed packages.
        cache_format: quantised format of the caches that a backend is to read.

    Raises:
        ArgumentError: an unknown name; the message lists the accepted ones.
        UnsupportedError: the backend does not read the format.
    """
    files = files or PeerFiles()
    if name == FlashMLAProvider.name:
        return FlashMLAProvider(files.flashmla)
    if name == FA3Provider.name:
        return FA3Provider(files.fa3)
    if name not in BACKENDS:
        accepted = sorted({*BACKENDS, FlashMLAProvider.name, FA3Provider.name})
        raise ArgumentError(f"provider is {name!r}, accepted are {accepted}")
    return BackendProvider(get_backend(name, cache_format=cache_format))
