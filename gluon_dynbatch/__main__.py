"""`python -m gluon_dynbatch` is the command `dynbatch`."""

import sys

from .cli import main

sys.exit(main())
