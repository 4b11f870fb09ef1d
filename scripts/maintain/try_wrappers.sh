#!/usr/bin/env bash
# Try every profiling wrapper of every version on this machine. Print a line for each: how it ended, seconds, which
# profiler it used and why, and the first row of the table that it left.
#
#   ./scripts/maintain/try_wrappers.sh                    all of them; preset small, or a toy model without a GPU
#   ./scripts/maintain/try_wrappers.sh --version 3 --output-dir DIR --preset medium --use-amp
#   ./scripts/maintain/try_wrappers.sh --time-limit 540   start nothing that the limit in seconds would cut off
#
# Other options go to the training scripts. Leaves results and logs in --output-dir (tried_wrappers). Exit status: 0 all
# delivered; 1 where one failed or was not tried.

set -uo pipefail
# shellcheck source=../common/wrappers/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common/wrappers/setup.sh"

target=tried_wrappers version="[1-4]" limit=86400 passed=()
while [ $# -gt 0 ]; do
    TAKEN=1
    case $1 in
        -h | --help) usage && exit 0 ;;
        --version) value_of "$@" && version=$VALUE ;;
        --output-dir) value_of "$@" && target=$VALUE ;;
        --time-limit) value_of "$@" && limit=$VALUE ;;
        *) passed+=("$1") ;;
    esac
    shift "$TAKEN"
done
[[ $version =~ ^([1-4]|\[1-4\])$ ]] || fail 2 "--version must be 1, 2, 3 or 4, not $version"
[[ $limit =~ ^[0-9]+$ ]] || fail 2 "--time-limit must be whole seconds, not $limit"
mkdir -p "$target" && target=$(cd "$target" && pwd) || exit 1
find_python

if [[ " ${passed[*]-} " != *" --preset"* ]] && { have_amd_gpu || have_nvidia_gpu; }; then passed+=(--preset small); fi

first_row() { # FOLDER: of the table in it, or of that of its trace; fails where there is none
    local table
    table=$(find "$1" \( -name limits.csv -o -name counters.csv -o -name launches.csv -o -name hotspots.csv \
        -o -name kernels.csv \) -exec ls -t {} + | sed -n 1p)
    if [ -n "$table" ]; then sed -n 2p "$table" | grep .; else "$PYTHON" "$SCRIPTS/kernel_times.py" "$1"/*/* --top 1; fi
}

try() { # FOLDER NAME OPTION...: run it, look at what it left, print the line
    local place log began=$SECONDS status said why word="done" seconds=$((limit - SECONDS))
    place="$target/$(basename "$1")/${*:2}"
    log=$place.log
    mkdir -p "$place"
    timeout -s INT -k 15 $((seconds < 120 ? seconds : 120)) "$1/$2" --output-dir "$place" "${@:3}" --num-steps 2 \
        ${passed[@]+"${passed[@]}"} >"$log" 2>&1
    status=$?
    said=$(tail -n 1 "$log")
    [ $status != 0 ] || said=$(first_row "$place" 2>&1) || status=1
    if [ $status = 0 ]; then delivered=$((delivered + 1)); else word="FAILED ($status)" failed=$((failed + 1)); fi
    why=$(sed -n 's/.* uses \(.*\)/, \1/p' "$log")
    echo "$word  $(basename "$1")/${*:2}  $((SECONDS - began)) s$why: ${said%%$'\n'*}"
}

delivered=0 failed=0 passed_over=()
tries=(get_trace.sh get_hotspots.sh get_counters.sh get_rocprof_sys.sh get_rocprof_compute.sh)
if { have_amd_gpu && find_tool rocprofv3; } || { have_nvidia_gpu && find_tool ncu; }; then
    tries+=("get_counters.sh --set memory")
fi
# shellcheck disable=SC2231 # the version may be a pattern
for folder in "$SCRIPTS"/../version${version}_*; do
    for try in "${tries[@]}"; do
        read -r -a words <<<"$try"
        if [ $((limit - SECONDS)) -lt 30 ]; then
            passed_over+=("$(basename "$folder")/$try")
        else
            try "$folder" "${words[@]}"
        fi
    done
done
echo "$delivered delivered, $failed failed; results and logs in $target"
[ ${#passed_over[@]} = 0 ] || printf 'not tried for lack of time: %s\n' "${passed_over[@]}"
[ $((failed + ${#passed_over[@]})) = 0 ]
