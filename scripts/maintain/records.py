"""Read the recorded runs: folders below scripts/recorded/ that maintain/record.sh writes.

A recorded run has one folder per part: headline/suite.json, graph/suite.json, kernels/kernels.json and so on. Each part
was measured on one machine and says on which. A part that a run lacks may be another run's, see Record.holding.
"""

import json
import pathlib

from common.measuring.suite_results import read_results, rows
from common.versions import REPOSITORY

RECORDED = REPOSITORY / "scripts" / "recorded"


class Record:
    """Read one recorded run: the rows of its parts, and the files in their folders."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        self.parts = {}

    def holding(self, part):
        """Return the record that has a part: this one or, where it lacks the part, the newest other; else this one.

        A pattern such as "vocabulary-*" stands for any of its parts.
        """
        if any(self.folder.glob(f"{part}/record.json")):
            return self
        found = list(self.folder.parent.glob(f"*/{part}/record.json"))
        newest = max(found, key=lambda path: json.loads(path.read_text())["date"], default=None)
        return Record(newest.parents[1]) if newest else self

    def suite(self, part="headline"):
        """Return the results of a part with "rows"; without any where the part was not recorded."""
        if part not in self.parts:
            path = self.folder / part / "suite.json"
            results = read_results(path) if path.exists() else {"record": None, "runs": [], "accuracy": []}
            self.parts[part] = results | {"rows": [row for row in rows(results) if row["status"] == "ok"]}
        return self.parts[part]

    def json(self, part, name):
        """Return the content of a part's file, with its record; None where the part was not recorded."""
        path, record = self.folder / part / name, self.folder / part / "record.json"
        if not path.exists() or not record.exists():
            return None
        return json.loads(path.read_text()) | {"record": json.loads(record.read_text())}

    def row(self, model, preset, precision, way=None):
        """Return the row of a model on one GPU, or None.

        way: "eager", "graph" or None. Who names it compares the two, so such a row comes from the part that timed both
        on one host, if that part has it; every other row comes from the headline.
        """
        parts = ["graph", "headline"] if way else ["headline", "graph"]
        for row in [row for part in parts for row in self.suite(part)["rows"]]:
            asked = way in (None, "graph" if row["captured"] else "eager") and row["processes"] == 1
            if asked and (row["model"], row["preset"], row["precision"]) == (model, preset, precision):
                return row
        return None


def newest_record():
    """Return the recorded run with the newest complete headline; those in recorded/contributed/ make no pages."""
    found = [Record(path.parents[1]) for path in RECORDED.glob("*/headline/record.json")]
    if not found:
        raise ValueError(f"there is no complete recorded run below {RECORDED.name}")
    return max(found, key=lambda record: record.suite()["record"]["date"])
