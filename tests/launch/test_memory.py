"""Python's collector while a command starts."""

import gc

import pytest

from stoker.launch import cli, command
from stoker.launch.hosts import define_hosts_flags
from stoker.launch.memory import made_to_last


@pytest.fixture(autouse=True)
def _thawed():
    yield
    gc.unfreeze()


def test_nothing_is_collected_inside_nor_looked_through_afterwards() -> None:
    before = gc.get_freeze_count()
    with made_to_last():
        assert not gc.isenabled()
        lasting = [[] for _ in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= before + len(lasting)


def test_a_failure_inside_leaves_the_collector_as_it_was() -> None:
    with pytest.raises(ImportError), made_to_last():
        raise ImportError
    assert gc.isenabled()


def test_who_has_turned_the_collector_off_keeps_it_off() -> None:
    gc.disable()
    try:
        with made_to_last():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_command_that_python_calls_leaves_its_callers_objects_alone(capsys) -> None:
    before = gc.get_freeze_count()
    assert cli.main(["generate", "--help"]) == 0
    assert gc.get_freeze_count() == before


def test_what_loading_has_freed_is_not_kept(monkeypatch) -> None:
    done = []
    monkeypatch.setattr(command, "keep_freed_memory", lambda: done.append("keeps"))

    def run(values, load) -> None:
        load()
        done.append("steps")

    given = command.Command("chat", define_hosts_flags, run, lambda values: done.append("loads"))
    assert given.main([]) == 0
    assert done == ["loads", "keeps", "steps"]
