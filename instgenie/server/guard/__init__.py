"""Checks before a request reaches a route: pace of the connection, request id, host and origin, API key."""
