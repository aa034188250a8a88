# SPDX-License-Identifier: Apache-2.0
"""Where write_manifest() writes."""

import pytest


def test_an_algorithm_is_not_a_target(tmp_path):
    """The second argument is a path. The name of an algorithm there is an error."""
    import numpy
    from fastsafetensors import write_manifest
    from fastsafetensors.numpy import save_file

    save_file({"a": numpy.zeros(4)}, tmp_path / "m.safetensors")
    with pytest.raises(ValueError, match="algorithm='sha256'"):
        write_manifest(tmp_path / "m.safetensors", "sha256")
    assert [p.name for p in tmp_path.iterdir()] == ["m.safetensors"]
