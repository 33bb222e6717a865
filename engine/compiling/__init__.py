"""Steps compiled for devices that need not be there, and what their programs hold."""
