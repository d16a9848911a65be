"""The contract between gateways and engines: messages, the broker that carries them, and the tokenizer."""
