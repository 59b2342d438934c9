"""``python -m actors.embedded --model DIR --port N``."""

import sys

from actors.embedded.server import main

if __name__ == "__main__":
    sys.exit(main())
