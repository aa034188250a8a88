# SPDX-License-Identifier: Apache-2.0
"""torch: its tensors, their memory, its devices, and its own file format."""
