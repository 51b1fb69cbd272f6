"""Checks a drafter as an author of one needs it: honest distributions, a true cache, seeds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

import torch

from specmla.models.deepseek import DeepseekForCausalLM
from specmla.testing.drafter_trace import Proposed, drafts_after, run_histories
from specmla.testing.frequencies import row_reasons, sibling_reasons
from specmla.testing.proposal_check import MakeDrafter, ProposalError
from specmla.verify.proposal import DraftRequest
from specmla.verify.sampling import SamplingParams

ATOL = 1e-3
_LENGTH = 7
_ASKED = {
    "plain": SamplingParams(1.0),
    "filtered": SamplingParams(0.8, top_k=8, top_p=0.9),
}


@dataclass
class DrafterReport:
    """What `check_drafter` found.

    Attributes:
        passed: names of the checks that hold.
        failures: name and reason of the others.
    """

    passed: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def note(self, name: str, reasons: Sequence[str]) -> None:
        """Add one check."""
        if reasons:
            more = f" and {len(reasons) - 3} more" if len(reasons) > 3 else ""
            self.failures.append(f"{name}: " + "; ".join(reasons[:3]) + more)
        else:
            self.passed.append(name)

    def raise_if_failed(self) -> None:
        """Raise one AssertionError that lists every failure."""
        if self.failures:
            raise AssertionError("\n".join(self.failures))


def check_drafter(
    make: MakeDrafter,
    target: DeepseekForCausalLM,
    *,
    num_drafts: int = 4,
    num_samples: int = 2000,
    remembers: bool = False,
    atol: float = ATOL,
    report: Callable[[str], None] = lambda line: None,
) -> DrafterReport:
    """Check a drafter against a target.

    * honest: over many seeds, the drafts of each place are as frequent as the reported
      distributions say (chi-square), none has probability 0, and siblings of a tree are equal as
      often as their rows say, which are those given the elder ones; for requests at temperature 1
      and for those with filters, whose drafts may be drawn from either but must be reported as
      drawn.
    * cache: after any history of acceptances of its own drafts it proposes what a fresh drafter
      proposes that is given the committed tokens as a prompt.
    * seeds: equal seeds give equal drafts, alone, among other requests, and asked again behind a
      step that was cancelled.

    An answer that no drafter may give (more drafts than were asked for, ids outside its vocabulary,
    rows of another width, no proposal at all) fails each check that meets it.

    Args:
        make: builds a drafter beside a step of the target; its cache has one layer to spare.
        target: any model; the drafter need not be any good for it.
        num_drafts: K that is asked for.
        num_samples: seeds of the frequency test.
        remembers: the drafter learns from other requests, so that histories are not compared.
        atol: most that a probability may change with the history; above the default drafts may
            differ where their rows agree so. What rounding makes of float32 networks is far below;
            of bfloat16 ones it is some 0.03.
        report: hears of each check.
    """
    found = DrafterReport()
    checks: dict[str, Callable[[], list[str]]] = {
        "honest": lambda: _count_frequencies(make, target, num_drafts, num_samples),
        "cache": lambda: _compare_histories(make, target, num_drafts, atol),
        "seeds": lambda: _compare_seeds(make, target, num_drafts),
    }
    if remembers:
        del checks["cache"]
    for name, run in checks.items():
        try:
            reasons = run()
        except ProposalError as error:
            reasons = [str(error)]
        found.note(name, reasons)
        report(f"{name}: {'failed' if reasons else 'holds'}")
    return found


def _prompt(target: DeepseekForCausalLM, seed: int, length: int) -> list[int]:
    draw = Random(seed)
    return [draw.randrange(target.config.vocab_size) for _ in range(length)]


def _count_frequencies(
    make: MakeDrafter, target: DeepseekForCausalLM, num_drafts: int, num_samples: int
) -> list[str]:
    """Compare frequencies with the reported rows; the rows of later places depend on the draws."""
    histories = dict.fromkeys(range(num_samples), _prompt(target, 0, _LENGTH))
    reasons: list[str] = []
    for name, params in _ASKED.items():
        sampling = {i: dataclasses.replace(params, seed=i) for i in histories}
        drafted = list(drafts_after(target, make, histories, sampling, num_drafts).values())
        told = row_reasons(drafted, num_drafts) + sibling_reasons(drafted)
        reasons += [f"{name}: {reason}" for reason in told]
    return reasons


def _compare_histories(
    make: MakeDrafter, target: DeepseekForCausalLM, num_drafts: int, atol: float
) -> list[str]:
    """Compare with a fresh drafter after every step of a run with random acceptances."""
    prompts = {i: _prompt(target, i, length) for i, length in enumerate((1, 2, 5, 9, 17))}
    seen = run_histories(
        target,
        make,
        prompts,
        5 * num_drafts,
        num_drafts,
        lambda name, length: Random(f"{name} {length}").randrange(num_drafts + 1),
    )
    reasons = [_unlike_fresh(make, target, request, got, atol) for request, got in seen]
    return [text for text in reasons if text]


def _unlike_fresh(
    make: MakeDrafter,
    target: DeepseekForCausalLM,
    request: DraftRequest,
    got: Proposed,
    atol: float,
) -> str:
    """Say what differs, if anything does."""
    if not request.num_drafts or len(request.tokens) < 2:
        return ""
    name, tokens = request.request_id, list(request.tokens)
    limits = request.num_drafts, request.num_nodes
    fresh = drafts_after(target, make, {name: tokens}, {name: request.sampling}, *limits)
    want, where = fresh[name], f"request {name} at {len(tokens)} tokens"
    same = torch.equal(got.tokens, want.tokens)
    rounded = atol > ATOL and got.tokens.shape == want.tokens.shape and got.probs is not None
    if not same and not rounded:
        return f"{where}: drafts {got.tokens.tolist()}, fresh {want.tokens.tolist()}"
    if got.probs is None or want.probs is None:
        return "" if got.probs is want.probs else f"{where}: only one reports distributions"
    # Rows up to the first draft that differs: those after it follow another one.
    count = len(got.tokens) if same else int((got.tokens != want.tokens).nonzero()[0]) + 1
    off = (got.probs[:count] - want.probs[:count]).abs()
    most = float(off.max()) if off.numel() else 0.0
    return f"{where}: distributions differ by {most:.1e}" if most > atol else ""


def _compare_seeds(make: MakeDrafter, target: DeepseekForCausalLM, num_drafts: int) -> list[str]:
    """Compare the drafts of requests together, again, asked twice, and one by one."""
    histories = {i: _prompt(target, i, 3 + 4 * i) for i in range(4)}
    sampling = {i: SamplingParams(1.0, seed=7 + i) for i in histories}
    together = drafts_after(target, make, histories, sampling, num_drafts)
    again = drafts_after(target, make, histories, sampling, num_drafts)
    twice = drafts_after(target, make, histories, sampling, num_drafts, times=2)
    reasons = []
    for name, tokens in histories.items():
        alone = drafts_after(target, make, {name: tokens}, sampling, num_drafts)
        for label, other in (("again", again), ("asked twice", twice), ("alone", alone)):
            if not torch.equal(other[name].tokens, together[name].tokens):
                reasons.append(f"request {name} drafts other tokens {label}, of equal seeds")
    return reasons
