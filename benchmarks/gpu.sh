#!/usr/bin/env bash
# Everything that is asked of a GPU, in one command of at most nine minutes, on a bare machine without a network:
#
#     WHEELS=folder bash benchmarks/gpu.sh          wheels that the machine lacks, installed into a temporary folder
#     bash benchmarks/gpu.sh --toy                  the same on the CPU with shapes of two layers, to try the script
#
# PYTHON names the interpreter, SECONDS_IN_ALL the time (default 530), DATA a folder with the paper's text, BASE a folder
# with GPT2-124M; without these two the row of Table 1 has random weights and made-up text: its time counts, its
# perplexity does not. OUT is where logs and lines of JSON go. Each part has a limit, and what did not fit is said.
set -u -o pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
TOY=${1:-}
OUT=${OUT:-$(mktemp -d)}
mkdir -p "$OUT"
ALL=${SECONDS_IN_ALL:-530}
BEGAN=$(date +%s)
SITE=$(mktemp -d)
trap 'rm -rf "$SITE"' EXIT
left() { echo $((ALL - ($(date +%s) - BEGAN))); }
part() { echo; echo "== $1 ($(left) s left)"; }
# at most SECONDS of what is left, with the whole output in a log
limited() { # seconds, log, command...
  local most=$1 log=$2 now; shift 2
  now=$(left); [ "$now" -lt "$most" ] && most=$now
  if [ "$most" -lt 5 ]; then echo "left out: no time"; return 0; fi
  timeout --kill-after=5 "$most" "$@" >"$OUT/$log" 2>&1; local code=$?
  if [ $code -eq 124 ] || [ $code -eq 137 ]; then echo "stopped after its $most s; what it had found:"; fi
  return $code
}

if [ -n "${WHEELS:-}" ]; then
  "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$SITE" "$WHEELS"/*.whl || exit 1
fi
"$PYTHON" benchmarks/metadata.py "$SITE" || exit 1
export PYTHONPATH="$SITE:$PWD/src:$PWD/benchmarks${PYTHONPATH:+:$PYTHONPATH}" COMINGLE_NO_TYPECHECK=1 PYTHONUNBUFFERED=1

part "machine"
nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader 2>/dev/null || echo "no NVIDIA GPU"
"$PYTHON" -c 'import sys, torch, transformers
print(sys.version.split()[0], "torch", torch.__version__, "transformers", transformers.__version__)
print("CUDA", torch.version.cuda, "available", torch.cuda.is_available())' || exit 1
if [ "$TOY" != --toy ] && ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo "no CUDA GPU here: bash benchmarks/gpu.sh --toy runs on the CPU"; exit 1
fi

if [ "$TOY" = --toy ]; then
  DEVICE=cpu; SPEED="--toy --device cpu"
  QUICK="(test_on_text and (fedavg or comigs-1g1s) and not moe and not plus) or micro_batches_and"
  export TRITON_INTERPRET=1  # without a GPU, Triton's kernels run in its interpreter, if there is Triton
else
  DEVICE=cuda; SPEED=""
  QUICK="test_on_text or test_on_nets or resume or bfloat16 or convolutions or memory or gpu_mixture or gpu_copies or nccl"
  QUICK="$QUICK or two_processes or (gpu_graphs and not every_method) or (every_method and (comigs-1g1s or hetlora))"
fi

part "correctness: every method on text and nets, resume, bfloat16, Triton kernels, CUDA graphs, copies, NCCL"
COMINGLE_TEST_DEVICE=$DEVICE limited $((ALL * 2 / 9)) tests.log "$PYTHON" -m pytest -q -p no:cacheprovider -m gpu tests/gpu -k "$QUICK"
grep -E "^(FAILED|ERROR)|passed|failed" "$OUT/tests.log" | cut -c1-200 | tail -40

part "speed"
# shellcheck disable=SC2086
limited $((ALL * 5 / 9)) speed.log "$PYTHON" benchmarks/gpu.py $SPEED --seconds $((ALL * 5 / 9 - 15)) --out "$OUT/speed.json"
grep -vE "Warning|warn" "$OUT/speed.log" | tail -30

part "a row of Table 1 at the paper's scale"
# shellcheck disable=SC2046
limited "$(left)" table1.log "$PYTHON" benchmarks/table1_row.py --seconds "$(($(left) - 10))" \
  $([ "$TOY" = --toy ] && echo --toy) ${DATA:+--data "$DATA"} ${BASE:+--base "$BASE"}
tail -5 "$OUT/table1.log"

echo; echo "$(($(date +%s) - BEGAN)) s in all; logs in $OUT"
