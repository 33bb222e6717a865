"""Runs a command as a user does, in this process."""

from __future__ import annotations

import pytest


def run(capsys: pytest.CaptureFixture[str], command, *flags: str) -> tuple[int, str, str]:
    status = command.COMMAND.main([*flags, "--nocache_programs"])
    captured = capsys.readouterr()
    return status, captured.out, captured.err
