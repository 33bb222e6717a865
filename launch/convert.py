"""`stoker convert`: writes a model as a checkpoint that loads fast, quantised if asked for."""

from __future__ import annotations

import sys
import time

from absl import flags

from ..models.checkpoints.converting import DENSE, convert_model
from ..models.checkpoints.manifest import STORAGES
from ..models.errors import StokerError
from ..models.sources import DEFAULT_MODEL, byte_bar
from .command import Command


def define_flags(values: flags.FlagValues) -> None:
    """The flags of this command."""
    flags.DEFINE_string(
        "model",
        DEFAULT_MODEL,
        "What to convert: whatever the other commands take as --model.",
        flag_values=values,
    )
    flags.DEFINE_string("output", None, "Folder to write.", flag_values=values)
    flags.DEFINE_enum(
        "to",
        "safetensors",
        STORAGES,
        "Who keeps the arrays: safetensors files, mapped into memory and without further "
        "packages, or Orbax, for meshes of devices (pip install 'stoker[orbax]').",
        flag_values=values,
    )
    flags.DEFINE_string(
        "quantize",
        None,
        "Make dense matrices int8 or int4; those that are quantised already stay as they are. "
        "Options follow, as in int4:group=64,minimum=false,search=false.",
        flag_values=values,
    )
    flags.DEFINE_enum(
        "dtype",
        None,
        DENSE,
        "Make all matrices dense and of this type, before --quantize: so quantised ones can be "
        "quantised again. By default they stay as they are.",
        flag_values=values,
    )
    flags.DEFINE_boolean(
        "overwrite",
        False,
        "Replace the folder if this command wrote it before.",
        flag_values=values,
    )


def run(values: flags.FlagValues) -> None:
    """Converts, and says what was written."""
    if not values.output:
        raise StokerError("give the folder to write, --output=FOLDER")
    start = time.perf_counter()
    with byte_bar("converting") as progress:
        done = convert_model(
            values.model,
            values.output,
            to=values.to,
            quantize=values.quantize,
            dtype=values.dtype,
            overwrite=values.overwrite,
            progress=progress,
        )
    seconds = time.perf_counter() - start
    print(
        f"wrote {done.written_bytes / 1e6:.2f} MB to {values.output} from "
        f"{done.read_bytes / 1e6:.2f} MB in {seconds:.1f} s"
    )


COMMAND = Command("convert", define_flags, run)

if __name__ == "__main__":
    sys.exit(COMMAND.main())
