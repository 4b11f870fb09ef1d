"""Print what a record was made with, and check that its commit holds the scripts that ran.

python scripts/maintain/provenance.py COMMAND...    # prints the record of a command that is about to run here
"""

import hashlib
import json
import pathlib
import subprocess
import sys

if __name__ == "__main__":
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from common.machine.description import describe, git
from common.versions import REPOSITORY

# Path -> the one that earlier commits have. A script that ran for a record and moves gets its entry here.
MOVED = {
    "scripts/common/measuring/peers.py": "scripts/common/peers.py",
    "scripts/common/peers.py": "scripts/maintain/peers.py",
}


def machine_line(record):
    """Return GPU, versions, date and commit of a record as one line of a page."""
    packages = record["packages"]
    versions = ", ".join(f"{name} {packages[name]}" for name in ("torch", "triton") if packages.get(name))
    driver = f", driver {record['driver']}" if record["driver"] else ""
    commit = f", commit {record['commit'][:10]}" if record["commit"] else ""
    modified = " with changes that are not committed" if record["modified"] else ""
    return f"{record['device']}{driver}, {record['runtime']}; {versions}; {record['date'][:10]}{commit}{modified}"


def text_of(commit, name):
    """Return the bytes of a file in a commit; None where it has none of this name."""
    shown = subprocess.run(["git", "-C", str(REPOSITORY), "show", f"{commit}:{name}"], capture_output=True)
    return shown.stdout if shown.returncode == 0 else None


def faults_of_commit(commit, ran):
    """Return which of the scripts (path, SHA-256) that ran are not those of a commit, as far as git knows it."""
    if not commit or git("cat-file", "-e", f"{commit}^{{commit}}") is None:
        return []
    faults = set()
    for path, sha256 in ran:
        name = path.relative_to(REPOSITORY).as_posix()
        asked = name
        text = text_of(commit, name)
        while text is None and name in MOVED:
            name = MOVED[name]
            text = text_of(commit, name)
        if text is None:
            faults.add(f"commit {commit[:10]} has no {asked}: name its earlier path in provenance.MOVED")
        elif hashlib.sha256(text).hexdigest() != sha256:
            faults.add(f"{name} of commit {commit[:10]} is not what ran")
    return sorted(faults)


if __name__ == "__main__":
    print(json.dumps(describe(sys.argv[1:]), indent=1))
