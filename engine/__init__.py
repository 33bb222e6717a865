"""How it is served: pages, steps, sampling, scheduling, the engine and its accounting."""
