"""`specmla info --model`: figures on success, one line and exit code 2 on bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specmla.__main__ import main
from specmla.cli.memory import parse_bytes, parse_tokens
from specmla.errors import ArgumentError

V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
WHOLE = V3 | {
    "num_hidden_layers": 2,
    "vocab_size": 1000,
    "intermediate_size": 512,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(V3))
    return tmp_path


def run(*arguments: object) -> int:
    return main(["info", *(str(a) for a in arguments)])


def told(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert run(*arguments, "--json") == 0
    (line,) = capsys.readouterr().out.splitlines()
    found: dict[str, Any] = json.loads(line)
    return found


def test_json(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = ["--context", "128k", "--batch", 32, "--gpu", "sm_90:132", "--gpu-memory", "141G"]
    found = told(capsys, "--model", config, *size)
    assert found["bytes_per_token_and_layer"] == {"mla": 1152, "mha": 81_920, "gqa_8": 4096}
    assert found["bytes_per_token"] == 70_272
    assert found["pages_per_request"] == 2048
    assert found["pages"] == 65_536
    assert found["cache_bytes"] == 32 * 131_072 * 70_272
    assert found["cache_bytes_per_layer"] * 61 == found["cache_bytes"]
    assert found["workspace_bytes"] == 65_536 * 1152
    assert found["backend"] == "hopper"
    assert found["scratch_bytes"]["triton"] > 0
    parts = found["cache_bytes"] + found["workspace_bytes"] + found["scratch_bytes"]["hopper"]
    assert found["needed_bytes"] == parts
    assert found["weight_bytes"] is None
    assert "vocab_size is missing" in found["weight_bytes_unknown"]
    assert found["requests_without_weights"] == 16
    assert found["requests"] is None


def test_weights_take_their_share(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other.json").write_text(json.dumps(WHOLE))
    at = ["--model", tmp_path / "other.json", "--context", 4096]
    found = told(capsys, *at, "--gpu-memory", "2GB")
    assert found["gpu_memory"] == 2 * 10**9
    assert 0 < found["requests"] < found["requests_without_weights"]
    alone = told(capsys, *at, "--gpu-memory", 2 * 10**9 - found["weight_bytes"])
    assert alone["requests_without_weights"] == found["requests"]
    assert told(capsys, *at, "--gpu-memory", "1M")["requests"] == 0


def test_text(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run("--model", config / "config.json", "--gpu-memory", "80GiB", "--gpu", "sm_80:108") == 0
    )
    out = capsys.readouterr().out
    for words in ("1,152 B", "MHA of 128 heads: 81,920 B", "71.1 times", "70,272 B", "128 pages"):
        assert words in out
    for words in (
        "GQA of 8 heads: 4,096 B",
        "hopper: not served",
        "without weights: ",
        "not known",
    ):
        assert words in out


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--context", "8q"], "context is '8q'"),
        (["--context", "0"], "context is 0"),
        (["--batch", "0"], "batch is 0"),
        (["--batch", "x"], "--batch"),
        (["--query-len", "0"], "query_len is 0"),
        (["--query-len", "9", "--context", "8"], "query_len is 9"),
        (["--page-size", "0"], "page_size is 0"),
        (["--dtype", "int8"], "int8"),
        (["--cache-format", "fp8_e5m2"], "e5m2"),
        (["--cache-format", "magic"], "name is 'magic'"),
        (["--gpu-memory", "lots"], "gpu_memory is 'lots'"),
        (["--gpu-memory", "0"], "gpu_memory is '0'"),
        (["--gpu", "h200"], "gpu is 'h200'"),
        (["--gpu", "sm_90:0"], "gpu is 'sm_90:0'"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_bad_options(
    options: list[str], word: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--model", config, *options) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert word in captured.err


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (None, "can't be read"),
        ("{", "can't be read"),
        ("[1]", "accepted is an object"),
        ("{}", "num_hidden_layers is None"),
        ('{"num_hidden_layers": 3}', "kv_lora_rank is missing"),
        (json.dumps(V3 | {"kv_lora_rank": -1}), "kv_lora_rank is -1"),
    ],
)
def test_bad_configs(
    text: str | None, word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    assert run("--model", tmp_path) == 2
    captured = capsys.readouterr()
    assert len(captured.err.splitlines()) == 1
    assert word in captured.err


def test_a_quantised_format(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, "--model", config, "--cache-format", "fp8_ds_mla")
    assert found["cache_format"] == "fp8_ds_mla"
    assert found["bytes_per_token_and_layer"] == {"mla": 656, "mha": 81_920, "gqa_8": 4096}
    assert found["workspace_bytes"] == 65_536 * 1152


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--json"], "json is given, accepted with --model alone"),
        (["--context", "128q"], "context is given, accepted with --model alone"),
        (["--batch", 1, "--gpu-memory", "1G"], "gpu_memory is given, accepted with --model alone"),
    ],
)
def test_options_of_an_account_need_a_model(
    options: list[object], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that repeats a default is given too."""
    assert run(*options) == 2
    shown = capsys.readouterr()
    assert told in shown.err
    assert shown.out == ""


def test_numbers() -> None:
    assert [parse_tokens(t) for t in ("8192", "8k", "1M")] == [8192, 8192, 2**20]
    assert parse_bytes("141G") == parse_bytes("141GiB") == 141 * 2**30
    assert [parse_bytes(t) for t in ("150GB", "1.5K", "7", "7 B")] == [150 * 10**9, 1536, 7, 7]
    for text in ("", "-1", "1P", "1e9", "G", "1gb"):
        with pytest.raises(ArgumentError, match="gpu_memory"):
            parse_bytes(text)
