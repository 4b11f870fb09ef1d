"""What the tools' command lines share: how they fail, and which of the four versions they are meant for."""

import os
import pathlib
import sys
from collections.abc import Callable

from common.versions import SCRIPTS


class Failure(Exception):
    """Ends a tool with this exit status (2 bad input, 1 a failure) and, unless it is empty, this one sentence."""

    def __init__(self, status: int, sentence: str = ""):
        super().__init__(sentence)
        self.status = status


def run_tool(program: str, work: Callable[[], int | None]) -> int:
    """The exit status of a tool's work; what goes wrong becomes one sentence for the user instead of a traceback."""
    try:
        return work() or 0
    except Failure as error:
        if str(error):
            print(f"{program}: {error}", file=sys.stderr)
        return error.status
    except ModuleNotFoundError as error:
        print(f"{program}: {sys.executable} has no {error.name}: run scripts/quickstart.sh first", file=sys.stderr)
        return 1
    except ValueError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader, head for one, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        print(f"{program}: {error.filename or 'the output'} cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{program}: interrupted", file=sys.stderr)
        return 130


def result_folder(name: str) -> pathlib.Path:
    """The folder that --profile-dir names, made if it is not there."""
    folder = pathlib.Path(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Failure(1, f"--profile-dir {folder} cannot be made: {error.strerror}") from None
    return folder


def version_meant(wanted: int | None = None) -> int:
    """wanted, else the version of the folder that the program was called from or in.

    The folders offer the tools as symbolic links, so the path by which a tool was called tells the version. Raises
    Failure where neither that nor the current folder does.
    """
    if wanted is not None:
        return wanted
    for folder in (pathlib.Path(sys.argv[0]).absolute().parent, pathlib.Path.cwd()):
        for version, script in SCRIPTS.items():
            if folder.exists() and folder.samefile(script.parent):
                return version
    raise Failure(2, "say which version with --version 1, 2, 3 or 4, or run this in a version's folder")


def add_version_option(parser) -> None:
    """The option --version, for argparse."""
    parser.add_argument(
        "--version", type=int, choices=SCRIPTS, metavar="N", help="1 to 4 (the folder in which this is called tells)"
    )
