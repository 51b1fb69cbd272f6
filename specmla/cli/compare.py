"""`specmla compare`: drafters x rules on held-out prompts, with intervals."""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from specmla.bench.compare import cases_of, compare
from specmla.bench.compare_prompts import held_out_prompts
from specmla.bench.compare_run import RunSettings
from specmla.bench.environment import collect_env
from specmla.cli.checkpoint import load_tokenizer, parse_device, parse_dtype, use_one_thread
from specmla.cli.compare_drafters import contenders_of, draft_problems, labels_of
from specmla.cli.compare_offline import score_rows, write_recording
from specmla.cli.compare_table import comparison_rows, gain_lines, score_lines
from specmla.cli.named import ASSETS
from specmla.errors import require
from specmla.models.weights import load_checkpoint
from specmla.verify.accept import LOSSLESS

_WIDTH = 150


@dataclass(frozen=True)
class CompareOptions:
    """Options of the command.

    Attributes:
        drafts, rules, temperatures: by comma.
        target: a checkpoint's directory, or None for the shipped target.
        prompts: JSON file with a list of texts, or None for excerpts of held-out modules.
        num_prompts: how many of them.
        repeats: turns.
        settings: sizes and seeds of a run.
        json, plot: what is given besides the table.
        record, recording: a file of target states to write, or to score drafters on.
    """

    drafts: str
    rules: str
    temperatures: str
    target: Path | None
    prompts: Path | None
    num_prompts: int
    repeats: int
    settings: RunSettings
    device: str
    dtype: str
    json: bool
    plot: Path | None
    record: Path | None = None
    recording: Path | None = None


def run_compare(options: CompareOptions) -> int:
    """Compare and report; the exit code is 0."""
    rules, temperatures, texts = _checked(options)
    console = Console(stderr=options.json, soft_wrap=True)
    if not console.is_terminal:  # a file is as wide as the table
        console.width = _WIDTH
    device, dtype = parse_device(options.device), parse_dtype(options.dtype)
    use_one_thread(device)
    folder = ASSETS / "target" if options.target is None else options.target
    tokenizer = load_tokenizer(folder)
    target, _ = load_checkpoint(folder, device=device, dtype=dtype)
    settings = options.settings
    if options.recording is not None:
        rows = score_rows(options.recording, options.drafts, target, settings)
        _print_scores(rows, console, options.json)
        return 0
    prompts = _prompts(options, texts, tokenizer)
    if options.record is not None:
        write_recording(options.record, options.drafts, target, prompts, temperatures[0], settings)
        console.print(f"recording: {options.record}", markup=False)
        return 0
    longest = max(map(len, prompts)) + settings.max_tokens + settings.num_nodes + 1
    contenders = contenders_of(options.drafts, target, settings, longest)
    cases = cases_of(contenders, rules, temperatures)
    parts = -(-len(prompts) // settings.batch)
    runs = options.repeats * parts * (len(cases) + len(temperatures))
    with _progress(runs) as on_run:
        found = compare(target, prompts, cases, settings, options.repeats, on_run)
    report = {"env": collect_env(), "options": _provenance(options, folder, prompts), **found}
    console.print(comparison_rows(found["rows"], settings, len(prompts)))
    for line in gain_lines(found["gains"]):
        console.print(line, markup=False)
    if options.plot is not None:
        from specmla.bench.compare_plot import plot_comparison

        plot_comparison(found["rows"], options.plot)
        console.print(f"plot: {options.plot}", markup=False)
    if options.json:
        print(json.dumps(report))
    return 0


def _checked(options: CompareOptions) -> tuple[list[str], list[float], list[str]]:
    """Read rules, temperatures and texts; list all that is wrong before a model is loaded."""
    found, temperatures = draft_problems(options.drafts), list[float]()
    rules = [name.strip() for name in options.rules.split(",")]
    if foreign := [name for name in rules if name not in LOSSLESS]:
        found.append(f"rule has {foreign}, accepted are {sorted(LOSSLESS)}, separated by commas")
    for word in options.temperatures.split(","):
        try:
            temperatures.append(float(word))
        except ValueError:
            found.append(f"temperature has {word!r}, accepted are numbers, separated by commas")
    if any(not 0 <= t < float("inf") for t in temperatures):
        found.append(f"temperature is {options.temperatures!r}, accepted are values >= 0")
    path = options.plot
    if path is not None and (path.suffix.lower() != ".png" or not path.absolute().parent.is_dir()):
        found.append(f"plot is {str(path)!r}, accepted is a file *.png in a directory that exists")
    if options.record is not None and (options.recording or len(temperatures) > 1):
        found.append("record is set, accepted are one temperature and no recording with it")
    texts = [] if options.prompts is None else _read_texts(options.prompts, found)
    require(found, "compare")
    return rules, list(dict.fromkeys(temperatures)), texts


def _read_texts(path: Path, found: list[str]) -> list[str]:
    """Read a JSON list of texts; where it is none, `found` gets the reason."""
    accepted = "accepted is a JSON file in UTF-8 with a list of texts, none of them empty"
    try:
        texts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        found.append(f"prompts is {str(path)!r}, {accepted}: {error}")
        return []
    if not isinstance(texts, list) or not all(isinstance(t, str) and t for t in texts) or not texts:
        found.append(f"prompts is {str(path)!r}, {accepted}")
        return []
    for at, text in enumerate(texts):
        try:
            text.encode()
        except UnicodeEncodeError as error:  # half of an escaped pair, which no tokenizer knows
            found.append(f"prompts is {str(path)!r}, {accepted}: text {at}: {error}")
    return texts


def _prompts(options: CompareOptions, texts: list[str], tokenizer: Any) -> list[list[int]]:
    if options.prompts is None:
        return held_out_prompts(tokenizer, options.num_prompts, options.settings.seed)
    return [tokenizer.encode(text).ids for text in texts[: options.num_prompts]]


def _provenance(options: CompareOptions, folder: Path, prompts: list[list[int]]) -> dict[str, Any]:
    """Say what was run, without a path of this machine."""
    digest = hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:16]
    source = "held-out modules of the standard library" if options.prompts is None else "own"
    return {
        **asdict(options.settings),
        "target": "shipped" if options.target is None else folder.resolve().name,
        "drafts": labels_of(options.drafts),
        "repeats": options.repeats,
        "device": options.device,
        "dtype": options.dtype,
        "prompts": {
            "source": source,
            "python": platform.python_version(),
            "count": len(prompts),
            "tokens": sum(map(len, prompts)),
            "digest": digest,
        },
    }


def _print_scores(rows: list[dict[str, Any]], console: Console, as_json: bool) -> None:
    for line in score_lines(rows):
        console.print(line, markup=False)
    if as_json:
        print(json.dumps({"rows": rows}))


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    """Show what runs, on stderr, where that is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns,
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task("warming up", total=total)
        started = False

        def on_run(label: str) -> None:
            nonlocal started
            bar.update(task, description=label, advance=int(started))
            started = True

        yield on_run
