# SPDX-License-Identifier: Apache-2.0
"""Opening models and loading their tensors."""
