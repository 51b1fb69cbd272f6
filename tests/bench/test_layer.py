"""`specmla.bench layer` at sizes that a CPU runs in moments."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from specmla.backends.base import AttentionOutput
from specmla.backends.reference import ReferenceBackend
from specmla.bench.__main__ import main
from specmla.bench.layer_calls import LayerCalls
from specmla.builder import MetadataBuilder
from specmla.cache.latent import LatentCache
from specmla.config import MLAConfig
from specmla.layer import MLAAttention
from specmla.testing import make_case

SIZES = ["--heads", "3", "--hidden", "48", "--nope", "16", "--value", "24", "--rank", "32"]
SIZES += ["--rope", "16", "--page-size", "16", "--reps", "2", "--device", "cpu"]


def test_the_command_writes_every_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "layer.json"
    words = ["layer", "--batch", "2q3s40", "1q1s17", *SIZES, "--q-rank", "8", "--json", str(file)]
    assert main(words) == 0
    content = json.loads(file.read_text())
    assert content["env"]["argv"] == words
    parts = ["store", "absorb", "attend", "lift", "row", "fused", "four", "layer", "sum"]
    assert [r["part"] for r in content["rows"]] == parts * 2
    assert [r["batch"] for r in content["rows"]] == ["2q3s40"] * 9 + ["1q1s17"] * 9
    for row in content["rows"]:
        assert row["eager_us"] > 0
        assert row["captured_us"] is None, "there is no graph on a CPU"
        assert row["rel_err"] < 1e-5
    total = sum(r["eager_us"] for r in content["rows"][:4])
    assert content["rows"][8]["eager_us"] == pytest.approx(total)
    assert "absorb" in capsys.readouterr().out


def test_batch_invariant_layers_are_timed_as_such(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    file = tmp_path / "layer.json"
    words = ["layer", "--batch", "1q2s20", *SIZES, "--batch-invariant", "--json", str(file)]
    for more in ([], ["--codes"]):
        assert main(words + more) == 0
        rows = json.loads(file.read_text())["rows"]
        assert {(r["backend"], r["batch_invariant"]) for r in rows} == {("triton", True)}
        assert {r["codes"] for r in rows} == {bool(more)}


def test_a_wrong_backend_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = ReferenceBackend.forward_mqa

    def wrong(*args: object, **options: object) -> AttentionOutput:
        got = real(*args, **options)  # type: ignore[arg-type]
        return AttentionOutput(got.out * 1.01, got.lse)

    monkeypatch.setattr(ReferenceBackend, "forward_mqa", wrong)
    assert main(["layer", "--batch", "2q3s40", *SIZES]) == 1
    out = capsys.readouterr().out
    assert "2q3s40: wrong result, not timed" in out
    assert "absorb" not in out


def test_the_parts_are_those_of_the_layer() -> None:
    """Fed with what the module projects, the four parts give what its `attend` gives."""
    dims = MLAConfig(
        hidden_size=48,
        num_heads=3,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=24,
    )
    torch.manual_seed(0)
    layer, backend = MLAAttention(dims), ReferenceBackend()
    case = make_case("2q3s40,1q1s9", num_heads=3, kv_lora_rank=32, rope_dim=16, page_size=16)
    builder = MetadataBuilder(
        backend=backend,
        page_size=16,
        num_pages=case.latent_cache.shape[0],
        num_heads=3,
        kv_lora_rank=32,
        device="cpu",
        max_seq_len=64,
        dtype=torch.float32,
    )
    metadata = builder.build(case.requests)
    calls = LayerCalls.make(dims, backend, metadata, case.q_latent, case.q_rope)
    with torch.no_grad():
        q_nope, q_rope, *halves = layer._project(calls.hidden, calls.angles)
        calls = calls._replace(q_nope=q_nope, q_rope=q_rope, projected=torch.cat(halves, dim=-1))
        pools = [LatentCache.from_pool([case.latent_cache.clone()]) for _ in range(2)]
        attended = layer.attend(calls.hidden, calls.angles, pools[0], 0, metadata, backend)
        assert torch.equal(calls.four(layer, pools[1]), attended)
        assert torch.equal(calls.layer(layer, pools[1]), layer.o_proj(attended))
        assert torch.equal(*(pool.layer(0).view(torch.int32) for pool in pools))
        calls = calls._replace(projected=layer.kv_a_proj_with_mqa(calls.hidden))
        for name in ("row", "fused"):
            pools[1].layer(0).zero_()
            getattr(calls, name)(layer, pools[1])
            true, stored = (pool.gather(0, metadata.slot_mapping) for pool in pools)
            assert torch.allclose(stored, true, rtol=1e-6, atol=1e-6)


def test_a_bad_batch_costs_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["layer", "--batch", "2x", *SIZES]) == 2
    assert capsys.readouterr().err.count("\n") == 1
