# SPDX-License-Identifier: Apache-2.0
"""Ranks that load or save one model together."""
