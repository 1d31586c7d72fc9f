"""Finds and imports the kernel folders under private names, so that they never collide with other packages.

The repository keeps them at the top as `triton_kernels/` and `pallas_kernels/`.  PyPI has another `triton_kernels`
(OpenAI's, which vLLM and transformers import), so ours are installed inside `dflash_jax` and always imported as
`dflash_jax_triton_kernels` and `dflash_jax_pallas_kernels`: the public names stay free for others.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from dflash_jax.errors import UserError
from dflash_jax.places import shipped_folder

FOLDERS = {"triton": "triton_kernels", "pallas": "pallas_kernels"}
EXTRAS = {"triton": "cuda", "pallas": "tpu"}


def private_name(backend: str) -> str:
    """The name in `sys.modules` of a backend's kernel package."""
    return f"dflash_jax_{_folder_name(backend)}"


def load_kernel_package(backend: str) -> ModuleType:
    """The kernel package of `backend` ("triton" or "pallas").  Importing it imports no kernel and no triton.

    Raises UserError for an unknown backend and for an installation that lacks the folder.
    """
    name = private_name(backend)
    loaded = sys.modules.get(name)
    return loaded if loaded is not None else _import_folder(name, _folder(backend))


def kernel_module(backend: str, name: str) -> ModuleType:
    """A module of the kernel package that is no kernel, for example its `tiles`."""
    return importlib.import_module(f"{load_kernel_package(backend).__name__}.{name}")


def kernel_names(backend: str) -> tuple[str, ...]:
    """The ops that `backend` has a kernel for: the sub-packages of its folder, sorted."""
    return tuple(sorted(entry.parent.name for entry in _folder(backend).glob("*/__init__.py")))


def load_kernel(backend: str, op: str) -> ModuleType:
    """The module of one kernel, for example `dflash_jax_triton_kernels.block_attention`.

    Raises UserError when there is no such kernel, and when a package that it needs is not installed.  Any other
    failure of the import is a fault of the kernel and passes through unchanged.
    """
    package = load_kernel_package(backend)
    if op not in kernel_names(backend):
        have = ", ".join(kernel_names(backend)) or "none"
        raise UserError(f"there is no {backend} kernel for {op!r} (kernels: {have})")
    try:
        return importlib.import_module(f"{package.__name__}.{op}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith(package.__name__):
            raise
        extra = f"pip install 'dflash-jax[{EXTRAS[backend]}]'"
        raise UserError(f"the {backend} kernel {op!r} needs the package {error.name!r}: {extra}") from error


def _folder_name(backend: str) -> str:
    if backend not in FOLDERS:
        raise UserError(f"there are no kernels for {backend!r} (known: {', '.join(FOLDERS)})")
    return FOLDERS[backend]


def _folder(backend: str) -> Path:
    name = _folder_name(backend)
    folder = shipped_folder(f"kernels/{name}", name)
    if folder is None:
        raise UserError(f"this installation has no {backend} kernels: dflash_jax/kernels/{name} is missing")
    return folder


def _import_folder(name: str, folder: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        name,
        folder / "__init__.py",
        submodule_search_locations=[str(folder)],
    )
    if spec is None or spec.loader is None:
        raise UserError(f"{folder}: not a Python package")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: relative imports inside it look here
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
