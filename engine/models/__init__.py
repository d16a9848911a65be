"""Model architectures and the loaders of their weights. Knows nothing of scheduling."""
