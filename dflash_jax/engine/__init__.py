"""The serving engine: many requests at once over paged KV pools.

Host side, plain Python ints, no JAX: `request`, `pages`, `prefix_cache`, `scheduler`, `loop`, `metrics`.
The device is whatever implements `protocol.Runner`.
"""
