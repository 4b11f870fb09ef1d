#!/usr/bin/env bash
# Tries every profiling wrapper of every version on this machine, checks what each one left, and lists the outcome.
#
#   ./scripts/try_wrappers.sh                        all of them, tiny model
#   ./scripts/try_wrappers.sh --version 3            those of one version
#   ./scripts/try_wrappers.sh --output-dir DIR --preset small --use-amp
#
# Other options go to the wrappers. Leaves results and logs in --output-dir (tried_wrappers); status 1 if one failed.

set -uo pipefail
scripts=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
target=tried_wrappers version="[1-4]" passed=(--num-steps 2)
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) sed -n -e '1d' -e '/^#/!q' -e 's/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && exit 0 ;;
        --version) version=${2:?} && shift ;;
        --output-dir) target=${2:?} && shift ;;
        *) passed+=("$1") ;;
    esac
    shift
done
mkdir -p "$target" || exit 1
target=$(cd "$target" && pwd)
# shellcheck source=profile_common.sh
source "$scripts/profile_common.sh"
find_python
have_amd_gpu || have_nvidia_gpu && passed=(--preset tiny "${passed[@]}")

left() { # NAME RESULT_FOLDER: what proves that the wrapper delivered; fails where it is missing or cannot be read
    case $1 in
        get_trace.sh | get_rocprof_sys.sh)
            if find "$2" -name '*.pftrace' -o -name '*.proto' | grep -q .; then
                du -sh "$2"
            else
                "$PYTHON" "$SCRIPTS/kernel_times.py" "$2" --top 1 | head -n 1
            fi
            ;;
        get_rocprof_compute.sh) find "$2" \( -name '*.csv' -o -name '*.db' \) -size +0 | grep . | head -n 1 ;;
        get_counters.sh) wc -l "$2/launches.csv" ;;
        *) sed -n 2p "$2/hotspots.csv" ;;
    esac
}

failed=0 outcome=()
# shellcheck disable=SC2231 # the version may be a pattern
for wrapper in "$scripts"/../version${version}_*/get_*.sh; do
    folder=$(basename "$(dirname "$wrapper")")
    name=$(basename "$wrapper")
    log=$target/$folder.$name.log
    echo "$folder/$name ..."
    SECONDS=0
    "$wrapper" --output-dir "$target/$folder/$name" "${passed[@]}" >"$log" 2>&1
    status=$?
    said=$(tail -n 1 "$log")
    if [ $status = 0 ]; then
        result=$(find "$target/$folder/$name" -mindepth 2 -maxdepth 2 -type d | sort | tail -n 1)
        said=$(left "$name" "$result") || status=1
    fi
    word="done"
    [ $status = 0 ] || { word="FAILED ($status)" && failed=1; }
    outcome+=("$word  $folder/$name  ${SECONDS} s, $(sed -n 's/.* uses //p' "$log"): $said")
done
echo && printf '%s\n' "${outcome[@]}"
exit $failed
