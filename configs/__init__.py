"""Model aliases and presets: data only."""
