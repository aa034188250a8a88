# SPDX-License-Identifier: Apache-2.0
"""What all functions that save have in common."""
