# SPDX-License-Identifier: Apache-2.0
"""Types of arguments."""

import os
from collections.abc import Sequence

# A path in any form that os.fsencode() takes.
Path = str | bytes | os.PathLike[str] | os.PathLike[bytes]

# One model: a path, or a list of files.
Paths = Path | Sequence[Path]
