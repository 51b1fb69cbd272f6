"""A paged session around a decoder, and transformers as oracle in float64."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specmla.backends.reference import ReferenceBackend
from specmla.builder import MetadataBuilder
from specmla.cache.latent import LatentCache
from specmla.metadata import RequestKind, RequestRows
from specmla.models.config import DeepseekConfig
from specmla.models.deepseek import DeepseekForCausalLM
from specmla.models.weights import load_checkpoint

PAGE, PAGES_EACH = 4, 12
YARN = {"type": "yarn", "factor": 40.0, "beta_fast": 32, "beta_slow": 1}
YARN |= {"original_max_position_embeddings": 16}
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 80,
    "intermediate_size": 96,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 32,
    "v_head_dim": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 640,
    "initializer_range": 0.2,
}
# What differs between them: query bottleneck, YaRN (equal, unequal and absent mscales), routing,
# tied head, biases, rotary layout, rank, rope width, heads.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "v2-lite": (
        "V2",
        {
            "num_attention_heads": 20,
            "q_lora_rank": None,
            "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "v2-grouped-tied": (
        "V2",
        {
            "num_attention_heads": 8,
            "q_lora_rank": 48,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 3.0,
            "tie_word_embeddings": True,
        },
    ),
    "v3-yarn-bias": (
        "V3",
        {
            "num_attention_heads": 40,
            "q_lora_rank": 48,
            "n_group": 4,
            "topk_group": 2,
            "kv_lora_rank": 256,
            "attention_bias": True,
            "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 0.6},
        },
    ),
    "v3-halves-dense": (
        "V3",
        {
            "num_attention_heads": 5,
            "q_lora_rank": None,
            "first_k_dense_replace": 3,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "rope_interleave": False,
            "rope_scaling": YARN,
        },
    ),
}


@dataclass
class Session:
    """A decoder with a cache full of NaN; request r owns shuffled pages, `lens[r]` tokens long."""

    model: DeepseekForCausalLM
    num_requests: int
    lens: list[int] = field(init=False)

    def __post_init__(self) -> None:
        config, weight = self.model.config, self.model.model.embed_tokens.weight
        num_pages = self.num_requests * PAGES_EACH + 3
        at = config.attention
        self.cache = LatentCache(
            config.num_layers, num_pages, PAGE, at.cache_width, weight.dtype, weight.device
        )
        for layer in range(config.num_layers):
            self.cache.layer(layer).fill_(torch.nan)
        pages = random.Random(7).sample(range(num_pages), num_pages)
        self.pages = [pages[r * PAGES_EACH :][:PAGES_EACH] for r in range(self.num_requests)]
        self.lens = [0] * self.num_requests
        self.builder = MetadataBuilder(
            backend=ReferenceBackend(),
            page_size=PAGE,
            num_pages=num_pages,
            num_heads=at.num_heads,
            kv_lora_rank=at.kv_lora_rank,
            device=weight.device,
            max_seq_len=PAGE * PAGES_EACH,
        )

    def step(self, *parts: tuple[int, RequestKind, Sequence[int]]) -> list[Tensor]:
        """Run new tokens of some requests; gives the logits `[Q, W]` of each, in that order."""
        rows = []
        for request, kind, tokens in parts:
            self.lens[request] += len(tokens)
            rows.append(RequestRows(kind, len(tokens), self.lens[request], self.pages[request]))
        metadata = self.builder.build(rows)
        packed = [token for i in metadata.order for token in parts[i][2]]
        hidden = self.model(torch.tensor(packed), metadata, self.cache, self.builder.backend)
        logits = self.model.logits(hidden).tensor_split(metadata.query_start[1:-1])
        place = {request: at for at, request in enumerate(metadata.order)}
        return [logits[place[i]] for i in range(len(parts))]


@dataclass(frozen=True)
class Pair:
    """The same weights twice: transformers' model and ours, loaded from what it saved."""

    theirs: Any
    ours: DeepseekForCausalLM
    config: DeepseekConfig
    directory: Path
    widened: Callable[[], contextlib.AbstractContextManager[None]]

    def oracle(self, ids: Sequence[int] | Tensor) -> Tensor:
        """Logits of transformers for a whole sequence [S], or several [B, S]."""
        ids = torch.as_tensor(ids)
        with torch.no_grad(), self.widened():
            logits: Tensor = self.theirs(
                ids if ids.dim() == 2 else ids[None], use_cache=False
            ).logits
        return logits if ids.dim() == 2 else logits[0]


class _WideTorch:
    """The module torch, where float32 is float64."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextlib.contextmanager
def float64_transformers() -> Iterator[None]:
    """Let transformers compute in float64 where its code says float32 (norms, softmax, rotary)."""
    from transformers import modeling_rope_utils
    from transformers.models.deepseek_v2 import modeling_deepseek_v2
    from transformers.models.deepseek_v3 import modeling_deepseek_v3

    with pytest.MonkeyPatch.context() as patch:
        for module in (modeling_rope_utils, modeling_deepseek_v2, modeling_deepseek_v3):
            patch.setattr(module, "torch", _WideTorch())
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        yield


def make_pair(name: str, directory: Path, dtype: torch.dtype) -> Pair:
    """Draw a model of transformers, norms, biases and corrections included, save it, load ours."""
    transformers = pytest.importorskip("transformers")
    version, changed = CASES[name]
    sizes = SIZES | changed
    sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    widened = float64_transformers if dtype == torch.float64 else contextlib.nullcontext
    torch.manual_seed(5)
    with widened():
        config = getattr(transformers, f"Deepseek{version}Config")(**sizes, rope_theta=10000.0)
        config._attn_implementation = config._experts_implementation = "eager"
        theirs = getattr(transformers, f"Deepseek{version}ForCausalLM")(config).to(dtype).eval()
    with torch.no_grad():
        for key, value in theirs.state_dict().items():
            if key.endswith(("norm.weight", "layernorm.weight")):
                value.add_(torch.randn_like(value), alpha=0.2)
            if key.endswith(("bias",)):
                value.normal_(std=0.2)
    theirs.save_pretrained(directory)
    ours, loaded = load_checkpoint(directory)
    return Pair(theirs, ours, loaded, directory, widened)


@pytest.fixture(scope="session", params=list(CASES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(request.param, tmp_path_factory.mktemp(request.param), torch.float64)


@pytest.fixture
def new_pair() -> Callable[[str, Path, torch.dtype], Pair]:
    return make_pair


@pytest.fixture
def widened() -> Callable[[], contextlib.AbstractContextManager[None]]:
    return float64_transformers


@pytest.fixture
def new_session() -> type[Session]:
    return Session
