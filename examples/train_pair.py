"""Train the pair that ships with specmla: a deep narrow MLA target and a shallow draft of it.

The corpus is the Python source of the running interpreter: its standard library and what is
installed. Held-out modules, chosen by name, are never trained on and give all figures.

    python examples/train_pair.py --out pair                      # a few minutes on one GPU
    python examples/train_pair.py --out pair --target pair/target # the drafts alone
    python examples/train_pair.py --out try --device cpu --steps 20 --target-size 2x64 \\
        --draft-sizes 1x64 --window 64 --batch 8 --pool 16 --max-megabytes 2 --prompts 4

Writes target/, draft/ (the best of the sizes asked for), drafts/SIZE/, report.json and curves.png.
"""

from __future__ import annotations

import json
import platform
import shutil
import time
from pathlib import Path
from typing import Any

import tokenizers
import torch
import torch._dynamo
from tokenizers import Tokenizer

from pairtrain.corpus import Corpus, load_corpus
from pairtrain.curves import Curves
from pairtrain.distill import Distillation
from pairtrain.evaluation import best_draft, evaluate, meets_goals
from pairtrain.monitor import say
from pairtrain.network import Network
from pairtrain.options import Options, read_options
from pairtrain.prompts import held_out_prompts
from pairtrain.target import TargetTraining
from pairtrain.tokenizer import encode_files, train_tokenizer
from pairtrain.windows import TokenWindows

TOKENIZER_BYTES = 48_000_000
LIMIT = 12_000_000  # bytes of everything that ships


def main(arguments: list[str] | None = None) -> None:
    """Train, evaluate, report."""
    started = time.monotonic()
    options = read_options(arguments)
    _set_up(options)
    options.out.mkdir(parents=True, exist_ok=True)
    corpus = _read_corpus(options)
    tokenizer = _make_tokenizer(corpus, options)
    train = _windows([file.text for file in corpus.train], tokenizer, options)
    held_out = _windows([file.text for file in corpus.held_out], tokenizer, options)
    report: dict[str, Any] = {
        "corpus": corpus.summary() | {"train_tokens": train.tokens.numel()},
        "environment": _environment(options),
    }
    curves = Curves()
    target = _train_target(tokenizer, train, held_out, options, curves, report)
    _write(report, curves, options.out)
    drafts = _train_drafts(target, train, held_out, options, curves, report)
    _write(report, curves, options.out)
    prompts = held_out_prompts(corpus.held_out, tokenizer, options.prompts, options.seed)
    figures = evaluate(options.out / "target", drafts, prompts, options)
    _choose(drafts, figures, options, report)
    report["seconds"] = round(time.monotonic() - started, 1)
    _write(report, curves, options.out)
    say(f"report: {options.out / 'report.json'}, {report['seconds']} s in all")


def _set_up(options: Options) -> None:
    torch.manual_seed(options.seed)
    # cuDNN's attention plans a shape anew, which costs seconds for nothing at these sizes.
    torch.backends.cuda.enable_cudnn_sdp(False)
    # Every width has a graph with and one without gradients; more than 8 would run uncompiled.
    torch._dynamo.config.recompile_limit = 4 * (len(options.draft_sizes) + 2)


def _read_corpus(options: Options) -> Corpus:
    started = time.monotonic()
    corpus = load_corpus(
        options.roots,
        max_bytes=round(options.max_megabytes * 1e6),
        held_out_percent=options.held_out_percent,
        workers=options.workers,
    )
    if not corpus.train or not corpus.held_out:
        raise SystemExit(
            f"corpus: {len(corpus.train)} training and {len(corpus.held_out)} held-out files; "
            "both are needed: give more roots or another --held-out-percent"
        )
    size = sum(len(file.text) for file in corpus.train) / 1e6
    say(
        f"corpus: {len(corpus.train)} files, {size:.1f} MB, {corpus.duplicates} duplicates, "
        f"{len(corpus.held_out)} files held out, {time.monotonic() - started:.1f} s"
    )
    return corpus


def _make_tokenizer(corpus: Corpus, options: Options) -> Tokenizer:
    """Train the tokenizer, or take the given target's, and save it beside the target."""
    started, path = time.monotonic(), options.out / "target" / "tokenizer.json"
    path.parent.mkdir(exist_ok=True)
    if options.target_dir:
        tokenizer = Tokenizer.from_file(str(options.target_dir / "tokenizer.json"))
    else:
        texts = [file.text for file in corpus.train]
        tokenizer = train_tokenizer(texts, options.vocab_size, TOKENIZER_BYTES)
    tokenizer.save(str(path), pretty=False)
    say(f"tokenizer: {tokenizer.get_vocab_size()} ids, {time.monotonic() - started:.1f} s")
    return tokenizer


def _windows(texts: list[str], tokenizer: Tokenizer, options: Options) -> TokenWindows:
    """Put all tokens on the device; a window has one token more than is predicted from."""
    started = time.monotonic()
    tokens = torch.from_numpy(encode_files(tokenizer, texts)).to(options.device)
    say(f"tokens: {tokens.numel() / 1e6:.2f} M, {time.monotonic() - started:.1f} s")
    return TokenWindows(tokens, options.window + 1)


def _train_target(
    tokenizer: Tokenizer,
    train: TokenWindows,
    held_out: TokenWindows,
    options: Options,
    curves: Curves,
    report: dict[str, Any],
) -> Network:
    """Train and save the target, or load and copy the one given."""
    folder = options.out / "target"
    if options.target_dir:
        target = Network.load(options.target_dir, options.device, options.compile)
        target.save(folder)
        return target
    target = Network.create(
        options.target_size,
        tokenizer.get_vocab_size(),
        options.device,
        options.seed,
        options.compile,
    )
    report["target"] = {"size": str(options.target_size)}
    report["target"] |= TargetTraining(target, train, held_out, options, curves).run()
    target.save(folder)
    say(f"target: saved, held-out loss {report['target']['held_out_loss']}")
    return target


def _train_drafts(
    target: Network,
    train: TokenWindows,
    held_out: TokenWindows,
    options: Options,
    curves: Curves,
    report: dict[str, Any],
) -> dict[str, Path]:
    """Train and save every draft; return their folders by size."""
    drafts = {
        str(size): Network.create(
            size, target.config.vocab_size, options.device, options.seed + 1 + i, options.compile
        )
        for i, size in enumerate(options.draft_sizes)
    }
    report["drafts"] = Distillation(target, drafts, train, held_out, options, curves).run()
    folders = {name: options.out / "drafts" / name for name in drafts}
    for name, draft in drafts.items():
        draft.save(folders[name])
    return folders


def _choose(
    drafts: dict[str, Path],
    figures: dict[str, dict[str, Any]],
    options: Options,
    report: dict[str, Any],
) -> None:
    """Copy the best draft to `draft` and put all figures into the report."""
    best, place = best_draft(figures), options.out / "draft"
    shutil.copytree(drafts[best], place, dirs_exist_ok=True)
    shipped = [path for part in ("target", "draft") for path in (options.out / part).iterdir()]
    size = sum(path.stat().st_size for path in shipped)
    report["evaluation"] = {
        "num_speculative_tokens": options.num_speculative_tokens,
        "new_tokens": options.new_tokens,
        "drafts": figures,
        "chosen": best,
        "meets_goals": meets_goals(figures[best]),
        "shipped_bytes": size,
    }
    for name, found in figures.items():
        steps = ", ".join(
            f"{kind} {found[kind]['tokens_per_step']}" for kind in ("greedy", "temperature_1")
        )
        say(f"{'* ' if name == best else '  '}draft {name}: tokens per step {steps}")
    say(f"shipped files: {size / 1e6:.2f} MB" + (" (over the limit)" if size > LIMIT else ""))


def _environment(options: Options) -> dict[str, Any]:
    on_gpu = options.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(options.device) if on_gpu else platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "tokenizers": tokenizers.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "options": {name: str(value) for name, value in vars(options).items() if name != "out"}
        | {"draft_sizes": " ".join(map(str, options.draft_sizes))},
    }


def _write(report: dict[str, Any], curves: Curves, out: Path) -> None:
    """Write the report, then the plot: what goes wrong with a plot costs the plot alone."""
    (out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    try:
        curves.draw(out / "curves.png")
    except Exception as error:  # a drawing library may raise anything, training must not be lost
        say(f"curves.png was not drawn: {error}")


if __name__ == "__main__":
    main()
