#!/usr/bin/env bash
# Checks a machine in about seven minutes. Instructors run it the day before. If nobody has tried your GPU, above all one of
# AMD's, please run it too. Prints a table and writes one text file to send to us, without user and host name.
#   ./scripts/check_room.sh                     GEMMs, set-up, kernel tests, a graph, every wrapper, the exercises
#   ./scripts/check_room.sh --quick             fewer kernel tests; the default without a GPU, where kernels are interpreted
#   ./scripts/check_room.sh --output room.txt   the text file (check_room.txt); logs stay in a folder next to it, room.txt.logs
#   ./scripts/check_room.sh --report room.json  also one file with all that a record of your GPU needs: kernels' errors beside
#                                               the interpreter's, their times, the steps of all versions; five minutes more
#   ./scripts/check_room.sh --time-limit 120    seconds for each line of the table (600)
# Exit status: 0; 1 if a line failed or was measured only in part; 2 for a bad option; 130 after Ctrl-C, with the table so far.
[ "${BASH##*/}" = bash ] || exec bash "$0" "$@" # called as sh check_room.sh
set -uo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/common/machine/environment.sh"

stop() { # SENTENCE: end because of a bad option
    say "check_room.sh: $1"
    exit 2
}

output=check_room.txt limit=600 quick="" report=""
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) usage && exit 0 ;;
        --quick) quick=1 ;;
        --output) output=${2:-} && shift ;;
        --report) report=${2:-} && shift ;;
        --time-limit) limit=${2:-} && shift ;;
        *) stop "there is no option $1: see --help" ;;
    esac
    [ $# -gt 0 ] || stop "the last option needs a value"
    shift
done
: 2>/dev/null >"$output" || stop "--output '$output' cannot be written"
[ -z "$report" ] || : 2>/dev/null >"$report" || stop "--report '$report' cannot be written"
[[ $limit =~ ^[1-9][0-9]*$ ]] || stop "--time-limit must be a number of seconds, not '$limit'"
output=$(realpath "$output") logs=$output.logs
[ -z "$report" ] || report=$(realpath "$report")
mkdir -p "$logs" || exit 1
use_environment room
gpu=$(gpu_kind)
[ "$gpu" != none ] || quick=1

rows=() failed=0 interrupted=""
trap 'interrupted=1' INT # the part that runs ends; the table so far is written

part() { # NAME COMMAND...: run it within the time limit; note its outcome, seconds and last line
    local status=0 start=$SECONDS log="$logs/${1//[^[:alnum:]]/_}.txt" outcome last
    [ -z "$interrupted" ] || { rows+=("$1|not run|-|interrupted") && return; }
    say "--- $1"
    timeout --foreground -s INT -k 20 "$limit" "${@:2}" >"$log" 2>&1 || status=$?
    case $status in
        0) outcome=ok ;;
        3) outcome=partly failed=1 ;; # a wrapper that measured only a part
        124) outcome="FAILED (time)" failed=1 ;;
        137) # by the time limit, or before it by a system that is short of memory
            outcome="FAILED (killed)" failed=1
            [ $((SECONDS - start)) -lt "$limit" ] || outcome="FAILED (time)"
            ;;
        *) outcome="FAILED ($status)" failed=1 ;;
    esac
    [ -z "$interrupted" ] || outcome=interrupted
    last=$(grep -Ev '^([0-9.]+ s)?[[:space:]]*$' "$log" | tail -n 1 | tr '|' ' ')
    last=${last//"$logs/"/} # the file is named below the table, and so is its folder
    rows+=("$1|$outcome|$((SECONDS - start))|${last:0:100}")
}

leave_out() { rows+=("$1|not run|-|$2"); } # NAME WHY

# shellcheck disable=SC2329 # part runs it in a shell of its own
check_graph() { # the same steps from a replayed graph and without one
    local script=(version4_pytorch_sdpa/tiny_llama_v4.py --preset tiny --num-steps 5)
    "$PYTHON" "${script[@]}" --graph --metrics-file "$logs/graph.json" &&
        "$PYTHON" "${script[@]}" --no-graph --metrics-file "$logs/eager.json" &&
        "$PYTHON" scripts/common/machine/room.py graph "$logs/graph.json" "$logs/eager.json"
}
# shellcheck disable=SC2329
interpret_kernels() { # the same tests without a GPU
    mapfile -t same < <("$PYTHON" scripts/common/machine/room.py tests "$logs/kernels.xml")
    CUDA_VISIBLE_DEVICES="" HIP_VISIBLE_DEVICES="" \
        "$PYTHON" -m pytest -q -p no:cacheprovider --junitxml "$logs/interpreted.xml" "${same[@]}"
}
export -f check_graph interpret_kernels
export PYTHON logs

cd -- "$ROOT" || exit 1
# First: a library whose GEMMs stall for half a second each would make every line after it fail.
for precision in bfloat16 tf32; do
    if [ "$gpu" = none ]; then
        leave_out "GEMM in $precision" "skipped: needs a GPU"
    else
        part "GEMM in $precision" "$PYTHON" scripts/common/machine/gemm_probe.py "$precision"
    fi
done
for script in version[1-4]_*/tiny_llama_v[1-4].py; do
    part "set-up check of ${script##*/}" "$PYTHON" "$script" --validate-setup
done
# Each case compiles kernels of its own, two to three seconds on a GPU. Of attention only the presets' width of a head:
# every other one is tuned, which takes 18 compilations.
chosen="outputs_and_gradients and (not attention or token or GPU) or adamw"
[ -z "$quick" ] || chosen="rms_norm or swiglu"
rm -f "$logs"/*.xml "$logs"/*.json # of an earlier run
tests=(-m "not slow" -k "$chosen" --junitxml "$logs/kernels.xml" tests/kernels/test_kernels.py)
part "kernel tests" "$PYTHON" -m pytest -q -p no:cacheprovider "${tests[@]}"
if [ "$gpu" = none ]; then
    leave_out "graph" "needs a GPU"
else
    part "graph" bash -c check_graph
fi
folder=$(echo version3_*)
[ "$gpu" != none ] || folder=$(echo version1_*) # interpreted kernels take minutes
for wrapper in hotspots trace counters rocprof_compute rocprof_sys; do
    part "get_$wrapper.sh" env TINY_LLAMA_PYTHON="$PYTHON" bash "$folder/get_$wrapper.sh" --output-dir "$logs/profiles"
done
part "exercises" "$PYTHON" exercises/check.py verify --solutions
if [ -n "$report" ]; then
    sizes=(--preset small --use-amp --num-steps 20)
    if [ "$gpu" = none ]; then
        sizes=(--hidden-dim 64 --num-layers 2 --num-heads 4 --seq-len 32 --batch-size 2 --vocab-size 256 --num-steps 5)
        leave_out "kernel tests in the interpreter" "the kernel tests ran there"
        leave_out "kernels' times" "needs a GPU"
    else
        part "kernel tests in the interpreter" bash -c interpret_kernels
        part "kernels' times" "$PYTHON" scripts/benchmark_kernels.py --json "$logs/benchmark.json"
    fi
    for script in version[1-4]_*/tiny_llama_v[1-4].py; do
        name=$(basename "$script" .py)
        part "steps of $name" "$PYTHON" "$script" "${sizes[@]}" --metrics-file "$logs/steps_$name.json"
    done
fi

"$PYTHON" scripts/common/machine/room.py facts >"$logs/facts.txt" 2>&1
{
    cat "$logs/facts.txt"
    echo "took        $((SECONDS / 60)) min $((SECONDS % 60)) s$([ -z "$quick" ] || echo ", quick")"
    echo
    printf '%s\n' "part|outcome|seconds|last line" "${rows[@]}" | "$PYTHON" scripts/common/machine/room.py table
} >"$logs/table.txt" 2>&1
cat "$logs/table.txt"
{
    cat "$logs/table.txt"
    for row in "${rows[@]}"; do
        case $row in *"|ok|"* | *"|not run|"*) continue ;; esac
        name=${row%%|*}
        echo && echo "=== the last lines of: $name" && tail -n 40 "$logs/${name//[^[:alnum:]]/_}.txt"
    done
    for log in "$logs"/get_*.txt; do
        echo && echo "=== what $(basename "$log" .txt) ran" && grep -E ' uses |rocprof|omni|nsys|ncu' "$log" | head -n 8
    done
} | "$PYTHON" scripts/common/machine/room.py scrub "$ROOT" "$logs" >"$output"
echo && echo "$output holds this and what failed. The logs are in $logs."
if [ -z "$report" ]; then
    echo "Send us $output in an issue."
else
    printf '%s\n' "part|outcome|seconds|last line" "${rows[@]}" |
        "$PYTHON" scripts/common/machine/room.py report "$logs" "$SECONDS" |
        "$PYTHON" scripts/common/machine/room.py scrub "$ROOT" "$logs" >"$report" || failed=1
    echo "$report holds all that a record of this machine needs, without names: send us this one in an issue."
fi
[ -z "$interrupted" ] || exit 130
exit "$failed"
