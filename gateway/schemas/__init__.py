"""OpenAI's request and response shapes. Knows nothing of the broker."""
