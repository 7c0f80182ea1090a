"""Write the table of tests/README.md from the results of the tests that inject faults.

usage: python tests/fault_table.py RESULTS.xml ...
  The files are what pytest --junitxml wrote; together they have all tests that inject faults, slow ones included.

A test file that injects faults has a dict ``FAULTS`` of literals, "fault | what happens" by a key. A test calls
``record_property("fault", FAULTS[key])`` once for each fault that it injects, when it does. A fault is survived if
its test passes.
"""

import argparse
import itertools
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

README = Path(__file__).with_name("README.md")
START, END = "<!-- table of faults: written by tests/fault_table.py -->\n", "<!-- end of the table -->\n"


def fault_table(*results: Path) -> str:
    """Return the table in Markdown."""
    tried, survived = Counter(), Counter()
    for test in itertools.chain(*(ElementTree.parse(path).iter("testcase") for path in results)):
        faults = [entry.get("value") for entry in test.iter("property") if entry.get("name") == "fault"]
        tried.update(faults)
        if test.find("failure") is None and test.find("error") is None:
            survived.update(faults)
    rows = [f"| {fault} | {tried[fault]} | {survived[fault]} |" for fault in sorted(tried)]
    rows.append(f"| all | | {tried.total()} | {survived.total()} |")
    return "\n".join(["| Fault | What happens | Tried | Survived |", "|---|---|---|---|", *rows]) + "\n"


def split_readme() -> tuple[str, str, str]:
    """Return what stands before, in and after the table."""
    before, _, rest = README.read_text(encoding="utf-8").partition(START)
    table, _, after = rest.partition(END)
    return before, table, after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path)
    table = fault_table(*parser.parse_args().results)
    before, _, after = split_readme()
    README.write_text(before + START + table + END + after, encoding="utf-8")
    print(table, end="")


if __name__ == "__main__":
    main()
