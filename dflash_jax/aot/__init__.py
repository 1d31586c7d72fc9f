"""Compiling for TPUs that are not there: what a step needs, moves and costs, by the TPU's own compiler."""
