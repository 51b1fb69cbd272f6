"""Models of which some parts are switched, or were changed since: refused before any allocation."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from specmla.batch_split import BatchRules
from specmla.errors import ArgumentError, UnsupportedError
from specmla.generate import build_step
from specmla.invariance import make_batch_invariant
from specmla.models.deepseek import DeepseekForCausalLM
from specmla.row_local import Linear
from tests.models.test_invariant_model import make_model

pytestmark = pytest.mark.usefixtures("dots_by_row")


def refused(model: DeepseekForCausalLM) -> str:
    with pytest.raises(UnsupportedError) as caught:
        build_step(model, num_pages=2**40, page_size=16)
    return str(caught.value)


def test_one_layer_alone() -> None:
    model = make_model()
    make_batch_invariant(model.model.layers[0])
    assert "model.layers.0.input_layernorm and 1" in refused(model)
    assert "have batch_invariant True, the model False" in refused(model)
    make_batch_invariant(model)
    build_step(model, num_pages=4, page_size=16)


def test_all_but_a_part_put_in_later() -> None:
    model = make_model()
    make_batch_invariant(model)
    mlp = model.model.layers[1].mlp
    mlp.up_proj = Linear(40, 64, bias=False).to(mlp.down_proj.weight.device)
    text = refused(model)
    assert "model.layers.1.mlp.up_proj have batch_invariant False, the model True" in text
    make_batch_invariant(model)
    mlp.up_proj = torch.nn.Linear(40, 64, bias=False)
    assert "model.layers.1.mlp.up_proj is a Linear, accepted are" in refused(model)


def test_a_cast_after_the_switch() -> None:
    model = make_model()
    make_batch_invariant(model)
    assert "dtype is torch.float64" in refused(model.double())


@pytest.mark.parametrize("given", [None, 5, "model", torch.zeros(1)])
def test_what_is_no_module(given: object) -> None:
    with pytest.raises(UnsupportedError, match=r"module is .*, accepted is a torch\.nn\.Module"):
        make_batch_invariant(given)  # type: ignore[arg-type]


def test_rules_of_wrong_types() -> None:
    with pytest.raises(ArgumentError) as caught:
        BatchRules(-1, workspace=3, batch_invariant="x")  # type: ignore[arg-type]
    for part in ("batch_invariant is 'x'", "workspace is 3", "num_speculative_tokens is -1"):
        assert f"{part}, accepted" in str(caught.value)
