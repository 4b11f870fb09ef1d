#!/usr/bin/env python3
"""Check that the training harness, the lower half of each tiny_llama_vN.py, is the same bytes in all four scripts.

    python scripts/maintain/harness.py              # check
    python scripts/maintain/harness.py --write 3    # copy the harness of version 3 into the other three

Exit status: 0, or 1 if a harness differs.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from common.command_line import Parser
from common.versions import SCRIPTS, halves


def main(argv=None):
    parser = Parser("harness.py", __doc__, with_json=False)
    parser.add_argument("--write", type=int, choices=SCRIPTS, metavar="VERSION", help="copy its harness to the others")
    arguments = parser.parse_args(argv)
    harness = halves(SCRIPTS[arguments.write or 1])[1]
    differing = [script for script in SCRIPTS.values() if halves(script)[1] != harness]
    for script in differing:
        if arguments.write:
            script.write_bytes(halves(script)[0] + harness)
        print(f"{script.name}: harness {f'of version {arguments.write} written' if arguments.write else 'differs'}")
    return int(bool(differing and not arguments.write))


if __name__ == "__main__":
    sys.exit(main())
