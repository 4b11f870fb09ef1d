#!/usr/bin/env python3
"""Find launches, gaps and idle time of a GPU in a trace: is the step bound by launching kernels or by running them?

example: python analyze_kernel_launches.py --trace-file results.csv --steps 30

Reads any profile with a row per launch: ANY_PROFILE.md lists the formats. The GPU is busy while a kernel or copy
runs on any queue, and idle otherwise. Every gap inside a step counts, however short. If the trace has
the CPU's calls too, as PyTorch's traces do, the tool says why the GPU idled and what the CPU did in the longest gaps.
"""

import sys

from common.command_line import Parser, add_gpu, add_steps
from common.profiles import gpu_profile
from common.profiles.idle import idle_results, idle_text
from common.tables import emit


def analyze(options):
    profile = gpu_profile(options.trace_file, options.steps, options.gpu)
    found = idle_results(profile)
    emit({"trace": profile.title, "results": found}, idle_text(profile.title, found), options.json)


def main(argv=None):
    parser = Parser("analyze_kernel_launches.py", __doc__)
    parser.add_argument("--trace-file", required=True, metavar="FILE", help="trace with every launch, or its folder")
    add_steps(parser)
    add_gpu(parser)
    return parser.run(analyze, argv)


if __name__ == "__main__":
    sys.exit(main())
