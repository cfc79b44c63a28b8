"""The Flux family."""
