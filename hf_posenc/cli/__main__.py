"""`python -m hf_posenc.cli`, for where the shell command is not on the path."""

import sys

from hf_posenc.cli.parser import main

sys.exit(main())
