#!/usr/bin/env bash
# Try every profiling wrapper of every version on this machine. Print a line for each: how it ended, seconds, which
# profiler it used and why, and the first row of the table of kernels that it left.
#
#   ./scripts/maintain/try_wrappers.sh                    all of them; preset small, or a toy model without a GPU
#   ./scripts/maintain/try_wrappers.sh --version 3 --output-dir DIR --preset medium --use-amp
#
# Other options go to the training scripts. Leaves results and logs in --output-dir (tried_wrappers), instead of those
# of an earlier try. Exit status: 0 all delivered; 1 where one failed or left no table.

set -uo pipefail
# shellcheck source=../common/wrappers/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common/wrappers/setup.sh"

target=tried_wrappers version="" passed=()
while [ $# -gt 0 ]; do
    TAKEN=1
    case $1 in
        -h | --help) usage && exit 0 ;;
        --version) value_of "$@" && version=$VALUE ;;
        --output-dir) value_of "$@" && target=$VALUE ;;
        *) passed+=("$1") ;;
    esac
    shift "$TAKEN"
done
[[ $version =~ ^[1-4]?$ ]] || fail 2 "--version must be 1, 2, 3 or 4, not $version"
mkdir -p "$target" && target=$(cd "$target" && pwd) || exit 1
find_python

if [[ " ${passed[*]-} " != *" --preset"* ]] && { have_amd_gpu || have_nvidia_gpu; }; then passed+=(--preset small); fi

first_row() { # FOLDER: of the table in it, or of that of its trace; fails where there is none
    local table
    table=$(find "$1" \( -name limits.csv -o -name counters.csv -o -name hotspots.csv \
        -o -name kernels.csv \) -exec ls -t {} + | sed -n 1p)
    if [ -n "$table" ]; then sed -n 2p "$table" | grep '[[:alnum:]]'; else "$PYTHON" "$SCRIPTS/kernel_times.py" "$1"/*/* --top 1; fi
}

try() { # FOLDER NAME OPTION...: run it, look at what it left, print the line
    local name place began=$SECONDS said why word="done"
    name=$(basename "$1")/${*:2}
    place=$target/$name
    rm -rf "$place" && mkdir -p "$place"
    if timeout -s INT -k 15 120 "$1/$2" --output-dir "$place" "${@:3}" --num-steps 2 \
        ${passed[@]+"${passed[@]}"} >"$place.log" 2>&1; then
        said=$(first_row "$place" 2>&1) || word="FAILED (no table)"
    else
        word="FAILED ($?)" said=$(tail -n 1 "$place.log")
    fi
    if [ "$word" = "done" ]; then delivered=$((delivered + 1)); else failed=$((failed + 1)); fi
    why=$(sed -n 's/^get_[a-z_]*\.sh.* uses \(.*\)/, \1/p' "$place.log")
    echo "$word  $name  $((SECONDS - began)) s$why: ${said%%$'\n'*}"
}

delivered=0 failed=0
# shellcheck disable=SC2231 # the version may be a pattern
for folder in "${SCRIPTS%/*}"/version${version:-[1-4]}_*; do
    for name in trace hotspots counters rocprof_sys rocprof_compute; do try "$folder" "get_$name.sh"; done
    if { have_amd_gpu && find_tool rocprofv3; } || { have_nvidia_gpu && find_tool ncu; }; then
        try "$folder" get_counters.sh --set memory
    fi
done
echo "$delivered delivered, $failed failed; results and logs in $target"
[ $failed = 0 ]
