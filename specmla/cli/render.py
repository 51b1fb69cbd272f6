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
        piece = tokenizer.decode([token for token, _ in group], skip_special_tokens=True)
        text.append(piece, style="green" if is_draft else "bold")
    return text


def comparison_table(runs: Mapping[str, Run], num_speculative_tokens: int) -> Table:
    """One column per way of decoding; `plain` comes first and is the base of the speed-up."""
    table = Table(title=f"draft-verify decoding, K = {num_speculative_tokens}")
    table.add_column("", no_wrap=True)
    columns = [_figures(run, runs["plain"]) for run in runs.values()]
    for name in runs:
        table.add_column(name, justify="right")
    for figure in columns[0]:
        table.add_row(figure, *(column[figure] for column in columns))
    table.caption = (
        "tokens_per_step: over all verify steps; mean_acceptance_length: over those with drafts, "
        "bonus included; histogram: steps that accepted 0, 1, ... K drafts"
    )
    return table


def _figures(run: Run, plain: Run) -> dict[str, str]:
    stats = run.stats
    distinct = sum(distinct_ngram_ratio(t) for t in run.tokens) / len(run.tokens)
    return {
        "tokens_per_step": f"{stats.tokens_per_step:.2f}",
        "mean_acceptance_length": f"{stats.mean_acceptance_length:.2f}",
        "draft_acceptance_rate": f"{stats.draft_acceptance_rate:.2f}",
        "rate by position": _spaced(stats.acceptance_rate_per_position, ".2f"),
        "acceptance_histogram": _spaced(stats.acceptance_histogram, "d"),
        "num_spec_steps": str(stats.num_spec_steps),
        "distinct 4-gram ratio": f"{distinct:.2f}",
        "tokens/s": f"{run.tokens_per_s:.0f}",
        "speedup": f"{run.tokens_per_s / plain.tokens_per_s:.2f}x",
    }


def _spaced(values: Sequence[float], form: str) -> str:
    return " ".join(format(value, form) for value in values) or "-"
