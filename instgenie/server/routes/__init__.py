"""The routes, one module per group: OpenAI's images API, templates, operators' endpoints, web pages."""
