#!/usr/bin/env bash
# Try every profiling wrapper of every version on this machine, and the count of FLOPs with its roofline. Check what
# each one left and print a line for it: how it ended, seconds, which profiler it used and why, what it left.
#
#   ./scripts/maintain/try_wrappers.sh                    all of them; preset small, or a toy model without a GPU
#   ./scripts/maintain/try_wrappers.sh --version 3        those of one version
#   ./scripts/maintain/try_wrappers.sh --time-limit 540   start nothing that the limit in seconds would cut off
#   ./scripts/maintain/try_wrappers.sh --each 100         seconds that one may take (120)
#   ./scripts/maintain/try_wrappers.sh --output-dir DIR --preset medium --use-amp
#
# Other options go to the training scripts. Leaves results and logs in --output-dir (tried_wrappers). Exit status: 0 all
# delivered; 1 where one failed or was not tried.

set -uo pipefail
scripts=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
target=tried_wrappers version="[1-4]" limit=86400 each=120 passed=()
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) sed -n -e '1d' -e '/^#/!q' -e 's/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && exit 0 ;;
        --version | --output-dir | --time-limit | --each)
            [ $# -gt 1 ] || { echo "try_wrappers.sh: $1 needs a value" >&2 && exit 2; }
            case $1 in
                --version) version=$2 ;;
                --output-dir) target=$2 ;;
                --time-limit) limit=$2 ;;
                --each) each=$2 ;;
            esac
            shift
            ;;
        *) passed+=("$1") ;;
    esac
    shift
done
[[ $version =~ ^([1-4]|\[1-4\])$ ]] || { echo "try_wrappers.sh: --version must be 1, 2, 3 or 4, not $version" >&2 && exit 2; }
[[ $limit$each =~ ^[0-9]+$ ]] || { echo "try_wrappers.sh: --time-limit and --each must be whole seconds" >&2 && exit 2; }
mkdir -p "$target" || exit 1
target=$(cd "$target" && pwd)
# shellcheck source=../common/wrappers/setup.sh
source "$scripts/common/wrappers/setup.sh"
find_python

counting=()
if [[ " ${passed[*]-} " != *" --preset"* ]]; then
    if have_amd_gpu || have_nvidia_gpu; then
        passed+=(--preset small)
    else # the wrappers choose such sizes themselves
        counting=(--hidden-dim 64 --num-layers 2 --num-heads 4 --batch-size 2 --seq-len 32)
    fi
fi

left() { # TRY RESULT_FOLDER: what proves that it delivered; fails where that is missing or cannot be read
    case $1 in
        get_trace.sh | get_rocprof_sys.sh) "$PYTHON" "$SCRIPTS/kernel_times.py" "$2" --top 1 | head -n 1 ;;
        get_rocprof_compute.sh) # without a GPU or its profiler, PyTorch's times
            if [ -e "$2/limits.csv" ]; then sed -n 2p "$2/limits.csv"; else sed -n 2p "$2/kernels.csv"; fi | grep .
            ;;
        "get_counters.sh --set"*) sed -n 2p "$2/counters.csv" | grep . ;;
        get_counters.sh) sed -n 2p "$2/launches.csv" | grep . ;;
        get_hotspots.sh) sed -n 2p "$2/hotspots.csv" | grep . ;;
        run_deepspeed_flops.py*) test -s "$2/roofline.png" && sed -n 2p "$2/mfu_analysis.csv" ;;
    esac
}

within() { # SECONDS COMMAND...
    if command -v timeout >/dev/null; then timeout -s INT -k 15 "$@"; else "${@:2}"; fi
}

attempt() { # FOLDER NAME OPTION...: run it, look at what it left, print the line
    local folder=$1 name=$2 place log began=$SECONDS status said why word="done" result seconds=$((limit - SECONDS))
    [ "$seconds" -lt "$each" ] || seconds=$each
    place="$target/$(basename "$folder")/${*:2}"
    log=$place.log
    mkdir -p "$place"
    if [ "$name" = run_deepspeed_flops.py ]; then
        within "$seconds" "$PYTHON" "$folder/$name" --profile-dir "$place" "${@:3}" --num-steps 5 \
            ${counting[@]+"${counting[@]}"} ${passed[@]+"${passed[@]}"} >"$log" 2>&1
        status=$? result=$place
    else
        within "$seconds" "$folder/$name" --output-dir "$place" "${@:3}" --num-steps 2 \
            ${passed[@]+"${passed[@]}"} >"$log" 2>&1
        status=$?
        result=$(find "$place" -mindepth 2 -maxdepth 2 -type d | sort | tail -n 1)
    fi
    said=$(tail -n 1 "$log")
    [ $status != 124 ] || said="ended after $seconds s; $said"
    [ $status != 0 ] || said=$(left "${*:2}" "$result" 2>&1) || status=1
    if [ $status = 0 ]; then delivered=$((delivered + 1)); else word="FAILED ($status)" failed=$((failed + 1)); fi
    why=$(sed -n 's/.* uses \(.*\)/, \1/p' "$log")
    echo "$word  $(basename "$folder")/${*:2}  $((SECONDS - began)) s$why: $said"
}

delivered=0 failed=0 passed_over=()
tries=(get_trace.sh get_hotspots.sh get_counters.sh get_rocprof_sys.sh get_rocprof_compute.sh)
if { have_amd_gpu && find_tool rocprofv3; } || { have_nvidia_gpu && find_tool ncu; }; then
    tries+=("get_counters.sh --set memory")
fi
tries+=("run_deepspeed_flops.py --generate-roofline")
# shellcheck disable=SC2231 # the version may be a pattern
for folder in "$scripts"/../version${version}_*; do
    for try in "${tries[@]}"; do
        read -r -a words <<<"$try"
        if [ $((limit - SECONDS)) -lt 30 ]; then
            passed_over+=("$(basename "$folder")/$try")
        else
            attempt "$folder" "${words[@]}"
        fi
    done
done
echo "$delivered delivered, $failed failed; results and logs in $target"
[ ${#passed_over[@]} = 0 ] || printf 'not tried for lack of time: %s\n' "${passed_over[@]}"
[ $((failed + ${#passed_over[@]})) = 0 ]
