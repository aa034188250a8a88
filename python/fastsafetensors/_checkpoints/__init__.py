# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a training run: their folders, their state, and the ranks that save them."""
