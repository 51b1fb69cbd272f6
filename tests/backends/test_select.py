"""Which backend is chosen, and the reasons against each other one."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from specmla.backends import select
from specmla.backends.base import AttentionBackend, Requirements
from specmla.backends.reference import ReferenceBackend
from specmla.backends.select import BACKENDS, choose_backend, get_backend, select_backend
from specmla.errors import ArgumentError, UnsupportedError
from specmla.mask import DraftMask


def needing(**changes: Any) -> Requirements:
    usual: dict[str, Any] = {
        "device": torch.device("cpu"),
        "dtype": torch.float32,
        "num_heads": 3,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "page_size": 64,
    }
    return Requirements(**(usual | changes))


def kind(name: str, priority: int, home: str = "cuda", reason: str = "") -> type[ReferenceBackend]:
    """Make a backend of that name, with a reason against it or none."""

    class Made(ReferenceBackend):
        capabilities = dataclasses.replace(
            ReferenceBackend.capabilities,
            name=name,
            priority=priority,
            device_types=(home, *({"cuda", "cpu"} - {home})),
        )

        def problems(self, need: Requirements) -> list[str]:
            asked.append(name)
            return [reason] if reason else []

    return Made


asked: list[str] = []


def made(monkeypatch: pytest.MonkeyPatch, *kinds: type[AttentionBackend]) -> None:
    asked.clear()
    known = {k.capabilities.name: (lambda k=k: k) for k in kinds}
    monkeypatch.setattr(select, "BACKENDS", known)


def test_the_best_is_chosen_with_the_reasons_against_all_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made(
        monkeypatch,
        kind("low", 1),
        kind("elsewhere", 50, "cpu"),
        kind("broken", 9, reason="no library"),
        kind("best", 5),
    )
    found = choose_backend(needing(device=torch.device("cuda")))
    assert found.backend.capabilities.name == "best"
    assert not found.pinned
    assert list(found.reasons.items()) == [
        ("broken", ("no library",)),
        ("low", ("can serve, but its priority is 1, that of 'best' 5",)),
        ("elsewhere", ("can serve, but is at home on 'cpu', 'best' here",)),
    ]


def test_lower_ones_are_asked_only_for_their_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    made(monkeypatch, kind("low", 1), kind("best", 5))
    found = choose_backend(needing(device=torch.device("cuda")))
    assert asked == ["best"]
    assert set(found.reasons) == {"low"}
    assert found.reasons is found.reasons
    assert asked == ["best", "low"]


def test_a_pinned_one_is_taken_or_raises_all_its_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    made(monkeypatch, kind("best", 5), kind("low", 1), kind("broken", 9, reason="no library"))
    found = choose_backend(needing(), "low")
    assert found.backend.capabilities.name == "low"
    assert found.pinned
    assert found.reasons == {
        "broken": ("no library",),
        "best": ("can serve, but 'low' was asked for",),
    }
    with pytest.raises(UnsupportedError, match="backend 'broken': no library"):
        choose_backend(needing(), "broken")
    given = kind("mine", 0)()
    assert choose_backend(needing(), given).backend is given
    assert set(choose_backend(needing(), given).reasons) == {"broken", "best", "low"}


def test_none_that_can_serve_raises_every_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    made(monkeypatch, kind("a", 1, reason="too small"), kind("b", 2, reason="too large"))
    with pytest.raises(UnsupportedError) as raised:
        choose_backend(needing())
    assert raised.value.reasons == ("b: too large", "a: too small")


def test_on_a_cpu_the_reference_is_chosen() -> None:
    found = choose_backend(needing())
    assert isinstance(found.backend, ReferenceBackend)
    assert select_backend(needing()).capabilities.name == "reference"
    assert set(found.reasons) == set(BACKENDS) - {"reference"}
    assert any("device is 'cpu'" in reason for reason in found.reasons["hopper"])
    assert len(found.reasons["flashmla"]) >= 3
    for name, reasons in found.reasons.items():
        assert reasons, name


@pytest.mark.parametrize("name", ["hopper", "flashmla"])
def test_a_pinned_one_lists_everything_in_the_way(name: str) -> None:
    need = needing(dtype=torch.float64, kv_lora_rank=96, page_size=8, masks=frozenset(DraftMask))
    with pytest.raises(UnsupportedError) as raised:
        select_backend(need, name)
    found = " ".join(raised.value.reasons)
    for words in ("device is 'cpu'", "float64", "kv_lora_rank is 96", "page_size is 8"):
        assert words in found
    assert raised.value.subject == f"backend '{name}'"


def test_unknown_names() -> None:
    with pytest.raises(ArgumentError, match="backend is 'magic'"):
        choose_backend(needing(), "magic")
    with pytest.raises(ArgumentError, match="flashmla"):
        get_backend("magic")


def test_names_in_the_place_of_formats_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"cache_format is 'fp8', accepted is .*CacheFormat"):
        get_backend("reference", cache_format="fp8")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"query_form is 'fp8', accepted is .*Fp8Query"):
        get_backend("reference", query_form="fp8")  # type: ignore[arg-type]


def test_requirements_name_everything_that_is_of_no_accepted_kind() -> None:
    wrong: dict[str, Any] = {
        "format": "fp8",
        "query_form": 2.0,
        "masks": "tree",
        "query_len_support": "varlen",
        "graphs": True,
    }
    with pytest.raises(ArgumentError) as raised:
        Requirements(torch.device("cpu"), torch.float32, 3, 128, 32, 16, **wrong)
    for name, value in wrong.items():
        assert f"{name} is {value!r}, accepted " in str(raised.value)
    with pytest.raises(ArgumentError, match=r"masks is \['tree'\], accepted "):
        Requirements(torch.device("cpu"), torch.float32, 3, 128, 32, 16, masks=["tree"])  # type: ignore[arg-type]
