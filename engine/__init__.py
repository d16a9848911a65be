"""The serving engine: batches, models, execution. Knows nothing of HTTP, tenants' rights or text."""
