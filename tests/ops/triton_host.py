"""Triton's kernels on a machine without a GPU: interpreted, or compiled for chips that are elsewhere.

Both stand in for `jax_triton`, which needs CUDA: `triton_call` is replaced, so that what is run or compiled is what the
ops launch, with their own tiles and constants.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import inspect
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

HAVE_TRITON = importlib.util.find_spec("triton") is not None
with_triton = pytest.mark.skipif(not HAVE_TRITON, reason="triton is not installed")
hosted = pytest.mark.skipif(
    not HAVE_TRITON or jax.default_backend() == "gpu", reason="for Triton's interpreter, which needs a CPU"
)
NAMES = {"float32": "fp32", "bfloat16": "bf16", "int32": "i32", "uint32": "u32", "bool": "i1"}
_ONE_AT_A_TIME = threading.Lock()  # each device of a mesh has a thread, and what is patched below is everyone's
# What interpreted kernels asked for ahead of time, for tests to look at: (which of their inputs, bytes from its start).
ASKED: list[tuple[int, int]] = []
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}  # that one program may have, by compute capability
POISON = {"f": np.nan, "V": np.nan, "i": 0x7BAD0BAD}  # of outputs before a kernel writes them; V: bfloat16


@dataclasses.dataclass(frozen=True)
class Launch:
    """One call of a kernel: `arrays` and `out` shapes, `aliases` from inputs to outputs, `constants` by name."""

    kernel: Any
    arrays: tuple[jax.ShapeDtypeStruct, ...]
    out: tuple[jax.ShapeDtypeStruct, ...]
    grid: tuple[int, ...]
    aliases: dict[int, int]
    settings: dict[str, int]
    constants: dict[str, Any]

    def compile(self, capability: int) -> Any:
        """The kernel's machine code for chips of that compute capability (80: 8.0)."""
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        pointers = [f"*{NAMES[str(x.dtype)]}" for x in (*self.arrays, *self.out)]
        names = list(inspect.signature(self.kernel.fn).parameters)
        signature = dict(zip(names, pointers, strict=False)) | dict.fromkeys(self.constants, "constexpr")
        attributes: Any = {(i,): [["tt.divisibility", 16]] for i in range(len(pointers))}
        source = ASTSource(self.kernel, signature, self.constants, attributes)
        return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=self.settings)

    def run(self, *arrays: Any) -> tuple[np.ndarray, ...]:
        """What Triton's interpreter makes of the kernel."""
        given = [np.array(x) for x in arrays]  # copies: what an output may write to
        made = [np.full(x.shape, POISON[np.dtype(x.dtype).kind], x.dtype) for x in self.out]
        for taken, by in self.aliases.items():
            made[by] = given[taken]
        addresses = _interpret(self.kernel, [_pointer(x) for x in (*given, *made)], self.grid, self.constants)
        ASKED.extend(_within_one(given, int(address)) for address in addresses)
        return tuple(made)


def _within_one(arrays: Sequence[np.ndarray], address: int) -> tuple[int, int]:
    """Which of the arrays holds it, and where."""
    for i, array in enumerate(arrays):
        if 0 <= address - array.ctypes.data < array.nbytes:
            return i, address - array.ctypes.data
    raise AssertionError("a kernel asks for what lies in none of its inputs")


def _pointer(array: np.ndarray) -> Any:
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    kind = tl.pointer_type(tl.str_to_ty(NAMES[str(array.dtype)], None))
    return tl.tensor(TensorHandle(np.array([array.ctypes.data], np.uint64), kind), kind)


def _interpret(
    kernel: Any, pointers: Sequence[Any], grid: tuple[int, ...], constants: dict[str, Any]
) -> list[np.uint64]:
    """Triton decides at import whether functions are interpreted; here they are while this runs.

    Returns the addresses that were asked for ahead of time.
    """
    import triton.language as tl
    from triton.runtime import interpreter
    from triton.runtime.interpreter import GridExecutor, InterpretedFunction, InterpreterBuilder, _patch_lang

    class Executor(GridExecutor):
        """Takes pointers, where the original takes torch's tensors."""

        def _init_args_hst(self, args_dev: Any, kwargs: Any) -> Any:
            return args_dev, kwargs

        def _restore_args_dev(self, args_dev: Any, args_hst: Any, kwargs: Any, kwargs_hst: Any) -> None:
            pass

    asked: list[np.uint64] = []
    own, dot = InterpretedFunction(kernel.fn), InterpreterBuilder.create_dot
    with _ONE_AT_A_TIME, contextlib.ExitStack() as stack:
        stack.enter_context(np.errstate(all="ignore"))  # NaN and infinity are as usual here as on a GPU
        widened = functools.partialmethod(_dot_of_floats, dot)
        stack.enter_context(mock.patch.object(InterpreterBuilder, "create_dot", widened))
        stack.enter_context(mock.patch.object(InterpreterBuilder, "get_bf16", _bfloat16, create=True))
        asking = functools.partial(_asking, asked)
        stack.enter_context(mock.patch.object(InterpreterBuilder, "create_inline_asm", asking))
        indexing = functools.partial(_indexing, interpreter._patch_lang_tensor)
        stack.enter_context(mock.patch.object(interpreter, "_patch_lang_tensor", indexing))
        rounded = functools.partialmethod(_rounding_cast, InterpreterBuilder.cast_impl)
        stack.enter_context(mock.patch.object(InterpreterBuilder, "cast_impl", rounded))
        for names in (*_modules(kernel), vars(tl), vars(tl.standard)):
            stack.enter_context(_interpreted_helpers(names))
        language: Any = types.SimpleNamespace(__globals__=vars(tl.standard))  # what its functions know, once for all
        stack.callback(_patch_lang(language).restore)
        Executor(own.rewrite(), own.arg_names, grid)(*pointers, **constants)
    return asked


def _bfloat16(self: Any, value: float) -> Any:
    """A constant, which the interpreter (triton 3.6) has for all other kinds of numbers."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    return TensorHandle((np.array([value], np.float32).view(np.uint32) >> 16).astype(np.uint16), tl.bfloat16)


def _asking(asked: list[np.uint64], code: str, constraints: str, values: Sequence[Any], *rest: Any) -> Any:
    """The one instruction that kernels have from elsewhere: it changes nothing."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    assert code.startswith("prefetch.global.L2 [$1];"), code
    [lines] = values
    asked.extend(lines.data.ravel())
    result = TensorHandle(np.zeros(lines.data.shape, np.int32), tl.int32)
    return types.SimpleNamespace(get_result=lambda index: result)


def _indexing(patch: Callable[..., Any], tensor: Any, scope: Any) -> None:
    """The interpreter's numbers are arrays [1], which numpy 2.4 no longer takes for the bounds of a loop."""
    patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def _dot_of_floats(self: Any, dot: Callable[..., Any], a: Any, b: Any, *rest: Any) -> Any:
    """The interpreter (triton 3.6) keeps bfloat16 as bits, and multiplies those."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    def floats(x: Any) -> Any:
        if x.data.dtype != np.uint16:
            return x
        return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    return dot(self, floats(a), floats(b), *rest)


def _rounding_cast(self: Any, cast: Callable[..., Any], x: Any, to: Any) -> Any:
    """The interpreter (triton 3.6) cuts float32 off where it becomes bfloat16; chips round."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    if (x.dtype.scalar, to.scalar) != (tl.float32, tl.bfloat16):
        return cast(self, x, to)
    return TensorHandle(x.data.astype(jnp.bfloat16).view(np.uint16), tl.bfloat16)


def _modules(kernel: Any) -> list[dict[str, Any]]:
    """What the kernel's module knows, and the modules of the helpers that it takes from elsewhere."""
    from triton.runtime.jit import JITFunction

    known = kernel.fn.__globals__
    helpers = [value.fn.__globals__ for value in known.values() if isinstance(value, JITFunction)]
    own = {id(names): names for names in (known, *helpers)}
    return [names for names in own.values() if not str(names["__name__"]).startswith("triton.")]


@contextmanager
def _interpreted_helpers(names: dict[str, Any]) -> Iterator[None]:
    """Compiled functions among a module's `names` are interpreted ones meanwhile."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    class Helper(InterpretedFunction):
        """Called inside a kernel, where the language is interpreted already: the original sees to that every time."""

        def __call__(self, *args: Any, **options: Any) -> Any:
            return self.rewrite()(*args, **options)

    helpers = {name: value for name, value in names.items() if isinstance(value, JITFunction)}
    names.update({name: Helper(value.fn) for name, value in helpers.items()})
    try:
        yield
    finally:
        names.update(helpers)


@contextmanager
def _standing_in(call: Callable[[Launch, Sequence[Any]], tuple[Any, ...]]) -> Iterator[None]:
    """`triton_call` is `call(launch, arrays)` meanwhile, and ops take the kernels that call it."""
    from dflash_jax.ops import dispatch
    from dflash_jax.ops.kernel_packages import load_kernel_package

    def triton_call(
        *arrays: Any, kernel: Any, grid: tuple[int, ...], out_type: Any, num_warps: int = 4, num_stages: int = 3,
        input_output_aliases: dict[int, int] | None = None, **constants: Any,
    ) -> Any:  # fmt: skip
        several = isinstance(out_type, tuple)
        launch = Launch(
            kernel, tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays),
            out_type if several else (out_type,), grid, input_output_aliases or {},
            {"num_warps": num_warps, "num_stages": num_stages}, constants,
        )  # fmt: skip
        results = call(launch, arrays)
        return results if several else results[0]

    package = load_kernel_package("triton").__name__
    stand_in: Any = types.ModuleType("jax_triton")
    stand_in.triton_call, stand_in.triton_lib = triton_call, None
    before = {name: module for name, module in sys.modules.items() if _within(name, package, "jax_triton")}
    for name in before:
        del sys.modules[name]
    sys.modules["jax_triton"] = stand_in
    dispatch._kernel.cache_clear()
    try:
        with mock.patch.dict(os.environ, {"DFLASH_JAX_TRITON": "jax_triton"}):
            yield
    finally:
        for name in [name for name in sys.modules if _within(name, package, "jax_triton")]:
            del sys.modules[name]
        sys.modules.update(before)
        dispatch._kernel.cache_clear()


def _within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


@contextmanager
def interpreting() -> Iterator[None]:
    """Ops of the backend `triton` run on the CPU."""

    def call(launch: Launch, arrays: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(jax.pure_callback(launch.run, launch.out, *arrays))

    with _standing_in(call):
        yield


@contextmanager
def recording() -> Iterator[list[Launch]]:
    """What ops of the backend `triton` launch is listed, and gives zeros."""
    launches: list[Launch] = []

    def call(launch: Launch, arrays: Sequence[Any]) -> tuple[Any, ...]:
        launches.append(launch)
        return tuple(jnp.zeros(x.shape, x.dtype) for x in launch.out)

    with _standing_in(call):
        yield launches
