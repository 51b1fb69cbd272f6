"""The keys of calls against Triton's own answer: what machine code a call needs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

pytest.importorskip("triton")

from triton import JITFunction
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.language import constexpr
from triton.runtime.jit import create_function_from_signature

from specmla.kernels.specialise import KernelSignature
from specmla.kernels.tensor_box import BoxedTensor, tensor_box


def _body(x, anywhere, any_value, y, N: constexpr, FLAG: constexpr):  # type: ignore[no-untyped-def]
    pass


KERNEL = JITFunction(
    _body, do_not_specialize=["any_value"], do_not_specialize_on_alignment=["anywhere"]
)
SIGNATURE = KernelSignature(KERNEL)
BINDER = create_function_from_signature(
    KERNEL.signature, KERNEL.params, CUDABackend(GPUTarget("cuda", 90, 32))
)
POOL = {
    dtype: torch.zeros(4096, dtype=dtype)
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.int64)
}
BOXES = [
    tensor_box(block, NVMMASharedLayout(swizzle, 16, 3))
    for block in ((1, 64, 64), (1, 16, 64))
    for swizzle in (64, 128)
]
HOSTILE_INTS = [
    *(0, 1, -1, 2, 15, 16, 17, 32, -16, 511, 512, 576),
    *(2**31 - 16, 2**31 - 1, 2**31, 2**31 + 16, -(2**31), -(2**31) - 1, 2**62, 2**63 - 1, 2**63),
]


def views() -> st.SearchStrategy[Any]:
    """Tensors at any element of their memory, strided and empty ones too."""
    return st.builds(
        lambda dtype, first, count, step: POOL[dtype][first : first + count * step : step],
        st.sampled_from(list(POOL)),
        st.integers(0, 40),
        st.integers(0, 3),
        st.integers(1, 3),
    )


def boxed() -> st.SearchStrategy[Any]:
    return st.builds(
        lambda dtype, page, box: BoxedTensor(POOL[dtype].view(-1, 16, 64)[page:], box),
        st.sampled_from([torch.bfloat16, torch.float16]),
        st.integers(0, 2),
        st.sampled_from(BOXES),
    )


ARGUMENT = st.one_of(
    st.sampled_from(HOSTILE_INTS), st.floats(width=32), st.none(), views(), boxed()
)
CALL = st.tuples(ARGUMENT, ARGUMENT, ARGUMENT, ARGUMENT)


def our_key(args: tuple[Any, ...]) -> object:
    pattern = SIGNATURE.pattern(tuple(map(type, args)))
    assert pattern is not None
    return tuple(map(type, args)), pattern.read(args)[0]


def triton_key(args: tuple[Any, ...]) -> object:
    plain = [a.descriptor() if isinstance(a, BoxedTensor) else a for a in args]
    return BINDER(*plain, N=64, FLAG=True)[1]


@given(CALL, CALL, st.sets(st.integers(0, 3)))
@example((16, 16, 16, 16), (17, 16, 16, 16), set())
@example((1, 1, 1, 1), (2, 1, 1, 1), set())
def test_keys_are_equal_just_where_triton_compiles_once(
    first: tuple[Any, ...], second: tuple[Any, ...], shared: set[int]
) -> None:
    second = tuple(first[i] if i in shared else second[i] for i in range(4))
    assert (our_key(first) == our_key(second)) == (triton_key(first) == triton_key(second))


@pytest.mark.parametrize("place", range(4))
def test_every_pair_of_hostile_values_at_every_place(place: int) -> None:
    memory = POOL[torch.bfloat16]
    values = [*HOSTILE_INTS, None, 1.0, *(memory[i:] for i in range(17)), POOL[torch.float16]]
    calls = [tuple(v if i == place else memory for i in range(4)) for v in values]
    ours, theirs = [our_key(c) for c in calls], [triton_key(c) for c in calls]
    for i in range(len(calls)):
        assert [ours[i] == k for k in ours] == [theirs[i] == k for k in theirs], calls[i]


def test_a_key_holds_no_tensor_and_its_arguments_have_addresses() -> None:
    pattern = SIGNATURE.pattern((torch.Tensor, torch.Tensor, int, type(None)))
    assert pattern is not None
    x, y = POOL[torch.float32][3:], POOL[torch.int32]
    key, flat = pattern.read((x, y, 7, None))
    assert flat == [x.data_ptr(), y.data_ptr(), 7, None]
    assert isinstance(key, tuple)
    assert not any(isinstance(part, torch.Tensor) for part in key)


def test_a_host_tensor_has_another_key_than_one_of_the_device() -> None:
    class OnDevice(torch.Tensor):
        is_cuda = True

    pattern = SIGNATURE.pattern((torch.Tensor,) * 4)
    assert pattern is not None
    x = POOL[torch.float32]
    moved = x.as_subclass(OnDevice)
    assert pattern.read((x, x, x, x))[0] != pattern.read((x, x, x, moved))[0]


@pytest.mark.parametrize(
    "argument", [True, "16", [1, 2], torch.zeros(2).as_subclass(type("Other", (torch.Tensor,), {}))]
)
def test_other_types_are_left_to_triton(argument: object) -> None:
    assert SIGNATURE.pattern((int, int, int, type(argument))) is None


def test_names_of_constexprs_have_to_be_complete() -> None:
    assert SIGNATURE.names_constexprs({"N": 1, "FLAG": True, "num_warps": 4})
    assert not SIGNATURE.names_constexprs({"N": 1, "num_warps": 4})
    assert not SIGNATURE.names_constexprs({"N": 1, "FLAG": True, "y": 4})


def test_signatures_that_cant_be_told_apart_say_why() -> None:
    def mixed(N: constexpr, x):  # type: ignore[no-untyped-def]
        pass

    def typed(x, y, N: constexpr):  # type: ignore[no-untyped-def]
        pass

    typed.__annotations__["y"] = "*fp32"
    for body, word in ((mixed, "stands before"), (typed, "'y'")):
        signature = KernelSignature(JITFunction(body))
        assert word in signature.problems[0]
        assert signature.pattern((int,) * len(signature.rules)) is None
