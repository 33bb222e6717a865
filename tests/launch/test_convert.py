"""`stoker convert`: what it says and writes, and how it fails."""

from __future__ import annotations

import pathlib

from commands import run
from gguf_files import Tiny, write_gguf

from stoker.launch import convert, generate


def command(capsys, *flags: str) -> tuple[int, str, str]:
    status = convert.COMMAND.main(list(flags))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_a_converted_model_generates_the_same(capsys, tmp_path: pathlib.Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", Tiny())
    target = tmp_path / "out"
    given = (f"--model={path}", f"--output={target}", "--quantize=int4:group=40")
    status, out, err = command(capsys, *given)
    assert (status, err) == (0, "")
    assert out.startswith("wrote 0.09 MB to ") and f"from {path.stat().st_size / 1e6:.2f} MB" in out
    ask = ("--prompt_ids=5,6,7", "--max_tokens=9", "--ignore_eos")
    direct = run(capsys, generate, f"--model={path}", "--quantize=int4:group=40", *ask)
    # Attention's rows of 64 columns take groups of 32, as the warning said both times.
    assert direct[:2] == run(capsys, generate, f"--model={target}", *ask)[:2]
    assert direct[0] == 0

    status, out, err = command(capsys, *given)
    assert (status, out) == (1, "") and "--overwrite" in err and err.count("\n") == 1
    assert command(capsys, *given, "--overwrite")[0] == 0


def test_what_must_be_given(capsys, tmp_path: pathlib.Path) -> None:
    status, _, err = command(capsys)
    assert status == 1 and "--output=FOLDER" in err
    path = write_gguf(tmp_path / "m.gguf", Tiny(), quantisation="Q4_1")
    given = (f"--model={path}", f"--output={tmp_path / 'out'}")
    status, _, err = command(capsys, *given, "--quantize=int8")
    assert status == 1 and "quantised already" in err and err.count("\n") == 1
    assert not (tmp_path / "out").exists()
    status, _, err = command(capsys, *given, "--to=zip")
    assert status == 2
