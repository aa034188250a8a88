# SPDX-License-Identifier: Apache-2.0
"""Types of arguments."""

import os

# A path in any form that os.fsencode() takes.
Path = str | bytes | os.PathLike[str] | os.PathLike[bytes]
