# SPDX-License-Identifier: Apache-2.0
"""Helpers of the trainer."""
