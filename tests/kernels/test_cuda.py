"""The CUDA C++ attention without a GPU: it compiles as its wrapper asks for it, and the wrapper's rule keeps what it promises."""

from __future__ import annotations

import re

import pytest
import torch

from draftwood.kernels.verify_attn.cuda_tile import CLUSTERS, TIMES, choose_tile, shared_bytes

H200 = {1: 132, 2: 66, 3: 39, 4: 30, 5: 22, 6: 17, 7: 15, 8: 15, 9: 9, 10: 7, 12: 7, 14: 7, 16: 7}
"""Clusters of each size that one holds at once: some of its groups of multiprocessors are small."""


@pytest.mark.parametrize(
    ("rows", "cluster", "page"),
    [(16, 1, 16), (32, 9, 64), (64, 3, 64), (64, 12, 16), (64, 1, 32)],
    ids=lambda x: str(x),
)
def test_compiles(rows, cluster, page, tmp_path, monkeypatch):
    """Shared memory as the wrapper counts it is asserted in the source; ptxas tells of the rest."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs the package cuda-bindings")
    pytest.importorskip("triton", reason="needs Triton, whose cache it uses")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from draftwood.kernels import nvrtc
    from draftwood.kernels.verify_attn.cuda_impl import options_of, sources_of

    try:
        nvrtc.version()
    except RuntimeError as e:
        pytest.skip(f"needs NVRTC: {e}")
    _, log = nvrtc.compile_logged(
        nvrtc.joined(sources_of(rows)), "attend", (*options_of(rows, cluster, page), "--ptxas-options=-v")
    )
    print(log)
    assert max(map(int, re.findall(r"(\d+) bytes spill", log))) <= 16  # values that change no more
    assert "serialized" not in log
    first = nvrtc.compile_cubin(sources_of(rows), options_of(rows, cluster, page))
    nvrtc.compile_cubin.cache_clear()
    monkeypatch.setattr(nvrtc, "compile_logged", None)
    assert nvrtc.compile_cubin(sources_of(rows), options_of(rows, cluster, page)) == first


@pytest.mark.parametrize("name", ["page_table", "prefix_len", "n_slots", "ancestors"])
def test_integers_that_the_kernel_would_misread_are_refused(name):
    pytest.importorskip("cuda.bindings.driver", reason="needs the package cuda-bindings")
    pytest.importorskip("triton", reason="needs Triton, whose cache it uses")
    from draftwood.kernels.verify_attn.cuda_impl import Attention

    shapes = {"page_table": (1, 3), "prefix_len": (1,), "n_slots": (1,)}
    given = {n: torch.zeros(shape, dtype=torch.int32) for n, shape in shapes.items()}
    given |= {"ancestors": torch.zeros(1, 2, 1, dtype=torch.int64)}
    Attention(**given, page=64)
    other = torch.int32 if name == "ancestors" else torch.int64
    with pytest.raises(TypeError, match=f"`{name}`: expected torch.int.., got {other}"):
        Attention(**given | {name: given[name].to(other)}, page=64)


@pytest.mark.parametrize("B", [1, 2, 8, 64])
@pytest.mark.parametrize("rows", [8, 64, 72, 256, 264, 512, 2112])
@pytest.mark.parametrize("keys", [1, 64, 300, 1056, 1057, 5000])
def test_tiles_are_shared_by_as_many_as_there_is_room_or_work_for(B, rows, keys):
    tile = choose_tile(B, rows, keys, H200.__getitem__)
    blocks = -(-keys // 64)
    assert tile.count == B * -(-rows // tile.rows)
    assert tile.resident == (tile.count <= 132)
    assert tile.cluster * tile.most_blocks >= blocks
    assert tile.cluster == 1 or tile.count <= H200[tile.cluster]
    for cluster in CLUSTERS:
        if cluster < tile.cluster:
            assert cluster * tile.most_blocks < blocks
        elif tile.count <= H200[cluster]:
            assert -(-blocks // cluster) >= tile.most_blocks
    assert tile.is_fast == (tile.resident and tile.most_blocks <= 10)


@pytest.mark.parametrize(
    ("shape", "tile"),
    [
        ((1, 17 * 8, 512 + 17), (16, 9)),
        ((1, 17 * 8, 1024 + 17), (16, 9)),
        ((1, 32 * 8, 1024 + 32), (32, 9)),
        ((16, 8, 1024 + 1), (16, 6)),
        ((1, 9 * 64, 256 + 9), (32, 5)),
        ((1, 9 * 64, 512 + 9), (32, 5)),
        ((1, 9 * 64, 1024 + 9), (64, 9)),
        ((1, 17 * 64, 256 + 17), (32, 3)),
        ((1, 17 * 64, 512 + 17), (64, 5)),
        ((1, 17 * 64, 1024 + 17), (64, 6)),
        ((1, 33 * 64, 256 + 33), (64, 3)),
        ((1, 33 * 64, 1024 + 33), (64, 3)),
        ((16, 32 * 8, 1024 + 32), (64, 2)),
    ],
)
def test_tiles_are_those_that_were_fastest_on_a_gpu_with_such_clusters(shape, tile):
    chosen = choose_tile(*shape, H200.__getitem__)
    assert (chosen.rows, chosen.cluster) == tile
    assert chosen.is_fast


def test_every_tile_fits_the_shared_memory_of_a_thread_block():
    assert max(shared_bytes(rows, cluster) for rows in TIMES for cluster in CLUSTERS) <= 227 * 1024
