"""Build hook: a wheel carries the repository's top-level folders inside `dflash_jax`.

Only a wheel: in an editable install the checkout itself has them, and copies beside it would hide the checkout.
"""

from __future__ import annotations

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# PyPI has another `triton_kernels`, so ours must not be installed under its own name.
INSIDE = {
    "triton_kernels": "dflash_jax/kernels/triton_kernels",
    "pallas_kernels": "dflash_jax/kernels/pallas_kernels",
    "configs": "dflash_jax/configs",
}


class KernelFolders(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "standard":
            build_data["force_include"].update(INSIDE)
