"""The commands on a tiny model: output, errors as one line, exit statuses."""

from __future__ import annotations

import io
import json
import math
import os
import pathlib
import subprocess
import sys

import pytest
from absl.flags import FlagValues
from commands import run
from gguf_files import Tiny, write_gguf

from stoker.engine.accounting import WeightBytes
from stoker.engine.engine import Engine
from stoker.engine.sampling_params import SamplingParams
from stoker.launch import chat, cli, common, convert, generate, inspect, score
from stoker.models.loading import load_model


def answer(capsys: pytest.CaptureFixture[str], *flags: str) -> dict:
    status, out, err = run(capsys, generate, *flags, "--json")
    assert (status, err) == (0, "")
    return json.loads(out)


def test_generate_json_is_what_the_engine_gives(capsys, model: str) -> None:
    result = answer(capsys, f"--model={model}", "--prompt_ids=5,6,7", "--max_tokens=9")
    loaded = load_model(model)
    engine = Engine(loaded, slots=3, context=64)
    (reply,) = engine.generate([[5, 6, 7]], SamplingParams(max_tokens=9))
    assert result["prompt_ids"] == [5, 6, 7]
    assert result["ids"] == reply.ids
    assert result["logprobs"] == pytest.approx(reply.choices[0].logprobs, abs=1e-4)
    assert result["text"] == loaded.tokenizer.decode(result["ids"], continuation=True)
    assert result["finish_reason"] == "length"
    assert result["ttft_s"] > 0
    assert result["decode_tok_s"] > 0


def test_streamed_text_is_the_json_text(capsys, model: str) -> None:
    flags = (f"--model={model}", "--prompt=the", "--max_tokens=20", "--temperature=2", "--seed=4")
    text = answer(capsys, *flags)["text"]
    status, out, _ = run(capsys, generate, *flags)
    assert (status, out) == (0, text + "\n")


def test_begin_token_is_added_once(capsys, model: str) -> None:
    plain = answer(capsys, f"--model={model}", "--prompt=the", "--max_tokens=1")
    assert plain["prompt_ids"] == [0, 259]
    chatting = answer(capsys, f"--model={model}", "--prompt=the", "--chat", "--max_tokens=1")
    assert 0 not in chatting["prompt_ids"]


def test_control_tokens_are_text_unless_asked(capsys, model: str) -> None:
    flags = (f"--model={model}", "--prompt=<|end|>", "--max_tokens=1")
    assert len(answer(capsys, *flags)["prompt_ids"]) == 1 + len("<|end|>")
    assert answer(capsys, *flags, "--parse_special")["prompt_ids"] == [0, 1]


def test_stop_string_is_cut_exactly(capsys, model: str) -> None:
    flags = (f"--model={model}", "--prompt_ids=9,8", "--max_tokens=40", "--ignore_eos")
    whole = answer(capsys, *flags)["text"]
    stop = whole[7:10]
    cut = answer(capsys, *flags, f"--stop={stop}", "--stop=never there")
    assert cut["text"] == whole[: whole.index(stop)]
    assert cut["finish_reason"] == "stop"


def test_stats_add_up(capsys, model: str) -> None:
    flags = (f"--model={model}", "--prompt_ids=5,6", "--max_tokens=5", "--stats", "--ignore_eos")
    stats = answer(capsys, *flags)["stats"]
    parts = stats["step_bytes"]
    total = parts.pop("total")
    assert total == pytest.approx(sum(parts.values()), abs=2)
    assert stats["achieved_bytes_s"] == pytest.approx(total / stats["step_s"], rel=1e-3)
    assert stats["bandwidth_share"] < 1
    status, _, err = run(capsys, generate, *flags)
    assert status == 0
    for word in ("load", "first token", "tok/s", "weights", "KV read", "GB/s", "peak memory"):
        assert word in err


def engine_of(model: str) -> Engine:
    """As `stoker generate` makes it, without further flags."""
    values = FlagValues()
    generate.define_flags(values)
    values(["stoker"])
    return common.new_engine(values, load_model(model), 512)


@pytest.mark.parametrize("prompt_len", [1, 2, 100])
def test_one_reader_of_a_small_model(model: str, prompt_len: int) -> None:
    """Some steps at once, what is compiled beforehand is all that a reply takes, and no more."""
    engine = engine_of(model)
    engine.warmup(prompt_len)
    programs = engine.runner.programs.compilations
    before = {program.step for program in programs}
    assert "decode_steps" in before and ("decode" in before) == (prompt_len == 1)
    ready = len(programs)
    reply = engine.generate([[5] * prompt_len], SamplingParams(max_tokens=30, ignore_eos=True))[0]
    assert len(reply.ids) == 30 and len(programs) == ready


@pytest.mark.parametrize("megabytes, steps", [(1, 4), (150, 3), (400, 1), (4000, 1)])
def test_text_of_large_models_does_not_come_in_bursts(
    monkeypatch: pytest.MonkeyPatch, model: str, megabytes: int, steps: int
) -> None:
    weights = WeightBytes(megabytes * 1e6, 0, 0, 0, 0)
    monkeypatch.setattr(common, "weight_bytes", lambda *_: weights)
    made = []
    monkeypatch.setattr(common, "Engine", lambda *_, **options: made.append(options))
    engine_of(model)
    assert made[0]["decode_steps"] == steps


def test_prompt_from_standard_input(capsys, monkeypatch, model: str) -> None:
    flags = (f"--model={model}", "--max_tokens=2")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("thé\n".encode())))
    piped = answer(capsys, *flags, "--prompt=-")
    assert piped["prompt_ids"] == answer(capsys, *flags, "--prompt=thé\n")["prompt_ids"]


def test_chat_keeps_its_cache(capsys, monkeypatch, model: str) -> None:
    lines = "hello\nand again\n/nonsense\n/reset\nhello\n/exit\nnot reached\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    flags = (f"--model={model}", "--temperature=0", "--max_tokens=8", "--stats", "--system=s")
    status, out, err = run(capsys, chat, *flags)
    assert status == 0
    first, _, again = [line for line in out.split("\n") if line]
    assert first == again
    reused = [int(line.split()[3]) for line in err.splitlines() if line.startswith("prompt")]
    assert reused[0] == 0
    # Full pages of what was said before.
    assert reused[1] >= len("<system>s<user>hello<assistant>") // 16 * 16 > 0
    assert "unknown command /nonsense" in err
    whole = answer(
        capsys, f"--model={model}", "--chat", "--prompt=hello", "--system=s", "--max_tokens=8"
    )
    assert whole["text"] == first


def test_chat_goes_on_after_a_prompt_that_is_too_long(capsys, monkeypatch, model) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("x" * 300 + "\nhi\n"))
    status, out, err = run(capsys, chat, f"--model={model}", "--context=64", "--max_tokens=4")
    assert status == 0
    assert (
        "but the context holds 64, reply included; shorten the prompt; /reset starts afresh" in err
    )
    assert len(out.splitlines()) >= 1


def test_score_is_the_mean_logprob(capsys, tmp_path: pathlib.Path, model: str) -> None:
    ids = [5, 99, 300, 12, 12, 40]
    path = tmp_path / "ids.json"
    path.write_text(json.dumps(ids))
    status, out, _ = run(capsys, score, f"--model={model}", f"--ids_file={path}", "--json")
    result = json.loads(out)
    assert (status, result["ids"], result["logprobs"][0]) == (0, ids, None)
    for n in range(1, 6):
        flags = (f"--prompt_ids={','.join(map(str, ids[:n]))}", "--max_tokens=1")
        best = answer(capsys, f"--model={model}", *flags)
        if best["ids"][0] == ids[n]:
            assert result["logprobs"][n] == pytest.approx(best["logprobs"][0], abs=1e-4)
        else:
            assert result["logprobs"][n] < best["logprobs"][0]
    mean = sum(result["logprobs"][1:]) / 5
    assert result["perplexity"] == pytest.approx(math.exp(-mean))
    text = tmp_path / "text.txt"
    text.write_text("the theme")
    status, out, _ = run(capsys, score, f"--model={model}", f"--text_file={text}")
    assert (status, out.startswith("perplexity ")) == (0, True)


BAD_RUNS = [
    (generate, [], "give either --prompt=TEXT"),
    (generate, ["--prompt=a", "--prompt_ids=1"], "give either --prompt=TEXT"),
    (generate, ["--prompt_ids=1,x"], "--prompt_ids=1,x: it takes whole numbers"),
    (generate, ["--prompt_ids="], "the prompt is empty"),
    (generate, ["--prompt_ids=1,512"], "token id 512 is not in the vocabulary of 512"),
    (generate, ["--prompt_ids=-1"], "token id -1 is not in the vocabulary"),
    (generate, ["--prompt_ids=1", "--chat"], "--chat puts text into a template"),
    (generate, ["--prompt=a", "--system=s"], "--system is part of a chat; add --chat"),
    (generate, ["--prompt=a", "--chat", "--parse_special"], "--parse_special is for a plain"),
    (generate, ["--prompt=a", "--temperature=-1"], "temperature is -1.0"),
    (generate, ["--prompt=a", "--temperature=nan"], "temperature is nan"),
    (generate, ["--prompt=a", "--top_p=1.5"], "top_p is 1.5"),
    (generate, ["--prompt=a", "--min_p=-1"], "min_p is -1.0"),
    (generate, ["--prompt=a", "--top_k=-7"], "top_k is -7"),
    (generate, ["--prompt=a", "--seed=-1"], "seed is -1"),
    (generate, ["--prompt=a", "--stop="], "stop holds ''"),
    (generate, ["--prompt=a", "--context=100000"], "this model takes from 1 to 256"),
    (generate, ["--prompt=" + "x" * 300], "301 tokens, but the context holds 256"),
    (generate, ["--prompt=" + "x" * 255], "256 tokens, but the context holds 256, reply included"),
    (generate, ["--prompt=\udcff"], "--prompt is not UTF-8"),
    (generate, ["--prompt=a", "--model=~nobody-of-that-name/x.gguf"], "cannot look for the model"),
    (generate, ["--prompt=a", "--model=" + "x" * 300], "cannot look for the model"),
    (score, [], "give either --text_file=FILE"),
    (score, ["--text_file=/does/not/exist"], "--text_file: cannot read '/does/not/exist': No such"),
    (score, ["--text_file=/"], "--text_file: cannot read '/': Is a directory"),
    (score, ["--text_file=/dev/null"], "at least 2 are needed"),
]


@pytest.mark.parametrize(("command", "flags", "message"), BAD_RUNS)
def test_bad_runs_end_in_one_line(capsys, model: str, command, flags, message: str) -> None:
    status, out, err = run(capsys, command, f"--model={model}", *flags)
    assert (status, out) == (1, "")
    assert message in err
    assert err.count("\n") == 1
    assert err.startswith(f"stoker {command.COMMAND.name}: ")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max_tokens=0"], "--max_tokens=0"),
        (["--max_tokens=many"], "--max_tokens=many"),
        (["--context=0"], "--context=0"),
        (["--dtype=float64"], "--dtype=float64"),
        (["--tempreature=1"], "tempreature"),
        (["prompt"], "unexpected argument 'prompt'"),
    ],
)
def test_bad_flags_end_in_one_line(capsys, flags: list[str], message: str) -> None:
    status, out, err = run(capsys, generate, "--prompt=a", *flags)
    assert (status, out) == (2, "")
    assert message in err
    assert "see stoker generate --help" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1, 2", "is not JSON"),
        ('{"a": 1}', "must hold a JSON list of whole numbers"),
        ("[1, 2.5]", "must hold a JSON list of whole numbers"),
        ("[1, true]", "must hold a JSON list of whole numbers"),
        ("[" * 5000, "is not JSON"),
        ("[4]", "there are 1 tokens to score; at least 2"),
        ("[4, 9999]", "token id 9999 is not in the vocabulary"),
    ],
)
def test_bad_id_files_are_named(capsys, tmp_path, model: str, content: str, message: str) -> None:
    path = tmp_path / "ids.json"
    path.write_text(content)
    status, _, err = run(capsys, score, f"--model={model}", f"--ids_file={path}")
    assert status == 1
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("kept", [0, 3, 30, 0.5, -1])
@pytest.mark.parametrize("command", [generate, inspect, convert])
def test_a_file_that_is_cut_off_ends_in_one_line(capsys, tmp_path, model, command, kept) -> None:
    """GGUF-07."""
    content = pathlib.Path(model).read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(content[: int(len(content) * kept) if kept == 0.5 else kept])
    flags = {generate: ["--prompt=a"], inspect: [], convert: [f"--output={tmp_path / 'out'}"]}
    status = command.COMMAND.main([f"--model={path}", *flags[command]])
    captured = capsys.readouterr()
    assert (status, captured.out, captured.err.count("\n")) == (1, "", 1)
    assert "cut.gguf'" in captured.err and not (tmp_path / "out").exists()


def test_names_in_a_damaged_file_move_no_cursor(capsys, tmp_path) -> None:
    tiny = Tiny(architecture="\x1b[2J\x00zzz")
    path = write_gguf(tmp_path / "m.gguf", tiny)
    assert inspect.COMMAND.main([f"--model={path}"]) == 1
    assert r"\x1b[2J\x00zzz" in (said := capsys.readouterr().err)
    assert said.rstrip("\n").isprintable()


def test_a_model_without_template_or_begin_token(capsys, bare: str) -> None:
    status, _, err = run(capsys, generate, f"--model={bare}", "--prompt=hi", "--chat")
    assert status == 1
    assert "template" in err
    status, _, err = run(capsys, generate, f"--model={bare}", "--prompt=")
    assert status == 1
    assert "no begin token to start from" in err


def test_a_template_from_a_file(capsys, tmp_path: pathlib.Path, model: str, bare: str) -> None:
    path = tmp_path / "template.jinja"
    path.write_text("[{{ messages[-1].content }}]")
    flags = ("--prompt=the", "--chat", "--max_tokens=1", f"--chat_template={path}")
    for name in (model, bare):
        result = answer(capsys, f"--model={name}", *flags)
        assert load_model(name).tokenizer.decode(result["prompt_ids"]) == "[the]"
    status, _, err = run(
        capsys, generate, f"--model={bare}", *flags[:3], "--chat_template=/no/file"
    )
    assert (status, err.count("\n")) == (1, 1)
    assert "--chat_template: cannot read '/no/file'" in err


def test_a_narrow_terminal_shows_question_marks(model: str) -> None:
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    for flags in (["--help"], [f"--model={model}", "--prompt_ids=3,4", "--max_tokens=20"]):
        command = [sys.executable, "-m", "stoker.launch.cli", "generate", *flags]
        run = subprocess.run(command, capture_output=True, env=environment)
        assert (run.returncode, run.stderr) == (0, b"")


def test_help_and_unknown_commands(capsys) -> None:
    assert cli.main(["--help"]) == 0
    overview = capsys.readouterr().out
    for name in ("generate", "chat", "score"):
        assert name in overview
        assert cli.main([name, "--help"]) == 0
        assert "--model=" in capsys.readouterr().out
    assert cli.main(["genrate"]) == 2
    assert "no command 'genrate'" in capsys.readouterr().err
    assert cli.main([]) == 2


@pytest.mark.parametrize(
    "start", [["-m", "stoker.launch.generate"], ["-m", "stoker.launch.cli", "generate"]]
)
def test_as_a_module_and_into_a_closed_pipe(start: list[str], model: str) -> None:
    flags = [f"--model={model}", "--prompt_ids=3,4", "--max_tokens=30", "--ignore_eos"]
    command = [sys.executable, *start, *flags]
    whole = subprocess.run(command, capture_output=True, text=True)
    assert (whole.returncode, whole.stderr) == (0, "")
    closed = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert closed.stdout is not None and closed.stderr is not None
    closed.stdout.close()
    assert closed.stderr.read() == ""
    assert closed.wait() == 1
