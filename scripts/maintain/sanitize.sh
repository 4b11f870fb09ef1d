#!/usr/bin/env bash
# Watches every kernel of version 3, forward and backward, with NVIDIA's compute-sanitizer:
#   memcheck    reads and writes outside of a tensor     racecheck   races in shared memory
#   initcheck   reads of memory that nothing has written
#
#   ./scripts/maintain/sanitize.sh                              all three tools, all kernels: about five minutes
#   ./scripts/maintain/sanitize.sh racecheck                    one tool
#   ./scripts/maintain/sanitize.sh memcheck initcheck -- rope   two tools, one group of kernels
#
# Prints a line for each tool and group, and what the tool said where it found something.
# Exit status: 0 when nothing was found; 1 where something was, or without an NVIDIA GPU or compute-sanitizer;
# 2 for a bad argument.

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common/wrappers/setup.sh"

tools=() groups=()
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) usage && exit 0 ;;
        memcheck | racecheck | initcheck) tools+=("$1") ;;
        --) shift && groups=("$@") && break ;;
        *) fail 2 "$1 is no tool: choose memcheck, racecheck or initcheck, and groups of kernels behind --" ;;
    esac
    shift
done
[ ${#tools[@]} -gt 0 ] || tools=(memcheck racecheck initcheck)

have_nvidia_gpu || fail 1 "compute-sanitizer watches NVIDIA GPUs only, and there is none here: on any machine, \
scripts/test.sh checks the same kernels between guard bands"
find_tool compute-sanitizer || fail 1 "compute-sanitizer is not installed: it comes with the CUDA toolkit, \
or as the package nvidia-cuda-sanitizer-api; put its folder on PATH"
find_python
kernels() { "$PYTHON" "$SCRIPTS/maintain/sanitize_kernels.py" "$@"; }

log=$(mktemp)
trap 'rm -f "$log"' EXIT
# Without the tools first: Triton compiles then, and a failure here is none of memory.
status=0
kernels ${groups[@]+"${groups[@]}"} >"$log" 2>&1 || status=$?
[ "$status" -ne 2 ] || fail 2 "$(sed -n 's/.*error: //p' "$log")"
[ "$status" -eq 0 ] || { cat "$log" && fail 1 "the kernels do not run even without a tool: their message is above"; }

# Every tensor is an allocation of its own, with a gap behind it, instead of a part of PyTorch's pool.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
found=0
while read -r group names; do
    [ ${#groups[@]} -eq 0 ] || [[ " ${groups[*]} " == *" $group "* ]] || continue
    for tool in "${tools[@]}"; do
        options=(--tool "$tool" --target-processes application-only --error-exitcode 1)
        [ "$tool" != memcheck ] || options+=(--padding 4096)
        if [ "$tool" != initcheck ]; then # which must see what PyTorch's kernels write
            for name in $names; do options+=(--kernel-name "kns=$name"); done
        fi
        status=0
        compute-sanitizer "${options[@]}" "$PYTHON" "$SCRIPTS/maintain/sanitize_kernels.py" "$group" >"$log" 2>&1 || status=$?
        summary=$(sed -n 's/^=* \([A-Z]* SUMMARY: .*\)/\1/p' "$log" | tail -n 1)
        printf '%-10s %-14s %s\n' "$tool" "$group" "${summary:-the tool ended with status $status and no summary}"
        if [[ $status -ne 0 || $summary != *SUMMARY:\ 0\ * ]] || ! grep -q "^$group: done" "$log"; then
            found=1
            head -n 60 "$log"
        fi
    done
done < <(kernels --list)
[ "$found" -eq 0 ] || fail 1 "something was found: it is printed below its line"
echo "nothing was found"
