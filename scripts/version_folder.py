"""Which of the four versions a tool is meant for: the one in whose folder it was called, unless an option says so."""

import pathlib
import sys

from versions import SCRIPTS


def version_meant(wanted: int | None = None) -> int:
    """wanted, else the version of the folder that the program was called from or in.

    The folders offer the tools as symbolic links, so the path by which a tool was called tells the version. Raises
    ValueError, a sentence for the user, where neither that nor the current folder does.
    """
    if wanted is not None:
        return wanted
    for folder in (pathlib.Path(sys.argv[0]).absolute().parent, pathlib.Path.cwd()):
        for version, script in SCRIPTS.items():
            if folder.exists() and folder.samefile(script.parent):
                return version
    raise ValueError("say which version with --version 1, 2, 3 or 4, or run this in a version's folder")


def add_version_option(parser) -> None:
    """The option --version, for argparse."""
    parser.add_argument(
        "--version", type=int, choices=SCRIPTS, metavar="N", help="1 to 4 (the folder in which this is called tells)"
    )
