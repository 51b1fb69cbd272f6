"""`check_backend`: the hostile cases that any attention backend should survive."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch

from specmla.backends.base import AttentionBackend
from specmla.errors import SpecMLAError, require
from specmla.testing.check_case import CheckCase
from specmla.testing.check_cases import derive_cases, find_base
from specmla.testing.check_report import CheckReport, Failure, Skip
from specmla.testing.examination import Examination
from specmla.testing.far_pages import NoRoomError
from specmla.testing.interpreted_dots import dots_by_row
from specmla.testing.refusals import Refusal, check_refusal, derive_refusals

REPEATS = 20
THOROUGH_REPEATS = 1000


def check_backend(
    backend: AttentionBackend,
    *,
    device: torch.device | str,
    dtypes: Sequence[torch.dtype] | None = None,
    thorough: bool = False,
    only: str = "",
    report: Callable[[str], None] | None = None,
) -> CheckReport:
    """Run a backend through hostile verify calls derived from what it declares.

    NaN in every slot, gap and output that nobody wrote, absurd ids in unused table cells, permuted
    and far pages, odd head counts, ragged rows, empty requests, every declared mask, window, page
    size and dtype; each row against a decode, repeats to the bit, one plan for several layers; and
    refusals of what it does not declare. One that was built for a `cache_format` is run over rows
    of that format, in its dims and dtype. Results are held to the error budget against float64 of
    `specmla.testing.budget`; where the backend is built batch-invariant (its attribute
    `batch_invariant`), rows and requests alone must agree with the batch to the bit.

    Args:
        backend: with its `capabilities`.
        device: where to run.
        dtypes: some of the declared ones; all of them if None. The first gets every case.
        thorough: every case in every dtype, the products of masks, page sizes and heads, and
            1000 repeats instead of 20; many more forms to compile.
        only: run only the cases whose name this regular expression is found in.
        report: called with a line after each case (`print`, say).

    Returns:
        What passed, failed or was skipped; call its `raise_if_failed`.

    Raises:
        ArgumentError: dtypes that are not declared.
        UnsupportedError: the backend can't run on `device` at all; every reason is listed.
    """
    where = torch.device(device)
    declared = backend.capabilities.dtypes
    wanted = tuple(declared if dtypes is None else dtypes)
    unknown = [str(d) for d in wanted if d not in declared]
    require(
        [f"dtypes has {unknown}, accepted are {[str(d) for d in declared]}"]
        if unknown or not wanted
        else [],
        "check_backend",
    )
    items: list[CheckCase | Refusal] = [
        *derive_cases(backend, device=where, dtypes=wanted, thorough=thorough),
        *derive_refusals(backend, find_base(backend, where, wanted)),
    ]
    found = CheckReport(backend.capabilities.name, str(where))
    began = time.perf_counter()
    broken = ""
    for item in (item for item in items if re.search(only, item.name)):
        if broken:
            line = _skip(found, item.name, f"the device failed in {broken}")
        else:
            line = _run(backend, item, THOROUGH_REPEATS if thorough else REPEATS, found)
        if line.startswith("FAILED") and not _is_usable(where):
            broken = item.name
        if report is not None:
            report(line)
    found.seconds = time.perf_counter() - began
    return found


def _run(
    backend: AttentionBackend, item: CheckCase | Refusal, repeats: int, found: CheckReport
) -> str:
    """Run one case into the report; gives a line about it."""
    name, began = item.name, time.perf_counter()
    try:
        if isinstance(item, Refusal):
            check_refusal(backend, item)
        else:
            reasons = backend.problems(item.need())
            if reasons:
                return _skip(found, name, "; ".join(reasons))
            examined = Examination(backend, item, repeats)
            with dots_by_row() if examined.is_invariant else nullcontext():
                examined.run()
    except NoRoomError as error:
        return _skip(found, name, str(error))
    except AssertionError as error:
        message = str(error)
    except SpecMLAError as error:
        message = f"refused, though problems() lists nothing against it: {error}"
    except Exception as error:  # a backend may raise anything, and the other cases matter too
        message = f"raised {type(error).__name__}: {error}"
    else:
        found.passed.append(name)
        return f"passed {name} in {time.perf_counter() - began:.2f} s"
    found.failures.append(Failure(name, repr(item), message))
    return f"FAILED {found.failures[-1]}"


def _skip(found: CheckReport, name: str, reason: str) -> str:
    found.skipped.append(Skip(name, reason))
    return f"skipped {name}: {reason}"


def _is_usable(device: torch.device) -> bool:
    """Tell whether the device still computes: an illegal access ends a CUDA context for good."""
    if device.type != "cuda":
        return True
    try:
        torch.zeros(1, device=device).item()
    except RuntimeError:
        return False
    return True
