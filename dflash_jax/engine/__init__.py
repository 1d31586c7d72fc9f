"""The serving engine: many requests at once over paged KV pools.

Host side, plain Python ints, no JAX: `request`, `pages`, `prefix_cache`, `scheduler`, `loop`, `metrics`, `turn`,
`interrupts`, `speculation`, `round_times`.  The device is whatever implements `protocol.Runner`; ours is `runner`, with
`packing` for what goes there and `build` for how it comes about.  `engine` and `async_engine` are the front, and
`prometheus` exports their metrics.
"""
