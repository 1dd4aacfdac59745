"""The folder of these tests is searched for the data that they share."""

import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parent))
