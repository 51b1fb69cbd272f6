"""What an acceptance rule is: a pure function from distributions and drafts to terms.

A rule never sees a random number, so the sampler, the fused kernels and an exact enumeration use
the same function, in float32 or float64. p is the target's distribution after all its processors; q
is the distribution each draft was really drawn from (one-hot on the draft where nothing was drawn).

Two kinds of drafts are never accepted, and they end the run differently:

- -1 (any negative id) means that no draft was made, and ends the request's drafts, whatever follows
  it; the token there comes from p.
- An id of W or more was really drawn, by a drafter with a larger vocabulary: p is 0 there, the
  draft is refused like any other and the token comes from the residual. With p instead, ids that
  q favours would gain: p = (1/2, 1/2), q = (1/2, 0) and 1/2 beyond would emit id 0 with 3/4.
"""

from __future__ import annotations

import enum
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from specmla.errors import ArgumentTypeError, require
from specmla.verify.sparse import DraftProbs, SparseProbs, check_sparse


class Ending(enum.Enum):
    """How many drafts stand, given the terms and random numbers.

    Attributes:
        FIRST_REFUSAL: as many as lead with u_j < accept_j.
        LAST_PASS: up to the last j with u_j < accept_j, whatever happened before it.
        MATCH: a token is drawn from each correction row; as many as lead equal to it. The
            token drawn where they end is the next one. Only this ending may key its numbers by
            the position of a token alone.
    """

    FIRST_REFUSAL = "first_refusal"
    LAST_PASS = "last_pass"
    MATCH = "match"


class RuleTerms(NamedTuple):
    """What a rule says before any random number is drawn.

    Attributes:
        accept: [B, K] float64 in [0, 1], the chance that draft j passes: if all before it stand
            for FIRST_REFUSAL and MATCH, in any case for LAST_PASS.
        correction: [B, K+1, W] not normalised, in the dtype of p. Row j is what to draw from if j
            drafts stand; for MATCH it is drawn from before that is known.
        ending: how the number of drafts follows.
    """

    accept: Tensor
    correction: Tensor
    ending: Ending = Ending.FIRST_REFUSAL


class Rule(Protocol):
    """A pure function from distributions and drafts to acceptance terms."""

    def __call__(self, p: Tensor, drafts: Tensor, q: DraftProbs = None) -> RuleTerms:
        """Give the terms.

        Args:
            p: [B, K+1, W] float32 or float64; row j follows the anchor and j drafts. Rows that
                follow a draft outside the vocabulary may hold anything.
            drafts: [B, K] int64; negative where no draft was made.
            q: what each draft was drawn from: dense [B, K, W], sparse [B, K, C], or None: one-hot
                on the draft. Rows without a draft may hold anything.

        Raises:
            ArgumentError: shapes that do not fit each other.
            ArgumentTypeError: drafts that are not int64.
        """
        ...


def check_terms(p: Tensor, drafts: Tensor, q: DraftProbs) -> None:
    """Check what a rule is given, as `Rule` says."""
    if drafts.dtype != torch.int64:
        raise ArgumentTypeError(f"drafts has dtype {drafts.dtype}, accepted is torch.int64")
    found = []
    if p.dim() != 3 or drafts.dim() != 2 or p.shape[:2] != (drafts.shape[0], drafts.shape[1] + 1):
        found.append(
            f"p has shape {tuple(p.shape)}, drafts {tuple(drafts.shape)}; accepted are "
            "[B, K+1, W] and [B, K]"
        )
    elif isinstance(q, SparseProbs):
        check_sparse(q)
        if q.ids.shape[:-1] != drafts.shape:
            found.append(f"q has ids of shape {tuple(q.ids.shape)}, accepted is {_shape(drafts)}")
    elif q is not None and q.shape != (*drafts.shape, p.shape[2]):
        found.append(
            f"q has shape {tuple(q.shape)}, accepted is {(*drafts.shape, p.shape[2])}; a draft "
            "vocabulary of another size is padded by pad_vocab"
        )
    require(found, "rule")


def term_problems(rule: Rule, terms: object, p: Tensor, drafts: Tensor) -> list[str]:
    """List why `terms` can't be what `rule` gives for p and drafts; no value is looked at."""
    name = getattr(rule, "__name__", None) or repr(rule)
    if not isinstance(terms, RuleTerms):
        return [f"rule {name} gives {type(terms).__name__}, accepted are RuleTerms"]
    found = []
    for label, given, shape in (
        ("accept", terms.accept, drafts.shape),
        ("correction", terms.correction, p.shape),
    ):
        if not isinstance(given, Tensor):
            found.append(f"rule {name} gives {label}={given!r}, accepted is a tensor")
        elif given.shape != shape or not given.is_floating_point() or given.device != p.device:
            found.append(
                f"rule {name} gives {label} {given.dtype} {tuple(given.shape)} on {given.device}, "
                f"accepted is floating {tuple(shape)} on {p.device}"
            )
    if not isinstance(terms.ending, Ending):
        found.append(f"rule {name} gives ending={terms.ending!r}, accepted are {[*Ending]}")
    return found


def _shape(drafts: Tensor) -> str:
    return f"({drafts.shape[0]}, {drafts.shape[1]}, C)"


def num_drafts(drafts: Tensor) -> Tensor:
    """Count the drafts [B] before the first negative id of each row [B, K]."""
    return (drafts >= 0).long().cumprod(dim=1).sum(dim=1)
