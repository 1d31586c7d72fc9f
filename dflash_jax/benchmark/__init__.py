"""`python -m dflash_jax.benchmark`: this engine beside what else would be used, on the same prompts, in one run.

Nothing here is imported by the rest of the package.
"""
