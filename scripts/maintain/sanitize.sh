#!/usr/bin/env bash
# Watches every kernel of version 3, forward and backward, with NVIDIA's compute-sanitizer:
#   memcheck    reads and writes outside of a tensor     racecheck   races in shared memory
#   initcheck   reads of memory that nothing has written
#
#   ./scripts/maintain/sanitize.sh                        all three tools: about five minutes
#   ./scripts/maintain/sanitize.sh racecheck initcheck    some of them
#
# Prints a line for each tool, and what the tool said where it found something.
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
program=("$PYTHON" "$SCRIPTS/maintain/sanitize_kernels.py")
mapfile -t kernels < <(sed -n 's/^def \(\w*_kernel\)(.*/--kernel-name\nkns=\1/p' "$SCRIPTS"/../version3_triton/tiny_llama_v3.py)

log=$(mktemp)
trap 'rm -f "$log"' EXIT
# Without the tools first: Triton compiles then, and a failure here is none of memory.
"${program[@]}" >"$log" 2>&1 || { cat "$log" && fail 1 "the kernels do not run even without a tool: see above"; }

# Every tensor is an allocation of its own, with a gap behind it, instead of a part of PyTorch's pool.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
found=0
for tool in "$@"; do
    options=(--tool "$tool" --target-processes application-only --error-exitcode 1)
    [ "$tool" != memcheck ] || options+=(--padding 4096)
    [ "$tool" = initcheck ] || options+=("${kernels[@]}") # initcheck must see what PyTorch's kernels write
    status=0
    compute-sanitizer "${options[@]}" "${program[@]}" >"$log" 2>&1 || status=$?
    summary=$(sed -n 's/^=* \([A-Z]* SUMMARY: .*\)/\1/p' "$log" | tail -n 1)
    printf '%-10s %s\n' "$tool" "${summary:-the tool ended with status $status and no summary}"
    if [[ $status -ne 0 || $summary != *SUMMARY:\ 0\ * ]] || ! grep -q "^all kernels ran" "$log"; then
        found=1
        head -n 60 "$log"
    fi
done
[ "$found" -eq 0 ] || fail 1 "something was found: it is printed below its line"
echo "nothing was found"
