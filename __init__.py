"""Stoker: a pure-functional LLM inference engine in JAX."""
