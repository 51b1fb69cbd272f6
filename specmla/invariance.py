"""Batch-invariant serving: what has it, what is in the way, and the switch.

With it the bits of a request don't depend on its batch mates, on how its prompt is cut into steps
or chunks, nor on whether the prompt's prefix was found in the cache:

- Products of activations and weights run in one tile form (`kernels.matmul`), norms a program a row
  (`kernels.norm`). Routed experts, by kernel or in the loop, are chosen by stable sorts, run in
  tiles of one form and summed in the order of choice (`kernels.expert_sum`). Rotation, activation
  functions, residuals and quantisation of rows treat each element, or the largest of a group, by
  itself.
- Verify rows attend by a backend that was built `batch_invariant`.
- Prompt rows and extends of any length attend by MHA to all their keys from the first one on, new
  rows included, by one running softmax over blocks at absolute multiples (`kernels.fold`). Chunks
  of a workspace carry that state on; they are not merged, which would round by where they end.
  `BatchRules(batch_invariant=True)` lays a step out so.

A verify and a prompt round differently: rows that a verify wrote are not those, to the bit, that a
prompt of the same tokens would write. `BlockManager(prompts_only=True)` shares none of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from specmla.backends.base import AttentionBackend
from specmla.cache.latent import LatentCache
from specmla.errors import UnsupportedError
from specmla.metadata import StepMetadata
from specmla.row_local import Linear, RMSNorm, kernel_problems

PARTS = (Linear, RMSNorm, nn.Embedding)
"""Modules with weights that have such results, beside those with an attribute `batch_invariant`."""


def make_batch_invariant(module: nn.Module) -> None:
    """Switch a layer or a model, on its device and in its dtype, to batch-invariant results.

    A model that was switched is wired by `build_step` to a backend and rules that go with it.

    Raises:
        UnsupportedError: a device, a dtype or a part of the module that has no such results; all
            reasons are listed and nothing has changed.
    """
    found = module_problems(module)
    if found:
        raise UnsupportedError("make_batch_invariant", found)
    switch(module)


def switch(module: nn.Module) -> None:
    """Switch all parts on, unchecked."""
    for part in module.modules():
        if hasattr(part, "batch_invariant"):
            vars(part)["batch_invariant"] = True


def module_problems(module: nn.Module) -> list[str]:
    """List why a module can't have batch-invariant results where it is."""
    if not isinstance(module, nn.Module):
        return [f"module is {module!r}, accepted is a torch.nn.Module"]
    weights = {(w.device, w.dtype): None for w in module.parameters() if w.is_floating_point()}
    found = [text for device, dtype in weights for text in kernel_problems(device, dtype)]
    by_kind: dict[str, list[str]] = {}
    for name, part in module.named_modules():
        has_it = isinstance(part, PARTS) or hasattr(type(part), "batch_invariant")
        if part._parameters and not has_it:
            by_kind.setdefault(type(part).__name__, []).append(name or "the module")
    kinds = ", ".join(f"{kind.__module__}.{kind.__name__}" for kind in PARTS)
    for kind, names in by_kind.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        found.append(f"{names[0]}{more} is a {kind}, accepted are {kinds}")
    return list(dict.fromkeys(found))


def switch_problems(module: nn.Module) -> list[str]:
    """List which parts are switched otherwise than the module, and, if it is switched, what of it
    can't be by now: parts may have been put in, cast or moved since."""
    wanted = bool(vars(module).get("batch_invariant", False))
    others = [
        name
        for name, part in module.named_modules()
        if getattr(part, "batch_invariant", wanted) is not wanted
    ]
    if not others:
        return module_problems(module) if wanted else []
    more = f" and {len(others) - 1} more" if len(others) > 1 else ""
    return [
        f"{others[0]}{more} have batch_invariant {not wanted}, the model {wanted}; accepted is one "
        "for all: make_batch_invariant(model) or a model of which nothing was switched"
    ]


def step_problems(
    hidden: Tensor,
    cache: LatentCache,
    metadata: StepMetadata,
    backend: AttentionBackend,
    fused_store: bool,
) -> list[str]:
    """List why a step of a batch-invariant layer would not be so."""
    return list(_step_problems(hidden, cache, metadata, backend, fused_store))


def _step_problems(
    hidden: Tensor,
    cache: LatentCache,
    metadata: StepMetadata,
    backend: AttentionBackend,
    fused_store: bool,
) -> Iterator[str]:
    if hidden.device.type != "cuda":
        yield from kernel_problems(hidden.device, hidden.dtype)
    if not backend.batch_invariant:
        name = backend.capabilities.name
        yield f"backend {name!r} has batch_invariant False, the layer's is True"
    if metadata.prefill is not None and not metadata.prefill.folded:
        yield (
            "the prompt part is not folded, accepted are steps of a builder with "
            "BatchRules(batch_invariant=True)"
        )
    if fused_store and cache.impl == "torch":
        yield "fused_store is True with a cache of impl 'torch', accepted is False or 'triton'"
    if torch.compiler.is_compiling():
        yield "the step is being compiled, accepted are eager and captured ones"
