"""The records that C is given, field by field as in noria_cpu.h.

Addresses and numbers only: who makes a record keeps alive what it points to.
"""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_int64, c_void_p


class Segment(ctypes.Structure):
    _fields_ = (("data", c_void_p), ("bias", c_void_p), ("kind", c_int64), ("out", c_int64))


class Linear(ctypes.Structure):
    _fields_ = (("segments", ctypes.POINTER(Segment)), ("num_segments", c_int64), ("in_", c_int64), ("out", c_int64))


class Layer(ctypes.Structure):
    _fields_ = (
        ("attention_norm", c_void_p),
        ("ffn_norm", c_void_p),
        ("qkv", Linear),
        ("output", Linear),
        ("gate_up", Linear),
        ("down", Linear),
    )


class LowRank(ctypes.Structure):
    _fields_ = (("down", ctypes.POINTER(Linear)), ("up", ctypes.POINTER(Linear)))


class Adapted(ctypes.Structure):
    _fields_ = (("pairs", ctypes.POINTER(LowRank)), ("start", c_int64), ("rows", c_int64))


class Batch(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("query_start", "kv_lens", "block_table", "tasks")),
        *((name, c_void_p) for name in ("positions", "slots", "cos_sin")),
        *((name, c_int64) for name in ("table_width", "num_tasks", "num_tokens", "longest")),
        *((name, c_int64) for name in ("num_heads", "num_kv_heads", "head_dim", "half", "window")),
        ("scale", c_double),
        ("softcap", c_double),
    )


class Pools(ctypes.Structure):
    _fields_ = (("keys", c_void_p), ("values", c_void_p))
