"""``python -m halfbyte``: the command line."""

import sys

from halfbyte.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
