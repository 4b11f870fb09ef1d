#!/usr/bin/env bash
# Run every profiler on one version, one after the other; name those that are missing. Ctrl-C stops with a summary.
#
#   ./run_all_profilers.sh                              PyTorch's profiler and the FLOP count
#   ./run_all_profilers.sh --enable-rocm-tools          ROCm's profilers too (without ROCm: NVIDIA's)
#   ./run_all_profilers.sh --batch-size 8 --seq-len 128 --enable-rocm-tools --profile-dir ./complete_rocm_analysis
#   ../scripts/run_all_profilers.sh --version 3         from any folder
#   ./run_all_profilers.sh --enable-rocm-tools --dry-run    print the commands only
#
# Other options go to the training script. Leaves everything under --profile-dir (all_profiles).
# Exit status: 0; 1 if a profiler failed; 3 if one measured only a part, which is kept; 130 after Ctrl-C.

[ "${BASH##*/}" = bash ] || exec bash "$0" "$@" # called as sh run_all_profilers.sh
set -uo pipefail
# shellcheck source=common/machine/wrappers/setup.sh
source "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/common/machine/wrappers/setup.sh"

target=all_profiles rocm="" version="" passed=() steps=() DRY_RUN=""
while [ $# -gt 0 ]; do
    TAKEN=1
    case $1 in # a tool would obey it, and the summary name another folder or version
        --profile-dir=* | --version=* | --profile-steps=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;;
    esac
    case $1 in
        -h | --help) usage && exit 0 ;;
        --enable-rocm-tools) rocm=1 ;;
        --dry-run) DRY_RUN=1 ;;
        --profile-dir) value_of "$@" && target=$VALUE ;;
        --version) value_of "$@" && version=$VALUE ;;
        --profile-steps) value_of "$@" && steps=(--profile-steps "$VALUE") ;; # without PyTorch's profiler it has no effect
        *) passed+=("$1") ;;
    esac
    shift "$TAKEN"
done
folder=$HERE # of the link that was called
[ -f "$folder/get_trace.sh" ] || folder=$PWD
[ -z "$version" ] || folder=$(echo "$HERE"/../version"$version"_*)
[ -f "$folder/get_trace.sh" ] || fail 2 "say which version with --version 1, 2, 3 or 4, or run this in a version's folder"
version=$(basename "$folder") && version=${version#version} && version=${version%%_*}
find_python
[ -n "$DRY_RUN" ] || mkdir -p "$target" 2>/dev/null || fail 1 "--profile-dir $target cannot be made: choose a writable folder"

results=() failed=0
trap 'failed=130' INT # bash waits for the tool to end, then goes on to the summary

tool() { # NAME COMMAND...: run it unless the user stopped an earlier one, and note the outcome
    local status=0
    [ "$failed" != 130 ] || { results+=("not run  $1") && return; }
    echo && echo "=== $1"
    if [ -n "$DRY_RUN" ] && [[ $1 = *.py ]]; then
        show "${@:2}" ${passed[@]+"${passed[@]}"}
        return
    fi
    "${@:2}" ${DRY_RUN:+--dry-run} ${passed[@]+"${passed[@]}"} || status=$?
    [ -z "$DRY_RUN" ] || [ $status != 0 ] || return 0 # nothing was done
    if [ $status = 130 ] || [ "$failed" = 130 ]; then
        results+=("stopped  $1") failed=130
    elif [ $status = 0 ]; then
        results+=("done     $1")
    elif [ $status = "$PARTLY" ]; then
        results+=("PARTLY   $1: its last line says what is missing")
        [ "$failed" != 0 ] || failed=$PARTLY
    else
        results+=("FAILED   $1 (exit status $status)") failed=1
    fi
}

tool run_pytorch_profiler.py "$PYTHON" "$SCRIPTS/run_pytorch_profiler.py" --version "$version" \
    --profile-dir "$target/pytorch_profiles" --generate-report ${steps[@]+"${steps[@]}"}
tool run_deepspeed_flops.py "$PYTHON" "$SCRIPTS/run_deepspeed_flops.py" --version "$version" \
    --profile-dir "$target/flops_analysis" --computational-intensity
for name in ${rocm:+hotspots trace counters rocprof_sys rocprof_compute}; do
    choice=$("$folder/get_$name.sh" --dry-run 2>&1 | sed -n 's/.* uses \(.*\)/\1/p')
    if [[ $choice == PyTorch* ]]; then # it would only repeat PyTorch's profiler
        results+=("missing  get_$name.sh: ${choice#*because }")
    else
        tool "get_$name.sh" "$folder/get_$name.sh" --output-dir "$target"
    fi
done

if [ -n "$DRY_RUN" ]; then
    echo
    printf '%s\n' ${results[@]+"${results[@]}"} # what is missing
    exit "$failed"
fi
echo && printable "=== all profilers, results in $target"
printf '%s\n' "${results[@]}"
exit "$failed"
