#!/usr/bin/env python3
"""Print the kernel times of a profile as one table, whichever profiler wrote it.

example: python kernel_times.py hotspots/hotspot_20260101_120000 --top 10 --csv kernels.csv

If a folder has the same run in several forms, it reads the most detailed one. The CSV's fourth column is the total
time, the last one the kernel's name: sort -t, -k4 -nr kernels.csv
"""

import pathlib
import sys

from common.command_line import Parser, add_gpu, positive
from common.profiles import files_of, group_table, kernel_table, kernel_text, read_profile
from common.tables import emit, write_csv


def analyze(options):
    profile = read_profile(options.path, gpu=options.gpu)
    kernels = kernel_table(profile.calls)
    if options.csv:
        write_csv(kernels, options.csv)
    text = f"{kernel_text(profile, options.top)}\n\nread from {', '.join(map(str, files_of(options.path)))}"
    content = {"kernels": kernels, "groups": group_table(profile.calls), "remarks": profile.remarks}
    emit(content, text, options.json)


def main(argv=None):
    parser = Parser("kernel_times.py", __doc__)
    add = parser.add_argument
    add("path", type=pathlib.Path, metavar="PATH", help="file or folder that a profiler wrote")
    add("--top", type=positive, default=20, metavar="N", help="kernels to print (%(default)s)")
    add("--csv", metavar="FILE", help="write the whole table as CSV")
    add_gpu(parser)
    return parser.run(analyze, argv)


if __name__ == "__main__":
    sys.exit(main())
