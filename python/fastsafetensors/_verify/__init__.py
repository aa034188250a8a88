# SPDX-License-Identifier: Apache-2.0
"""Digests, manifests and signatures of models."""
