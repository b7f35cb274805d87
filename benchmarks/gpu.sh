#!/usr/bin/env bash
# Everything that is asked of a GPU, in one command of at most nine minutes, on a bare machine without a network:
#
#     WHEELS=folder bash benchmarks/gpu.sh          wheels that the machine lacks, installed into a temporary folder
#     PARTS=speed bash benchmarks/gpu.sh            one part with all the time; the others are tests and table1
#     bash benchmarks/gpu.sh --toy                  the same on the CPU with shapes of two layers, to try the script
#
# PYTHON names the interpreter, SECONDS_IN_ALL the time (default 530), DATA a folder with the paper's text, BASE a folder
# with GPT2-124M; without these two the row of Table 1 has random weights and made-up text: its time counts, its
# perplexity does not. OUT is where logs and lines of JSON go. Each part has a limit, and what did not fit is said.
# It exits with 1 if a part failed; one that was stopped has not.
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
PARTS=${PARTS:-tests speed table1}
FAILED=""
wanted() { [[ " $PARTS " == *" $1 "* ]]; }
# of so many ninths of all the time, or all of it for a part alone
share() { if [ "$PARTS" = "${PARTS% *}" ]; then left; else echo $((ALL * $1 / 9)); fi; }
# at most SECONDS of what is left, with the whole output in a log; stopped as by Ctrl-C, so that what was found is said
limited() { # seconds, log, command...
  local most=$1 log=$2 now; shift 2
  : >"$OUT/$log"
  now=$(left); [ "$now" -lt "$most" ] && most=$now
  if [ "$most" -lt 5 ]; then echo "left out: no time"; return 0; fi
  timeout --signal=INT --kill-after=10 "$most" "$@" >"$OUT/$log" 2>&1; local code=$?
  if [ $code -eq 124 ] || [ $code -eq 137 ]; then echo "stopped after its $most s; what it had found:"; return 0; fi
  if [ $code -ne 0 ]; then echo "failed with $code"; FAILED="$FAILED $log"; fi
}

if [ -n "${WHEELS:-}" ]; then
  "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$SITE" "$WHEELS"/*.whl || exit 1
fi
"$PYTHON" benchmarks/metadata.py "$SITE" || exit 1
export PYTHONPATH="$SITE:$PWD/src:$PWD/benchmarks${PYTHONPATH:+:$PYTHONPATH}" COMINGLE_NO_TYPECHECK=1 PYTHONUNBUFFERED=1

part "machine"
nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader 2>/dev/null || echo "no NVIDIA GPU"
"$PYTHON" benchmarks/metadata.py || exit 1
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

if wanted tests; then
  part "correctness: every method on text and nets, resume, bfloat16, Triton kernels, CUDA graphs, copies, NCCL"
  # Several processes, if pytest-xdist is there: most of the time goes into tiny models that wait for Python.
  MANY=""; [ "$TOY" != --toy ] && "$PYTHON" -c 'import xdist' 2>/dev/null && MANY="-n 4"
  # What a driver or a compiler warns of is no wrong number: here a warning is none of the errors that it is elsewhere.
  # shellcheck disable=SC2086
  COMINGLE_TEST_DEVICE=$DEVICE OMP_NUM_THREADS=${OMP_NUM_THREADS:-4} limited "$(share 2)" tests.log \
    "$PYTHON" -m pytest -q -p no:cacheprovider -W default $MANY -m gpu tests/gpu -k "$QUICK"
  grep -E "^(FAILED|ERROR)|passed|failed|^E  |rror:" "$OUT/tests.log" | cut -c1-200 | tail -60
fi

if wanted speed; then
  part "speed"
  SECONDS_HERE=$(share 5)
  # shellcheck disable=SC2086
  limited "$SECONDS_HERE" speed.log \
    "$PYTHON" benchmarks/gpu.py $SPEED --seconds $((SECONDS_HERE - 15)) --out "$OUT/speed.json"
  grep -vE "Warning:|warnings?\.warn|warn_once" "$OUT/speed.log" | tail -60
fi

if wanted table1; then
  part "a row of Table 1 at the paper's scale"
  # shellcheck disable=SC2046
  limited "$(left)" table1.log "$PYTHON" papers/benchmarks/table1_row.py --seconds "$(($(left) - 10))" \
    $([ "$TOY" = --toy ] && echo --toy) ${DATA:+--data "$DATA"} ${BASE:+--base "$BASE"}
  tail -5 "$OUT/table1.log"
fi

echo; echo "$(($(date +%s) - BEGAN)) s in all; logs in $OUT"
[ -z "$FAILED" ] || { echo "failed, see there:$FAILED"; exit 1; }
