"""`python -m tandem_runtime.cli`: the `tandem` command where scripts are not installed."""

import sys

from . import main

sys.exit(main())
