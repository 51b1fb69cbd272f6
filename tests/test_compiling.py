"""A layer and a decoder compiled over the operators: bit by bit, without a copy of the cache."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend

from specmla.backends.base import AttentionBackend, AttentionOutput
from specmla.backends.reference import ReferenceBackend
from specmla.builder import MetadataBuilder
from specmla.cache import CacheFormat, cache_format
from specmla.cache.latent import LatentCache
from specmla.compiling import OperatorCache, as_operators
from specmla.config import MLAConfig
from specmla.errors import UnsupportedError
from specmla.layer import MLAAttention
from specmla.metadata import RequestRows, VerifyPart
from specmla.quant_output import QuantOutput
from specmla.rope import RotaryEmbedding
from tests.models.test_weights import make_model
from tests.test_layer import EXACT, PAGE, PROMPT, VERIFY, Paged, make_layer

CONFIG = MLAConfig(48, 12, 128, 16, 32, 32, q_lora_rank=24)
POOL = (14, PAGE, 160)
# Twice the same shapes, then others: graphs for static and for any T.
STEPS = [
    [(0, VERIFY, 4), (1, VERIFY, 4)],
    [(0, VERIFY, 3), (1, VERIFY, 5)],
    [(0, VERIFY, 2), (1, VERIFY, 1)],
    [(0, VERIFY, 13), (1, VERIFY, 0)],
]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Watcher(ReferenceBackend):
    """Notes the address of what it reads."""

    def __init__(self, cache_format: CacheFormat | None = None) -> None:
        super().__init__(cache_format)
        self.addresses: list[int] = []

    def forward_mqa(
        self, q_latent: Tensor, q_rope: Tensor, latent_cache: Tensor, part: VerifyPart, **rest: Any
    ) -> AttentionOutput:
        self.addresses.append(latent_cache.data_ptr())
        return super().forward_mqa(q_latent, q_rope, latent_cache, part, **rest)


class WatchedCache(LatentCache):
    """Notes the address of what it writes."""

    def store_into(self, pool: Tensor, *rest: Tensor) -> None:
        self.__dict__.setdefault("addresses", []).append(pool.data_ptr())
        super().store_into(pool, *rest)


def make_paged(
    dtype: torch.dtype, token: bool | None, cache_format: CacheFormat | None = None
) -> Paged:
    """Set two requests up, over operators unless `token` is None."""
    backend = Watcher(cache_format)
    paged = Paged(CONFIG, 2, backend, dtype)
    views = [paged.cache.layer(0), paged.cache.layer(1)]
    if cache_format is not None:
        (element, columns), fill = cache_format.storage, 0xFF
        views = [torch.full((*POOL[:2], columns), fill, dtype=element) for _ in range(2)]
    paged.cache = WatchedCache.from_pool(views, format=cache_format)
    paged.watched, paged.watcher = paged.cache, backend
    if token is not None:
        paged.cache, wrapped = as_operators(paged.cache, backend, token=token)
        paged.builder = MetadataBuilder(
            backend=wrapped,
            page_size=PAGE,
            num_pages=POOL[0],
            num_heads=CONFIG.num_heads,
            kv_lora_rank=CONFIG.kv_lora_rank,
            device="cpu",
            max_seq_len=6 * PAGE,
        )
    return paged


def pool_bytes(paged: Paged) -> Tensor:
    """All of the memory, gaps and unused rows included."""
    whole = paged.cache.layer(0)
    storage = torch.empty(0, dtype=whole.dtype).set_(whole.untyped_storage())
    return storage.view(torch.uint8)


def make_hidden(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(40, 48, generator=generator).to(dtype) for _ in range(2)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("token", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_layer_equals_the_plain_one(dtype: torch.dtype, token: bool, compiled: bool) -> None:
    layer, hidden = make_layer(CONFIG).to(dtype), make_hidden(dtype)
    plain, wrapped = make_paged(dtype, None), make_paged(dtype, token)
    runs: Any = layer
    if compiled:
        runs = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for parts in STEPS:
        want, got = plain.step(layer, hidden, *parts), wrapped.step(runs, hidden, *parts)
        for w, g in zip(want, got, strict=True):
            assert torch.equal(w, g)
        assert torch.equal(pool_bytes(plain), pool_bytes(wrapped))
    assert plain.cache.layer(0).isnan().all()  # the other layer of the interleaved pool
    assert not plain.cache.layer(1).isnan().all()


@pytest.mark.parametrize("token", [False, True])
@pytest.mark.parametrize("name", ["fp8", "fp8_per_token_head"])
def test_quantised_rows_compile(name: str, token: bool) -> None:
    scale = {"k_scale": 0.03125} if name == "fp8" else {}
    made = cache_format(name, 128, 32, dtype=torch.bfloat16, **scale)
    layer, hidden = make_layer(CONFIG).bfloat16(), make_hidden(torch.bfloat16)
    plain, wrapped = (make_paged(torch.bfloat16, t, made) for t in (None, token))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for parts in STEPS[:2]:
        want, got = plain.step(layer, hidden, *parts), wrapped.step(compiled, hidden, *parts)
        for w, g in zip(want, got, strict=True):
            assert torch.equal(w, g)
    assert torch.equal(plain.cache.layer(1), wrapped.cache.layer(1))
    assert not (plain.cache.layer(1) == 0xFF).all()


@pytest.mark.parametrize("token", [False, True])
def test_decoder_compiles(token: bool) -> None:
    """Two layers: their pages are views of one memory, each written by its own store."""
    model = make_model(moe=None).eval().requires_grad_(False)
    dims, pools, outs = model.config.attention, [], []
    for wrap in (False, True):
        cache = LatentCache(2, 4, 8, dims.cache_width, torch.float32, "cpu")
        for i in range(2):
            cache.layer(i).fill_(torch.nan)
        backend: AttentionBackend = ReferenceBackend()
        pools.append(cache)
        run: Any = model
        if wrap:
            cache, backend = as_operators(cache, backend, token=token)
            run = torch.compile(model, fullgraph=True, backend="aot_eager")
        builder = MetadataBuilder(
            backend=backend,
            page_size=8,
            num_pages=4,
            num_heads=dims.num_heads,
            kv_lora_rank=dims.kv_lora_rank,
            device="cpu",
            max_seq_len=24,
        )
        steps = [RequestRows(VERIFY, q, s, [3, 0, 1]) for q, s in ((4, 4), (4, 8), (5, 13))]
        ids = [torch.arange(row.query_len) * 3 % 19 for row in steps]
        metadata = [builder.build([row]) for row in steps]
        outs.append([run(i, m, cache, backend) for i, m in zip(ids, metadata, strict=True)])
    for plain, compiled in zip(*outs, strict=True):
        assert torch.equal(plain, compiled)
    for i in range(2):
        both = (pool.layer(i).view(torch.int32) for pool in pools)
        assert torch.equal(*both)


@pytest.mark.parametrize("token", [False, True])
def test_one_graph_serves_all_steps(token: bool) -> None:
    """Lengths, slots and plans are data: only another T is traced again, once for all T."""
    counter = CompileCounterWithBackend("aot_eager")
    layer, hidden = make_layer(CONFIG).float(), make_hidden(torch.float32)
    paged = make_paged(torch.float32, token)
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for i, parts in enumerate(STEPS):
        paged.step(compiled, hidden, *parts)
        assert counter.frame_count == (1 if i < 2 else 2)


def traced(token: bool) -> torch.fx.GraphModule:
    """Give the layer's graph as a compiler gets it, functional."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(copy.deepcopy(graph))
        return graph.forward

    layer, hidden = make_layer(CONFIG).float(), make_hidden(torch.float32)
    paged = make_paged(torch.float32, token)
    compiled = torch.compile(layer, fullgraph=True, backend=aot_autograd(fw_compiler=keep))
    paged.step(compiled, hidden, *STEPS[0])
    (graph,) = graphs
    return graph


def nodes_like_the_pool(graph: torch.fx.GraphModule) -> list[torch.fx.Node]:
    """List the nodes that give as many values as the pool has; no weight does."""
    size, found = torch.Size(POOL).numel(), []
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor) and value.numel() == size:
            found.append(node)
    return found


def test_the_graph_holds_no_clone_of_the_cache() -> None:
    """The pool comes in and the functional form of `store` gives it on; nothing else is as big."""
    nodes = nodes_like_the_pool(traced(token=False))
    assert [node.op for node in nodes] == ["placeholder", "call_function"]
    assert nodes[1].target.__name__ == "getitem"
    users = [str(user.target) for node in nodes for user in node.users]
    assert users == ["auto_functionalized_v2", "specmla.attend.default", "output"]


def test_the_graph_with_a_token_holds_no_cache_at_all() -> None:
    graph = traced(token=True)
    assert nodes_like_the_pool(graph) == []
    names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    stored, attended = (names.index(f"specmla.{n}_token.default") for n in ("store", "attend"))
    assert stored < attended


@pytest.mark.parametrize("token", [False, True])
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@pytest.mark.slow
# Inductor's own imports say so.
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
def test_compiled_operators_get_the_cache_itself(token: bool, compiler: str) -> None:
    """Inductor writes in place. `aot_eager` does not, which is what the token is for."""
    if compiler == "inductor" and shutil.which("g++") is None:
        pytest.skip("Inductor needs a C++ compiler here")
    layer, hidden = make_layer(CONFIG), make_hidden(torch.float64)
    plain, paged = make_paged(torch.float64, None), make_paged(torch.float64, token)
    compiled = torch.compile(layer, fullgraph=True, backend=compiler)
    for parts in STEPS[:3]:
        want, got = plain.step(layer, hidden, *parts), paged.step(compiled, hidden, *parts)
        for w, g in zip(want, got, strict=True):
            torch.testing.assert_close(g, w, **EXACT)
    torch.testing.assert_close(paged.cache.layer(1), plain.cache.layer(1), **EXACT, equal_nan=True)
    own = paged.cache.layer(1).data_ptr()
    seen = set(paged.watched.addresses), set(paged.watcher.addresses)
    if token or compiler == "inductor":
        assert seen == ({own}, {own})
    else:
        assert own not in seen[0]


def test_without_the_token_rows_are_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store has no other reader then, and a compiler drops what nobody reads."""
    store = OperatorCache.store

    def forget(self: OperatorCache, layer: int, *rows: Tensor) -> Tensor:
        store(self, layer, *rows)
        return rows[0].new_empty(layer, 0)

    layer, hidden = make_layer(CONFIG).float(), make_hidden(torch.float32)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    kept = make_paged(torch.float32, token=True)
    kept.step(compiled, hidden, *STEPS[0])
    assert not kept.cache.layer(1).isnan().all()
    torch._dynamo.reset()
    monkeypatch.setattr(OperatorCache, "store", forget)
    lost = make_paged(torch.float32, token=True)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    lost.step(compiled, hidden, *STEPS[0])
    assert lost.cache.layer(1).isnan().all()


@pytest.mark.parametrize("token", [False, True])
def test_prompts_run_uncompiled_only(token: bool) -> None:
    layer, hidden = make_layer(CONFIG).float(), make_hidden(torch.float32)
    plain, wrapped = make_paged(torch.float32, None), make_paged(torch.float32, token)
    steps = [[(0, PROMPT, 20), (1, VERIFY, 2)], [(0, PROMPT, 5)], [(0, VERIFY, 3)]]
    for parts in steps:
        want, got = plain.step(layer, hidden, *parts), wrapped.step(layer, hidden, *parts)
        for w, g in zip(want, got, strict=True):
            assert torch.equal(w, g)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="accepted are verify rows"):
        wrapped.step(compiled, hidden, (0, PROMPT, 4), (1, VERIFY, 1))


def test_quantised_output_compiles() -> None:
    layer, hidden = make_layer(CONFIG).bfloat16(), make_hidden(torch.bfloat16)[0]
    buffers = []
    for token in (None, False, True):
        paged = make_paged(torch.bfloat16, token)
        output = QuantOutput(
            torch.zeros(8, 384).to(torch.float8_e4m3fn), block_scale=torch.zeros(8, 3)
        )
        run = layer.attend
        if token is not None:
            run = torch.compile(layer.attend, fullgraph=True, backend="aot_eager")
        metadata = paged.metadata((0, VERIFY, 7))
        at = RotaryEmbedding(CONFIG).at(metadata.positions, torch.bfloat16)
        run(hidden[:7], at, paged.cache, 1, metadata, paged.builder.backend, output)
        buffers.append((output.values.view(torch.uint8), output.block_scale))
    assert buffers[0][1][:7].all()
    for values, made in buffers[1:]:
        assert torch.equal(values, buffers[0][0])
        assert torch.equal(made, buffers[0][1])


def test_wrapping_twice_is_refused() -> None:
    paged = make_paged(torch.float32, token=False)
    with pytest.raises(UnsupportedError, match=r"wrapped: \(True, False\), accepted are plain"):
        as_operators(paged.cache, ReferenceBackend())
    with pytest.raises(UnsupportedError, match=r"wrapped: \(False, True\)"):
        as_operators(paged.watched, paged.builder.backend)


def test_layer_type() -> None:
    """The wrapped pair passes for a plain one."""
    paged = make_paged(torch.float32, token=True)
    assert isinstance(paged.cache, LatentCache)
    assert paged.builder.backend.capabilities is ReferenceBackend.capabilities
    assert isinstance(make_layer(CONFIG), MLAAttention)
