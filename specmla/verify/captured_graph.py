"""Something that runs again over the same buffers: a CUDA graph, or on a CPU the call itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")
WARM_UP_CALLS = 2


def record(call: Callable[[], T], device: torch.device, pool: Any = None) -> Callable[[], T]:
    """Capture `call` and give what replays it; both give what `call` gave, in the same memory.

    On CUDA it is run a few times first, since a capture can neither compile kernels nor reserve
    scratch. The tensors that a replay gives are overwritten by the next one, of any graph that
    shares the pool. On a CPU there are no graphs: a replay calls the function again.

    Args:
        call: reads its inputs from buffers that stay.
        device: where it runs.
        pool: of `torch.cuda.graph_pool_handle()`, shared by graphs that never run at once.

    Raises:
        RuntimeError: it does what no graph can hold, such as waiting for the device.
    """
    if device.type != "cuda":
        call()
        return call
    with torch.cuda.device(device):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP_CALLS):
                call()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            held = call()

    def replay() -> T:
        graph.replay()
        return held

    return replay
