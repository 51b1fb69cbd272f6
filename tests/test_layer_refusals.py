"""What a layer refuses of a step, all reasons at once, before a row is stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from specmla.batch_split import BatchRules
from specmla.cache import CacheFormat, cache_format
from specmla.cache.latent import LatentCache
from specmla.errors import ArgumentError
from specmla.quant_output import QuantOutput
from specmla.rope import RotaryEmbedding
from specmla.workspace import PrefillWorkspace
from tests.mixed_batch import CONFIG, EXTEND, LAYER, PROMPT, VERIFY, Absorbing, Batch

PARTS = [(VERIFY, 2, 5), (EXTEND, 9, 30), (PROMPT, 3, 0)]


def made(name: str | None, **scale: float) -> CacheFormat | None:
    return None if name is None else cache_format(name, 128, 32, dtype=torch.float64, **scale)


FORMATS = {
    "other-scale": (made("fp8", k_scale=2.0**-6), made("fp8"), r"k_scale=0.015625.*k_scale=1.0"),
    "codes-read-as-numbers": (made("fp8_ds_mla"), None, r"Fp8DsMla.* reads plain rows"),
    "numbers-read-as-codes": (None, made("fp8"), r"plain rows.*reads Fp8Format"),
    "other-codes": (made("fp8"), made("fp8_per_token_head"), r"Fp8Format.*Fp8PerTokenHeadFormat"),
}


@pytest.mark.parametrize("parts", [PARTS, PARTS[:1], PARTS[2:]], ids=["mixed", "verify", "prompt"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_backend_that_reads_other_rows_than_the_cache_holds(name: str, parts: Any) -> None:
    """Codes of one scale read by another are wrong numbers that nothing later would notice."""
    held, read, message = FORMATS[name]
    batch = Batch(parts, 16, backend=Absorbing(held), cache_format=held)
    batch.wrap(batch.cache, Absorbing(read))
    before = batch.cache.layer(0).clone()
    with pytest.raises(ArgumentError, match=f"MLAAttention: cache holds .*{message}"):
        batch.run(range(len(parts)))
    torch.testing.assert_close(batch.cache.layer(0), before, rtol=0, atol=0, equal_nan=True)


def test_an_equal_scale_for_values_is_served() -> None:
    held = made("fp8", k_scale=0.5, v_scale=0.5)
    batch = Batch(PARTS, 16, backend=Absorbing(held), cache_format=held)
    want = batch.run(range(3))
    batch.wrap(batch.cache, Absorbing(made("fp8", k_scale=0.5)))
    for got, one in zip(batch.run(range(3)), want, strict=True):
        assert torch.equal(got, one)


WRONG: dict[str, tuple[Callable[[Batch], Any], str]] = {
    "hidden-width": (
        lambda batch: {"hidden": torch.zeros(14, 23, dtype=torch.float64)},
        r"hidden has shape \(14, 23\), accepted is \[T=14, D=24\]",
    ),
    "hidden-rows": (
        lambda batch: {"hidden": torch.zeros(13, 24, dtype=torch.float64)},
        r"hidden has shape \(13, 24\), accepted is \[T=14, D=24\]",
    ),
    "cache-width": (
        lambda batch: {"cache": LatentCache(1, 40, 16, 144, torch.float64, "cpu")},
        r"cache has a width of 144, accepted is C \+ R = 160",
    ),
    "page-size": (
        lambda batch: {"cache": LatentCache(1, 40, 8, 160, torch.float64, "cpu")},
        r"cache has pages of 8 tokens, accepted are 16, as the step",
    ),
    "num-pages": (
        lambda batch: {"cache": LatentCache(1, 2, 16, 160, torch.float64, "cpu")},
        r"cache has 2 pages, accepted are at least \d+, as the step",
    ),
    "layer": (lambda batch: {"layer_id": 1}, r"layer_id is 1, accepted are 0 to 0"),
    "output": (
        lambda batch: {"output": QuantOutput(torch.zeros(14, 30))},
        r"output is torch.float32, accepted is torch.float64 or a quantised one",
    ),
}


def call(batch: Batch, **changed: Any) -> None:
    step = batch.builder.build(batch.requests)
    rows = torch.zeros(step.num_rows, 24, dtype=torch.float64)
    at = RotaryEmbedding(CONFIG).at(step.positions, torch.float64)
    given = {"hidden": rows, "angles": at, "cache": batch.cache, "layer_id": 0,
             "metadata": step, "backend": batch.builder.backend} | changed  # fmt: skip
    LAYER.attend(**given)


def written(batch: Batch) -> torch.Tensor:
    return batch.cache.layer(0).clone()


@pytest.mark.parametrize("name", WRONG)
def test_one_at_a_time(name: str) -> None:
    change, message = WRONG[name]
    batch = Batch(PARTS, 16)
    before = written(batch)
    with pytest.raises(ArgumentError, match=message):
        call(batch, **change(batch))
    torch.testing.assert_close(written(batch), before, rtol=0, atol=0, equal_nan=True)


def test_all_at_once() -> None:
    batch = Batch(PARTS, 16)
    changed = [WRONG[name][0](batch) for name in ("hidden-rows", "cache-width", "output")]
    with pytest.raises(ArgumentError) as raised:
        call(batch, **{name: value for one in changed for name, value in one.items()})
    for part in ("(13, 24)", "144", "torch.float32"):
        assert part in str(raised.value)


def test_a_workspace_of_another_width() -> None:
    batch = Batch(PARTS, 16)
    workspace = PrefillWorkspace(96, 16, torch.float64, "cpu")
    workspace.claim(16)
    workspace.lock()
    batch.builder.configure(BatchRules(4, workspace=workspace))
    before = written(batch)
    with pytest.raises(ArgumentError, match=r"workspace has a width of 96, accepted is 160"):
        batch.run(range(3))
    torch.testing.assert_close(written(batch), before, rtol=0, atol=0, equal_nan=True)
