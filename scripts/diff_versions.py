#!/usr/bin/env python3
"""Print how the lesson of one version differs from that of another: the part of each script above its harness.

example: python diff_versions.py 1 2    # what version 2 changes

The training harness below the line is the same bytes in all four scripts, so these differences are all there are.
"""

import difflib
import sys

from common.command_line import Parser
from common.versions import SCRIPTS, halves


def differences(old, new):
    """Return the lines of a unified diff of two versions' lessons."""
    lessons = [halves(SCRIPTS[version])[0].decode().splitlines(keepends=True) for version in (old, new)]
    return difflib.unified_diff(*lessons, SCRIPTS[old].name, SCRIPTS[new].name)


def show(options):
    sys.stdout.write("".join(differences(options.old, options.new)))
    sys.stdout.flush()  # here, where a reader that has seen enough, such as head, ends no program with a traceback


def main(argv=None):
    parser = Parser("diff_versions.py", __doc__, with_json=False)
    parser.add_argument("old", type=int, choices=SCRIPTS, metavar="OLD", help="a version, 1 to 4")
    parser.add_argument("new", type=int, choices=SCRIPTS, metavar="NEW", help="the version to compare with it")
    return parser.run(show, argv)


if __name__ == "__main__":
    sys.exit(main())
