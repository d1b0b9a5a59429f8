"""How collectives are called."""

from __future__ import annotations

import pytest

from hp_sharding.comm import called, different_ways


@pytest.mark.parametrize(
    ("label", "layers"),
    [
        ("3:blocks.1", ", of layer 'blocks.1'"),
        ("0:GPT..blocks.2, backward 12", ", of layers 'GPT' to 'blocks.2'"),
        ("12:blocks.1..blocks.4 to 15:head, backward 3", ", of layers 'blocks.1' to 'head'"),
        ("3:head to 3:head", ", of layer 'head'"),
        ("3:a..b to 4:c..d", ", of layers 'a' to 'd'"),
        ("1:head, moment1", ", of layer 'head'"),
        ("agreement, backward 3", ""),
        ("gradient norm", ""),
        ("", ""),
    ],
)
def test_layers_are_named_where_a_bucket_is(label: str, layers: str) -> None:
    assert called("all_gather (float32)", 64, label) == f"all_gather (float32) of 64 bytes labelled {label!r}{layers}"


def test_both_sides_of_a_difference_are_named() -> None:
    text = different_ways("gather", 7, (0, "this"), (3, "that"))
    assert "as collective 7 of lane 'gather' rank 0 has this, rank 3 has that; all ranks must" in text
