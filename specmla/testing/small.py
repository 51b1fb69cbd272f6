"""A few small hostile verify calls, one launch each, for compute-sanitizer.

    python -m specmla.testing.small --backend hopper
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 \
        python -m specmla.testing.small --backend hopper

A sanitizer slows every kernel some fifty times, so all but the backend's own kernels stays on the
host: the inputs are built there and copied, and the result is compared there.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from specmla.backends.base import AttentionBackend, AttentionOutput
from specmla.backends.select import BACKENDS, get_backend
from specmla.errors import UnsupportedError
from specmla.mask import DraftMask
from specmla.testing.case import CaseSpec, VerifyCase, make_case
from specmla.testing.check_case import CheckCase
from specmla.testing.check_cases import find_base
from specmla.testing.oracle import assert_matches_oracle


def small_cases(backend: AttentionBackend, device: torch.device | str) -> list[CheckCase]:
    """List the cases that a backend serves on `device`: each other form, a split, every mask."""
    where = torch.device(device)
    base = find_base(backend, where, backend.capabilities.dtypes)
    ragged = [(7, 65), (1, 64), (0, 9), (0, 0), (3, 2), (2, 130)]
    changes: dict[str, dict[str, object]] = {
        "ragged": {"batch": ragged, "page_gap": 64, "query_layout": "slice"},
        "decodes": {"batch": [(1, 1), (1, 65), (1, 0)]},
        "split": {"batch": [(4, 1025)]},
        "heads-12-tree": {
            "batch": ragged,
            "num_heads": 12,
            "mask": DraftMask.TREE,
            "windows": True,
        },
        "heads-126": {"batch": [(2, 65), (1, 63)], "num_heads": 126},
        "page-16": {"batch": ragged, "page_size": 16, "windows": True},
    }
    made = [
        CheckCase(name, dataclasses.replace(base, **change))  # type: ignore[arg-type]
        for name, change in changes.items()
    ]
    return [case for case in made if not backend.problems(case.need())]


def run_small(backend: AttentionBackend, spec: CaseSpec) -> None:
    """Build a case on the host, run it once on the device of `spec`, compare on the host.

    Raises:
        AssertionError: the result is outside the error budget.
    """
    here = make_case(**vars(dataclasses.replace(spec, device="cpu")))
    got = _send(here, spec.device).attend(backend)
    if got.out.is_cuda:
        torch.cuda.synchronize(got.out.device)
    assert_matches_oracle(AttentionOutput(got.out.cpu(), got.lse.cpu()), here, here.tables())


def _send(case: VerifyCase, device: torch.device | str) -> VerifyCase:
    """Copy a case with its strides and the NaN between its rows, one copy a tensor."""
    return dataclasses.replace(
        case,
        spec=dataclasses.replace(case.spec, device=device),
        q_latent=_copy(case.q_latent, device),
        q_rope=_copy(case.q_rope, device),
        latent_cache=_copy(case.latent_cache, device),
    )


def _copy(view: Tensor, device: torch.device | str) -> Tensor:
    size = view.untyped_storage().nbytes() // view.element_size()
    whole = view.as_strided((size,), (1,), 0).to(device)
    return whole.as_strided(view.shape, view.stride(), view.storage_offset())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases; gives 1 if a result is wrong or no case ran, 2 if none can, else 0."""
    parser = argparse.ArgumentParser(prog="python -m specmla.testing.small", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--backend", required=True, choices=sorted(BACKENDS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", default="", help="run only cases whose name contains this")
    given = parser.parse_args(arguments)
    backend = get_backend(given.backend)
    wrong = 0
    try:
        cases = [case for case in small_cases(backend, given.device) if given.only in case.name]
    except UnsupportedError as error:
        print(error, file=sys.stderr)
        return 2
    for case in cases:
        try:
            run_small(backend, case.spec)
        except AssertionError as error:
            wrong += 1
            print(f"WRONG {case.name}: {error}\n    {case!r}", flush=True)
        else:
            print(f"right {case.name}", flush=True)
    print(f"{given.backend} on {given.device}: {len(cases) - wrong} of {len(cases)} cases right")
    return int(wrong > 0 or not cases)


if __name__ == "__main__":
    sys.exit(main())
