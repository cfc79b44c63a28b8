"""The HTTP process: OpenAI's images API and operators' endpoints over a cluster. Imports no torch."""
