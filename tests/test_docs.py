"""The documents name tests that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_test_that_the_table_of_formats_names_exists() -> None:
    named = re.findall(r"`(test_\w+)::(test_\w+)`", (ROOT / "docs" / "checkpoints.md").read_text(encoding="utf-8"))
    assert len(named) > 30
    for file, test in named:
        text = (ROOT / "tests" / f"{file}.py").read_text(encoding="utf-8")
        assert re.search(rf"^def {test}\b", text, re.MULTILINE), f"{file} has no {test}"


def test_every_case_of_checkpoints_and_conditions_is_a_test() -> None:
    """The cases of groups 2, 3, 5, 6 and 7 of the collected faults, by id."""
    ids = "16 18 20 21 22 24 25 27 29 30 31 33 34 35 37 39 40 54 55 58 59 61 63 64 65 68 69 71 72 74 75 76 79 80 81"
    names = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "tests").glob("test_*.py")))
    named = {int(number) for number in re.findall(r"(?:\bB|_b)(\d+)(?=\b|_)", names)}
    missing = {int(number) for number in f"{ids} 82 83 85 86 88 89 91 92".split()} - named
    assert not missing, f"no test names B{sorted(missing)}"
