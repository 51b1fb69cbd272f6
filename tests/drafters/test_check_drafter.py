"""`check_drafter` passes every drafter of ours and catches what can be wrong with one."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from drafters import (
    DDTreeDrafter,
    DFlashDrafter,
    DraftModelDrafter,
    DraftModelTreeDrafter,
    DSparkDrafter,
    Eagle3Drafter,
    GQAEagle3Drafter,
    MTPDrafter,
    NgramDrafter,
    SuffixDrafter,
)
from specmla import DeepseekForCausalLM
from specmla.testing import check_drafter
from specmla.testing.frequencies import chi_square_p
from tests.drafters.eagle3_network import tiny_eagle3
from tests.drafters.gqa_eagle3_network import tiny_gqa_eagle3
from tests.drafters.networks import VOCAB, tiny_block, tiny_mtp, tiny_target


@pytest.fixture(scope="module")
def target() -> DeepseekForCausalLM:
    return tiny_target(layers=3)


def maker(target, kind: str):
    if kind == "ngram":
        return lambda step: NgramDrafter(VOCAB)
    if kind == "draft_model":
        return lambda step: DraftModelDrafter(tiny_target(1), num_pages=1400, page_size=4)
    if kind == "model_tree":
        wide = (0.5, 0.4, 0.3)  # so that three nodes are a tree
        return lambda step: DraftModelTreeDrafter(
            tiny_target(1), num_pages=1400, page_size=4, rates=wide
        )
    if kind.startswith("suffix"):
        return lambda step: SuffixDrafter(VOCAB, tree=kind.endswith("tree"), max_cached_tokens=0)
    if kind == "ddtree":
        blocks = maker(target, "dflash")
        return lambda step: DDTreeDrafter(blocks(step))
    if kind == "mtp":
        return lambda step: MTPDrafter(target, tiny_mtp(target), step)
    if kind == "eagle3":
        head = tiny_eagle3(target)
        return lambda step: Eagle3Drafter(target, head, num_pages=1400, page_size=8)
    if kind == "gqa_eagle3":
        known = tiny_gqa_eagle3(target, norm_before_residual=True, norm_output=True)
        return lambda step: GQAEagle3Drafter(target, known, num_pages=1400, page_size=8)
    draft = tiny_block(target, kind)
    made = {"dflash": DFlashDrafter, "dspark": DSparkDrafter}[kind]
    return lambda step: made(target, draft, num_pages=1400, page_size=8)


KINDS = ["ngram", "suffix", "draft_model", "mtp", "eagle3", "gqa_eagle3", "dflash", "dspark"]
TREES = ["suffix-tree", "model_tree", "ddtree"]


@pytest.mark.parametrize("kind", KINDS + TREES)
def test_our_drafters_pass(target, kind):
    lines: list[str] = []
    found = check_drafter(
        maker(target, kind), target, num_drafts=3, num_samples=300, report=lines.append
    )
    found.raise_if_failed()
    assert found.passed == ["honest", "cache", "seeds"]
    assert lines == ["honest: holds", "cache: holds", "seeds: holds"]


@pytest.mark.parametrize("kind", ["model_tree", "ddtree"])
def test_histories_of_trees_accept_paths(target, kind):
    """The youngest children are accepted, so that rows have to be moved."""
    seen = []
    make = maker(target, kind)

    def listening(step):
        drafter = make(step)
        observe = drafter.observe
        drafter.observe = lambda results, hidden=None: (
            seen.extend(results),
            observe(results, hidden),
        )
        return drafter

    check_drafter(listening, target, num_drafts=7, num_samples=4).raise_if_failed()
    paths = [r.path for r in seen if r.path]
    assert any(len(path) > 1 for path in paths)
    assert any(path != tuple(range(len(path))) for path in paths)


class Wrong:
    """Wraps a drafter and spoils one thing."""

    def __init__(self, drafter) -> None:
        self.drafter, self.vocab_size = drafter, drafter.vocab_size
        self.hidden_layers = drafter.hidden_layers
        self.count = 0

    def propose(self, requests):
        return self.drafter.propose(requests)

    def observe(self, results, hidden=None):
        self.drafter.observe(results, hidden)

    def reset(self, request_id):
        self.drafter.reset(request_id)


class Sharpened(Wrong):
    """Reports another distribution than it draws from."""

    def propose(self, requests):
        given = super().propose(requests)
        if given.probs is None:
            return given
        sharper = given.probs**1.5
        probs = sharper / sharper.sum(-1, keepdim=True).clamp(min=1e-30)
        return type(given)(given.request_ids, given.counts, given.tokens, probs)


class Raw(Wrong):
    """Draws from filtered rows and reports them as they were before, of filtered requests alone."""

    def propose(self, requests):
        given = super().propose(requests)
        if given.probs is None or not any(r.sampling.top_k for r in requests):
            return given
        mixed = 0.9 * given.probs + 0.1 / VOCAB
        return type(given)(given.request_ids, given.counts, given.tokens, mixed)


class Forgetful(Wrong):
    """Hears every second step only, and of the others what is not so."""

    def observe(self, results, hidden=None):
        self.count += 1
        if self.count % 2 == 0:
            hidden = hidden._replace(states=hidden.states.roll(1, 0) + 0.5)
        super().observe(results, hidden)


class Unseeded(Wrong):
    """Draws from a generator of its own."""

    def propose(self, requests):
        drawn = [
            r._replace(
                sampling=type(r.sampling)(
                    r.sampling.temperature, seed=int(torch.randint(2**62, ()))
                )
            )
            for r in requests
        ]
        return super().propose(drawn)


class Counting(Wrong):
    """Draws other numbers when it is asked again."""

    def propose(self, requests):
        self.count += 1
        return super().propose(
            [
                r._replace(
                    sampling=dataclasses.replace(r.sampling, seed=r.sampling.seed + self.count)
                )
                for r in requests
            ]
        )


@pytest.mark.parametrize(
    ("wrong", "check"),
    [
        (Sharpened, "honest: plain: draft 0 is not drawn from the reported rows"),
        (Raw, "honest: filtered: draft 0 is not drawn from the reported rows"),
        (Forgetful, "cache"),
        (Unseeded, "seeds"),
        (Counting, "seeds: request 0 drafts other tokens asked twice"),
    ],
)
def test_wrong_drafters_are_caught(target, wrong, check):
    make = maker(target, "dflash")
    found = check_drafter(lambda step: wrong(make(step)), target, num_drafts=3, num_samples=600)
    assert any(text.startswith(check) for text in found.failures)
    with pytest.raises(AssertionError, match=check):
        found.raise_if_failed()


def test_chi_square_is_that_of_its_tables():
    """0.05 at 3.841 with one degree of freedom, at 11.070 with five."""
    expected = torch.full((2,), 50.0, dtype=torch.float64)
    shift = (3.841 * 50 / 2) ** 0.5
    counts = expected + torch.tensor([shift, -shift], dtype=torch.float64)
    assert abs(chi_square_p(counts, expected) - 0.05) < 1e-4
    six = torch.full((6,), 100.0, dtype=torch.float64)
    part = (11.0705 * 100 / 6) ** 0.5
    signs = torch.tensor([1, -1, 1, -1, 1, -1], dtype=torch.float64)
    assert abs(chi_square_p(six + signs * part, six) - 0.05) < 1e-4
    assert chi_square_p(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 20.0])) == 0.0


def test_one_draw_of_a_rare_rest_is_no_deviation():
    """It happens to one right drafter in twenty."""
    expected = torch.tensor([1200.0, 799.95, 0.05], dtype=torch.float64)
    counts = torch.tensor([1200.0, 799.0, 1.0], dtype=torch.float64)
    assert chi_square_p(counts, expected) > 0.9
    assert chi_square_p(torch.tensor([1999.0, 1.0]), torch.tensor([1999.95, 0.05])) == 1.0
