#!/usr/bin/env bash
# Try every profiling wrapper on this machine; print a line for each: how it ended, seconds, and the last line it printed.
#
#   ./scripts/maintain/try_wrappers.sh                       those of all versions
#   ./scripts/maintain/try_wrappers.sh version3_triton       those of these folders
#
# Leaves results and logs in ./tried_wrappers. Exit status: 0 all delivered; 1 where one failed.

set -uo pipefail
[ $# -gt 0 ] || set -- "$(dirname "${BASH_SOURCE[0]}")"/../../version[1-4]_*

failed=0
for folder in "$@"; do
    for wrapper in get_{trace,hotspots,counters,rocprof_sys,rocprof_compute}.sh "get_counters.sh --set memory"; do
        [[ $wrapper != *--set* ]] || command -v rocprofv3 ncu >/dev/null || continue # PyTorch's profiler has no counters
        place=$PWD/tried_wrappers/$(basename "$folder")/$wrapper
        rm -rf "$place" && mkdir -p "$place" || exit 1
        began=$SECONDS word="done"
        read -r -a command <<<"$wrapper --num-steps 2"
        timeout -s INT -k 15 120 "$folder/${command[0]}" --output-dir "$place" "${command[@]:1}" >"$place.log" 2>&1 ||
            { word="FAILED ($?)" && failed=$((failed + 1)); }
        echo "$word  $(basename "$folder")/$wrapper  $((SECONDS - began)) s: $(tail -n 1 "$place.log")"
    done
done
echo "$failed failed; results and logs in tried_wrappers"
[ $failed = 0 ]
