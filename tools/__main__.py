"""Writes the generated files below the current folder, the repository's root; with --check only compares them."""

import sys

from tools import FILES
from tools.helm_chart import main

if __name__ == "__main__":
    sys.exit(main("python -m tools", FILES))
