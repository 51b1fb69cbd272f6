"""Compiles the forms of `bench accept` in processes side by side; they share Triton's cache."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.process import BaseProcess

import torch

from specmla.bench.accept import fused
from specmla.bench.accept_forms import AcceptOptions, Form, make_batch, make_data
from specmla.errors import SpecMLAError
from specmla.verify.fused import check_impl
from specmla.verify.rules.token_level import token_level


def warm_forms(forms: Sequence[Form], options: AcceptOptions) -> None:
    """Run the kernels of each form once, at the sizes that are timed: they compile by these."""
    for form in forms:
        fused(form.rule, make_batch(form, options), make_data(form, options, options.seed))
    if options.device.type == "cuda":
        torch.cuda.synchronize(options.device)


def warm_in_processes(
    forms: Sequence[Form], options: AcceptOptions, processes: int, limit_s: float
) -> list[str]:
    """Run forms whose kernels differ once each, spread over some processes.

    Args:
        forms: that will be timed.
        options: as they will be timed.
        processes: most at a time.
        limit_s: processes that take longer are ended.

    Returns:
        What went wrong; the forms compile when they are timed then.
    """
    try:
        check_impl("triton", token_level, options.device)
    except SpecMLAError as error:
        return [f"nothing is compiled: {error}"]
    different = list({form.compiled: form for form in forms if not form.is_lossy}.values())
    context = multiprocessing.get_context("spawn")
    shares = [different[i::processes] for i in range(min(processes, len(different)))]
    started: list[BaseProcess] = [
        context.Process(target=warm_forms, args=(share, options), daemon=True) for share in shares
    ]
    for process in started:
        process.start()
    end, found = time.monotonic() + limit_s, []
    for process, share in zip(started, shares, strict=True):
        process.join(max(0.0, end - time.monotonic()))
        names = ", ".join(" ".join((f.shape, f.rule, f.sampling, f.q)) for f in share)
        if process.is_alive():
            process.terminate()
            process.join()
            found.append(f"not compiled within {limit_s:.0f} s: {names}")
        elif process.exitcode:
            found.append(f"a process that compiled ended with {process.exitcode}: {names}")
    return found
