"""`specmla generate`: continue one prompt with a checkpoint on disk."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from specmla.cli.checkpoint import load_tokenizer, parse_device, parse_dtype
from specmla.cli.lookup import LOOKUPS
from specmla.cli.named import ASSETS, SHIPPED, TREE, is_known, make_named
from specmla.cli.run import MakeDrafter, run_loop
from specmla.errors import ArgumentError
from specmla.models.deepseek import DeepseekForCausalLM
from specmla.models.weights import load_checkpoint
from specmla.verify.sampling import SamplingParams


@dataclass(frozen=True)
class GenerateOptions:
    """Options of the command, in its order."""

    prompt: str
    target: Path | None
    draft: str
    num_speculative_tokens: int
    sampling: SamplingParams
    device: str
    dtype: str
    backend: str | None
    tree: bool = False
    rule: str = "token_level"
    graphs: bool = False


def run_generate(options: GenerateOptions) -> int:
    """Print the continuation on stdout, the acceptance figures on stderr."""
    device, dtype = parse_device(options.device), parse_dtype(options.dtype)
    text = _text(options.prompt)
    _check_draft(options)
    folder = ASSETS / "target" if options.target is None else options.target
    tokenizer = load_tokenizer(folder)
    model, config = load_checkpoint(folder, device=device, dtype=dtype)
    prompt = tokenizer.encode(text).ids
    sampling = replace(options.sampling, stop_token_ids=config.eos_token_ids)
    run = run_loop(
        model,
        [prompt],
        [sampling],
        _drafter(options, model, len(prompt)),
        num_speculative_tokens=options.num_speculative_tokens,
        backend=options.backend,
        rule=options.rule,
        graphs=options.graphs,
    )
    print(tokenizer.decode(run.tokens[0]))
    stats, console = run.stats, Console(stderr=True)
    console.print(
        f"{run.num_tokens} tokens ({run.finish_reasons[0]}), {run.tokens_per_s:.1f} tokens/s, "
        f"tokens_per_step "
        f"{stats.tokens_per_step:.2f}, mean_acceptance_length {stats.mean_acceptance_length:.2f}, "
        f"draft_acceptance_rate {stats.draft_acceptance_rate:.2f}"
    )
    return 0


def _text(argument: str) -> str:
    """Refuse bytes that are no UTF-8: Python hides them in surrogates, tokenizers know none."""
    try:
        argument.encode()
    except UnicodeEncodeError as error:
        raise ArgumentError(f"prompt is {argument!r}, accepted is UTF-8: {error}") from error
    return argument


def _check_draft(options: GenerateOptions) -> None:
    """Refuse a name of nothing before a model is loaded."""
    if options.draft in ("none", *LOOKUPS):
        if options.tree:
            raise ArgumentError(
                f"tree is set with draft {options.draft!r}, accepted is a model: "
                f"{', '.join(SHIPPED)} or a directory; for suffixes use draft 'suffix-tree'"
            )
    elif not is_known(options.draft):
        raise ArgumentError(
            f"draft is {options.draft!r}, accepted are {', '.join([*LOOKUPS, *SHIPPED])}, none and "
            f"an existing directory, the models also with {TREE} behind them"
        )


def _drafter(
    options: GenerateOptions, target: DeepseekForCausalLM, num_prompt: int
) -> MakeDrafter | None:
    if options.draft == "none":
        return None
    longest = num_prompt + (options.sampling.max_tokens or 0) + options.num_speculative_tokens + 1
    return make_named(
        options.draft,
        target,
        num_requests=1,
        longest=longest,
        backend=options.backend,
        tree=options.tree,
    )
