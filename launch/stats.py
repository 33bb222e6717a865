"""The report of `--stats`: predicted bytes beside measured time."""

from __future__ import annotations

import sys
from typing import Any

from ..engine.accounting import peak_memory, step_cost
from ..engine.engine import Engine
from ..engine.replies import Reply
from .meshes import devices_at_once, mesh_lines


def reply_stats(engine: Engine, reply: Reply, limit: tuple[float, str]) -> dict[str, Any]:
    """What one reply cost, by name; plain numbers for JSON. Bytes are of an average decode step.

    `limit` comes from `memory_bandwidth`, asked before the model was loaded: its probe takes memory
    that would otherwise count into the peak.
    """
    tokens = len(reply.prompt_ids)
    context = tokens + len(reply.ids) / 2
    model = engine.model
    cost = step_cost(model.config, model.params, [context])
    # Steps come in bursts, whose last may have gone on after the end of the reply.
    tokens_after = max(len(reply.ids) - 1, 1)
    steps = -(-tokens_after // engine.decode_steps) * engine.decode_steps
    seconds = (reply.tpot_s or 0.0) * tokens_after / steps or None
    bandwidth, source = limit[0] * devices_at_once(model), limit[1]
    achieved = cost.bytes / seconds if seconds else None
    return {
        "load_s": model.load_seconds,
        "compile_s": engine.compile_s,
        "prompt_tokens": tokens,
        "reused_tokens": reply.cached_tokens,
        "ttft_s": reply.times.ttft_s,
        "decode_tok_s": 1 / reply.tpot_s if reply.tpot_s else 0.0,
        "step_bytes": {
            "weights": round(cost.weights),
            "kv_read": round(cost.kv_read),
            "kv_write": round(cost.kv_write),
            "logits": round(cost.logits),
            "total": round(cost.bytes),
        },
        "step_operations": round(cost.operations),
        "step_s": seconds,
        "floor_step_s": cost.bytes / bandwidth if bandwidth else None,
        "achieved_bytes_s": achieved,
        "bandwidth_bytes_s": bandwidth or None,
        "bandwidth_source": source,
        "bandwidth_share": achieved / bandwidth if achieved and bandwidth else None,
        "peak_memory_bytes": peak_memory(),
        "mesh": mesh_lines(model),
    }


def print_stats(stats: dict[str, Any]) -> None:
    """The same for people, on standard error."""
    step = stats["step_bytes"]
    kv = f"KV read {megabytes(step['kv_read'])}, KV written {megabytes(step['kv_write'])}"
    rows = {
        "load": f"{stats['load_s']:.2f} s, compile {stats['compile_s']:.2f} s",
        "prompt": f"{stats['prompt_tokens']} tokens, {stats['reused_tokens']} of them cached",
        "first token": f"{stats['ttft_s']:.2f} s",
        "decode": f"{stats['decode_tok_s']:.1f} tok/s",
        "bytes per step": f"{megabytes(step['total'])}: weights {megabytes(step['weights'])}, "
        f"{kv}, logits {megabytes(step['logits'])}",
    }
    if stats["step_s"]:
        rows |= {"time per step": _time_per_step(stats), "achieved": _achieved(stats)}
    rows["peak memory"] = megabytes(stats["peak_memory_bytes"])
    if stats["mesh"]:
        rows["mesh"] = "; ".join(stats["mesh"])
    width = max(map(len, rows))
    for name, text in rows.items():
        print(f"{name:{width}}  {text}", file=sys.stderr)


def _time_per_step(stats: dict[str, Any]) -> str:
    floor = stats["floor_step_s"]
    text = f"{stats['step_s'] * 1e3:.1f} ms"
    return f"{text}; floor {floor * 1e3:.1f} ms" if floor else text


def _achieved(stats: dict[str, Any]) -> str:
    text = f"{stats['achieved_bytes_s'] / 1e9:.2f} GB/s"
    if not stats["bandwidth_share"]:
        return f"{text}; this device's bandwidth is not known ({stats['bandwidth_source']})"
    limit = f"{stats['bandwidth_bytes_s'] / 1e9:.1f} GB/s ({stats['bandwidth_source']})"
    return f"{text}, {stats['bandwidth_share']:.1%} of {limit}"


def megabytes(count: float) -> str:
    """Bytes in MB of 10**6, for people."""
    return f"{count / 1e6:.2f} MB"
