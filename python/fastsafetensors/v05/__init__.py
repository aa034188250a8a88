# SPDX-License-Identifier: Apache-2.0
"""The interface of fastsafetensors 0.5, for the programs that were written for it.

Everything in here is over the library's own loads and saves. Programs import it from where it was
(`fastsafetensors.loader`, `fastsafetensors.saver`, ..); new ones want fastsafetensors.torch,
safe_open, fastsafetensors.distributed and fastsafetensors.checkpoint.
"""
