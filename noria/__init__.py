"""Noria: an OpenAI-compatible gateway with its own serving engine.

`noria.gateway` speaks HTTP and text, `noria.engine` schedules and computes, `noria.kernels` holds tensor operations.
This package is only the front door; importing it imports none of them.
"""
