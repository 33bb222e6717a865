"""Python in a process of its own that has eight devices, which the host pretends to have."""

from __future__ import annotations

import subprocess
import sys


def on_eight_devices(helpers_on_path: dict[str, str], *command: str) -> str:
    """What `python COMMAND` prints; AssertionError with its errors where it fails."""
    # Without the optimisations that cost more than they save here.
    flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    environment = helpers_on_path | {"XLA_FLAGS": flags}
    run = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    return run.stdout
