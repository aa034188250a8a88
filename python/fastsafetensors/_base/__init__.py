# SPDX-License-Identifier: Apache-2.0
"""Errors, options, types of arguments and other small things that all modules use."""
