"""The flags that commands share, and what they make of them."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import jax
from absl import flags
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from ..engine.accounting import weight_bytes
from ..engine.engine import Engine
from ..engine.sampling_params import SamplingParams
from ..engine.shapes import Shapes
from ..models.config import ACTIVATION_TYPES, DTYPES, KV_DTYPES, PLATFORMS
from ..models.errors import StokerError
from ..models.loading import Model, load_model
from ..models.sources import DEFAULT_MODEL, byte_bar, cache_folder
from ..models.tokenizers import Tokenizer
from .hosts import define_hosts_flags
from .meshes import define_mesh_flags, given_mesh

#: Where `--context` is not given: contexts are rounded up to a power of two from here, so that a
#: few compiled shapes serve all prompts.
SMALLEST_CONTEXT = 1024
#: Few shapes, since a command that serves one sequence compiles them while somebody waits.
ONE_SEQUENCE = Shapes(decode=(1,), rows=(16, 64, 256), sequences=(1,), score=64)
#: Weights read between two sights of the text: less than 1/30 s on a computer with two cores.
BURST_BYTES = 1 << 29
#: More steps at once save hardly more of the host's work.
MOST_STEPS = 4
#: Bytes of compiled programs to keep.
PROGRAMS_BYTES = 1 << 30


def define_model_flags(
    values: flags.FlagValues,
    *,
    context: bool = True,
    stats: bool = True,
    keep_programs: bool = True,
) -> None:
    """Which model, how it is computed and, where asked for, `--context` and `--stats`.

    `keep_programs` is the default of `--cache_programs`.
    """
    flags.DEFINE_string(
        "model",
        DEFAULT_MODEL,
        "Alias of a model, path of a .gguf file, directory that holds one or that Hugging Face's "
        "files are in, or hf:organisation/name[@revision].",
        flag_values=values,
    )
    flags.DEFINE_enum(
        "dtype",
        None,
        DTYPES,
        "Type of activations: by default float32 on a CPU, and bfloat16 elsewhere.",
        flag_values=values,
    )
    flags.DEFINE_enum(
        "kv_dtype",
        None,
        KV_DTYPES,
        "Type of cached keys and values: by default --dtype, but bfloat16 beside int8 activations.",
        flag_values=values,
    )
    flags.DEFINE_enum(
        "kernels",
        None,
        PLATFORMS,
        "Who does the arithmetic: xla, the reference; cpu, the compiled kernels; tpu or gpu, the "
        "Pallas kernels. By default the fastest that this machine has.",
        flag_values=values,
    )
    flags.DEFINE_enum(
        "activations",
        None,
        ACTIVATION_TYPES,
        "What quantised weights are multiplied with: float32, exactly, or int8, fast; by default "
        "int8 where the CPU kernels run.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "quantize",
        None,
        "Make dense matrices int8 or int4 as they are read; those that are quantised already stay "
        "as they are. Options follow, as in int4:group=64,minimum=false,search=false.",
        flag_values=values,
    )
    flags.DEFINE_boolean(
        "cache_programs",
        keep_programs,
        "Keep compiled programs in the cache folder, for a faster next start.",
        flag_values=values,
    )
    define_mesh_flags(values)
    define_hosts_flags(values)
    if context:
        flags.DEFINE_integer(
            "context",
            None,
            "Longest sequence, prompt and reply together, in tokens; by default what is needed.",
            lower_bound=1,
            flag_values=values,
        )
    if stats:
        flags.DEFINE_boolean(
            "stats",
            False,
            "Report times, bytes moved and memory on standard error.",
            flag_values=values,
        )


def define_chat_flags(values: flags.FlagValues) -> None:
    """`--system` and `--chat_template`."""
    flags.DEFINE_string("system", None, "System message of a chat.", flag_values=values)
    flags.DEFINE_string(
        "chat_template",
        None,
        "File with a Jinja chat template to use in place of the model's own.",
        flag_values=values,
    )


def chat_template(values: flags.FlagValues) -> str | None:
    """The text of `--chat_template`, or None where it is not given."""
    path = values.chat_template
    return None if path is None else read_text("chat_template", path)


def define_sampling_flags(
    values: flags.FlagValues, *, temperature: float = 0.0, top_p: float = 1.0, max_tokens: int = 256
) -> None:
    """The flags of `SamplingParams`."""

    def number(name: str, default: float, text: str) -> None:
        flags.DEFINE_float(name, default, text, flag_values=values)

    flags.DEFINE_integer(
        "max_tokens", max_tokens, "Most tokens to generate.", lower_bound=1, flag_values=values
    )
    number("temperature", temperature, "Randomness of sampling; 0 takes the likeliest token.")
    flags.DEFINE_integer(
        "top_k", 0, "Sample from the k likeliest tokens; 0 or -1 for all.", flag_values=values
    )
    number("top_p", top_p, "Sample from the fewest tokens whose probabilities reach this.")
    number("min_p", 0.0, "Drop tokens below this share of the likeliest one's probability.")
    number("repetition_penalty", 1.0, "Divides logits of tokens that have occurred; 1 for none.")
    number("presence_penalty", 0.0, "Subtracted from logits of tokens that the reply holds.")
    number("frequency_penalty", 0.0, "Subtracted for each time the reply holds the token.")
    flags.DEFINE_integer(
        "min_tokens", 0, "Tokens before which no end token comes.", flag_values=values
    )
    flags.DEFINE_integer(
        "seed", None, "Seed of sampling: equal seeds give equal replies.", flag_values=values
    )
    flags.DEFINE_multi_string(
        "stop", [], "String that ends the reply; may be given again.", flag_values=values
    )
    flags.DEFINE_boolean(
        "ignore_eos", False, "Generate past end tokens, up to --max_tokens.", flag_values=values
    )


def sampling_params(values: flags.FlagValues) -> SamplingParams:
    """The sampling flags, checked."""
    names = (
        *("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "seed"),
        *("repetition_penalty", "presence_penalty", "frequency_penalty", "ignore_eos"),
    )
    given: dict[str, Any] = {name: values[name].value for name in names}
    return SamplingParams(**given, stop=tuple(values.stop))


def open_model(values: flags.FlagValues) -> Model:
    """The model that `--model` and `--dtype` name, on the devices of `--mesh`."""
    cache_programs(values)
    mesh, rules = given_mesh(values)
    # Of several processes, one shows how far it is.
    leads = jax.process_index() == 0
    with byte_bar("loading") if leads else contextlib.nullcontext() as progress:
        return load_model(
            values.model,
            dtype=values.dtype,
            kv_dtype=values.kv_dtype,
            kernels=values.kernels,
            activations=values.activations,
            quantize=values.quantize,
            mesh=mesh,
            rules=rules,
            progress=progress,
        )


def count_bar() -> Progress:
    """A bar on standard error, on a terminal only, for tasks that are counted."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, console=console, disable=not console.is_terminal)


def tokenizer_of(model: Model) -> Tokenizer:
    """The model's tokenizer; a StokerError where it has none."""
    if model.tokenizer is None:
        raise StokerError(f"model '{model.name}' has no tokenizer; give token ids, not text")
    return model.tokenizer


def cache_programs(values: flags.FlagValues) -> None:
    """Points JAX's compilation cache at the cache folder, as `--cache_programs` says.

    A cache that the user set up for JAX is left alone. Without a writable folder, programs are not
    kept.
    """
    folder = cache_folder() / "programs"
    if not values.cache_programs or jax.config.values["jax_compilation_cache_dir"]:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _drop_orphans(folder)
    except OSError:
        return
    # To miss the cache, as when two processes clear it up at once, costs time and nothing else.
    warnings.filterwarnings("ignore", message="Error (reading|writing) persistent compilation")
    if os.access(folder, os.W_OK):
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)
        jax.config.update("jax_compilation_cache_max_size", PROGRAMS_BYTES)


def _drop_orphans(folder: Path) -> None:
    """Removes programs whose time of use is not on record: JAX can neither evict nor pass them."""
    for program in folder.glob("*-cache"):
        if not program.with_name(program.name.removesuffix("-cache") + "-atime").exists():
            program.unlink(missing_ok=True)


def new_engine(values: flags.FlagValues, model: Model, needed: int) -> Engine:
    """An engine for one sequence of at least `needed` tokens, or of `--context` of them."""
    context = values.context
    if context is None:
        context = min(round_context(needed), model.config.max_positions)
    return Engine(
        model, slots=1, context=context, shapes=ONE_SEQUENCE, decode_steps=_steps_at_once(model)
    )


def _steps_at_once(model: Model) -> int:
    """Decode steps for each dispatch to one reader: so few that text does not come in bursts."""
    if model.config.kernels.platform == "xla":  # which may widen all weights in each step
        return 1
    step = weight_bytes(model.config, model.params).read(1)
    return max(1, min(MOST_STEPS, BURST_BYTES // int(step)))


def round_context(needed: int) -> int:
    """The power of two from `SMALLEST_CONTEXT` on that holds `needed` tokens."""
    return max(SMALLEST_CONTEXT, 1 << (needed - 1).bit_length())


def read_text(flag: str, path: str) -> str:
    """The UTF-8 text of a file, or of standard input for "-".

    Raises:
      StokerError: where it cannot be read or is not UTF-8, naming the flag and the file.
    """
    try:
        if path == "-" and sys.stdin is None:
            raise StokerError(f"--{flag}: standard input is closed")
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
        return data.decode("utf-8")
    except OSError as error:
        raise StokerError(f"--{flag}: cannot read {path!r}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise StokerError(
            f"--{flag}: {path!r} is not UTF-8 text (byte {error.start} cannot be decoded)"
        ) from None
