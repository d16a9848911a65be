"""Text in and out of token ids: chat templates, incremental detokenising, stop strings. Knows no network."""
