# SPDX-License-Identifier: Apache-2.0
"""Tensors that are read when they are used: the modules behind fastsafetensors.lazy."""
