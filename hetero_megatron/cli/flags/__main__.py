"""`python -m hetero_megatron.cli.flags`: the table of flags as text or Markdown."""

import sys

from hetero_megatron.cli.flags.help import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
