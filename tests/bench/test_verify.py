"""The verify command on tiny shapes: what it measures, what it refuses, how it ends."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specmla.backends.base import AttentionOutput, Requirements
from specmla.backends.reference import ReferenceBackend
from specmla.bench import __main__ as command
from specmla.bench.provider import BackendProvider, Provider, get_provider
from specmla.bench.verify import VerifyOptions, compute_oracle, requirements, run_batch
from specmla.errors import ArgumentError
from specmla.mask import DraftMask
from specmla.query import QueryLenSupport
from specmla.reference import absorbed_mqa
from specmla.testing import VerifyCase, make_case

BATCH = "2q3s40,1q2s5"
SHAPE = ["--heads", "4", "--rank", "32", "--rope", "16", "--page-size", "16", "--reps", "2"]
OPTIONS = VerifyOptions(
    page_size=16,
    mask=DraftMask.CAUSAL,
    dtype=torch.float32,
    kv_lora_rank=32,
    rope_dim=16,
    device=torch.device("cpu"),
    reps=2,
)


class Spoiled(BackendProvider):
    """The reference backend, its result changed by `spoil`; counts calls after the first."""

    def __init__(self, spoil: Callable[[AttentionOutput], AttentionOutput]) -> None:
        super().__init__(ReferenceBackend())
        self.name, self.spoil, self.calls = "spoiled", spoil, 0

    def run(self, case: VerifyCase, latent_cache: Tensor, plan: Any) -> AttentionOutput:
        self.calls += 1
        return self.spoil(super().run(case, latent_cache, plan))


class Absent(BackendProvider):
    """A peer that isn't installed."""

    def __init__(self) -> None:
        super().__init__(ReferenceBackend())
        self.name = "absent"

    def problems(self, need: Requirements) -> list[str]:
        return ["package flash is not installed", "device is 'cpu', accepted are ['cuda']"]


def last_row_doubled(got: AttentionOutput) -> AttentionOutput:
    out = got.out.clone()
    out[-1] *= 2
    return AttentionOutput(out, got.lse)


def lse_in_base_two(got: AttentionOutput) -> AttentionOutput:
    return AttentionOutput(got.out, got.lse * 1.4427)


def one_nan(got: AttentionOutput) -> AttentionOutput:
    out = got.out.clone()
    out[0, 0, 0] = float("nan")
    return AttentionOutput(out, got.lse)


@pytest.fixture
def providers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Provider]:
    """Providers that the command finds by name, beside the real ones."""
    extra: dict[str, Provider] = {}
    monkeypatch.setattr(
        command, "get_provider", lambda name, files: extra.get(name) or get_provider(name, files)
    )
    return extra


def run_command(*words: str) -> int:
    return command.main(["verify", "--batch", BATCH, *SHAPE, "--device", "cpu", *words])


def test_writes_every_field_and_ends_with_zero(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out.json"
    assert run_command("--impl", "reference", "--json", str(file)) == 0
    content = json.loads(file.read_text())
    assert set(content) == {"env", "rows"}
    assert content["env"]["argv"][:3] == ["verify", "--batch", BATCH]
    assert "CPU" in content["env"]["mode"]
    (row,) = content["rows"]
    assert {key: row[key] for key in ("batch", "heads", "mask", "page_size", "provider")} == {
        "batch": BATCH,
        "heads": 4,
        "mask": "causal",
        "page_size": 16,
        "provider": "reference",
    }
    assert row["us"] > 0
    assert row["plan_us"] > 0
    assert 0 < row["rel_err"] < 1e-5
    assert row["gbps"] == pytest.approx((2 * 40 + 5) * 48 * 4 / row["us"] / 1e3)
    assert row["tflops"] == pytest.approx(2 * (2 * 3 * 40 + 2 * 5) * 4 * 80 / row["us"] / 1e6)
    assert row["ratio"] == 1.0
    assert "reason" not in row
    assert BATCH in capsys.readouterr().out


@pytest.mark.parametrize("spoil", [last_row_doubled, lse_in_base_two, one_nan])
def test_wrong_result_is_not_timed_and_ends_with_one(
    spoil: Callable[[AttentionOutput], AttentionOutput],
    providers: dict[str, Provider],
    tmp_path: Path,
) -> None:
    wrong = Spoiled(spoil)
    providers["spoiled"] = wrong
    file = tmp_path / "out.json"
    assert run_command("--impl", "spoiled", "reference", "--json", str(file)) == 1
    first, second = json.loads(file.read_text())["rows"]
    assert first["status"] == "wrong"
    assert "exceeds the budget" in first["reason"]
    assert first["us"] is None
    assert wrong.calls == 1
    assert second["us"] > 0
    assert second["ratio"] == 1.0


def test_untouched_wrapper_passes(providers: dict[str, Provider]) -> None:
    """The wrong ones above fail for what they spoil, not for being wrapped."""
    providers["spoiled"] = Spoiled(lambda got: got)
    assert run_command("--impl", "spoiled") == 0


def test_absent_provider_is_a_row_with_its_reasons(
    providers: dict[str, Provider], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    providers["absent"] = Absent()
    file = tmp_path / "out.json"
    assert run_command("--impl", "absent", "reference", "--json", str(file)) == 0
    first, second = json.loads(file.read_text())["rows"]
    assert first["status"] == "refused"
    assert first["reason"] == (
        "package flash is not installed; device is 'cpu', accepted are ['cuda']"
    )
    assert second["us"] > 0
    assert "absent: package flash is not installed" in capsys.readouterr().out


def test_a_quantised_cache_is_measured_and_named(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    words = ("--cache-format", "fp8", "--dtype", "bf16", "--json", str(file))
    assert run_command("--impl", "reference", *words) == 0
    (row,) = json.loads(file.read_text())["rows"]
    assert (row["status"], row["cache_format"]) == ("timed", "fp8")
    # Refused by name: it reads no quantised rows.
    assert run_command("--impl", "rows", *words) == 2


def test_nothing_measured_ends_with_two(providers: dict[str, Provider]) -> None:
    providers["absent"] = Absent()
    assert run_command("--impl", "absent") == 2


def test_ratio_is_to_the_first_provider_of_the_same_batch() -> None:
    makers = [lambda: BackendProvider(ReferenceBackend()), lambda: Spoiled(lambda got: got)]
    first, second = run_batch(BATCH, 2, makers, OPTIONS)
    assert first.us is not None
    assert second.us is not None
    assert second.ratio == second.us / first.us


@pytest.mark.parametrize("mask", ["causal", "full", "tree"])
def test_serves_every_mask(mask: str) -> None:
    assert run_command("--impl", "reference", "--mask", mask) == 0


def test_sweeps_batches_and_heads(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["verify", "--batch", "1q1s8", "2q1-2s9", "--impl", "reference", *SHAPE]
    assert command.main([*words, "--heads", "2", "3", "--device", "cpu"]) == 0
    lines = [line.split()[:3] for line in capsys.readouterr().out.splitlines()[1:-1]]
    pairs = [("1q1s8", "2"), ("1q1s8", "3"), ("2q1-2s9", "2"), ("2q1-2s9", "3")]
    assert lines == [[batch, heads, "reference"] for batch, heads in pairs]


def test_plot_is_written(tmp_path: Path) -> None:
    assert run_command("--impl", "reference", "--plot", str(tmp_path / "a.png")) == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_oracle_is_float64_and_sees_the_cache() -> None:
    case = make_case(BATCH, num_heads=2, kv_lora_rank=32, rope_dim=16, page_size=16)
    oracle = compute_oracle(case)
    assert oracle.exact.out.dtype == torch.float64
    assert oracle.plain.out.dtype == torch.float32
    other = make_case(BATCH, num_heads=2, kv_lora_rank=32, rope_dim=16, page_size=16, seed=1)
    wrong = absorbed_mqa(
        case.q_latent, case.q_rope, other.latent_cache, case.tables(), softmax_scale=0.1
    )
    assert not torch.allclose(wrong.out.double(), oracle.exact.out)


@pytest.mark.parametrize(
    ("batch", "support"),
    [
        ("3q1s8", QueryLenSupport.SINGLE_ONLY),
        ("3q2s8", QueryLenSupport.UNIFORM),
        ("3q1-2s8", QueryLenSupport.VARLEN),
    ],
)
def test_requirements_name_the_query_shape(batch: str, support: QueryLenSupport) -> None:
    case = make_case(batch, num_heads=3, kv_lora_rank=32, rope_dim=0, page_size=16)
    need = requirements(case)
    assert (need.query_len_support, need.num_heads, need.qk_rope_head_dim) == (support, 3, 0)


def test_unknown_provider() -> None:
    with pytest.raises(ArgumentError, match="'flash', accepted are"):
        get_provider("flash")
