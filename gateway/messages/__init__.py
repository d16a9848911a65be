"""Anthropic's Messages API beneath its endpoint: a second dialect of chat completions over the same generation path."""
