"""The one dispatcher: which backend computes an op.

`select` turns the user's `--kernels` choice into a `Kernels` value, once, at start-up; it is hashable and a
static argument of every compiled step.  An explicit choice never falls back: what a backend does not have is
refused with a reason.  `auto` picks by platform and says what it picked.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from dflash_jax.errors import UserError
from dflash_jax.ops import native, reference
from dflash_jax.ops.kernel_packages import EXTRAS, kernel_module, kernel_names, load_kernel, load_kernel_package
from dflash_jax.ops.reference.accept import Accepted
from dflash_jax.ops.reference.numerics import Turned, dot

CHOICES = ("auto", "xla", "pallas", "triton", native.NAME)

# The meaning of each op, in plain XLA.  A backend has kernels for some of them; the others are XLA's there, too.
REFERENCE: dict[str, Callable[..., Any]] = {
    "prepare_block": reference.prepare_block,
    "accept_bonus": reference.accept_bonus,
    "kv_inject": reference.kv_inject,
    "cache_write": reference.cache_write,
    "block_attention": reference.paged_attention,
    "prefill_attention": reference.paged_attention,
    "add_norm": reference.add_norm,
    "project": reference.project,
    "gated_product": reference.gated_product,
    "head_logits": reference.head_logits,
    "argmax_head": reference.argmax_head,
    "top_tokens": reference.top_tokens,
    "sample_tokens": reference.sample_tokens,
}


def _verify_attention(
    kernels: Kernels, pool: Array, qkv: Array, q_norm: Array | None, k_norm: Array | None, eps: float, cos: Array,
    sin: Array, locations: Array, page_table: Array, lengths: Array, *, causal: bool, window: int | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """A target layer's attention from its projection qkv [S, B, G, R+2, D] on: [S, B, N, D], and the pool written."""
    q, kv, pool = kernels.cache_write(pool, qkv, q_norm, k_norm, eps, cos, sin, locations)
    return kernels.block_attention(q, kv, pool, page_table, lengths, causal=causal, window=window), pool


def _draft_attention(
    kernels: Kernels, pool: Array, qkv: Array, q_norm: Array | None, k_norm: Array | None, eps: float, cos: Array,
    sin: Array, page_table: Array, lengths: Array, *, causal: bool, window: int | None = None,
) -> Array:  # fmt: skip
    """The same for a draft layer, whose keys and values are scratch: the pool is only read."""
    q, kv = reference.norm_rope(qkv, q_norm, k_norm, eps, cos, sin)
    return kernels.block_attention(q, kv, pool, page_table, lengths, causal=causal, window=window)


def _project_add_norm(
    kernels: Kernels, x: Array, y: Array, w: Array | Turned, norm: Array, eps: float,
    ahead: Array | Turned | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """A sublayer's last product and what follows it: (x + y·w, its norm), each [..., H], of y [..., K] and w [K, H].

    ahead: what is read next, if that is known.  It counts for nothing; a kernel may have it brought nearer.
    """
    del ahead
    return kernels.add_norm(x, dot(y, w), norm, eps)


# Ops that are several in a row.  A backend may have one kernel for all of it; elsewhere they are what these say.
COMPOSED: dict[str, Callable[..., Any]] = {
    "verify_attention": _verify_attention,
    "draft_attention": _draft_attention,
    "project_add_norm": _project_add_norm,
}
OPS = (*REFERENCE, *COMPOSED)
PLATFORMS = {"triton": "gpu", "pallas": "tpu", native.NAME: "cpu"}  # where a backend's kernels run
INTERPRETED = {"pallas": "cpu"}  # where they are interpreted instead, if asked for: to test them, not to serve

STATIC = "static"
# The axis of key/value or query heads of each kernel's arguments and results, by which a mesh splits them; None: all
# devices have the whole.  A tuple of pools is split alike in all its parts.
HEAD_AXES: dict[str, tuple[tuple[int | str | None, ...], tuple[int | None, ...]]] = {
    "block_attention": ((2, 3, 2, None, None), (2,)),
    "prefill_attention": ((2, 3, 2, None, None), (2,)),
    "cache_write": ((2, 2, None, None, STATIC, None, None, None), (2, 3, 2)),
    "verify_attention": ((2, 2, None, None, STATIC, None, None, None, None, None), (2, 2)),
    "draft_attention": ((2, 2, None, None, STATIC, None, None, None, None), (2,)),
    "kv_inject": ((2, None, 3, 2, None, STATIC, None, None, None), (2,)),
    "add_norm": ((None, None, None, STATIC), (None, None)),
    "prepare_block": ((None,) * 4, (None,) * 3),
    "accept_bonus": ((None,) * 7, (None,) * 4),
}
# Kernels for one device alone: a mesh splits the vocabulary, and XLA compares its parts; or what a product sums over,
# and XLA adds its parts up.
UNSPLIT = ("argmax_head", "top_tokens", "project", "project_add_norm", "gated_product")
# Kernels that are no faster than XLA (on an H200): `auto` leaves them out, naming the backend takes them in.
NO_FASTER = {"triton": ("prepare_block", "accept_bonus", "argmax_head")}
NAMED: dict[str, Callable[..., Any]] = {"accept_bonus": Accepted}  # of kernels' plain tuples, the op's named result


@dataclasses.dataclass(frozen=True)
class Kernels:
    """The backend in use; `reason` says why and is printed at start-up.  Hashable by all but that.

    interpret: kernels are run by JAX, not by the chip they are for.  spared: ops that are XLA's though this backend has
    kernels for them.  mesh: each device runs a kernel on its own heads (XLA cannot split a kernel); None or one device:
    there is nothing to split.
    """

    backend: str = "xla"
    reason: str = dataclasses.field(compare=False, default="")
    interpret: bool = False
    spared: tuple[str, ...] = ()
    mesh: Mesh | None = None

    def __getattr__(self, op: str) -> Callable[..., Any]:
        """`kernels.block_attention(…)` calls this backend's implementation of the op."""
        if op not in OPS:
            raise AttributeError(f"{op} is not an op (ops: {', '.join(OPS)})")
        if op not in self.own_ops:
            return functools.partial(COMPOSED[op], self) if op in COMPOSED else REFERENCE[op]
        return _kernel(self.backend, op, self.interpret, self.mesh)

    @property
    def own_ops(self) -> tuple[str, ...]:
        """The ops that this backend's kernels compute; the others are XLA's."""
        names = _ops_of(self.backend)
        split = self.mesh is not None and self.mesh.size > 1
        left = (*self.spared, *UNSPLIT) if split else self.spared
        return tuple(op for op in OPS if op in names and op not in left)


def _ops_of(backend: str) -> tuple[str, ...]:
    if backend == "xla":
        return ()
    return native.OPS if backend == native.NAME else kernel_names(backend)


def _native_kernel(op: str) -> Callable[..., Any]:
    """The op in float32, which is what there is on a CPU; in other types as XLA has it."""
    own, xla = getattr(native, op), REFERENCE[op]

    def call(first: Array, *args: Any, **options: Any) -> Any:
        return (own if first.dtype == jnp.float32 else xla)(first, *args, **options)

    return call


@functools.cache
def _kernel(backend: str, op: str, interpret: bool, mesh: Mesh | None) -> Callable[..., Any]:
    if backend == native.NAME:
        return _native_kernel(op)
    kernel = getattr(load_kernel(backend, op), op)
    if op == "argmax_head":
        kernel = _of_plain_head(kernel)
    if interpret:
        kernel = functools.partial(kernel, interpret=True)
    if mesh is not None and mesh.size > 1:
        kernel = _by_heads(kernel, op, mesh)
    if op in NAMED:
        kernel = _naming(kernel, NAMED[op])
    declined = getattr(load_kernel_package(backend), "Declined", None)
    return kernel if declined is None else _refusing(kernel, f"kernels {backend!r} cannot do {op} here", declined)


def _of_plain_head(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """`kernel(hidden, head, …)`, whose head [V, H] may be called turned: it then lies as it is declared."""

    @functools.wraps(kernel)
    def call(hidden: Any, head: Any, *args: Any, **options: Any) -> Any:
        return kernel(hidden, head.array if isinstance(head, Turned) else head, *args, **options)

    return call


def _naming(kernel: Callable[..., Any], name: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(kernel)
    def call(*args: Any, **options: Any) -> Any:
        return name(*kernel(*args, **options))

    return call


def _by_heads(kernel: Callable[..., Any], op: str, mesh: Mesh) -> Callable[..., Any]:
    """`kernel` on every device of a one-axis mesh, each with its share of the heads."""
    axes_in, axes_out = HEAD_AXES[op]
    (name,) = mesh.axis_names

    def spec(axis: int | None) -> PartitionSpec:
        return PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, name)

    results: Any = spec(axes_out[0]) if len(axes_out) == 1 else tuple(map(spec, axes_out))

    def split(*args: Any, **options: Any) -> Any:
        fixed = {i: args[i] for i, axis in enumerate(axes_in) if axis == STATIC}
        moving = [i for i in range(len(args)) if i not in fixed]

        def local(*own: Any) -> Any:
            every = {**fixed, **dict(zip(moving, own, strict=True))}
            return kernel(*(every[i] for i in range(len(args))), **options)

        specs = tuple(spec(axes_in[i]) for i in moving)  # pyright: ignore[reportArgumentType]
        run = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=results, check_vma=False)
        return run(*(args[i] for i in moving))

    return split


def _refusing(kernel: Callable[..., Any], sentence: str, declined: type[Exception]) -> Callable[..., Any]:
    """`kernel`, whose refusals become a sentence to the user."""

    @functools.wraps(kernel)
    def call(*args: Any, **options: Any) -> Any:
        try:
            return kernel(*args, **options)
        except declined as error:
            raise UserError(f"{sentence}: {error} (kernels xla can)") from error

    return call


def tile_rules(backend: str) -> Any:
    """The module that says how a backend's launches are cut: `tiles` of its kernel package."""
    return kernel_module(backend, "tiles")


XLA = Kernels()


def backends(platform: str) -> tuple[str, ...]:
    """What can be used on `platform` (`cpu`, `gpu` or `tpu`) with what is installed."""
    return ("xla", *(name for name in PLATFORMS if missing(name, platform) is None))


def interpreted(platform: str) -> tuple[str, ...]:
    """Backends whose kernels can be interpreted on `platform`."""
    return tuple(name for name, where in INTERPRETED.items() if where == platform and kernel_names(name))


def missing(backend: str, platform: str) -> str | None:
    """Why `backend` cannot be used on `platform`, other than interpreted; None if it can."""
    if not _ops_of(backend):
        return "there are none in this version yet"
    if platform != PLATFORMS[backend]:
        return f"they run on {PLATFORMS[backend]}, and the platform is {platform}"
    if backend == native.NAME:
        return native.refusal()
    package = _about_launches("missing") if backend == "triton" else None
    return f"the package {package!r} is missing: pip install 'dflash-jax[{EXTRAS[backend]}]'" if package else None


def _about_launches(question: str) -> str | None:
    """What the Triton package's `launch` answers; what it declines is a sentence to the user."""
    try:
        return getattr(kernel_module("triton", "launch"), question)()
    except load_kernel_package("triton").Declined as error:
        raise UserError(str(error)) from error


def select(choice: str, platform: str, mesh: Mesh | None = None) -> Kernels:
    """The backend for `choice` on `platform` (`cpu`, `gpu` or `tpu`), for arrays on `mesh`.

    UserError for one that cannot be had.
    """
    split = mesh if mesh is not None and mesh.size > 1 else None
    chosen, why = _selected(choice, platform)
    if split is not None and chosen.backend == native.NAME:
        if choice != "auto":
            raise UserError(f"kernels {choice!r} cannot be used: they serve one device, and {split.size} are asked for")
        chosen, why = Kernels("xla"), f" on {platform} (auto)"
    chosen = dataclasses.replace(chosen, mesh=split)
    return dataclasses.replace(chosen, reason=f"kernels: {_described(chosen)}{why}")


def _selected(choice: str, platform: str) -> tuple[Kernels, str]:
    """The backend, and why."""
    if choice not in CHOICES:
        raise UserError(f"kernels {choice!r} is not one of {', '.join(CHOICES)}")
    if choice == "auto":
        return _automatic(platform)
    if choice in interpreted(platform):
        slow = f"asked for; interpreted on {platform}, which is slow and meant for tests"
        return Kernels(choice, interpret=True), f" ({slow})"
    if choice != "xla" and (reason := missing(choice, platform)):
        raise UserError(f"kernels {choice!r} cannot be used: {reason} (available: {', '.join(backends(platform))})")
    return Kernels(choice), " (asked for)"


def _automatic(platform: str) -> tuple[Kernels, str]:
    """The platform's own backend; XLA where there is none or it cannot be used, which is said."""
    for backend, home in PLATFORMS.items():
        if home == platform:
            if reason := missing(backend, platform):
                return Kernels("xla"), f" (auto; not {backend}: {reason})"
            spared = NO_FASTER.get(backend, ())
            left = f"; no faster: its {', '.join(spared)}" if spared else ""
            return Kernels(backend, spared=spared), f" (auto{left})"
    return Kernels("xla"), f" on {platform} (auto)"


def _described(kernels: Kernels) -> str:
    own = kernels.own_ops
    if not own:
        return kernels.backend
    if kernels.backend == native.NAME:
        return f"native for {', '.join(own)} and float32 products of up to {native.MOST_ROWS} rows, xla for all else"
    launched = f" ({_about_launches('described')})" if kernels.backend == "triton" else ""
    return f"{kernels.backend}{launched} for {', '.join(own)}, xla for the other ops"
