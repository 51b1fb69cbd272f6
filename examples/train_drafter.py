"""Train drafters that read a target's hidden states: MTP, EAGLE-3, DFlash, DSpark, side by side.

The corpus is the Python source of the running interpreter, as for `train_pair.py`: held-out modules
are never trained on. The target is the shipped one, or any that the library loads.

    python examples/train_drafter.py --method mtp eagle3 dflash dspark --out drafts  # on a GPU
    python examples/train_drafter.py --method mtp dflash dspark --out drafts --minutes 4.6 \\
        --target-layers 1 4 7 9 --prompts 48  # those that ship: 6 minutes on an H200
    python examples/train_drafter.py --method mtp --out drafts --target FOLDER --pool 0
    python examples/train_drafter.py --method dspark --out try --device cpu --steps 30 \\
        --window 64 --batch 8 --pool 16 --max-megabytes 2 --prompts 4

Writes METHOD/ (config.json, model.safetensors) for each method, report.json and curves.png.
"""

from __future__ import annotations

import json
import platform
import time
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo
from tokenizers import Tokenizer

from drafters.block_config import BlockConfig
from drafters.eagle3_config import Eagle3Config
from pairtrain.block_trainee import BlockTrainee
from pairtrain.corpus import Corpus, load_corpus
from pairtrain.curves import Curves
from pairtrain.draft_loss import row_loss
from pairtrain.drafter_figures import evaluate_drafters
from pairtrain.drafter_options import DrafterOptions, read_drafter_options
from pairtrain.drafter_plot import draw_training
from pairtrain.drafter_training import DrafterTraining, Trainee
from pairtrain.eagle3_trainee import Eagle3Trainee, commonest, subset_loss
from pairtrain.frozen_target import FrozenTarget, sampler_problems
from pairtrain.monitor import say
from pairtrain.mtp_trainee import MTPTrainee
from pairtrain.prompts import held_out_prompts
from pairtrain.tokenizer import encode_files
from pairtrain.windows import TokenWindows

SHIPPED = Path(str(files("specmla"))) / "assets" / "target"
UNUSED_BYTE = "ÿ"  # byte 255 in a byte-level alphabet: it occurs in no UTF-8 text


def main(arguments: list[str] | None = None) -> None:
    """Train, evaluate, report."""
    started = time.monotonic()
    options = read_drafter_options(SHIPPED, arguments)
    torch.manual_seed(options.seed)
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch._dynamo.config.recompile_limit = 64
    options.out.mkdir(parents=True, exist_ok=True)
    corpus = _read_corpus(options)  # by processes that fork, before there is a GPU's context
    target = FrozenTarget(options.target, options.device, options.compile)
    tokenizer = Tokenizer.from_file(str(options.target / "tokenizer.json"))
    train = _windows(corpus.train, tokenizer, options)
    trainees = _trainees(target, tokenizer, train, options)
    held_out = _windows(corpus.held_out, tokenizer, options)
    curves = Curves()
    report: dict[str, Any] = {
        "corpus": corpus.summary() | {"train_tokens": train.tokens.numel()},
        "environment": _environment(options),
    }
    report["training"] = DrafterTraining(target, trainees, train, held_out, options, curves).run()
    report["curves"] = curves.panels
    _write(report, curves, options.out)
    if options.prompts:
        prompts = held_out_prompts(corpus.held_out, tokenizer, options.prompts, options.seed)
        folders = {t.name: options.out / t.name for t in trainees}
        report["evaluation"] = evaluate_drafters(target.model, folders, prompts, options)
    report["bytes"] = {t.name: _size(options.out / t.name) for t in trainees}
    report["seconds"] = round(time.monotonic() - started, 1)
    _write(report, curves, options.out)
    say(f"report: {options.out / 'report.json'}, {report['seconds']} s in all")


def _trainees(
    target: FrozenTarget, tokenizer: Tokenizer, train: TokenWindows, options: DrafterOptions
) -> list[Trainee]:
    problems = sampler_problems(target.config) if options.pool else []
    if problems:
        raise SystemExit(f"--target: {'; '.join(problems)}: give --pool 0, to train on the corpus")
    loss = torch.compile(row_loss, dynamic=False, disable=not options.compile)
    made: list[Trainee] = []
    for i, name in enumerate(options.methods):
        seed = options.seed + i
        if name == "mtp":
            made.append(MTPTrainee(target, options.drafts, seed, loss))
        elif name == "eagle3":
            made.append(_eagle3(target, train, seed, options))
        else:
            config = _block_config(name, target, _mask_token(tokenizer, options), options)
            made.append(BlockTrainee(config, target, seed, loss))
        size = sum(p.numel() for p in made[-1].module.parameters())
        say(f"{name}: {size / 1e6:.2f} M parameters, {made[-1].num_drafts} drafts")
    return made


def _eagle3(
    target: FrozenTarget, train: TokenWindows, seed: int, options: DrafterOptions
) -> Eagle3Trainee:
    """Size a head like the target's layers; it drafts the commonest tokens."""
    size = min(options.draft_vocab, target.config.vocab_size)
    config = Eagle3Config(
        target.config.attention,
        target.config.intermediate_size,
        target.config.vocab_size,
        size,
        options.target_layers or low_middle_high(target.config.num_layers),
    )
    ids = commonest(train.tokens, size, target.config.vocab_size)
    loss = torch.compile(subset_loss, dynamic=False, disable=not options.compile)
    return Eagle3Trainee(config, target, ids, options.drafts, seed, loss)


def _block_config(
    name: str, target: FrozenTarget, mask_token_id: int, options: DrafterOptions
) -> BlockConfig:
    """Size a block network like the target's layers."""
    dspark = name == "dspark"
    return BlockConfig(
        attention=target.config.attention,
        num_layers=options.num_layers,
        intermediate_size=target.config.intermediate_size,
        vocab_size=target.config.vocab_size,
        block_size=options.block if dspark else options.block + 1,
        mask_token_id=mask_token_id,
        target_layer_ids=options.target_layers
        or spread_layers(target.config.num_layers, options.num_layers),
        sample_from_anchor=dspark,
        markov_rank=options.markov_rank if dspark else 0,
        confidence_head=dspark,
        architecture="DSparkDraftModel" if dspark else "DFlashDraftModel",
    )


def spread_layers(num_layers: int, count: int) -> tuple[int, ...]:
    """Spread `count` of a target's layers evenly from the second to the last but two."""
    if count == 1 or num_layers < 5:
        return (num_layers // 2,)
    last = num_layers - 3
    return tuple(dict.fromkeys(round(1 + i * (last - 1) / (count - 1)) for i in range(count)))


def low_middle_high(num_layers: int) -> tuple[int, ...]:
    """Give the layers that EAGLE-3 takes of a deep target; of a flat one ends and middle."""
    if num_layers < 7:
        return (0, (num_layers - 1) // 2, num_layers - 1)
    return (1, num_layers // 2 - 1, num_layers - 4)


def _mask_token(tokenizer: Tokenizer, options: DrafterOptions) -> int:
    found = options.mask_token_id
    found = tokenizer.token_to_id(UNUSED_BYTE) if found is None else found
    if found is None:
        raise SystemExit(
            "--mask-token-id: the tokenizer has no token of byte 255; give an unused id"
        )
    return found


def _read_corpus(options: DrafterOptions) -> Corpus:
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
    say(f"corpus: {len(corpus.train)} files, {time.monotonic() - started:.1f} s")
    return corpus


def _windows(sources: Any, tokenizer: Tokenizer, options: DrafterOptions) -> TokenWindows:
    """Put all tokens on the device; a window has one token more than rows are drafted from."""
    started = time.monotonic()
    dtype = np.int16 if tokenizer.get_vocab_size() <= 32767 else np.int32
    tokens = encode_files(tokenizer, [file.text for file in sources], dtype)
    say(f"tokens: {len(tokens) / 1e6:.2f} M, {time.monotonic() - started:.1f} s")
    return TokenWindows(torch.from_numpy(tokens).to(options.device), options.window + 1)


def _environment(options: DrafterOptions) -> dict[str, Any]:
    on_gpu = options.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(options.device) if on_gpu else platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "options": {
            name: str(value)
            for name, value in vars(options).items()
            if name not in ("out", "target")
        },
    }


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def _write(report: dict[str, Any], curves: Curves, out: Path) -> None:
    """Write the report, then the plot: what goes wrong with a plot costs the plot alone."""
    (out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    try:
        held_out = report["training"]["held_out"]
        draw_training(curves, held_out, report.get("evaluation", {}), out / "curves.png")
    except Exception as error:  # a drawing library may raise anything, training must not be lost
        say(f"curves.png was not drawn: {error}")


if __name__ == "__main__":
    main()
