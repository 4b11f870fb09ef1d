#!/usr/bin/env bash
# All stages of the debugging journey, one after the other: each is trained, then profiled, then all are compared.
#
#   ./run_all_stages.sh                                 rocprofv3, else Nsight Systems, else PyTorch's profiler
#   ./run_all_stages.sh --preset medium                 options of tiny_llama_v3.py go through to every stage
#   ./run_all_stages.sh --profiler pytorch --output-dir /tmp/stages
#   ./run_all_stages.sh --dry-run                       print the commands and run nothing
#
# Leaves results/stageN_output.log, stageN_metrics.json, stageN_profile/, stageN_profile.csv and comparison.txt. Ends
# with status 1 if a stage fails; what the others gave is kept.

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../../scripts/common/machine/wrappers/setup.sh"

# The plumbing trains the version that it finds beside a wrapper; here it is the stage at hand.
training_command() { TRAIN=("$PYTHON" "$STAGE" "$@"); } # OPTIONS OF THE USER
name_result() { :; } # each stage has its own

train() { # keep what the stage prints, and its figures
    local log=$RESULTS/stage${NUMBER}_output.log metrics=$RESULTS/stage${NUMBER}_metrics.json
    rm -f "$metrics" "$log"
    show "${TRAIN[@]}" --metrics-file "$metrics"
    [ -z "$DRY_RUN" ] || return 0
    "${TRAIN[@]}" --metrics-file "$metrics" 2>&1 | tee -i "$log"
}

profile_stage() {
    rm -rf "$OUT"
    # shellcheck disable=SC2034 # profile_nsys reads PLACE
    PLACE=$OUT TRAIN+=(--no-graph)
    case $PROFILER in
        rocm) profile rocprofv3 --kernel-trace --stats --output-format csv -d "$OUT" -o kernels_%pid% -- "${TRAIN[@]}" ;;
        nsight) profile_nsys cuda,nvtx ;;
        pytorch) profile_pytorch ;;
    esac
    report kernel_times.py "$OUT" --top 10 --csv "$RESULTS/stage${NUMBER}_profile.csv"
}

run_stage() { # OPTIONS OF THE USER; runs in a subshell, which a failure ends
    set -euo pipefail
    setup stage rocprofv3 nsys "" "$@"
    RESULTS=${OUTPUT_DIR:-$HERE/results} OUT=${OUTPUT_DIR:-$HERE/results}/stage${NUMBER}_profile
    [ -n "$DRY_RUN" ] || mkdir -p "$RESULTS" 2>/dev/null ||
        fail 1 "$RESULTS cannot be made: choose a writable folder with --output-dir"
    train
    profile_stage
}

case " $* " in *" -h "* | *" --help "*) usage && exit 0 ;; esac
failed=()
for STAGE in "$HERE"/v3_stage[0-9]_*.py; do
    NUMBER=${STAGE##*/v3_stage} && NUMBER=${NUMBER%%_*}
    echo && echo "=== ${STAGE##*/}"
    set +e # errexit would be off inside a condition
    (run_stage "$@")
    status=$?
    set -e
    case $status in
        0) ;;
        2 | 130) exit $status ;;
        *) failed+=("$NUMBER") ;;
    esac
done

results=$HERE/results dry=""
while [ $# -gt 0 ]; do
    [ "$1" != --dry-run ] || dry=1
    [ "$1" != --output-dir ] || results=${2%/}
    shift
done
[ ${#failed[@]} = 0 ] || fail 1 "failed: stage ${failed[*]}; see what they said above and in $results"
[ -z "$dry" ] || exit 0
find_python
echo && echo "=== comparison, also in $results/comparison.txt"
"$PYTHON" "$HERE/compare_stages.py" "$results" | tee "$results/comparison.txt"
