"""The HTTP gateway: OpenAI's API, text, tenants. Imports `noria.engine.wire` and nothing else of the engine."""
