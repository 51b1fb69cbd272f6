"""The commands `grid` (measure many points, in pieces) and `plot` (draw and judge the result)."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specmla.bench import grid_plot, plot
from specmla.bench.arguments import (
    add_common,
    add_dims,
    add_peers,
    at_least,
    check_outputs,
    dtype_of,
    peer_files,
)
from specmla.bench.ceilings import Ceilings, measure_ceilings
from specmla.bench.environment import collect_env
from specmla.bench.grid import device_is_lost, failed_point, measure_point
from specmla.bench.ledger import Ledger
from specmla.bench.points import EVERYWHERE, SOMEWHERE, SUBSETS, Point, providers_of, select
from specmla.bench.pool import PagePool
from specmla.bench.provider import Provider, get_provider
from specmla.bench.report import FAILED, WRONG, GridRow
from specmla.bench.targets import target_table
from specmla.bench.timing import method
from specmla.bench.verify import check_batch
from specmla.bench.within_budget import within_budget
from specmla.bench.workload import COLD_FACTOR, GridOptions, make_pool
from specmla.errors import ArgumentError
from specmla.mask import DraftMask


def add_grid(commands: Any) -> None:
    """Add the command `grid`."""
    parser = commands.add_parser(
        "grid",
        help="many points, checked and timed against other kernels, resumable",
        epilog="Points that FILE has are skipped; it is written after each point. Named targets "
        "come first, then a coarse sub-grid, then the rest.",
    )
    parser.set_defaults(run=_grid)
    add = parser.add_argument
    add("--budget", type=at_least(1), default=480, help="stop within so many seconds (480)")
    add("--providers", nargs="+", default=[*EVERYWHERE, *SOMEWHERE], metavar="NAME")
    add("--only", nargs="+", default=[], choices=list(SUBSETS), metavar="SUBSET",
        help=f"of {', '.join(SUBSETS)}")  # fmt: skip
    add("--again", action="store_true", help="measure points that FILE has as well")
    add("--batch", nargs="+", metavar="SPEC", help="these batches instead of the grid")
    add("--heads", nargs="+", type=at_least(1), default=[16], help="with --batch (default 16)")
    add("--mask", choices=[m.value for m in DraftMask], default="causal", help="with --batch")
    add("--page-size", type=at_least(1), default=64, help="with --batch (default 64)")
    add_dims(parser)
    add_peers(parser)
    add_common(parser)


def add_plot(commands: Any) -> None:
    """Add the command `plot`."""
    parser = commands.add_parser("plot", help="draw a grid's file and judge it by the targets")
    parser.set_defaults(run=_plot)
    parser.add_argument("grid", type=Path, metavar="GRID.json")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="for the PNG files")


@dataclass(frozen=True)
class Run:
    """One run over points that are still to be measured."""

    points: Sequence[Point]
    providers: Sequence[Provider]
    wanted: tuple[str, ...]
    options: GridOptions
    pool: PagePool
    ceilings: Ceilings
    number: int

    def measure(self, point: Point) -> list[GridRow]:
        """Measure one point with the providers that are meant to be there."""
        names = providers_of(point, self.wanted)
        here = [p for p in self.providers if p.name in names]
        try:
            rows = measure_point(point, here, self.pool, self.ceilings, self.options)
        except RuntimeError as error:
            rows = failed_point(point, here, self.options, error)
        return [dataclasses.replace(row, run=self.number) for row in rows]


def _grid(args: argparse.Namespace, words: Sequence[str]) -> int:
    start = time.monotonic()
    providers = [get_provider(name, peer_files(args)) for name in args.providers]
    check_outputs(args.json)
    ledger = Ledger(args.json)
    points = _points(args)
    custom = args.batch is not None
    left = [p for p in points if args.again or not _is_done(ledger, p, providers, custom=custom)]
    print(f"{len(points)} points, {len(points) - len(left)} of them measured before", flush=True)
    if not left:
        return 0
    options = GridOptions(dtype_of(args), args.rank, args.rope, args.device, args.seed)
    found = measure_ceilings(options.device, options.dtype)
    env = collect_env(words) | {"mode": method(options.device, COLD_FACTOR), "ceilings": found}
    run = Run(
        points=left,
        providers=providers,
        wanted=tuple(args.providers),
        options=options,
        pool=make_pool(left, options),
        ceilings=Ceilings(found["copy_gbps"], found["gemm_tflops"]),
        number=ledger.begin(env),
    )
    return _measure_all(run, ledger, args.budget, start)


def _measure_all(run: Run, ledger: Ledger, budget_s: float, start: float) -> int:
    done, wrong = 0, 0
    for point in within_budget(run.points, budget_s, time.monotonic, start):
        before = time.monotonic()
        rows = run.measure(point)
        ledger.add(dataclasses.asdict(row) for row in rows)
        done += 1
        wrong += sum(row.status == WRONG for row in rows)
        print(_line(point, rows, time.monotonic() - before), flush=True)
        if device_is_lost(run.options.device):
            print("the device is lost: start again, measured points are kept", file=sys.stderr)
            return 1
    took = time.monotonic() - start
    print(f"{done} points in {took:.1f} s, {len(run.points) - done} left")
    return 1 if wrong else 0


def _is_done(ledger: Ledger, point: Point, providers: Sequence[Provider], *, custom: bool) -> bool:
    wanted = tuple(p.name for p in providers)
    names = wanted if custom else providers_of(point, wanted)
    here = [p for p in providers if p.name in names]
    return all(ledger.has(point, p.name, present=not p.missing()) for p in here)


def _points(args: argparse.Namespace) -> list[Point]:
    if args.batch is None:
        return select(tuple(args.only))
    if args.only:
        raise ArgumentError("--only is given with --batch, accepted is one of them")
    for batch in args.batch:
        check_batch(batch, DraftMask(args.mask))
    return [Point(b, h, args.mask, args.page_size) for b in args.batch for h in args.heads]


def _line(point: Point, rows: Sequence[GridRow], seconds: float) -> str:
    cells = [
        f"{row.provider} {row.status if row.us is None else f'{row.us:.1f} µs'}" for row in rows
    ]
    name = f"{point.batch} {point.heads} heads {point.mask} page {point.page_size}"
    lines = [f"{name}: {', '.join(cells)} ({seconds:.2f} s)"]
    odd = [row for row in rows if row.status in (WRONG, FAILED)]
    return "\n".join(lines + [f"    {row.provider}: {row.reason}" for row in odd])


def _plot(args: argparse.Namespace, words: Sequence[str]) -> int:
    if not args.grid.is_file():
        raise ArgumentError(f"{args.grid} is not there, accepted is the file of a grid")
    if not args.out.is_dir():
        raise ArgumentError(f"--out is {args.out}, accepted is an existing folder")
    if not plot.is_available():
        raise ArgumentError(plot.HINT)
    document = Ledger(args.grid).document()
    for path in grid_plot.draw_all(document, args.out):
        print(path)
    print(target_table(document))
    return 0
