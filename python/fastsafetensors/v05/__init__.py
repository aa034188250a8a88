# SPDX-License-Identifier: Apache-2.0
"""The API of fastsafetensors 0.5, for existing programs.

Everything here uses the library's own loads and saves. Programs import it from the old paths
(`fastsafetensors.loader`, `fastsafetensors.saver`, ...). New programs should use
fastsafetensors.torch, safe_open, fastsafetensors.distributed and fastsafetensors.checkpoint.
"""
