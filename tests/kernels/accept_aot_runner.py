"""Compile the acceptance kernels ahead of time, without a device.

    python tests/kernels/accept_aot_runner.py REPORT.json

Writes the list that `aot_runner.py` writes. Every form for Hopper, the widest ones for the others.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from aot_runner import TARGETS, measure
from triton.compiler import ASTSource

from specmla.kernels.accept_forms import aot_variants

WIDEST = 4
"""Forms that are compiled for every architecture: the first ones."""

if __name__ == "__main__":
    built = []
    for arch in TARGETS:
        for i, (kernel, signature, constants, options) in enumerate(aot_variants()):
            if i < WIDEST or arch == "sm_90":
                label = f"{kernel.__name__} {arch} form {i}"
                at = {name: (n,) for n, name in enumerate(kernel.arg_names)}
                # As launches are: aligned tensors, and a vocabulary that 16 divides.
                kinds = signature.items()
                even = [name for name, kind in kinds if kind[0] == "*" or name == "W"]
                hints = {at[name]: [["tt.divisibility", 16]] for name in even}
                fixed = {at[name]: value for name, value in constants.items()}
                source = ASTSource(kernel, signature, fixed, hints)
                built.append(measure(label, arch, source, dict(options)))
    Path(sys.argv[1]).write_text(json.dumps(built))
