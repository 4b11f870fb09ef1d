#!/usr/bin/env bash
# Watches every kernel of version 3, forward and backward, with NVIDIA's compute-sanitizer:
#   memcheck    reads and writes outside of a tensor     racecheck   races in shared memory
#   initcheck   reads of memory that nothing has written
#
#   ./scripts/maintain/sanitize.sh                        all three tools: about five minutes
#   ./scripts/maintain/sanitize.sh racecheck initcheck    some of them
#
# Prints a line for each tool and training, and what the tool said where it found something.
# Exit status: 0 when nothing was found; 1 where something was, or without an NVIDIA GPU or compute-sanitizer;
# 2 for a bad argument.

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common/wrappers/setup.sh"

for tool in "$@"; do
    case $tool in
        -h | --help) usage && exit 0 ;;
        memcheck | racecheck | initcheck) ;;
        *) fail 2 "$tool is no tool: choose memcheck, racecheck or initcheck" ;;
    esac
done
[ $# -gt 0 ] || set -- memcheck racecheck initcheck

have_nvidia_gpu || fail 1 "compute-sanitizer watches NVIDIA GPUs only, and there is none here: on any machine, \
scripts/test.sh checks the same kernels between guard bands"
find_tool compute-sanitizer || fail 1 "compute-sanitizer is not installed: it comes with the CUDA toolkit, \
or as the package nvidia-cuda-sanitizer-api; put its folder on PATH"
find_python
# Trainings that launch every kernel at sizes that divide no tile; fp8 wants multiples of 16.
trainings=(
    "--hidden-dim 48 --num-heads 3 --num-kv-heads 1 --intermediate-dim 50 --vocab-size 5003 --seq-len 97"
    "--hidden-dim 30 --num-heads 5 --num-kv-heads 1 --intermediate-dim 3001 --seq-len 200 --disable-attention-kernel"
    "--hidden-dim 128 --num-heads 1 --num-kv-heads 1 --seq-len 37 --vocab-size 37 --use-amp --amp-dtype float16"
    "--hidden-dim 48 --num-heads 3 --num-kv-heads 3 --intermediate-dim 80 --seq-len 112 --use-amp --fp8"
)
script=$SCRIPTS/../version3_triton/tiny_llama_v3.py
mapfile -t kernels < <(sed -n 's/^def \(\w*_kernel\)(.*/--kernel-name\nkns=\1/p' "$script")
log=$(mktemp)
trap 'rm -f "$log"' EXIT

train() { # NUMBER COMMAND...: run a training under a command and write what it says to the log
    local options
    read -r -a options <<<"${trainings[$1]} --num-layers 2 --batch-size 1 --num-steps 1 --warmup-steps 1 --no-graph"
    "${@:2}" "$PYTHON" "$script" "${options[@]}" >"$log" 2>&1
}

# Without the tools first: Triton compiles then, and a failure here is none of memory.
for number in "${!trainings[@]}"; do
    train "$number" || { cat "$log" && fail 1 "the kernels do not run even without a tool: see above"; }
done

# Every tensor is an allocation of its own, with a gap behind it, instead of a part of PyTorch's pool.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
found=0
for tool in "$@"; do
    options=(--tool "$tool" --target-processes application-only --error-exitcode 1)
    [ "$tool" != memcheck ] || options+=(--padding 4096)
    [ "$tool" = initcheck ] || options+=("${kernels[@]}") # initcheck must see what PyTorch's kernels write
    for number in "${!trainings[@]}"; do
        status=0
        train "$number" compute-sanitizer "${options[@]}" || status=$?
        summary=$(sed -n 's/^=* \([A-Z]* SUMMARY: .*\)/\1/p' "$log" | tail -n 1)
        printf '%-10s %s\n' "$tool" "${summary:-the tool ended with status $status and no summary}"
        if [[ $status -ne 0 || $summary != *SUMMARY:\ 0\ * ]] || ! grep -q "^  trained " "$log"; then
            found=1
            head -n 60 "$log"
        fi
    done
done
[ "$found" -eq 0 ] || fail 1 "something was found: it is printed below its line"
echo "nothing was found"
