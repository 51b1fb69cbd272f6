"""What backends declare beyond shapes: heads, LSE, graphs, architectures, forms of scores."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from specmla.backends import base
from specmla.backends.base import GraphSupport, Requirements
from specmla.backends.fixed_heads import FixedHeads
from specmla.backends.reference import ReferenceBackend
from specmla.backends.select import BACKENDS, choose_backend, get_backend
from specmla.bucket import Bucket
from specmla.builder import MetadataBuilder
from specmla.capture import CapturedMetadata
from specmla.config import MLAConfig
from specmla.errors import ArgumentError, UnsupportedError
from specmla.kernels.launch import Device
from specmla.query import QueryLenSupport

SCORES: dict[str, Any] = {
    "alibi": True,
    "sliding_window": 4096,
    "logits_soft_cap": 50.0,
    "sinks": True,
}


def needing(**changes: Any) -> Requirements:
    usual = Requirements(torch.device("cpu"), torch.float32, 16, 512, 64, 64)
    return dataclasses.replace(usual, **changes)


def limited(**changes: Any) -> ReferenceBackend:
    made = ReferenceBackend()
    made.capabilities = dataclasses.replace(made.capabilities, **changes)
    return made


@pytest.mark.parametrize("name", BACKENDS)
def test_forms_of_scores_are_refused_by_name_all_at_once(name: str) -> None:
    backend = get_backend(name)
    plain = backend.declared_problems(needing())
    reasons = backend.declared_problems(needing(**SCORES))
    for argument, value in SCORES.items():
        assert (
            sum(text.startswith(f"{argument} is {value!r}, accepted is") for text in reasons) == 1
        )
    assert len(reasons) == len(plain) + len(SCORES)


def test_a_choice_raises_for_each_of_them() -> None:
    for argument, value in SCORES.items():
        with pytest.raises(UnsupportedError, match=f"reference: {argument} is {value!r}"):
            choose_backend(needing(**{argument: value}))


HF: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("alibi", True, "alibi is True"),
        ("sliding_window", 128, "sliding_window is 128"),
        ("attn_logit_softcapping", 30.0, "logits_soft_cap is 30.0"),
        ("attn_logit_softcap", 20, "logits_soft_cap is 20"),
        ("logits_soft_cap", 10.0, "logits_soft_cap is 10.0"),
        ("attention_sinks", True, "sinks is True"),
    ],
)
def test_a_config_that_asks_for_one_is_refused(field: str, value: Any, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        MLAConfig.from_hf(HF | {field: value})
    with pytest.raises(ArgumentError, match=rf"v_head_dim is missing.*{words}"):
        MLAConfig.from_hf({k: v for k, v in HF.items() if k != "v_head_dim"} | {field: value})


def test_what_a_config_switches_off_is_no_reason() -> None:
    off = {"alibi": False, "sliding_window": 128, "use_sliding_window": False}
    off |= {"attn_logit_softcapping": None, "logits_soft_cap": 0.0, "attention_sinks": False}
    assert MLAConfig.from_hf(HF | off) == MLAConfig.from_hf(HF)


def test_more_heads_than_declared_are_refused() -> None:
    backend = limited(max_heads=15)
    assert backend.declared_problems(needing()) == ["num_heads is 16, accepted are 1 to 15"]
    assert not backend.declared_problems(needing(num_heads=15))
    fixed = FixedHeads(ReferenceBackend(), 128).capabilities
    assert (fixed.max_heads, fixed.padded_heads) == (128, 128)


def test_an_lse_that_is_needed_and_not_given_is_a_reason() -> None:
    assert not limited(gives_lse=False).declared_problems(needing())
    assert not ReferenceBackend().declared_problems(needing(lse=True))
    (reason,) = limited(gives_lse=False).declared_problems(needing(lse=True))
    assert reason.startswith("lse is needed")


def test_graphs_that_are_needed_and_not_served_are_a_reason() -> None:
    for has in GraphSupport:
        for need in GraphSupport:
            found = limited(graphs=has).declared_problems(needing(graphs=need))
            served = list(GraphSupport).index(has) >= list(GraphSupport).index(need)
            assert (not found) == served, (has, need)
            assert served or found == [
                f"graphs {need.value!r} are needed, accepted is {has.value!r}"
            ]


@pytest.mark.parametrize("name", BACKENDS)
def test_ragged_graphs_are_declared_where_ragged_rows_are(name: str) -> None:
    has = get_backend(name).capabilities
    uniform = has.query_len_support is QueryLenSupport.UNIFORM
    assert has.graphs is (GraphSupport.UNIFORM if uniform else GraphSupport.RAGGED)


@pytest.mark.parametrize(
    ("graphs", "ragged", "words"),
    [
        (GraphSupport.NEVER, False, "declares graphs 'never'"),
        (GraphSupport.NEVER, True, "declares graphs 'never'"),
        (GraphSupport.UNIFORM, True, "declares graphs 'uniform' and accepts ragged=False"),
        (GraphSupport.UNIFORM, False, None),
    ],
)
def test_a_step_is_captured_as_far_as_declared(
    graphs: GraphSupport, ragged: bool, words: str | None
) -> None:
    builder = MetadataBuilder(
        backend=limited(graphs=graphs), page_size=16, num_pages=8, num_heads=4, kv_lora_rank=32,
        device="cpu", max_seq_len=64,
    )  # fmt: skip
    if words is None:
        CapturedMetadata(builder, Bucket(2, 3, ragged))
        return
    with pytest.raises(ArgumentError, match=words):
        CapturedMetadata(builder, Bucket(2, 3, ragged))


@pytest.mark.parametrize(
    ("arch", "capability", "reasons"),
    [
        ("sm_90", (9, 0), []),
        ("sm_120", (12, 0), ["architecture is sm_120, accepted are ['sm_80', 'sm_90']"]),
        ("sm_75", (7, 5), ["compute capability is 7.5, accepted is 8.0 on"]),
    ],
)
def test_other_architectures_are_refused_before_any_work(
    arch: str, capability: tuple[int, int], reasons: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(base, "describe_device", lambda device: Device(arch, 132))
    backend = limited(architectures=("sm_80", "sm_90"), min_capability=(8, 0))
    assert backend.problems(needing(device=torch.device("cuda"))) == reasons
    assert limited().problems(needing(device=torch.device("cuda"))) == []
    assert backend.problems(needing()) == []
