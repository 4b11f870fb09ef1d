"""Read a file that may be cut off, damaged, foreign or endless: each fault becomes one sentence that names the file.

with errors_of(path):
    content = read_object(path, "metrics file")
"""

import codecs
import contextlib
import csv
import functools
import gzip
import io
import json
import math
import pathlib
import re
import sqlite3
import stat
import zlib

from common.command_line import Failure, printable

# All that a reader raises if the contents do not have its format.
DAMAGE = (
    *(ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, EOFError),
    *(csv.Error, sqlite3.Error, zlib.error, gzip.BadGzipFile),
)
LONGEST_REASON = 200  # letters: it may quote the file


@contextlib.contextmanager
def errors_of(path):
    """Turn every error in reading a file into a Failure with one sentence that names the file."""
    try:
        yield
    except DAMAGE as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        reason = " ".join(reason.split())
        raise Failure(2, f"{path} is cut off or damaged: {printable(reason[:LONGEST_REASON])}") from None
    except OSError as error:
        raise Failure(2, f"{path} cannot be read: {error.strerror}") from None
    except MemoryError:
        raise Failure(1, f"{path} does not fit into memory") from None
    except Failure as error:
        raise Failure(error.status, f"{path} {error}") from None


EMPTY = "is empty: the profiler was stopped or wrote nothing, or the disk is full"
GZIP = b"\x1f\x8b"
UNPACKED = 2**32  # bytes at most: a trace of a GPU can have a gigabyte, a damaged or foreign file any number


def check_regular(path):
    """Raise Failure for a device or a pipe, which may never end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise Failure(2, "isn't a regular file: name a file that a profiler or a script wrote")


def content_of(path):
    """Return the bytes of a file, unpacked if gzip packed them."""
    check_regular(path)
    content = path.read_bytes().removeprefix(codecs.BOM_UTF8)  # an editor may have saved it
    if not content.startswith(GZIP):
        return content
    with gzip.GzipFile(fileobj=io.BytesIO(content)) as packed:
        content = packed.read(UNPACKED + 1)
    if len(content) > UNPACKED:
        raise Failure(2, f"unpacks to more than {UNPACKED / 2**30:.0f} GiB: unpack it yourself if it is yours")
    return content


CONTROL = re.compile(r"\\u00[01]|[\x7f-\x9f]")  # as JSON writes them, apart from spaces and ends of lines


def read_object(path, kind):
    """Return the object in a JSON file of this workshop; refuse numbers that are not finite and control characters.

    kind: the words for such a file in an error message.
    """
    text = content_of(pathlib.Path(path))
    whole = functools.partial(number, convert=int)
    content = json.loads(text, parse_constant=number, parse_float=number, parse_int=whole)
    if not isinstance(content, dict):
        raise Failure(2, f"isn't a {kind}")
    text = json.dumps(content, ensure_ascii=False)
    text.encode()  # raises where a string is no text
    if CONTROL.search(text):
        raise ValueError("it contains a control character, which a terminal would obey")
    return content


def number(text, convert=float):
    """Convert the text of a number; raise ValueError for forms that only Python reads, such as 1_000 and NaN."""
    value = convert(text)
    if not math.isfinite(value) or not str(text).isascii() or "_" in str(text):
        raise ValueError(f"{text!r} isn't a number")
    return value
