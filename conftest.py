"""Test session set-up that must happen before anything imports torch or Triton."""

from __future__ import annotations

import os

# Workers share the machine; must be set before torch starts its thread pool.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")

import hypothesis
import pytest
import torch

HAS_GPU = torch.cuda.is_available()

# Triton decides when a kernel is decorated, so this precedes every import of specmla.kernels.
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"

hypothesis.settings.register_profile("ci", derandomize=True, deadline=None)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=1000)
hypothesis.settings.load_profile("ci")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if HAS_GPU:
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, torch sees none")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
