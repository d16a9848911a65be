"""Who may do what, and how much: organisations, projects, keys; limits, budgets and what was used.

Knows the store and no endpoint, no model and no text.
"""
