"""`python -m hf_posenc`, for environments without the shell command on the path."""

import sys

from hf_posenc.cli.parser import main

sys.exit(main())
