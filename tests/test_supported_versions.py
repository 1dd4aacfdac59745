"""The lower bounds in pyproject.toml are the releases that `make test-oldest` installs."""

import re
from pathlib import Path

import pytest


ROOT = Path(__file__).resolve().parents[1]
PINS = dict(
    line.split("==")
    for line in (ROOT / ".ci/oldest.txt").read_text().splitlines()
    if line and not line.startswith("#")
)


@pytest.mark.parametrize("name", sorted(PINS))
def test_lower_bound_is_the_oldest_tested_release(name):
    (bound,) = re.findall(rf'"{name}>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert (PINS[name] + ".").startswith(bound + ".")
