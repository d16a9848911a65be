"""Iteration-level scheduling in pure Python: state in, plan out. Knows no torch, no Redis, no clock, no text."""
