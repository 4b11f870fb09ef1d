"""Copy standard input to standard output and append it to a file; end with status 130 if Ctrl-C came meanwhile.

A shell that waits for a program does not learn of Ctrl-C unless the program dies of it; this process does.
"""

import contextlib
import os
import signal
import sys


def main(path):
    """Return 130 after Ctrl-C, else 0; raise the file's OSError at the end of the input.

    Until then somebody must read: a profiler whose output nobody reads dies before it writes what it measured.
    """
    interrupts = []
    failure = None
    signal.signal(signal.SIGINT, lambda *_: interrupts.append(1))  # the writer ends first, and all it says is kept
    with open(path, "ab", buffering=0) as log:
        while chunk := os.read(0, 2**16):
            try:
                if not failure:
                    log.write(chunk)
            except OSError as error:
                failure = error
            with contextlib.suppress(BrokenPipeError):  # nobody reads: the log goes on
                os.write(1, chunk)
    if failure:
        raise failure
    return 130 if interrupts else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1]))
    except OSError as error:
        sys.exit(f"tee.py: {sys.argv[1]}: {error.strerror}")
