# SPDX-License-Identifier: Apache-2.0
"""Readers of files for the 0.5-style loaders, and how to register one's own."""
