"""The MLA layer: written out by hand, without a cache, and through the cache, all the same."""

from __future__ import annotations

import copy
import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from specmla.backends.base import AttentionBackend, AttentionOutput
from specmla.backends.reference import ReferenceBackend
from specmla.builder import MetadataBuilder
from specmla.cache.latent import LatentCache
from specmla.config import MLAConfig, YarnScaling
from specmla.errors import ArgumentError
from specmla.layer import MLAAttention
from specmla.metadata import RequestKind, RequestRows, StepMetadata
from specmla.rope import RotaryEmbedding
from specmla.testing.budget import relative_error

VERIFY, PROMPT = RequestKind.VERIFY, RequestKind.PROMPT
PAGE = 16
# Sums of at most a few hundred float64 products of size ~1, in different orders.
EXACT = {"rtol": 0.0, "atol": 1e-11}
YARN = YarnScaling(40.0, 4096, mscale=1.0, mscale_all_dim=0.707)

# heads, rank, nope, rope, v, bottleneck, what else
DIMS: dict[str, tuple[int, int, int, int, int, int | None, dict[str, Any]]] = {
    "20-heads": (20, 128, 16, 32, 24, None, {}),
    "40-heads-rank-256": (40, 256, 16, 64, 8, 24, {"attention_bias": True}),
    "rank-512-no-rope": (3, 512, 24, 0, 16, 12, {}),
    "yarn-halves": (5, 128, 8, 32, 40, None, {"rope_scaling": YARN, "rope_interleave": False}),
    "yarn": (12, 128, 64, 32, 64, 16, {"rope_scaling": YARN}),
}


def make_config(name: str) -> MLAConfig:
    heads, rank, nope, rope, v, bottleneck, more = DIMS[name]
    return MLAConfig(48, heads, rank, nope, rope, v, q_lora_rank=bottleneck, **more)


def make_layer(config: MLAConfig, seed: int = 0) -> MLAAttention:
    torch.manual_seed(seed)
    layer = MLAAttention(config).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            fan_in = parameter.shape[-1] if parameter.dim() > 1 else 9
            parameter.normal_(std=1.5 * fan_in**-0.5)
    return layer


@pytest.fixture(params=list(DIMS))
def layer(request: pytest.FixtureRequest) -> MLAAttention:
    return make_layer(make_config(request.param))


def angles(config: MLAConfig, positions: Tensor, dtype: torch.dtype = torch.float64) -> Any:
    return RotaryEmbedding(config).at(positions, dtype)


def run_full(layer: MLAAttention, hidden: Tensor) -> Tensor:
    with torch.no_grad():
        at = angles(layer.config, torch.arange(hidden.shape[0]), hidden.dtype)
        return layer.forward_full(hidden[None], at)[0]


def written_out(layer: MLAAttention, hidden: Tensor) -> Tensor:
    """One head and row at a time, rotary pairs as complex numbers, no shared code."""
    c, w = layer.config, {name: p.detach() for name, p in layer.named_parameters()}

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

    def norm(name: str, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w[f"{name}.weight"]

    def rotate(x: Tensor, position: int) -> Tensor:
        half = x.shape[-1] // 2
        if not half:
            return x
        # Frequencies and factor of YaRN are tested by themselves and against transformers.
        frequency = RotaryEmbedding(c).inv_freq
        factor = c.rope_scaling.rotary_factor if c.rope_scaling else 1.0
        pairs = x.view(half, 2) if c.rope_interleave else x.view(2, half).T
        turned = torch.view_as_real(
            torch.view_as_complex(pairs.contiguous())
            * torch.polar(torch.ones(()).double() * factor, frequency * position)
        )
        return turned.flatten() if c.rope_interleave else turned.T.flatten()

    scale = 1.0 / math.sqrt(c.qk_nope_head_dim + c.qk_rope_head_dim)
    if c.rope_scaling:
        scale *= (0.1 * 0.707 * math.log(40.0) + 1.0) ** 2
    query = (
        linear("q_proj", hidden)
        if c.q_lora_rank is None
        else linear("q_b_proj", norm("q_a_layernorm", linear("q_a_proj", hidden)))
    )
    row = linear("kv_a_proj_with_mqa", hidden)
    latent = norm("kv_a_layernorm", row[:, : c.kv_lora_rank])
    k_rope = [rotate(r, s) for s, r in enumerate(row[:, c.kv_lora_rank :])]
    heads = []
    for h in range(c.num_heads):
        q = query[:, h * c.qk_head_dim :][:, : c.qk_head_dim]
        w_h = w["kv_b_proj.weight"].view(c.num_heads, -1, c.kv_lora_rank)[h]
        keys, values = latent @ w_h[: c.qk_nope_head_dim].T, latent @ w_h[c.qk_nope_head_dim :].T
        rows = []
        for t in range(len(hidden)):
            scores = keys[: t + 1] @ q[t, : c.qk_nope_head_dim]
            turned = rotate(q[t, c.qk_nope_head_dim :], t)
            scores = scores + torch.stack([k @ turned for k in k_rope[: t + 1]])
            rows.append((scores * scale).softmax(0) @ values[: t + 1])
        heads.append(torch.stack(rows))
    return linear("o_proj", torch.cat(heads, dim=1))


class Paged:
    """Requests over one NaN-filled cache, shuffled pages; `hidden[r]` is fed from its start on."""

    def __init__(
        self,
        config: MLAConfig,
        num_requests: int,
        backend: AttentionBackend,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.config, self.lens = config, [0] * num_requests
        num_pages = 6 * num_requests + 2
        # Gaps between pages, two layers interleaved, the second of them is used.
        pool = torch.full((num_pages, 2, PAGE * config.cache_width + 3), torch.nan, dtype=dtype)
        views = [
            pool[:, i, : PAGE * config.cache_width].unflatten(1, (PAGE, config.cache_width))
            for i in range(2)
        ]
        self.cache = LatentCache.from_pool(views)
        pages = random.Random(3).sample(range(num_pages), num_pages)
        self.pages = [pages[6 * r :][:6] for r in range(num_requests)]
        self.builder = MetadataBuilder(
            backend=backend,
            page_size=PAGE,
            num_pages=num_pages,
            num_heads=config.num_heads,
            kv_lora_rank=config.kv_lora_rank,
            device="cpu",
            max_seq_len=6 * PAGE,
        )

    def metadata(self, *parts: tuple[int, RequestKind, int]) -> StepMetadata:
        rows = []
        for request, kind, count in parts:
            self.lens[request] += count
            rows.append(RequestRows(kind, count, self.lens[request], self.pages[request]))
        return self.builder.build(rows)

    def step(
        self, layer: MLAAttention, hidden: list[Tensor], *parts: tuple[int, RequestKind, int]
    ) -> list[Tensor]:
        before = list(self.lens)
        metadata = self.metadata(*parts)
        new = [hidden[r][before[r] : self.lens[r]] for r, _, _ in parts]
        packed = torch.cat([new[i] for i in metadata.order])
        at = angles(self.config, metadata.positions, packed.dtype)
        out = layer(packed, at, self.cache, 1, metadata, self.builder.backend)
        split = out.tensor_split(metadata.query_start[1:-1])
        return [split[metadata.order.index(i)] for i in range(len(parts))]


def test_full_equals_written_out(layer: MLAAttention) -> None:
    hidden = torch.randn(9, 48).double()
    torch.testing.assert_close(run_full(layer, hidden), written_out(layer, hidden), **EXACT)


def test_paths_through_the_cache_equal_full(layer: MLAAttention) -> None:
    """Prompts, chunks, decodes and verifies, alone and mixed, over page borders and at 65 keys."""
    hidden = [torch.randn(n, 48).double() for n in (70, 40, 33)]
    paged, want = Paged(layer.config, 3, ReferenceBackend()), [run_full(layer, h) for h in hidden]
    got: list[list[Tensor]] = [[], [], []]
    steps = (
        ((0, PROMPT, 60), (1, PROMPT, 5)),
        ((1, VERIFY, 4), (0, VERIFY, 1)),
        ((0, VERIFY, 4), (2, PROMPT, 17), (1, VERIFY, 1)),
        ((2, PROMPT, 16), (0, VERIFY, 5), (1, VERIFY, 8)),
        ((1, PROMPT, 22),),
    )
    for parts in steps:
        for (request, _, _), out in zip(parts, paged.step(layer, hidden, *parts), strict=True):
            got[request].append(out)
    assert paged.lens == [70, 40, 33]
    for request in range(3):
        torch.testing.assert_close(torch.cat(got[request]), want[request], **EXACT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_paths_in_other_dtypes_err_like_full(dtype: torch.dtype) -> None:
    """Budget: absorption rounds q_latent and the latent once more than MHA does, hence twice."""
    layer, hidden = make_layer(make_config("yarn")), torch.randn(70, 48).to(dtype)
    rounded = copy.deepcopy(layer).to(dtype)
    layer.load_state_dict(rounded.state_dict())
    exact = run_full(layer, hidden.double())
    plain = relative_error(run_full(rounded, hidden), exact)
    paged = Paged(layer.config, 1, ReferenceBackend(), dtype)
    prompt = paged.step(rounded, [hidden], (0, PROMPT, 60))[0]
    verify = torch.cat([paged.step(rounded, [hidden], (0, VERIFY, q))[0] for q in (1, 5, 4)])
    assert prompt.dtype == verify.dtype == dtype
    assert relative_error(prompt, exact[:60]) <= 2 * plain + torch.finfo(dtype).eps
    assert relative_error(verify, exact[60:]) <= 2 * plain + torch.finfo(dtype).eps


def test_a_scale_from_a_width_would_show(layer: MLAAttention) -> None:
    hidden, config = torch.randn(65, 48).double(), layer.config
    want = run_full(layer, hidden)[-1]
    for wrong in (config.cache_width**-0.5, config.kv_lora_rank**-0.5):
        layer.softmax_scale = wrong
        assert (run_full(layer, hidden)[-1] - want).abs().max() > 1e-3


class Recorder(ReferenceBackend):
    """Notes which path was taken, with what."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int, float]] = []

    def forward_mqa(self, q_latent: Tensor, q_rope: Tensor, *rest: Any, **options: Any) -> Any:
        assert q_latent.stride(-1) == q_rope.stride(-1) == 1
        self.calls.append(("mqa", q_latent.shape[0], options["softmax_scale"]))
        return super().forward_mqa(q_latent, q_rope, *rest, **options)

    def forward_mha(self, query: Tensor, *rest: Any, **options: Any) -> Any:
        self.calls.append(("mha", query.shape[0], options["softmax_scale"]))
        return super().forward_mha(query, *rest, **options)


def test_verify_never_becomes_mha() -> None:
    """Not even a long one without context, and a one-token prompt stays a prompt."""
    layer, backend = make_layer(make_config("yarn")), Recorder()
    paged, hidden = Paged(layer.config, 2, backend), [torch.randn(64, 48).double()] * 2
    paged.step(layer, hidden, (0, VERIFY, 40), (1, PROMPT, 1))
    scale = layer.config.softmax_scale
    assert backend.calls == [("mqa", 40, scale), ("mha", 1, scale)]
    paged.step(layer, hidden, (1, VERIFY, 3))
    assert backend.calls[2:] == [("mqa", 3, scale)]
    assert scale == pytest.approx(96**-0.5 * 1.589626, rel=1e-6)


def test_no_rows() -> None:
    layer = make_layer(make_config("yarn"))
    paged, hidden = Paged(layer.config, 2, ReferenceBackend()), [torch.randn(8, 48).double()] * 2
    paged.step(layer, hidden, (0, PROMPT, 3))
    out = paged.step(layer, hidden, (0, VERIFY, 0), (1, VERIFY, 0))
    assert [o.shape for o in out] == [(0, 48), (0, 48)]
    metadata = paged.metadata()
    at = angles(layer.config, metadata.positions)
    out = layer(hidden[0][:0], at, paged.cache, 1, metadata, paged.builder.backend)
    assert out.shape == (0, 48)


def test_wrong_rows_are_refused_before_anything_is_stored() -> None:
    layer = make_layer(make_config("yarn"))
    paged = Paged(layer.config, 1, ReferenceBackend())
    metadata = paged.metadata((0, PROMPT, 3))
    at = angles(layer.config, metadata.positions)
    for hidden, message in (
        (torch.randn(4, 48).double(), r"hidden has shape \(4, 48\), accepted is \[T=3, D=48\]"),
        (torch.randn(1, 3, 48).double(), r"hidden has shape \(1, 3, 48\), accepted"),
    ):
        with pytest.raises(ArgumentError, match=message):
            layer(hidden, at, paged.cache, 1, metadata, paged.builder.backend)
    with pytest.raises(ArgumentError, match="float32"):
        layer.float()(torch.randn(3, 48), at, paged.cache, 1, metadata, paged.builder.backend)
    assert paged.cache.layer(1).isnan().all()


def test_absorbed_weights_follow_kv_b_proj() -> None:
    layer, other = make_layer(make_config("yarn")), make_layer(make_config("yarn"), seed=1)

    def current(module: MLAAttention) -> bool:
        c, weight = module.config, module.kv_b_proj.weight
        w_uk, w_uv = module.absorbed_weights()
        per_head = weight.view(c.num_heads, -1, c.kv_lora_rank)
        return (
            w_uk.shape == (c.num_heads, c.qk_nope_head_dim, c.kv_lora_rank)
            and w_uv.shape == (c.num_heads, c.kv_lora_rank, c.v_head_dim)
            and w_uk.data_ptr() == weight.data_ptr()
            and torch.equal(w_uk, per_head[:, : c.qk_nope_head_dim])
            and torch.equal(w_uv.transpose(1, 2), per_head[:, c.qk_nope_head_dim :])
        )

    address = layer.absorbed_weights()[1].data_ptr()
    layer.load_state_dict(other.state_dict())
    assert current(layer)
    assert layer.absorbed_weights()[1].data_ptr() == address
    layer.load_state_dict(make_layer(make_config("yarn"), seed=2).state_dict(), assign=True)
    assert current(layer)
    assert current(layer.float())
    assert current(copy.deepcopy(layer))


@pytest.mark.parametrize("bottleneck", [None, 16])
@pytest.mark.parametrize("bias", [False, True])
def test_parameters_have_the_names_of_checkpoints(bottleneck: int | None, bias: bool) -> None:
    layer = MLAAttention(
        MLAConfig(48, 3, 32, 8, 16, 12, q_lora_rank=bottleneck, attention_bias=bias)
    )
    shapes = {name: tuple(p.shape) for name, p in layer.state_dict().items()}
    query = {"q_proj.weight": (3 * 24, 48)}
    if bottleneck:
        query = {"q_a_proj.weight": (16, 48), "q_a_layernorm.weight": (16,)}
        query["q_b_proj.weight"] = (3 * 24, 16)
    biases = {"kv_a_proj_with_mqa.bias": (48,), "o_proj.bias": (48,)}
    biases |= {"q_a_proj.bias": (16,)} if bottleneck else {}
    assert shapes == {
        **query,
        "kv_a_proj_with_mqa.weight": (32 + 16, 48),
        "kv_a_layernorm.weight": (32,),
        "kv_b_proj.weight": (3 * (8 + 12), 32),
        "o_proj.weight": (48, 3 * 12),
        **(biases if bias else {}),
    }


def test_gradients_of_full() -> None:
    config = MLAConfig(6, 2, 4, 3, 2, 5, q_lora_rank=3)
    layer = make_layer(config)
    at = angles(config, torch.arange(4))
    hidden = torch.randn(2, 4, 6).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: layer.forward_full(x, at), (hidden,))
    layer.forward_full(hidden, at).square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in layer.parameters())


class _Silent(AttentionBackend):
    """Answers at once, so that what remains is the layer."""

    def forward_mqa(self, q_latent: Tensor, q_rope: Tensor, *_: Any, **__: Any) -> AttentionOutput:
        return AttentionOutput(q_latent, q_latent)

    def forward_mha(self, *_: Any, **__: Any) -> AttentionOutput:
        raise AssertionError("a verify took the prompt path")


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_a_verify_takes_few_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small models on the CPU are bound by the number of calls."""
    layer = make_layer(make_config("20-heads"))
    paged = Paged(layer.config, 1, ReferenceBackend())
    metadata = paged.metadata((0, VERIFY, 5))
    at, hidden = angles(layer.config, metadata.positions), torch.randn(5, 48).double()
    monkeypatch.setattr(paged.cache, "store", lambda *_: None)
    with _Counter() as counter, torch.no_grad():
        layer(hidden, at, paged.cache, 1, metadata, _Silent())
    views = ("t.", "view", "_unsafe_view", "split", "transpose", "unsqueeze", "slice")
    busy = [name for name in counter.names if not name.startswith(views)]
    # 4 projections, 2 bmm, 6 for the norm, 6 to rotate, 1 to pack the heads, and a few to spare.
    assert len(busy) <= 22, busy
    assert len(counter.names) <= 36, counter.names
