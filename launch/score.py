"""`stoker score`: perplexity and log-probabilities of a text."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from typing import Any

from absl import flags

from ..engine.sampling_params import SamplingParams
from ..models.errors import StokerError
from ..models.loading import Model
from . import common
from .command import Command


def define_flags(values: flags.FlagValues) -> None:
    """The flags of this command."""
    common.define_model_flags(values)
    flags.DEFINE_string(
        "text_file", None, "UTF-8 text to score; - reads standard input.", flag_values=values
    )
    flags.DEFINE_string(
        "ids_file", None, "JSON list of token ids to score, taken as they are.", flag_values=values
    )
    flags.DEFINE_boolean(
        "json", False, "Print one JSON object: ids, logprobs, perplexity.", flag_values=values
    )


def run(values: flags.FlagValues, load: Callable[[], Model]) -> None:
    """Scores and prints."""
    if (values.text_file is None) == (values.ids_file is None):
        raise StokerError("give either --text_file=FILE (- for standard input) or --ids_file=FILE")
    ids = None if values.ids_file is None else _read_ids(values.ids_file)
    text = None if values.text_file is None else common.read_text("text_file", values.text_file)
    model = load()
    if text is not None:
        ids = common.tokenizer_of(model).encode(text)
    assert ids is not None
    if len(ids) < 2:
        raise StokerError(f"there are {len(ids)} tokens to score; at least 2 are needed")
    engine = common.new_engine(values, model, len(ids))
    start = time.perf_counter()
    (reply,) = engine.generate([ids], SamplingParams(max_tokens=0, prompt_logprobs=0))
    seconds = time.perf_counter() - start
    if reply.error:
        raise StokerError(reply.error)
    logprobs = reply.prompt_logprobs or []
    known = [value for value in logprobs if value is not None]
    perplexity = math.exp(-math.fsum(known) / len(known))
    if values.json:
        result = {"model": model.name, "ids": ids, "logprobs": logprobs, "perplexity": perplexity}
        print(json.dumps(result))
    else:
        print(f"perplexity {perplexity:.4f} over {len(known)} tokens")
    if values.stats:
        print(
            f"load {model.load_seconds:.2f} s, compile {engine.compile_s:.2f} s, "
            f"scored {len(ids) / (seconds - engine.compile_s):.0f} tok/s",
            file=sys.stderr,
        )


def _read_ids(path: str) -> list[int]:
    try:
        ids: Any = json.loads(common.read_text("ids_file", path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise StokerError(f"--ids_file: {path!r} is not JSON: {error}") from None
    whole = isinstance(ids, list) and all(type(token) is int for token in ids)
    if not whole:
        raise StokerError(f"--ids_file: {path!r} must hold a JSON list of whole numbers")
    return ids


COMMAND = Command("score", define_flags, run, common.open_model)

if __name__ == "__main__":
    sys.exit(COMMAND.main())
