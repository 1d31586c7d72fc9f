"""Pallas (Mosaic) kernels for TPUs: one folder per op, under the names of `dflash_jax.ops`.

`dflash_jax.ops.kernel_packages` imports this folder as `dflash_jax_pallas_kernels`; nothing else does.  It imports
nothing of `dflash_jax`, and its modules import each other relatively.
"""

if __name__ == "pallas_kernels":
    raise ImportError(
        "this 'pallas_kernels' is a folder of the dflash_jax repository and not importable under that name; take the"
        " repository off sys.path (run from another folder) to reach an installed package of the same name"
    )


class Declined(Exception):
    """What a kernel cannot do on the chip, as a reason for the user."""
