#!/usr/bin/env bash
# Profile the whole system over 2 steps: timeline and call profile of host and GPU, and the state of the device.
#
#   ./get_rocprof_sys.sh                                   rocprof-sys-run, else Nsight Systems, else PyTorch's profiler
#   ./get_rocprof_sys.sh --preset medium --num-steps 5     options of the training script go through
#   ./get_rocprof_sys.sh -- --sample cputime               options after -- go to the profiler: call stacks too
#   --nproc-per-node N (1): N processes under torchrun, a result per rank   --output-dir DIR (this folder)
#   --profiler auto|rocm|nsight|pytorch (auto)                              --dry-run: print the commands only
# Exit status: 0; 1 no result; 2 a bad option; 3 only a part was measured, and is kept; 130 Ctrl-C; or the script's
#
# Writes rocprof_sys/profile_<timestamp>/ with a trace to open in https://ui.perfetto.dev (before ROCm 6.3.1: in its
# version 46); prints the top 10 kernels. https://rocm.docs.amd.com/projects/rocprofiler-systems/en/latest/
exec bash "$(dirname "$(realpath "$0")")/wrapper.sh" "$0" "$@"
