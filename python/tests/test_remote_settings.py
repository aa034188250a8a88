# SPDX-License-Identifier: Apache-2.0
"""Arguments that remote.configure() and remote.cache_prune() reject."""

import pytest


@pytest.mark.parametrize(("setting", "error", "words"), [
    ({"offline": "no"}, TypeError, "offline must be True or False, not 'no'"),
    ({"anonymous": 1}, TypeError, "anonymous must be True or False, not 1"),
    ({"cache_required": "off"}, TypeError, "cache_required must be True or False"),
    ({"cache_bytes_max": -1}, ValueError, "cache_bytes_max must be 0 or positive and below"),
    ({"tries_max": -1}, ValueError, "tries_max must be 0 to 4294967295, not -1"),
    ({"connect_ms": 2**40}, ValueError, "connect_ms must be 0 to 4294967295"),
    ({"retry_base_ms": "5"}, TypeError, "retry_base_ms must be a whole number, not '5'"),
    ({"cache_bytes_max": "much"}, ValueError, "cache_bytes_max must be a size such as"),
])
def test_settings_of_the_wrong_kind_are_refused(setting, error, words):
    from fastsafetensors import remote

    with pytest.raises(error, match=words):
        remote.configure(**setting)


def test_cache_sizes_may_be_text_and_pruning_needs_one(tmp_path):
    from fastsafetensors import remote

    remote.configure(cache_bytes_max="1GiB")
    remote.configure()
    assert remote.cache_prune("1GiB", tmp_path)["removed_count"] == 0
    with pytest.raises(TypeError, match="bytes_max"):
        remote.cache_prune()
