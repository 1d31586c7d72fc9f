"""Triton kernels for CUDA GPUs, launched by XLA or jax_triton: one folder per op, under the names of `dflash_jax.ops`.

`dflash_jax.ops.kernel_packages` imports this folder as `dflash_jax_triton_kernels`; nothing else does.  It imports
nothing of `dflash_jax`, and its modules import each other relatively.
"""

if __name__ == "triton_kernels":
    raise ImportError(
        "this 'triton_kernels' is a folder of the dflash_jax repository and not importable under that name; take the"
        " repository off sys.path (run from another folder) to reach an installed package of the same name"
    )


class Declined(Exception):
    """What cannot be done; the message says why.  `dflash_jax.ops` tells it to the user."""
