"""What a drafter and the verify step exchange: requests to draft for, proposals, results."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from specmla.bucket import Bucket
from specmla.errors import ArgumentTypeError, require
from specmla.verify.sampling import SamplingParams
from specmla.verify.sparse import SparseProbs, check_sparse
from specmla.verify.tree import parent_problems


class DraftRequest(NamedTuple):
    """A request that may be drafted for.

    Attributes:
        request_id: the engine's name of it.
        tokens: all committed tokens, prompt included; the last one is the anchor, whose row is not
            yet in the target's cache. Read-only.
        num_drafts: at most this many tokens may be proposed.
        sampling: the request's parameters; an honest drafter reports the distribution it drew from.
        num_nodes: at most this many nodes a tree may have; it may be `num_drafts` deep.
    """

    request_id: Hashable
    tokens: Sequence[int]
    num_drafts: int
    sampling: SamplingParams
    num_nodes: int = 0


@dataclass(frozen=True)
class DraftProposal:
    """Draft tokens for a batch, as a chain or a tree for each request.

    Attributes:
        request_ids: B names.
        counts: drafts of each request, known on the host; zero is allowed.
        tokens: [B, K] int64, K >= max(counts), -1 past a request's count.
        probs: [B, K, W] float32 or float64, the distribution each token was really drawn from; or
            `SparseProbs` [B, K, C], the ids that could be drawn with their exact probabilities; or
            None where nothing was drawn (the distribution is then one-hot on the token). For a
            greedy request any row will do: its drafts are compared with the target's choice. On a
            CPU the rows are checked; on a GPU a wrong one biases the output unseen. Of a tree's
            node it is what it was drawn from given its elder siblings, those before it in `tokens`
            (`draw_siblings`).
        parents: for each request the place in `tokens` of each draft's parent, -1 for the anchor,
            or None for a chain; None: chains only. Nodes may stand in any order, at most 63. Which
            nodes there are may not depend on a token of a node that was left out.

    Ids are not checked: the rule refuses one outside the vocabulary; -1 ends the drafts of a chain,
    and in a tree is passed over with what hangs on it. The tensors may lie on any device.
    """

    request_ids: tuple[Hashable, ...]
    counts: tuple[int, ...]
    tokens: Tensor
    probs: Tensor | SparseProbs | None = None
    parents: tuple[Sequence[int] | None, ...] | None = None

    def __post_init__(self) -> None:
        """Check types, and shapes against each other.

        Raises:
            ArgumentError: names every field that disagrees.
            ArgumentTypeError: fields of another type.
        """
        self._check_types()
        b, found = len(self.request_ids), []
        if len(self.counts) != b:
            found.append(f"counts has {len(self.counts)} entries, request_ids {b}")
        if self.tokens.dtype != torch.int64:
            found.append(f"tokens has dtype {self.tokens.dtype}, accepted is torch.int64")
        if not all(isinstance(c, Integral) for c in self.counts):
            found.append(f"counts is {self.counts}, accepted are integers")
        elif self.tokens.dim() != 2 or self.tokens.shape[0] != b:
            found.append(f"tokens has shape {tuple(self.tokens.shape)}, accepted is [{b}, K]")
        elif any(not 0 <= c <= self.tokens.shape[1] for c in self.counts):
            found.append(f"counts {self.counts} must lie in 0 .. K={self.tokens.shape[1]}")
        require(found + self._probs_problems() + self._parents_problems(), "DraftProposal")

    def _check_types(self) -> None:
        found = [
            f"{name} is {getattr(self, name)!r}, accepted is a tuple"
            for name in ("request_ids", "counts", "parents")
            if not (name == "parents" and self.parents is None)
            and (
                isinstance(getattr(self, name), str) or not hasattr(getattr(self, name), "__len__")
            )
        ]
        if not isinstance(self.tokens, Tensor):
            found.append(f"tokens is a {type(self.tokens).__name__}, accepted is a tensor")
        if not isinstance(self.probs, Tensor | SparseProbs | None):
            found.append(
                f"probs is a {type(self.probs).__name__}, accepted are a tensor, SparseProbs, None"
            )
        if found:
            raise ArgumentTypeError("DraftProposal: " + "; ".join(found))

    def _parents_problems(self) -> list[str]:
        found: list[str] = []
        if self.parents is None:
            return found
        if len(self.parents) != len(self.counts):
            return [f"parents has {len(self.parents)} entries, counts {len(self.counts)}"]
        for i, (parents, count) in enumerate(zip(self.parents, self.counts, strict=True)):
            if parents is None:
                continue
            wrong = parent_problems(parents)
            if not wrong and len(parents) != count:
                wrong = [f"has {len(parents)} nodes, counts[{i}] is {count}"]
            found += [f"parents[{i}] {problem}" for problem in wrong]
        return found

    def _probs_problems(self) -> list[str]:
        found: list[str] = []
        if self.probs is None:
            return found
        if isinstance(self.probs, SparseProbs):
            return self._sparse_problems(self.probs)
        shape = self.probs.shape
        if len(shape) != 3 or shape[:2] != self.tokens.shape or not shape[2]:
            found.append(
                f"probs has shape {tuple(self.probs.shape)}, tokens {tuple(self.tokens.shape)}; "
                "accepted is [B, K, W] with W > 0"
            )
        if self.probs.dtype not in (torch.float32, torch.float64):
            found.append(f"probs has dtype {self.probs.dtype}, accepted are float32 and float64")
        elif self.probs.device.type == "cpu" and not found and len(self.counts) == len(self.probs):
            found += self._row_problems(self.probs)
        return found

    def _sparse_problems(self, probs: SparseProbs) -> list[str]:
        check_sparse(probs)
        shape = tuple(probs.ids.shape)
        if len(shape) != 3 or shape[:2] != self.tokens.shape:
            return [
                f"probs has ids of shape {shape}, tokens {tuple(self.tokens.shape)}; accepted "
                "is [B, K, C]"
            ]
        if probs.ids.device.type != "cpu" or len(self.counts) != shape[0]:
            return []
        return probs.row_problems(self._drafted())

    def _drafted(self) -> Tensor:
        """Tell which cells [B, K] hold a draft that was drawn."""
        drafted = torch.arange(self.tokens.shape[1]) < torch.tensor(self.counts)[:, None]
        if self.parents is not None:  # where q is exhausted no draft is made
            drafted &= self.tokens.cpu() >= 0
        return drafted

    def _row_problems(self, probs: Tensor) -> list[str]:
        """Check that each drafted row is a distribution; NaN is none."""
        is_one = (probs.sum(-1) - 1).abs() <= 1e-3
        bad = self._drafted() & ~(is_one & (probs.amin(-1) >= 0))
        if not bad.any():
            return []
        at = bad.nonzero().tolist()[:4]
        return [f"probs rows {at} are no distributions, accepted are rows >= 0 that sum to 1"]


class RequestResult(NamedTuple):
    """What one step decided for one request, on the host after `commit`.

    Attributes:
        request_id: the engine's name of it.
        new_tokens: tokens emitted in this step, in order; ends with the stop token if one was met.
        num_drafts: drafts that were verified (0 for a prompt).
        num_accepted: drafts accepted by the rule, before any cut by a stop or a limit.
        finish_reason: "stop", "length", or None while it goes on.
        is_prompt: the step computed the request's prompt; such a step says nothing about drafts.
        path: of a tree, the places in the proposal's tokens of the accepted drafts, in order; None
            for a chain, where they are the first ones.
        num_levels: depth of the tree that was verified; None for a chain, as deep as num_drafts.
        logprobs: natural log-probability of each new token, if `SamplingParams.logprobs` asks.
    """

    request_id: Hashable
    new_tokens: tuple[int, ...]
    num_drafts: int
    num_accepted: int
    finish_reason: str | None
    is_prompt: bool = False
    path: tuple[int, ...] | None = None
    num_levels: int | None = None
    logprobs: tuple[float, ...] | None = None


class HiddenRows(NamedTuple):
    """Target hidden states of the rows whose tokens are committed now, all but the new anchor's.

    Attributes:
        states: [R, m * D], rows of the first result, then of the next; the m layers that the
            drafter asked for side by side. Its own memory: later steps don't overwrite it.
        starts: position of the first row of each result. Of a prompt whose prefix was found in the
            cache it is the first one that was computed: the rows before it have no states.
        counts: rows of each result.
    """

    states: Tensor
    starts: tuple[int, ...]
    counts: tuple[int, ...]


class Drafter(Protocol):
    """Proposes tokens; knows specmla by its public names only.

    `vocab_size` is that of the proposed ids and of `probs`. A drafter that works on the target's
    hidden states has an attribute `hidden_layers`, the layers it asks for (see `StateCollector`).
    One with a true `drafts_ahead` proposes chains that follow from `tokens` alone, without `probs`:
    they may be proposed before the last step's tokens are known (see `DraftsAhead`). One with a
    true `drafts_trees` proposes trees: `generate(graphs=True)` captures steps for them.
    """

    vocab_size: int

    def propose(self, requests: Sequence[DraftRequest]) -> DraftProposal:
        """Draft at most `num_drafts` tokens for each request, continuing after its anchor."""
        ...

    def observe(self, results: Sequence[RequestResult], hidden: HiddenRows | None = None) -> None:
        """Learn what was accepted; `hidden` for those that have `hidden_layers`, else None."""
        ...

    def reset(self, request_id: Hashable) -> None:
        """Forget a request that has ended; unknown names are ignored."""
        ...


@runtime_checkable
class CapturableDrafter(Protocol):
    """A drafter that can propose by CUDA graphs, as `generate(graphs=True)` asks it to."""

    def capture(self, buckets: Sequence[Bucket], sampling: Sequence[SamplingParams]) -> None:
        """Propose by graphs from here on, where a batch fits a bucket: 1 + K rows for K drafts.

        Every kind of the parameters is captured, and that of all of them in one batch. Buckets of
        one row hold no draft. What was captured before need not be captured again.
        """
        ...
