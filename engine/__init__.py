"""How it is served: cache, steps, sampling, sessions, accounting."""
