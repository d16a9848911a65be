"""Batches: files of requests that run when there is room, each line through the endpoint that it names."""
