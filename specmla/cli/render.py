"""What a person sees: coloured continuations and the comparison table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from specmla.cli.run import Run
from specmla.verify.diversity import distinct_ngram_ratio

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def continuation(
    tokenizer: Tokenizer, prompt: str, tokens: Sequence[int], drafted: Sequence[bool]
) -> Text:
    """The prompt dimmed, then the new text with tokens of accepted drafts in green.

    Each run of one colour is decoded on its own: a character whose bytes fall into two runs shows
    as a replacement mark.
    """
    text = Text(prompt, style="dim")
    pairs = zip(tokens, drafted, strict=True)
    for is_draft, group in groupby(pairs, key=lambda pair: pair[1]):
        piece = tokenizer.decode([token for token, _ in group], skip_special_tokens=False)
        text.append(piece, style="green" if is_draft else "bold")
    return text


def comparison_table(runs: Mapping[str, Run], num_speculative_tokens: int) -> Table:
    """One row per way of decoding; `plain` comes first and is the base of the speed-up."""
    plain = runs["plain"]
    table = Table(title=f"draft-verify decoding, K = {num_speculative_tokens}")
    table.add_column("drafter")
    for name in (
        "tokens_per_step",
        "mean_acceptance_length",
        "draft_acceptance_rate",
        "by position",
        "acceptance_histogram",
        "num_spec_steps",
        "distinct 4-grams",
        "tokens/s",
        "speedup",
    ):
        table.add_column(name, justify="right")
    for name, run in runs.items():
        stats = run.stats
        distinct = sum(distinct_ngram_ratio(t) for t in run.tokens) / len(run.tokens)
        rates = " ".join(f"{rate:.2f}" for rate in stats.acceptance_rate_per_position)
        table.add_row(
            name,
            f"{stats.tokens_per_step:.2f}",
            f"{stats.mean_acceptance_length:.2f}",
            f"{stats.draft_acceptance_rate:.2f}",
            rates or "-",
            " ".join(str(n) for n in stats.acceptance_histogram) or "-",
            str(stats.num_spec_steps),
            f"{distinct:.2f}",
            f"{run.tokens_per_s:.0f}",
            f"{run.tokens_per_s / plain.tokens_per_s:.2f}x",
        )
    return table
