"""Count what a drafter achieves, under the names vLLM uses."""

from __future__ import annotations

from dataclasses import dataclass, field

from specmla.errors import require


@dataclass
class AcceptanceStats:
    """Counts over request-steps; a request-step is one verify of one request.

    A request-step without drafts emits one token. It counts in `tokens_per_step` only, since it
    says nothing about the drafts. Prompt steps are not to be observed.

    Attributes:
        num_steps: request-steps, those without drafts included.
        num_spec_steps: request-steps that verified at least one draft.
        num_emitted_tokens: tokens that reached the user, cut ones not counted.
        num_draft_tokens: drafts verified, all nodes of a tree.
        drafted_per_position: entry j counts the request-steps that had a draft at place j; in a
            tree places are depths.
        accepted_per_position: entry j counts those in which it was accepted.
        acceptance_histogram: entry n counts the request-steps with drafts that accepted n.
    """

    num_steps: int = 0
    num_spec_steps: int = 0
    num_emitted_tokens: int = 0
    num_draft_tokens: int = 0
    drafted_per_position: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)
    acceptance_histogram: list[int] = field(default_factory=list)

    def observe(
        self, num_drafts: int, num_accepted: int, num_emitted: int, num_levels: int | None = None
    ) -> None:
        """Add one request-step.

        Args:
            num_drafts: drafts verified, padding not counted.
            num_accepted: drafts the rule accepted.
            num_emitted: tokens emitted after any cut by a stop token or a limit.
            num_levels: depth of a tree; None for a chain, as deep as it has drafts.

        Raises:
            ArgumentError: counts that no step can have.
        """
        levels, found = num_drafts if num_levels is None else num_levels, []
        if not min(num_drafts, 1) <= levels <= num_drafts:
            found.append(f"num_levels={levels}, accepted is 1 .. num_drafts={num_drafts}")
        if not 0 <= num_accepted <= levels:
            found.append(f"num_accepted={num_accepted}, accepted is 0 .. {levels}")
        if not 1 <= num_emitted <= num_accepted + 1:
            found.append(f"num_emitted={num_emitted}, accepted is 1 .. {num_accepted + 1}")
        require(found, "AcceptanceStats.observe")
        self.num_steps += 1
        self.num_emitted_tokens += num_emitted
        if num_drafts:
            self.num_spec_steps += 1
            self.num_draft_tokens += num_drafts
            refused = [0] * (levels - num_accepted)
            _add(self.drafted_per_position, [1] * levels)
            _add(self.accepted_per_position, [1] * num_accepted + refused)
            _add(self.acceptance_histogram, [0] * num_accepted + [1] + refused)

    def merge(self, other: AcceptanceStats) -> None:
        """Add the counts of another run."""
        self.num_steps += other.num_steps
        self.num_spec_steps += other.num_spec_steps
        self.num_emitted_tokens += other.num_emitted_tokens
        self.num_draft_tokens += other.num_draft_tokens
        _add(self.drafted_per_position, other.drafted_per_position)
        _add(self.accepted_per_position, other.accepted_per_position)
        _add(self.acceptance_histogram, other.acceptance_histogram)

    @property
    def num_accepted_draft_tokens(self) -> int:
        """Drafts accepted by the rule."""
        return sum(self.accepted_per_position)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens a step with drafts yields: 1 + accepted drafts / steps with drafts."""
        return 1.0 + _ratio(self.num_accepted_draft_tokens, self.num_spec_steps)

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted drafts / drafts."""
        return _ratio(self.num_accepted_draft_tokens, self.num_draft_tokens)

    @property
    def acceptance_rate_per_position(self) -> list[float]:
        """Share of the steps with drafts that accepted place j, whether or not they had one."""
        return [_ratio(n, self.num_spec_steps) for n in self.accepted_per_position]

    @property
    def tokens_per_step(self) -> float:
        """Emitted tokens / request-steps, those without drafts included."""
        return _ratio(self.num_emitted_tokens, self.num_steps)

    def as_dict(self) -> dict[str, int | float | list[int] | list[float]]:
        """Give every count and rate by name, ready for JSON."""
        return {
            "mean_acceptance_length": self.mean_acceptance_length,
            "draft_acceptance_rate": self.draft_acceptance_rate,
            "acceptance_rate_per_position": self.acceptance_rate_per_position,
            "acceptance_histogram": list(self.acceptance_histogram),
            "drafted_per_position": list(self.drafted_per_position),
            "accepted_per_position": list(self.accepted_per_position),
            "num_steps": self.num_steps,
            "num_spec_steps": self.num_spec_steps,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_draft_tokens": self.num_accepted_draft_tokens,
            "num_emitted_tokens": self.num_emitted_tokens,
            "tokens_per_step": self.tokens_per_step,
        }


def _add(counts: list[int], more: list[int]) -> None:
    """Add place by place into `counts`, which grows to the longer length."""
    counts.extend([0] * (len(more) - len(counts)))
    for place, n in enumerate(more):
        counts[place] += n


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
