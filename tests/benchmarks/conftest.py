"""The benchmarks are scripts: their folder is on the path when one is run, and here too."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
