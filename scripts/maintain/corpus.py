"""Collect real text to train on from installed packages, and read it back.

The text is the Python sources and pages (.py, .md, .rst, .txt) of installed packages, without repetitions. Files are
taken in the order of the SHA-256 of their contents, which mixes packages and depends on no folder. Every tenth file is
held out. Near copies, such as licenses of other years, stay: the held-out loss compares runs and says nothing of new
text. One file holds it all: train.txt, held_out.txt and about.json in a tar archive, packed by xz.
"""

import csv
import hashlib
import importlib.metadata
import io
import json
import lzma
import pathlib
import sysconfig
import tarfile
from typing import NamedTuple

from common.command_line import Failure
from common.profiles import errors_of

SUFFIXES = (".py", ".md", ".rst", ".txt")
SMALLEST, LARGEST = 64, 200_000  # bytes of a file: longer ones are mostly tables
HELD_OUT_EVERY = 10
ENOUGH = 20_000_000  # bytes, of which nine tenths are trained on: 2,000 steps of medium read 16.4 million tokens


class Corpus(NamedTuple):
    train: bytes
    held_out: bytes
    about: dict  # what the text is: files, bytes and SHA-256 of both parts, packages


def installed_files():
    """Yield (package and version, path) of every source and page of the packages in this Python's own environment."""
    folders = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    for package in importlib.metadata.distributions(path=sorted(folders)):
        title = f"{package.name} {package.version}"
        record = package.read_text("RECORD") or ""  # package.files asks for each file whether it exists
        for name, *_ in csv.reader(record.splitlines()):
            if name.endswith(SUFFIXES):
                yield title, pathlib.Path(package.locate_file(name))


def distinct_texts(files):
    """Return {SHA-256: (package, content)} of the files that are text of a fitting size, in the order of the SHA-256.

    A text that several packages hold belongs to the first one by name.
    """
    found = {}
    for package, path in files:
        try:
            content = path.read_bytes()
        except OSError:  # listed by its package, and removed since
            continue
        if SMALLEST <= len(content) <= LARGEST and b"\0" not in content:
            digest = hashlib.sha256(content).hexdigest()
            found[digest] = min(found.get(digest, (package, content)), (package, content))
    return dict(sorted(found.items()))


def split(files, enough=ENOUGH):
    """Return so many bytes of the files' texts, as lists of (package, content): to train on, and held out."""
    train = []
    held_out = []
    size = 0
    for number, text in enumerate(distinct_texts(files).values(), 1):
        if size >= enough:
            break
        size += len(text[1])
        (train if number % HELD_OUT_EVERY else held_out).append(text)
    if size < enough or not held_out:
        raise Failure(1, f"the installed packages have {size:,} bytes of text, but {enough:,} are needed: install more")
    return train, held_out


def about_part(texts, whole):
    return {"files": len(texts), "bytes": len(whole), "sha256": hashlib.sha256(whole).hexdigest()}


def collect(files=None, enough=ENOUGH):
    """Return the Corpus of the installed packages, or of other (package, path) pairs."""
    parts = split(installed_files() if files is None else files, enough)
    train, held_out = (b"\n".join(content for _, content in texts) for texts in parts)
    about = {
        "what": "Python sources and pages of installed packages, every tenth file held out",
        "train": about_part(parts[0], train),
        "held_out": about_part(parts[1], held_out),
        "packages": sorted({package for texts in parts for package, _ in texts}),
    }
    return Corpus(train, held_out, about)


def write(corpus, path):
    """Write a Corpus as one packed file: the same bytes for the same text."""
    members = {"about.json": json.dumps(corpus.about, indent=1).encode() + b"\n"}
    members |= {"train.txt": corpus.train, "held_out.txt": corpus.held_out}
    with lzma.open(path, "wb", preset=9) as packed, tarfile.open(fileobj=packed, mode="w") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def unpacked(path):
    """Return the bytes of a file that xz packed; ValueError if it is none or is cut off."""
    with lzma.open(path) as packed:
        try:
            return packed.read()
        except (lzma.LZMAError, EOFError) as error:
            raise ValueError(str(error)) from None


def read(path):
    """Return the Corpus in a file that write() made; Failure with one sentence if it is damaged or foreign."""
    with errors_of(path):
        try:
            with tarfile.open(fileobj=io.BytesIO(unpacked(path))) as archive:
                members = ("about.json", "train.txt", "held_out.txt")
                about, train, held_out = (archive.extractfile(name).read() for name in members)
        except tarfile.TarError as error:
            raise ValueError(str(error)) from None
        about = json.loads(about)
        for name, part in (("train", train), ("held_out", held_out)):
            if hashlib.sha256(part).hexdigest() != about[name]["sha256"]:
                raise ValueError(f"the SHA-256 of {name}.txt is not the one in about.json")
        return Corpus(train, held_out, about)


def described(about):
    """Return one sentence about the text."""
    train = about["train"]
    held_out = about["held_out"]
    names = sorted({package.rsplit(" ", 1)[0] for package in about["packages"]})
    return (
        f"{about['what']}: {train['bytes']:,} bytes of {train['files']:,} files to train on, "
        f"{held_out['bytes']:,} bytes of {held_out['files']:,} files held out, from {len(names)} packages"
    )
