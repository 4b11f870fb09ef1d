#!/usr/bin/env bash
# Profile any command, such as your own training script. The question comes first, the command after --.
#
#   profile.sh hotspots -- python train.py --epochs 1      which kernels take the time
#   profile.sh trace -- torchrun --nproc-per-node 2 train.py    timeline of host and GPU
#   profile.sh counters --set memory --kernel attention -- python train.py    hardware counters of the kernels
#   profile.sh compute -- python train.py --steps 2        what limits the top kernels; runs the command many times
#   profile.sh system -- python train.py --steps 2         the whole process: host, GPU, device
#   --profiler auto|rocm|nsight|pytorch (auto)     --output-dir DIR (this folder)     --dry-run: print the commands only
#   --profiler-option WORD: goes to the profiler, may be repeated; also the options that version1_*/get_*.sh --help lists
#   --warmup-steps N (2), --profile-steps N (3): with PyTorch's profiler, which counts optimizer steps
#
# ROCm's and NVIDIA's profilers see the whole run, start-up too, so let the command make only a few steps. Switch CUDA or
# HIP graphs off: ROCm's profilers may miss their kernels. Without ROCm's or NVIDIA's profilers, PyTorch's profiles a
# Python script. kernel_times.py, kernel_counters.py and analyze_kernel_launches.py read every result. Tools that compare
# with the model's formulas need a profile of our own scripts, and say so.
# Exit status: 0; 1 no result; 2 a bad option; 3 only a part was measured, and is kept; 130 Ctrl-C; or the command's
[ "${BASH##*/}" = bash ] || exec bash "$0" "$@" # called as sh profile.sh
set -euo pipefail
WRAPPER=${BASH_SOURCE[0]}
# shellcheck source=common/machine/wrappers/setup.sh
source "$(dirname "$(realpath "$WRAPPER")")/common/machine/wrappers/setup.sh"
# shellcheck disable=SC2034 # setup.sh, run.sh and the bodies read these
HERE=$PWD STEPS="" WORKLOAD=command
COMMAND=() QUESTIONS="hotspots, trace, counters, compute or system"
RUNNER=(--warmup-steps 2 --profile-steps 3)

training_command() { # set TRAIN to the user's command, which may change its folder before a profiler writes there
    OUTPUT_DIR=$(realpath -m "${OUTPUT_DIR:-.}")
    [ -z "$PROCESSES" ] || fail 2 "--nproc-per-node belongs to the versions' wrappers: write torchrun into the command"
    [ ${#PASSED[@]} = 0 ] || fail 2 "there is no option ${PASSED[0]}: put the command and its options after --"
    TRAIN=("$(command -v "${COMMAND[0]}")" "${COMMAND[@]:1}") || fail 2 "there is no command ${COMMAND[0]}"
}

profile_pytorch() { # put PyTorch's profiler before the first word that names a Python file
    local words=() word found=""
    for word in "${TRAIN[@]}"; do
        if [ -z "$found" ] && [[ $word == *.py ]]; then
            [ ${#words[@]} -gt 0 ] || words=("$PYTHON")
            words+=("$SCRIPTS/common/machine/profile_script.py" "${RUNNER[@]}" --profile-dir "$PLACE")
            [[ " ${PYTORCH_OPTIONS[*]-} " != *" --profile-memory "* ]] || words+=(--profile-memory)
            found=1
        fi
        words+=("$word")
    done
    [ -n "$found" ] || fail 1 "PyTorch's profiler needs a Python script, and the command names no .py file"
    profile "${words[@]}"
}

question=${1:-}
case $question in
    -h | --help) usage && exit 0 ;;
    hotspots | trace | counters) body=$question ;;
    compute) body=rocprof_compute ;;
    system) body=rocprof_sys ;;
    *) fail 2 "the first word must be $QUESTIONS, got '$question'" ;;
esac
shift
options=() extra=()
while [ $# -gt 0 ]; do
    TAKEN=1
    case $1 in
        --profiler-option=* | --warmup-steps=* | --profile-steps=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;;
    esac
    case $1 in
        -h | --help) usage && exit 0 ;;
        --profiler-option) # its value may begin with hyphens
            [ $# -gt 1 ] || value_of "$1"
            extra+=("$2") TAKEN=2
            ;;
        --warmup-steps | --profile-steps)
            value_of "$@" && RUNNER+=("$1" "$VALUE")
            [[ $VALUE =~ ^[0-9]+$ ]] || fail 2 "$1 must be a number, got $VALUE"
            [[ $1 != --profile-steps || $VALUE =~ [1-9] ]] || fail 2 "--profile-steps must be at least 1, got $VALUE"
            ;;
        --)
            COMMAND=("${@:2}")
            break
            ;;
        *) options+=("$1") ;;
    esac
    shift "$TAKEN"
done
[ ${#COMMAND[@]} -gt 0 ] || fail 2 "the command is missing: profile.sh $question [options] -- python train.py"
[ ${#extra[@]} = 0 ] || extra=(-- "${extra[@]}")
set -- ${options[@]+"${options[@]}"} ${extra[@]+"${extra[@]}"}
# shellcheck source=/dev/null
source "$SCRIPTS/common/machine/wrappers/$body.sh"
conclude
