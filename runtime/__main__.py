"""`python -m runtime`, for where the `runtime` script is not on the path."""

import sys

from runtime.cli.main import main

sys.exit(main())
