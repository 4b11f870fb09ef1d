#!/usr/bin/env bash
# Record a timeline of 5 steps: what the host calls, what the GPU runs, and the gaps between.
#
#   ./get_trace.sh                               rocprofv3, else Nsight Systems, else PyTorch's profiler
#   ./get_trace.sh --preset medium --use-amp     options of the training script go through
#   ./get_trace.sh --rocpd                       write ROCm 7's database and convert it with rocpd
#   ./get_trace.sh -- --sys-trace                options after -- go to the profiler
#   --nproc-per-node N (1): N processes under torchrun, a result per rank   --output-dir DIR (this folder)
#   --profiler auto|rocm|nsight|pytorch (auto)                              --dry-run: print the commands only
# Exit status: 0; 1 no result; 2 a bad option; 3 only a part was measured, and is kept; 130 Ctrl-C; or the script's
#
# Writes traces/trace_<timestamp>/ with a trace for https://ui.perfetto.dev (nsys: Nsight Systems); prints the top 10.
# https://rocm.docs.amd.com/projects/rocprofiler-sdk/en/latest/how-to/using-rocprofv3.html
exec bash "$(dirname "$(realpath "$0")")/wrapper.sh" "$0" "$@"
