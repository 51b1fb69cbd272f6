"""A whole model's bits: logits of a request alone and beside others, and the loop over it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from specmla.config import MLAConfig
from specmla.errors import UnsupportedError
from specmla.generate import build_step, generate
from specmla.invariance import make_batch_invariant
from specmla.metadata import RequestKind, RequestRows
from specmla.models.config import DeepseekConfig
from specmla.models.deepseek import DeepseekForCausalLM
from specmla.models.grouped_experts import group_experts
from specmla.models.moe import MoEConfig
from specmla.verify.sampling import SamplingParams

pytestmark = pytest.mark.usefixtures("dots_by_row")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DIMS = MLAConfig(40, 2, 32, 12, 16, 10)
EXPERTS = MoEConfig(
    8, 2, 32, 1, 1, topk_method="noaux_tc", scoring_func="sigmoid", n_group=2, topk_group=1,
    norm_topk_prob=True,
)  # fmt: skip
PROMPT, VERIFY = RequestKind.PROMPT, RequestKind.VERIFY
Given = tuple[RequestKind, Sequence[int], int, tuple[int, ...]]
"""Kind, token ids, tokens with them, pages."""


def make_model(moe: MoEConfig | None = None, *, tied: bool = False) -> DeepseekForCausalLM:
    # Torch on the CPU rounds activations past the last whole vector otherwise: 64 has no such rest.
    config = DeepseekConfig(DIMS, 2, 50, 64, 200, moe=moe, tie_word_embeddings=tied)
    model = DeepseekForCausalLM(config)
    model.reset_parameters(0.2, torch.Generator().manual_seed(4))
    return model.requires_grad_(False).to(DEVICE)


@torch.no_grad()
def logits(model: DeepseekForCausalLM, steps: Sequence[Sequence[Given]]) -> list[Tensor]:
    """Run steps on a cache of their own; gives the logits of each request of the last one."""
    step = build_step(model, num_pages=16, page_size=16, prefix_caching=False)
    for given in steps:
        requests = [RequestRows(kind, len(ids), end, own) for kind, ids, end, own in given]
        metadata = step.builder.build(requests)
        ids = [i for at in metadata.order for i in given[at][1]]
        tokens = torch.tensor(ids, device=DEVICE)
        out = model.logits(model(tokens, metadata, step.cache, step.builder.backend))
    pieces = out.split([len(given[at][1]) for at in metadata.order])
    return [pieces[metadata.order.index(i)] for i in range(len(given))]


@pytest.mark.parametrize("kind", ["dense", "tied", "experts", "grouped experts"])
def test_logits_do_not_depend_on_the_batch(kind: str) -> None:
    model = make_model(EXPERTS if "experts" in kind else None, tied=kind == "tied")
    if kind == "grouped experts":
        assert group_experts(model) == 1
    make_batch_invariant(model)
    text, other = list(range(40)), list(range(49, 0, -1))
    mine, theirs = (2, 7, 3), (1, 5, 11, 6)
    alone = logits(model, [[(PROMPT, text[:36], 36, mine)], [(VERIFY, text[36:], 40, mine)]])
    mixed = logits(
        model,
        [
            [(PROMPT, other[:20], 20, theirs), (PROMPT, text[:9], 9, mine)],
            [(PROMPT, text[9:36], 36, mine), (VERIFY, other[20:22], 22, theirs)],
            [(VERIFY, other[22:23], 23, theirs), (VERIFY, text[36:], 40, mine)],
        ],
    )
    assert alone[0].isfinite().all()
    assert torch.equal(mixed[1], alone[0])


def test_the_loop_gives_everyone_their_own_tokens() -> None:
    model = make_model()
    make_batch_invariant(model)
    sampled = SamplingParams(max_tokens=6, temperature=1.0, seed=3)
    prompts = {"a": ([1, 2, 3], sampled), "b": (list(range(20)), SamplingParams(max_tokens=6))}

    def tokens(names: str) -> dict[str, list[int]]:
        step = build_step(model, num_pages=12, page_size=16, prefix_caching=False)
        got: dict[str, list[int]] = {}
        for results in generate(model, step, {name: prompts[name] for name in names}):
            for result in results:
                got.setdefault(result.request_id, []).extend(result.new_tokens)
        return got

    together = tokens("ba")
    assert together == tokens("a") | tokens("b")
    assert {len(each) for each in together.values()} == {6}


def test_backends_without_it_are_refused() -> None:
    model = make_model()
    make_batch_invariant(model)
    with pytest.raises(UnsupportedError, match="batch_invariant"):
        build_step(model, num_pages=12, page_size=16, backend="reference")
