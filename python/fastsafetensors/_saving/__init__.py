# SPDX-License-Identifier: Apache-2.0
"""What all functions that save have in common."""

# Its handler of the interpreter's exit must run after those that the program registers later, which
# may save.
from . import running_saves as running_saves
