"""`--coordinator`, `--num_processes`, `--process_id`: one command in several processes."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import traceback
from typing import Any, NoReturn

import jax
from absl import flags

from ..engine.hosts import dismiss, facts_of, follow
from ..models.errors import StokerError
from ..models.loading import Model
from ..sharding import AUTO, HostsError, Team, join
from .command import FAILED, INTERRUPTED, Command


def define_hosts_flags(values: flags.FlagValues) -> None:
    """The flags that `join_hosts` reads."""
    flags.DEFINE_string(
        "coordinator",
        None,
        "Share the model with other processes, started with the same flags: host:port of process "
        "0, which prints and plans, or auto, where jax.distributed knows the cluster.",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "num_processes",
        None,
        "Processes of --coordinator, this one included.",
        lower_bound=1,
        flag_values=values,
    )
    flags.DEFINE_integer(
        "process_id",
        None,
        "Which of them this is, from 0 on.",
        lower_bound=0,
        flag_values=values,
    )
    flags.DEFINE_integer(
        "join_timeout",
        300,
        "Seconds to wait for the other processes.",
        lower_bound=1,
        flag_values=values,
    )


def wants_hosts(values: flags.FlagValues) -> bool:
    """Whether the flags name other processes.

    Raises:
      StokerError: they contradict each other.
    """
    numbered = [name for name in ("num_processes", "process_id") if values[name].present]
    if values.coordinator is None and numbered:
        raise StokerError(f"--{numbered[0]} belongs to several processes; give --coordinator too")
    if values.coordinator == AUTO and numbered:
        raise StokerError(f"--coordinator=auto finds --{numbered[0]} itself; leave it out")
    return values.coordinator is not None


def join_hosts(values: flags.FlagValues, label: str) -> Team:
    """Joins the other processes.

    Raises:
      StokerError: the flags do not fit, or the others are not there.
    """
    try:
        return join(
            values.coordinator,
            values.num_processes,
            values.process_id,
            timeout_s=values.join_timeout,
            label=label,
        )
    except HostsError as error:
        raise StokerError(str(error)) from None


def run_shared(command: Command, values: flags.FlagValues) -> NoReturn:
    """Runs a command in several processes: process 0 as it is, the others at its service.

    Raises:
      StokerError: this process did not join the others. Once it has, it ends here.
    """
    _keep_output()
    team = join_hosts(values, f"stoker {command.name}")
    try:
        status, problem = command.attempt(lambda: _share(command, values, team))
    except BaseException as error:
        traceback.print_exc()
        status, problem = FAILED, f"{type(error).__name__}: {error}"
    if status != 0:
        verb = "was interrupted" if status == INTERRUPTED else f"failed: {problem}"
        team.watch.fail_others(f"process {team.hosts.index} {' '.join(verb.split())}", status)
    else:
        if team.hosts.leads:
            dismiss(team)
        team.leave()
    sys.stderr.flush()
    # Not the usual way, on which JAX would wait for processes that may have gone.
    os._exit(status)


def _keep_output() -> None:
    """Leaves standard output to Python: Gloo prints there, and goes to standard error instead."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(kept, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)


def _share(command: Command, values: flags.FlagValues, team: Team) -> int:
    if team.hosts.count > 1 and not values.mesh:
        devices = jax.device_count()
        raise StokerError(
            f"{team.hosts.count} processes, with {devices} devices in all, share a model over a "
            f"mesh; give --mesh, for example --mesh=tensor:{devices}"
        )

    def lead() -> Model:
        model = command.loaded(values)
        team.agree(facts_of(model))
        return dataclasses.replace(model, team=team)

    if team.hosts.leads:
        command.run(values, lead)
        return 0

    def decline(*_: Any) -> None:
        print(f"process {team.hosts.index} ends with process 0; stop that one", file=sys.stderr)

    # In one terminal Ctrl-C reaches all processes, and what it means is process 0's to say.
    signal.signal(signal.SIGINT, decline)
    model = command.loaded(values)
    team.agree(facts_of(model))
    who = f"process {team.hosts.index} of {team.hosts.count}"
    print(f"{who} follows process 0, which prints", file=sys.stderr)
    follow(model, team)
    return 0
