"""Declares the commands and their options; the work is done by one module each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Verify drafted tokens over the paged latent cache of MLA models.",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from specmla import __version__

        print(f"specmla {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="print it")
    ] = False,
) -> None:
    """Verify drafted tokens over the paged latent cache of MLA models."""


Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:N")]
Backend = Annotated[str | None, typer.Option(help="attention backend; the best one if not given")]
NumDrafts = Annotated[
    int, typer.Option("--num-speculative-tokens", "-k", min=0, max=63, help="drafts a step")
]
Graphs = Annotated[
    bool, typer.Option("--graphs", help="CUDA graphs of steps and, where they can be, drafts")
]


@app.command()
def demo(
    device: Device = "cpu",
    num_speculative_tokens: NumDrafts = 4,
    max_tokens: Annotated[int, typer.Option(min=1, help="new tokens a prompt")] = 96,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 0.0,
    seed: Annotated[int, typer.Option(help="of all random streams")] = 0,
    backend: Backend = None,
    json: Annotated[
        bool, typer.Option("--json", help="one JSON line on stdout, text on stderr")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="PNG of the acceptance by position")] = None,
    draft: Annotated[
        str,
        typer.Option(
            help="by comma: ngram, suffix, suffix-tree, draft_model, mtp, dflash, dspark; "
            "draft_model and dflash also with -tree behind them"
        ),
    ] = "ngram,draft_model,dspark",
    graphs: Graphs = False,
) -> int:
    """Continue Python prompts with the shipped models: plain, and with each drafter of --draft."""
    from specmla.cli.demo import DemoOptions, run_demo

    options = DemoOptions(
        device, num_speculative_tokens, max_tokens, temperature, seed, backend, json, plot, draft,
        graphs,
    )  # fmt: skip
    return run_demo(options)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="text to continue")],
    target: Annotated[
        Path | None,
        typer.Option(
            help="checkpoint directory in Hugging Face layout; the shipped target if not given"
        ),
    ] = None,
    draft: Annotated[
        str,
        typer.Option(
            help="a drafter's directory, ngram, suffix, suffix-tree, none; of the shipped target "
            "draft_model, mtp, dflash, dspark"
        ),
    ] = "ngram",
    num_speculative_tokens: NumDrafts = 4,
    max_tokens: Annotated[int, typer.Option(min=1, help="new tokens")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 0.0,
    top_k: Annotated[int, typer.Option(help="0 keeps all")] = 0,
    top_p: Annotated[float, typer.Option(help="1 keeps all")] = 1.0,
    min_p: Annotated[float, typer.Option(help="0 keeps all")] = 0.0,
    rule: Annotated[
        str,
        typer.Option(help="token_level, block, sample_match; lossy_typical, lossy_relaxed"),
    ] = "token_level",
    seed: Annotated[int, typer.Option(help="of all random streams")] = 0,
    device: Device = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16")] = "float32",
    backend: Backend = None,
    tree: Annotated[
        bool, typer.Option("--tree", help="trees of as many drafts: of a draft model or DFlash")
    ] = False,
    graphs: Graphs = False,
) -> int:
    """Continue a prompt with any DeepSeek-V2/V3-architecture checkpoint."""
    from specmla.cli.generate import GenerateOptions, run_generate
    from specmla.verify.sampling import SamplingParams

    sampling = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        max_tokens=max_tokens,
    )
    options = GenerateOptions(
        prompt, target, draft, num_speculative_tokens, sampling, device, dtype, backend, tree, rule,
        graphs,
    )  # fmt: skip
    return run_generate(options)


@app.command()
def info(
    called: typer.Context,
    model: Annotated[
        Path | None, typer.Option(help="config.json or its directory: what serving it takes")
    ] = None,
    context: Annotated[str, typer.Option(help="tokens a request, as 8192, 8k or 1m")] = "8k",
    batch: Annotated[int, typer.Option(help="requests at once")] = 1,
    query_len: Annotated[int, typer.Option(help="rows a request in a verify, 1 + drafts")] = 5,
    page_size: Annotated[int, typer.Option(help="tokens a page")] = 64,
    dtype: Annotated[str, typer.Option(help="of plain cache rows")] = "bfloat16",
    cache_format: Annotated[
        str | None, typer.Option(help="of quantised rows: fp8, fp8_ds_mla, ...")
    ] = None,
    gpu_memory: Annotated[
        str | None, typer.Option(help="bytes, as 141G (of 2**30) or 150GB (of 10**9)")
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help="that scratch is sized for; the present one, or sm_90:132")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="one JSON line; needs --model")] = False,
) -> int:
    """Print versions, devices and why each backend is or isn't available; or, of a model, what
    its cache, workspace and scratch take and how many requests fit.
    """
    from specmla.cli.info import run_info
    from specmla.cli.memory import MemoryOptions, run_memory

    if model is None:
        sources = {name: called.get_parameter_source(name) for name in called.params}
        return run_info(
            [n for n, source in sources.items() if source and source.name == "COMMANDLINE"]
        )
    return run_memory(
        MemoryOptions(
            model, context, batch, query_len, page_size, dtype, cache_format, gpu_memory, gpu, json
        )
    )


@app.command()
def compare(
    draft: Annotated[
        str,
        typer.Option(
            help="by comma: ngram, suffix, suffix-tree, draft_model, mtp, dflash, dspark, "
            "directories; draft models and DFlash also with -tree behind them"
        ),
    ] = "ngram,suffix,suffix-tree,draft_model,draft_model-tree",
    rule: Annotated[
        str, typer.Option(help="by comma: token_level, block, sample_match; greedy is one for all")
    ] = "token_level,block,sample_match",
    temperature: Annotated[str, typer.Option(help="by comma; 0 is greedy")] = "0,1",
    target: Annotated[
        Path | None, typer.Option(help="checkpoint directory; the shipped target if not given")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="JSON list of texts; excerpts of held-out modules if not given"),
    ] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="how many prompts")] = 12,
    num_speculative_tokens: NumDrafts = 4,
    nodes: Annotated[int, typer.Option(min=1, max=63, help="most nodes of a tree")] = 12,
    max_tokens: Annotated[int, typer.Option(min=1, help="new tokens a prompt")] = 64,
    batch: Annotated[int, typer.Option(min=1, help="prompts at once")] = 1,
    repeats: Annotated[int, typer.Option(min=1, help="turns, each with other seeds")] = 1,
    seed: Annotated[int, typer.Option(help="of prompts and all random streams")] = 0,
    device: Device = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16")] = "float32",
    backend: Backend = None,
    json: Annotated[
        bool, typer.Option("--json", help="one JSON line on stdout, text on stderr")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="PNG of the comparison")] = None,
    record: Annotated[
        Path | None, typer.Option(help="instead, write texts and states that --draft asks for")
    ] = None,
    recording: Annotated[
        Path | None, typer.Option(help="instead, score --draft on such a file, target not run")
    ] = None,
) -> int:
    """Compare drafters and acceptance rules on held-out prompts, with bootstrap intervals."""
    from specmla.bench.compare_run import RunSettings
    from specmla.cli.compare import CompareOptions, run_compare

    k = num_speculative_tokens
    settings = RunSettings(k, nodes, max_tokens, batch, seed, backend)
    return run_compare(
        CompareOptions(
            draft, rule, temperature, target, prompts, num_prompts, repeats, settings, device,
            dtype, json, plot, record, recording,
        )
    )  # fmt: skip


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)
def bench(context: typer.Context) -> int:
    """Check kernels against float64, then time them (same as python -m specmla.bench)."""
    from specmla.bench.__main__ import main

    return main(context.args)
