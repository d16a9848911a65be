"""One file per OpenAI noun: rename fields, call `generation`, shape the answer."""
