#!/usr/bin/env python3
"""Check that the training harness, the lower half of each tiny_llama_vN.py, is the same bytes in all four scripts.

    python scripts/maintain/harness.py              # check
    python scripts/maintain/harness.py --write 3    # copy the harness of version 3 into the other three
    python scripts/maintain/harness.py --diff 1 3   # print how the lesson of version 3 differs from that of version 1

Exit status: 0, or 1 if a harness differs.
"""

import difflib
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from common.command_line import Parser
from common.versions import SCRIPTS

HEADING = b"# ============ The training harness below"


def halves(script):
    """Return the lesson and the harness of a script, as bytes; the harness starts with its heading."""
    lesson, heading, harness = script.read_bytes().partition(HEADING)
    if not heading or HEADING in harness:
        raise SystemExit(f"harness.py: {script} must have one line that starts with {HEADING.decode()!r}")
    return lesson, heading + harness


def main(argv=None):
    parser = Parser("harness.py", __doc__, with_json=False)
    parser.add_argument("--write", type=int, choices=SCRIPTS, metavar="VERSION", help="copy its harness to the others")
    parser.add_argument("--diff", nargs=2, type=int, choices=SCRIPTS, metavar="VERSION", help="compare two lessons")
    arguments = parser.parse_args(argv)
    if arguments.diff:
        lessons = [halves(SCRIPTS[version])[0].decode().splitlines(keepends=True) for version in arguments.diff]
        sys.stdout.writelines(difflib.unified_diff(*lessons, *(SCRIPTS[version].name for version in arguments.diff)))
        return 0
    harness = halves(SCRIPTS[arguments.write or 1])[1]
    differing = [script for script in SCRIPTS.values() if halves(script)[1] != harness]
    for script in differing:
        if arguments.write:
            script.write_bytes(halves(script)[0] + harness)
        print(f"{script.name}: harness {f'of version {arguments.write} written' if arguments.write else 'differs'}")
    return int(bool(differing and not arguments.write))


if __name__ == "__main__":
    sys.exit(main())
