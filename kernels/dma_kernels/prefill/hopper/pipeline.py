"""Loads of keys and values from global memory into the stages of a pipeline in shared memory, in Gluon.

At an mbarrier one thread arrives, and Triton first synchronizes its warpgroup. At a named barrier (PTX ``bar``) every
warp arrives by itself, and none waits.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ...device.gluon import aggregate, reinterpret
from ...device.tiles import TILE
from .mma import is_16bit
from .tile_range import BLOCK

# Renamed in Triton 3.9.
copy = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


class NamedBarrier(IntEnum):
    """Numbers of the 16 named barriers of a CTA."""

    TRITON = 0  # to 7: barriers that the compiler uses for the CTA and its warpgroups
    STAGE = 8  # plus the index of a stage: it is free; plus the number of stages: so are the queries
    END = 16  # minus the number of warpgroups: the vote of the first one on a tile


STAGE_BARRIER = gl.constexpr(int(NamedBarrier.STAGE))


@gluon.constexpr_function
def vote_barrier(warpgroup, warpgroups):
    """Return the barrier of a warpgroup's votes."""
    return int(NamedBarrier.END) - warpgroups + warpgroup


@gluon.jit
def wait_for_operands():
    """Wait for the end of the previous launch, which this one may overlap."""
    gl.inline_asm_elementwise("griddepcontrol.wait; mov.b32 $0, 0;", "=r", [], gl.int32, False, 1)


@gluon.jit
def bar_arrive(barrier, THREADS: gl.constexpr):
    """Arrive at a named barrier of ``THREADS`` threads without waiting."""
    gl.inline_asm_elementwise("bar.arrive $1, $2; mov.b32 $0, 0;", "=r,r,r", [barrier, THREADS], gl.int32, False, 1)


@gluon.jit
def bar_sync(barrier, THREADS: gl.constexpr):
    """Arrive at a named barrier of ``THREADS`` threads and wait for the others."""
    gl.inline_asm_elementwise("bar.sync $1, $2; mov.b32 $0, 0;", "=r,r,r", [barrier, THREADS], gl.int32, False, 1)


@gluon.jit
def block_view(stage, desc):
    """View a low-tile stage of keys or values as a block of ``desc`` for high tiles, 16-bit ``[1, 1, 64, D]``."""
    D: gl.constexpr = desc.block_shape[3]
    LAYOUT: gl.constexpr = desc.layout
    DTYPE: gl.constexpr = desc.dtype
    if is_16bit(stage.dtype) and stage.shape[len(stage.shape) - 2] == TILE:
        stage = reinterpret(stage, DTYPE, [2, 1, 1, BLOCK, D], LAYOUT).index(0)
    else:
        stage = reinterpret(stage, DTYPE, [1, 1, BLOCK, D], LAYOUT)
    return stage


@aggregate
class KVSource:
    """Keys and values of a kv head in global memory."""

    k_desc: Any  # keys of high tiles, 16-bit ``[B, Hkv, T, D]``
    v_desc: Any  # values of high tiles, 16-bit ``[B, Hkv, T, Dv]``
    k_low_desc: Any  # keys of low tiles, a matrix of rows of ``D`` elements
    # values of low tiles: E4M3, a matrix whose rows are a channel's 128 values of a tile; or 16-bit, like ``v_desc``
    v_low_desc: Any
    i_b: Any  # batch row
    i_kv: Any  # kv head
    k_start: Any  # position of the first row of ``k_desc``
    v_start: Any  # position of the first row of ``v_desc``
    v_low_start: Any  # position of the first row of ``v_low_desc``, if it is 16-bit
    tile_row: Any  # row of tile 0 among all stored tiles; may be negative
    HEAD_DIM: Any  # channels of values

    @gluon.jit
    def issue_block_k(self, block, barrier, target, pred=True):
        """Issue the TMA load of 64 keys of a high tile."""
        copy(self.k_desc, [self.i_b, self.i_kv, block * BLOCK - self.k_start, 0], barrier, target, pred=pred)

    @gluon.jit
    def issue_block_v(self, block, barrier, target, pred=True):
        """Issue the TMA load of 64 values of a high tile."""
        copy(self.v_desc, [self.i_b, self.i_kv, block * BLOCK - self.v_start, 0], barrier, target, pred=pred)

    @gluon.jit
    def issue_tile_k(self, tile, offset, barrier, target, pred=True):
        """Issue the TMA load of keys of a low tile, starting at key ``offset`` of the tile."""
        copy(self.k_low_desc, [(self.tile_row + tile) * TILE + offset, 0], barrier, target, pred=pred)

    @gluon.jit
    def issue_tile_v(self, tile, offset, barrier, target):
        """Issue the TMA load of values of a low tile; 16-bit ones start at key ``offset`` of the tile."""
        if self.v_low_desc.dtype == gl.float8e4nv:
            copy(self.v_low_desc, [(self.tile_row + tile) * self.HEAD_DIM, 0], barrier, target)
        else:
            position = tile * TILE + offset
            copy(self.v_low_desc, [self.i_b, self.i_kv, position - self.v_low_start, 0], barrier, target)


@aggregate
class Stage:
    """A position in a ring of stages: the index, and the phase of its barrier."""

    index: Any
    phase: Any

    @gluon.jit
    def next(self, STAGES: gl.constexpr):
        is_last = self.index == STAGES - 1
        index, phase = gl.where(is_last, 0, self.index + 1), gl.where(is_last, self.phase ^ 1, self.phase)
        return Stage(index=index, phase=phase)


@gluon.jit
def first_stage():
    return Stage(index=gl.to_tensor(0), phase=gl.to_tensor(0))


@aggregate
class KVPipeline:
    """A ring of stages that one producer warp fills and the consumer warpgroups empty.

    A stage holds the keys and values of a low tile, or 64 keys and values of a high tile.
    """

    k_smem: Any  # keys ``[STAGES, 128, D]``
    v_smem: Any  # values ``[STAGES, Dv, 128]`` in E4M3, or 16-bit ``[STAGES, 1, 1, 128, Dv]``
    full: Any  # barriers of stages that are filled
    WARPGROUPS: Any  # consumer warpgroups

    @gluon.jit
    def acquire(self, index):
        """As the producer, wait until all consumers have released a stage."""
        bar_sync(STAGE_BARRIER + index, 128 * self.WARPGROUPS + 32)

    @gluon.jit
    def release(self, index):
        """As a consumer, release a stage to the producer. Index ``STAGES`` stands for the queries."""
        bar_arrive(STAGE_BARRIER + index, 128 * self.WARPGROUPS + 32)

    @gluon.jit
    def release_all(self):
        STAGES: gl.constexpr = self.k_smem.shape[0]
        for index in gl.static_range(STAGES):
            self.release(index)

    @gluon.jit
    def drain(self):
        """As the producer, wait until every stage is released, so that no barrier keeps pending arrivals."""
        STAGES: gl.constexpr = self.k_smem.shape[0]
        for index in gl.static_range(STAGES):
            self.acquire(index)

    @gluon.jit
    def wait(self, stage, pred=True):
        """As a consumer, wait until a stage is filled."""
        mbarrier.wait(self.full.index(stage.index), stage.phase, pred=pred)

    @gluon.jit
    def release_and_advance(self, stage):
        self.release(stage.index)
        return stage.next(self.k_smem.shape[0])

    @gluon.jit
    def skip(self, stage, count):
        """As a consumer, release the next ``count`` stages, each when it is filled; return the stage after them."""
        for _ in range(count):
            self.wait(stage)
            stage = self.release_and_advance(stage)
        return stage
