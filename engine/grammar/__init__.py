"""Outputs that must match a grammar: compiled beside the loop, followed token by token, told to the sampler as masks.

Knows no HTTP, no scheduler and no model; `noria.engine.engine` and `noria.engine.live` join it to the rest.
"""
