"""`stoker inspect`: what a checkpoint holds, from its headers alone."""

from __future__ import annotations

import json
import sys

from absl import flags
from rich.console import Console
from rich.table import Table

from ..models.checkpoints.inspection import Report, inspect_model, rope_text
from ..models.sources import DEFAULT_MODEL
from .command import Command, write_output


def define_flags(values: flags.FlagValues) -> None:
    """The flags of this command."""
    flags.DEFINE_string(
        "model",
        DEFAULT_MODEL,
        "What to look at: whatever the other commands take as --model.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "json",
        None,
        "Write one JSON object to this file, or - for standard output.",
        flag_values=values,
    )


def run(values: flags.FlagValues) -> None:
    """Inspects and prints."""
    report = inspect_model(values.model)
    if values.json is None:
        print_report(report, Console(highlight=False))
        return
    write_output("json", values.json, json.dumps(report.to_json(), indent=1) + "\n")


def print_report(report: Report, console: Console) -> None:
    """Tables for people."""
    facts = Table.grid(padding=(0, 2))
    for name, text in _facts(report).items():
        facts.add_row(name, text)
    console.print(facts)
    table = Table("part", box=None, padding=(0, 2))
    for title in ("parameters", "active", "MB in the file", "MB loaded"):
        table.add_column(title, justify="right")
    for name, part in (*report.groups.items(), ("all", report.total)):
        sizes = (f"{size / 1e6:,.2f}" for size in (part.file_bytes, part.loaded_bytes))
        table.add_row(name, f"{part.parameters:,}", f"{part.active:,}", *sizes)
    console.print(table)
    table = Table("type in the file", box=None, padding=(0, 2))
    for title in ("tensors", "MB"):
        table.add_column(title, justify="right")
    for name, (count, size) in report.types.items():
        table.add_row(name, f"{count}", f"{size / 1e6:,.2f}")
    console.print(table)
    for line in report.unusual:
        console.print(f"- {line}", markup=False)


def _facts(report: Report) -> dict[str, str]:
    config, words = report.config, report.tokenizer
    experts = ""
    if config.n_experts:
        experts = f", {config.n_experts} experts, {config.experts_per_token} to a token"
    heads = f"{config.n_heads} query and {config.n_kv_heads} KV heads of {config.head_dim}"
    if config.latent is not None:
        heads = f"{config.n_heads} heads on latent vectors of {config.latent.kv_rank}"
    ends = ", ".join(f"{token} {spelt}" for token, spelt in words["end"].items()) or "none"
    begins = ", ".join(f"{token} {spelt}" for token, spelt in words["begin"].items()) or "none"
    added = "" if words["adds_begin"] else " (not added)"
    template = "none"
    if words["template_characters"]:
        template = f"{words['template_characters']} characters, {words['template_source']}"
    files = f"{report.files} file{'s' if report.files > 1 else ''}"
    total = report.total
    share = f", {total.active / 1e6:,.1f} M active" if total.active != total.parameters else ""
    facts = {
        "model": report.name,
        "path": report.path,
        "format": f"{report.format}; {files}, {report.file_bytes / 1e6:,.2f} MB",
        "family": f"{config.family}: {config.n_layers} layers of {config.d_model}, {heads}, "
        f"MLP {config.d_ff} ({config.activation}){experts}",
        "parameters": f"{total.parameters / 1e6:,.1f} M{share}",
        "context": f"{config.max_positions} tokens; rotary {rope_text(config)}",
        "KV cache": f"{report.kv_token_bytes:,} bytes a token in bfloat16, "
        f"{report.kv_context_bytes / 1e6:,.1f} MB for a whole context",
        "tokenizer": f"{words['kind']}, {words['tokens']} tokens ({words['special_tokens']} "
        f"special) on {config.vocab_size} rows",
        "begin": f"{begins}{added}",
        "end": ends,
        "template": template,
    }
    return {name: text.replace("[", r"\[") for name, text in facts.items()}


COMMAND = Command("inspect", define_flags, run)

if __name__ == "__main__":
    sys.exit(COMMAND.main())
