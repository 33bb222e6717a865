#!/usr/bin/env bash
# One run of under five minutes for a rented accelerator, with nothing fetched: numerics of every
# operation against the float32 reference, then speed beside the floor. Prints tables; writes JSON.
#
#   scripts/device_check.sh [FOLDER] [flags of scripts/device_check.py]
#
# PYTHON picks an interpreter that has JAX for the device. WHEELS may name a folder of wheels of what
# else it lacks (flax, gguf, …), which are unpacked beside the results and not installed. Where that
# JAX is another version than the tests run with, the report says which.
set -euo pipefail
out="$(realpath -m "${1:-device_check}")"
shift || true
root="$(cd "$(dirname "$0")/.." && pwd)"
python="${PYTHON:-python3}"
mkdir -p "$out"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
ln -s "$root" "$work/stoker"
if [ -n "${WHEELS:-}" ]; then
    "$python" -m pip install --quiet --no-index --no-deps --target "$work/site" "$WHEELS"/*.whl
fi
export PYTHONPATH="$work:$work/site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
cd "$work"
timeout --signal=INT --kill-after=10 320 "$python" "$root/scripts/device_check.py" --out="$out" "$@" \
    2>&1 | tee "$out/log.txt"
