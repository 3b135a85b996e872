"""The named barriers of a CTA (PTX ``bar``), in Gluon.

At an mbarrier one thread arrives, and Triton first synchronizes its warpgroup. At a named barrier every warp arrives by
itself, and none waits.
"""

from __future__ import annotations

from enum import IntEnum

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


class NamedBarrier(IntEnum):
    """Numbers of the 16 barriers."""

    TRITON = 0  # to 7: barriers that the compiler uses for the CTA and its warpgroups
    STAGE = 8  # plus the index of a stage: it is free; plus the number of stages: so are the queries
    END = 16  # minus the number of warpgroups: the vote of the first one on a tile


STAGE_BARRIER = gl.constexpr(int(NamedBarrier.STAGE))


@gluon.constexpr_function
def vote_barrier(warpgroup, warpgroups):
    """Return the barrier of a warpgroup's votes."""
    return int(NamedBarrier.END) - warpgroups + warpgroup
