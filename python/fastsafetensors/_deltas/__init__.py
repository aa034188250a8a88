# SPDX-License-Identifier: Apache-2.0
"""Weight deltas: the modules behind fastsafetensors.deltas."""
