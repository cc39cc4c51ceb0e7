"""Thin handlers: read the request, ask the right object, answer. What they share is in `context`."""
