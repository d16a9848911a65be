"""Answers that are kept: items, their events, and what becomes of them in the store."""
