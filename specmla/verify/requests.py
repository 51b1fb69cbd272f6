"""The host's view of a request between steps: its tokens, parameters and what it may still emit."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence

from specmla.errors import ArgumentTypeError, require
from specmla.verify.processors.constraint import TokenConstraint
from specmla.verify.processors.counts import TokenCounts
from specmla.verify.sampling import SamplingParams


class RequestState:
    """A request's committed tokens and limits.

    Attributes:
        tokens: committed tokens, prompt first; the last one is the anchor.
        num_prompt: length of the prompt.
        limit: length at which the request ends, by `max_tokens` or the context limit.
        counts: its distinct tokens, if penalties need them.
        constraint: says which tokens may follow; None allows all.
    """

    __slots__ = (
        "constraint",
        "counts",
        "limit",
        "num_prompt",
        "request_id",
        "sampling",
        "tokens",
    )

    def __init__(
        self,
        request_id: Hashable,
        prompt: Sequence[int],
        sampling: SamplingParams,
        *,
        vocab_size: int,
        max_seq_len: int,
        constraint: TokenConstraint | None = None,
        output: Sequence[int] = (),
    ) -> None:
        """Check the prompt, and what was emitted after it before the request was preempted.

        Raises:
            ArgumentError: an empty prompt, ids outside the vocabulary, no room for one new token,
                no id that may be emitted.
            ArgumentTypeError: tokens that are no sequence of integers, or other parameters.
        """
        _check_types(request_id, sampling, constraint)
        tokens, emitted = (
            _tokens(given, f"request {request_id!r}: {name}")
            for name, given in (("prompt", prompt), ("output", output))
        )
        found = _problems(tokens, emitted, sampling, vocab_size, max_seq_len)
        require(found, f"request {request_id!r}")
        self.request_id = request_id
        self.tokens = tokens + emitted
        self.num_prompt = len(tokens)
        self.sampling = sampling.seeded()
        self.counts = TokenCounts(tokens) if sampling.has_penalties else None
        if self.counts is not None:
            self.counts.add(emitted)
        self.constraint = constraint
        most = sampling.max_tokens
        self.limit = max_seq_len if most is None else min(max_seq_len, len(tokens) + most)

    @property
    def num_output(self) -> int:
        """Tokens emitted so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def budget(self) -> int:
        """Tokens that may still be emitted (`max_tokens` and the context limit)."""
        return self.limit - len(self.tokens)

    @property
    def draft_limit(self) -> int:
        """Most drafts worth verifying: the bonus token takes one of the budget.

        Keeping to it also keeps every draft row inside the context limit.
        """
        return max(0, self.limit - len(self.tokens) - 1)

    def cut(self, candidates: Sequence[int]) -> tuple[tuple[int, ...], str | None]:
        """Give what may be emitted of `candidates` and the reason to finish, if any.

        The first stop token ends the run and is itself emitted; what follows it is dropped, bonus
        included.
        """
        room, stops = self.budget, self.sampling.stop_token_ids
        kept = tuple(candidates[:room])
        reason = "length" if len(kept) == room else None
        if stops:
            stop = next((i for i, token in enumerate(kept) if token in stops), None)
            if stop is not None:
                kept, reason = kept[: stop + 1], "stop"
        return kept, reason

    def append(self, emitted: Sequence[int]) -> None:
        """Commit emitted tokens; the constraint has heard of them already."""
        self.tokens.extend(emitted)
        if self.counts is not None:
            self.counts.add(emitted)


def _tokens(given: Sequence[int], label: str) -> array[int]:
    try:
        return array("q", list(given))  # of bytes, array would take eight for one number
    except (TypeError, OverflowError) as error:
        raise ArgumentTypeError(f"{label} accepts integers of 64 bits: {error}") from error


def _check_types(request_id: Hashable, sampling: object, constraint: object) -> None:
    if not isinstance(sampling, SamplingParams):
        raise ArgumentTypeError(
            f"request {request_id!r}: sampling is {sampling!r}, accepted are SamplingParams"
        )
    if constraint is not None and not all(
        callable(getattr(constraint, name, None)) for name in ("masks", "advance")
    ):
        raise ArgumentTypeError(
            f"request {request_id!r}: constraint is {constraint!r}, accepted are None and "
            "objects with `masks` and `advance` (TokenConstraint)"
        )


def _problems(
    tokens: array[int],
    output: array[int],
    sampling: SamplingParams,
    vocab_size: int,
    max_seq_len: int,
) -> list[str]:
    """List what is wrong with a prompt and output, and with the ids that the parameters name."""
    found, room = [], max_seq_len - len(output)
    if not 1 <= len(tokens) < room:
        after = f" before an output of {len(output)}" if output else ""
        found.append(f"prompt has {len(tokens)} tokens, accepted are 1 to {room - 1}{after}")
    if sampling.max_tokens is not None and len(output) >= sampling.max_tokens:
        most = sampling.max_tokens
        found.append(f"output has {len(output)} tokens, accepted are fewer than max_tokens={most}")
    for name, ids in sampling.named_ids.items():
        foreign = [t for t in ids if t >= vocab_size]
        if foreign:
            found.append(f"{name} hold {foreign}, accepted are 0 to {vocab_size - 1}")
    found += _ban_problems(sampling, vocab_size)
    for name, given in (("prompt", tokens), ("output", output)):
        if outside := sorted({t for t in given if not 0 <= t < vocab_size}):
            found.append(f"{name} holds ids {outside[:8]}, accepted are 0 to {vocab_size - 1}")
    return found


def _ban_problems(sampling: SamplingParams, vocab_size: int) -> list[str]:
    """List why no id at all could be emitted."""
    stops = sampling.stop_token_ids if sampling.min_tokens else ()
    banned = {*sampling.banned_token_ids, *stops}
    if len(banned) < vocab_size:
        return []
    what = f"banned_token_ids ({len(sampling.banned_token_ids)} ids)"
    if stops:
        what += f", with stop_token_ids ({len(stops)} ids) until min_tokens={sampling.min_tokens},"
    return [f"{what} ban all {vocab_size} ids, accepted is to leave one"]
