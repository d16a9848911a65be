"""Runs the scheduler's batches on tensors. Knows nothing of policy or transport."""
