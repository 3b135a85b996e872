"""Tile sizes of the kernels: a pure function of the chip and the shape, with the measured reason beside each number.

Measured on an H200 (torch 2.11, Triton 3.6, batch 1, 32 query and 8 kv heads, causal, MXINT8 low tiles and
FP8 values, TFLOP/s).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from ..numerics.formats import padded_channels
from .chip import TENSOR_MEMORY_ARCHS
from .lowering import Form, Lowering


@dataclass(frozen=True)
class HopperTiles:
    """Sizes of the warp-specialised prefill kernel, and which calls are long enough for it.

    Attributes:
        groups: Warpgroups of 64 query positions in a program.
        stages: Blocks of keys and values in flight.
        registers: Of a thread of these warpgroups.
        min_keys: Fewest keys of a call.
        min_rows: Fewest query rows of all heads and batch rows.
    """

    groups: int
    stages: int
    registers: int
    min_keys: int
    min_rows: int


@dataclass(frozen=True)
class ShortTiles:
    """Sizes of Hopper's prefill kernel for short prompts.

    Attributes:
        key_stages: Blocks of keys in flight.
        value_stages: Blocks of values in flight.
        registers: Of a thread.
        max_keys: Most keys that a query sees on average, if the call is one for the kernel for long prompts, too.
    """

    key_stages: int
    value_stages: int
    registers: int
    max_keys: int = 0


@dataclass(frozen=True)
class PrefillTiles:
    """Sizes of the prefill kernel.

    Attributes:
        block_m: Query positions of a program; divides 128.
        block_n: Keys of a step; divides 128.
        num_warps: Warps of a program.
        num_stages: Key blocks in flight in the loop over low tiles.
        max_registers: Of a thread; ``None`` for as many as the compiler likes.
        high_block_n: Keys of a step in the loop over high tiles; divides 128.
        high_stages: Key blocks in flight in that loop.
        stage_queries: Whether the queries of low tiles go through memory, see the kernel.
        hopper: Of the kernel that takes long calls on Hopper, see :func:`dma_kernels.prefill.hopper.host.takes`.
        short: Of the one that takes short calls there, see :func:`dma_kernels.prefill.hopper.host.takes_short`.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None
    high_block_n: int = 64
    high_stages: int = 1
    stage_queries: bool = False
    hopper: HopperTiles | None = None
    short: ShortTiles | None = None


@functools.cache
def select_tiles(
    arch: int, lowering: Lowering, head_dim: int, value_dim: int, *, has_softcap: bool = False
) -> PrefillTiles:
    """Return the sizes for a chip of compute capability ``arch`` (90 is Hopper).

    Args:
        arch: Major version times ten plus minor.
        lowering: Forms of keys and values.
        head_dim: Of queries and keys.
        value_dim: Of values.
        has_softcap: Whether scores are capped.
    """
    widest = padded_channels(max(head_dim, value_dim))
    is_hopper = arch == 90
    is_packed = Form.PACKED in (lowering.key, lowering.low_key)
    are_keys_8bit = lowering.low_key not in (None, Form.DEQUANTIZED)
    are_values_8bit = lowering.low_value is Form.E4M3
    hopper = short = None
    if is_hopper and 64 <= widest <= 128 and lowering.low_key is not None:
        short = _short_tiles(widest, are_keys_8bit, are_values_8bit)
        if widest == 128 or are_values_8bit or not are_keys_8bit:
            hopper = _hopper_tiles(widest, are_keys_8bit, are_values_8bit)
    if arch in TENSOR_MEMORY_ARCHS and widest > 128:
        # 128 rows of 256 channels take half of the tensor memory, and with scores and operands most forms do not fit.
        return PrefillTiles(64, 64, num_warps=8, num_stages=2)
    if is_packed and arch in TENSOR_MEMORY_ARCHS:
        # Their block-scaled products are of 128 rows. 4 warps would spill registers in the loop over low tiles.
        return PrefillTiles(128, 128, num_warps=8, num_stages=2)
    if widest <= 128 and is_hopper and (are_keys_8bit or are_values_8bit):
        # 64 x 128 with 4 warps against 128 x 128 with 8: 806 to 549 at head_dim 128 and 32K (attention alone), and
        # with 16-bit values 613 to 523. Several programs then share a multiprocessor, and one computes its softmax
        # while another keeps the matrix units busy. Queries from shared memory, not registers: 820 against 668.
        # High tiles in blocks of 64 keys, where low values have 8 bits one in flight: 87.7 us at 2K, 254.6 for 8 x 1K,
        # 244 at 4K. With two there is room for a program less: 99.1, 290.9, 295; two of 32 keys 92.0, 266.0, 254. At
        # head_dim 64 it makes no difference in time, and 32 keys spill least.
        tiles = PrefillTiles(
            64, 128, num_warps=4, num_stages=2, high_stages=2, stage_queries=True, hopper=hopper, short=short
        )
        # What it does with a softcap has no room under a cap on registers: its loop would spill (compiled, not timed).
        if has_softcap or not (are_keys_8bit and are_values_8bit):
            return tiles
        # A cap admits a third (fourth) program: 806 against 728 at head_dim 128 and 32K, 558 against 419 at head_dim 64
        # and 16K. A third stage would push the third program out: 768 against 806.
        if widest == 128:
            return replace(tiles, max_registers=168, high_stages=1)
        return replace(tiles, max_registers=128, num_stages=3, high_block_n=32)
    if widest <= 128 and is_hopper and lowering.low_key is Form.DEQUANTIZED:
        # 16-bit keys and values (32K, quantising counted; SDPA 14.8 ms): 17.0 ms. Blocks of 64 queries read the L2
        # cache twice as often: 17.2 at best. One program of 128 x 128 17.4, of 128 x 64 18.5. The cap lets two programs
        # share a multiprocessor: without it 22.6. A softcap has no room under it, and gets the second best.
        if widest == 128 and not has_softcap:
            return PrefillTiles(
                128, 64, 8, num_stages=2, max_registers=128, stage_queries=True, hopper=hopper, short=short
            )
        # At head_dim 64 and 16K 2.57 ms (SDPA 2.37), with two stages 2.97. 128 x 128 under a cap took 2.50 and spilled.
        # With a softcap high tiles go 32 keys at a time: with 64 the loop over low ones spills (compiled, not timed).
        return PrefillTiles(
            64, 64 if widest == 128 else 128, 4, num_stages=3, high_block_n=32 if has_softcap else 64, high_stages=2,
            stage_queries=True, hopper=hopper, short=short,
        )  # fmt: skip
    if widest <= 128 and arch > 90 and are_keys_8bit and are_values_8bit:
        return PrefillTiles(64, 128, num_warps=4, num_stages=2 if widest == 128 else 3)
    if widest <= 128 and arch >= 90 and lowering.low_key is None:
        # All tiles are high ones: their loop is the one that counts.
        return PrefillTiles(64, 64, num_warps=4, num_stages=2, high_stages=2)
    if widest <= 64:
        return PrefillTiles(block_m=64, block_n=128, num_warps=4, num_stages=2)
    if widest <= 128:
        # 16-bit operands fill twice the shared memory.
        return PrefillTiles(block_m=64, block_n=64, num_warps=4, num_stages=2)
    # Of 256 channels the output takes half of Hopper's registers. 16 query and 8 kv heads, quantising counted, in
    # milliseconds at 8K / 32K (SDPA, which is cuDNN: 0.87 / 12.1).
    if is_hopper and are_values_8bit:
        # 8-bit keys: 1.39 / 19.2. 128 x 64 1.49 / 22.5, with spills in the loop; 64 x 64 1.82 / 27.5, with three stages
        # 1.54 / 22.0, with 4 warps 1.46 / 20.3 and spills; 64 x 128 with one stage 1.71 / 24.4. The kernel for long
        # prompts: 0.71 / 8.3. 16-bit keys (``fp4``): 1.96 / 26.1, with 128 x 64 2.21 / 26.9, with 64 x 64 2.46 / 35.2.
        hopper = _wide_hopper_tiles() if are_keys_8bit else None
        return PrefillTiles(64, 128, num_warps=8, num_stages=2, stage_queries=True, hopper=hopper)
    if is_hopper and are_keys_8bit:
        # ``paper``: 0.93 / 12.0, although a dozen scalars are spilled. 128 x 64 with 8 warps 1.01 / 13.2; what spills
        # nothing, 64 x 128 with 8 warps, 1.58 / 22.8.
        return PrefillTiles(64, 64, num_warps=4, num_stages=2, stage_queries=True)
    if is_hopper:
        # 16-bit operands (keys and values): 1.22 / 15.8; 64 x 64 with 4 warps 1.60 / 22.0.
        return PrefillTiles(128, 64, num_warps=8, num_stages=2, stage_queries=True)
    # Not measured, compiled: what spills least in the loop over low tiles.
    if arch == 80:
        # 0 to 9 accesses a step (in Triton 3.7 to 22); 128 x 64, with room for one stage, 36 to 103. 64 x 64 none, but
        # it would read keys and values from the L2 cache about as fast as that can deliver them.
        # High tiles 16 keys at a time: with 32 the loop over low ones spills 3 scalars of ``fp4``, now none.
        return PrefillTiles(128, 32, num_warps=8, num_stages=2, high_block_n=16, stage_queries=True)
    # The consumer chips have 99 KB of shared memory. With 4 warps 16-bit and block-scaled operands spill up to 51 times
    # a step, and 3 KB of a thread in all; with 8 never in the loop, and 700 bytes at most.
    num_warps = 4 if are_keys_8bit and are_values_8bit and not is_packed else 8
    return PrefillTiles(64, 32, num_warps=num_warps, num_stages=1, high_block_n=32, stage_queries=num_warps == 8)


def _short_tiles(widest: int, are_keys_8bit: bool, are_values_8bit: bool) -> ShortTiles:
    """Return the sizes for head dimensions of 64 and, padded to it, 128: three and four programs to a multiprocessor.

    8-bit keys and E4M3 values, the kernel for all chips, this one, quantising counted: 8 x 1K 239 to 170 us, 2K 94 to
    71, 4K 241 to 203, 8 x 4K 1,893 to 1,587. That of long prompts there and beyond: 8K 686 to 678, 12K 1,485 to 1,560,
    bidirectional 4K 421 to 370, 6K 753 to 768, windows of 2K in 16K 918 to 876; with a softcap 16K 4,971 to 4,491. With
    two places for values a program less fits: 8 x 1K 199.

    At head_dim 64 that of long prompts, this one: 8K 538 to 500 us, 12K 1,130 to 1,089, 16K 1,923 to 1,905,
    bidirectional 4K 281 to 272, 8K 980 to 1,004. With three places for keys, a program less, 16K 2,106.

    16-bit operands, of all chips, of long prompts, this one:

    =======================================  ======  ======  =====  =====  =====  ======  ==============
    us                                       8 x 1K      2K     4K     6K     8K  8 x 4K  bidirectional
    =======================================  ======  ======  =====  =====  =====  ======  ==============
    INT8 keys, 16-bit values, all chips         249      93    269
    of long prompts                             254      90    246    472          1,867  4K 454
    this one                                    174      72    221    462          1,685  4K 429
    one place for keys, two for values          181      74    230    473          1,727  4K 423
    E5M2 keys, 16-bit values (``paper``)        262      94    276    558    921   2,236  4K 487
    of long prompts                             264      90    243    461    757   1,945  4K 436
    this one                                    223      80    235    478    803   1,859  4K 432
    16-bit keys, E4M3 values (``fp4``)          353     142    364    698  1,107   2,677  4K 577
    of long prompts                             377     136    310    543    853   2,245  4K 502
    this one                                    298     122    300    577    935   2,261  4K 513
    16-bit keys and values                      304     120    351    715  1,173   2,798  2K 178
    of long prompts                             283     103    274    522    857   2,132  2K 164
    this one                                    229      99    293    604  1,026   2,296  2K 165
    =======================================  ======  ======  =====  =====  =====  ======  ==============
    """
    if widest == 64:
        return ShortTiles(key_stages=2, value_stages=2, registers=128, max_keys=7_168)
    max_keys = {2: 4_096, 1: 2_560, 0: 1_536}[are_keys_8bit + are_values_8bit]
    return ShortTiles(key_stages=2, value_stages=1, registers=168, max_keys=max_keys)


def _hopper_tiles(widest: int, are_keys_8bit: bool, are_values_8bit: bool) -> HopperTiles:
    """Return the sizes for head dimensions of 64 and, padded to it, 128, where products are of 64 x 128 scores.

    Three warpgroups leave a thread 160 registers, which a block's scores, its product and the output just fit in. With
    an arrival of every warp, which takes Triton's barriers and the spills out of the loop, 32K takes 10.05 ms instead
    of 10.9. Tried without gain: turns, so that one warpgroup at a time computes its softmax, or its scores (13.2, 16.8
    ms).

    Tried without gain either (an H200, Triton 3.6, CUDA graphs in turns, quantising counted; one kernel at two
    places of the turn differed by 2 to 4 %, at 32K by 10):

    ===============================================  ======  =====  =====  =====  ======  ======
    us                                               8 x 1K     2K     4K     8K  8 x 4K     32K
    ===============================================  ======  =====  =====  =====  ======  ======
    The kernel for all chips                            261     94    244
    This kernel                                         283    100    245    741   1,877   9,570
    A: 64 positions of three heads of a group           280    104    251    760   1,944   9,828
    B: as A, a program for each multiprocessor          265    107    259    761   1,861   9,868
    As B, two warpgroups                                258    103    265    818   1,903  11,108
    In another run, C: as A, the two blocks of a
    high tile at once                                   308    109    260    759   1,902   9,898
    D: as C, its warpgroups quantise the queries        359    122    269    791   2,187   9,966
    As D, but blocks of high tiles one by one           321    115    257    757   2,016   9,371
    As D, no barrier in the low loop (waits called)     363    124    272    805   2,150   9,980
    ===============================================  ======  =====  =====  =====  ======  ======

    Warpgroups of A all need the same tiles, and from A on no tile is quantised that is low for no query. In B copies of
    the next queries and keys begin before the output is written. D has 1,500 instructions before a program's first
    block instead of a launch.

    Two warpgroups, with 240 registers and two blocks of keys at a time: 813 TFLOP/s at 32K against 918, as the slower
    units (exponentials, conversions) then idle more. A token that makes warpgroups begin their scores one after the
    other: 883 to 920 against 912. A quarter of the exponentials as polynomials, of more instructions: 840 against 891.
    Two warpgroups that begin a block's scores with the product of the block before it and compute their softmax while
    that goes on, in high tiles as in low ones, without a spill (an H200, Triton 3.6, in one run; against this kernel):
    8K 831 to 737 us, 8 x 4K 2,103 to 1,946, 32K 12.0 to 9.45 ms; with queries rotated and quantised in that kernel 785,
    1,989 and 10.7. A scheduler then has two warps that compute instead of three, and issues in 40 % of the cycles
    instead of 46. Of short calls it makes no difference: 8 x 1K 290 us, the other kernel 297; 2K 107, 100.

    Changes to the loop over low tiles, each in turns with this kernel, 8K and 32K over its time (the same H200;
    benchmarks/prefill-loop-h200.csv): the tile's factor loaded a tile ahead 1.04, 1.05; scores that begin at 1.5 * 2^23
    and so need no conversion 1.09, 1.15; no maximum, tiles whose sums pass E4M3's range done again 1.07, 1.07; turns at
    the exponentials 1.07, 1.09 (behind a barrier alone: ptxas moves exponentials across it, unless what they take
    depends on it); both, the turn handed on early, and a first look at a tile 0.99, 0.98, at 1 % more error; sums by
    the matrix units 1.04, 1.04; the product with values in two halves 1.04, 1.06.

    One program fills a multiprocessor, and what it does before and after its loop is hidden by nothing. So it pays for
    long rows alone. Against the kernel for all chips, quantising counted, in milliseconds: 8-bit keys and E4M3 values
    0.236 to 0.226 at 4K, 0.694 to 0.733 at 8K, 9.31 to 10.94 at 32K; 16-bit keys (``fp4``) 0.365 to 0.416 at 4K, 11.37
    to 15.49 at 32K, and 16-bit values too 0.308 to 0.370 and 13.18 to 17.38; 8-bit keys and 16-bit values
    (``paper``) 0.273 to 0.299 and 11.52 to 14.57. Windows, padding, head_dim 96: benchmarks/prefill-short-h200.csv.

    At head_dim 64 the output takes half the registers, and of 8-bit keys and values four warpgroups fit: at 16K 1,923
    us, with three 2,061, with six places 1,943. Of 16-bit operands three; beside 8-bit keys 16-bit values are faster in
    the kernel of short prompts at any length: 16K 2,251 to 2,078, 32K 8,798 to 8,391.
    """
    if widest == 64 and are_keys_8bit and are_values_8bit:
        # The first warpgroup has 120 registers, and keeps everything in them.
        return HopperTiles(groups=4, stages=4, registers=112, min_keys=4_096, min_rows=32 * 8_192)
    # As many blocks as fit in shared memory at 128 channels.
    stages = {(True, True): 4, (True, False): 3, (False, True): 3, (False, False): 2}[are_keys_8bit, are_values_8bit]
    # With values of high tiles in 16 bits (an H200, Triton 3.6): 1 x 4K takes the kernel for all chips 245 us, the
    # variant of one program for each multiprocessor 259; 8 x 4K 2,065, this one 1,954. What counts is how many
    # programs share the chip.
    min_rows = 32 * (8_192 if are_keys_8bit and are_values_8bit else 4_096)
    return HopperTiles(groups=3, stages=stages, registers=160, min_keys=4_096, min_rows=min_rows)


def _wide_hopper_tiles() -> HopperTiles:
    """Return the sizes for head dimensions of 160 to 256, with 8-bit keys and E4M3 values.

    The output takes 128 registers of a thread and a block's scores 64, so there are two warpgroups. The product with
    values goes 128 channels at a time, the second begun when the first is there: 561 instructions for a tile. With 32
    at a time, one ahead of that which is added, they were 660; 8K / 32K took 674 / 9,311 us instead of 636 / 8,601
    (Triton 3.6; 16 query and 8 kv heads); with 64, one in flight, 782 / 11,197, with spills. At 192 channels, of which
    the second product has half for nothing, 603 / 7,883, and 607 / 7,725 with 64.

    The other kernel has one program on a multiprocessor too, and is overtaken early, as CUDA graphs in microseconds:
    512 keys 44.5 against 39.3, 1K 60.0 against 65.6, 2K 107 against 149, 4K 255 against 419; 8 query heads at 2K 68
    against 76.
    """
    return HopperTiles(groups=2, stages=2, registers=240, min_keys=1_024, min_rows=16_384)


L2_BYTES = 8 << 20
"""Keys and values in 8 bits that programs running at the same time should share. Through a Hopper's L2 cache of 50 MB
queries, outputs and the 16-bit keys and values of high tiles pass beside them."""


def select_section(kv_heads: int, bytes_per_head: int) -> int:
    """Return how many kv heads (of all batch rows) are worked on at a time.

    As many as fit in the L2 cache: in a section the longest rows go first, and only the end of the last section leaves
    multiprocessors idle.

    Args:
        kv_heads: Heads times batch rows.
        bytes_per_head: Of keys and values.
    """
    return max(1, min(kv_heads, L2_BYTES // max(1, bytes_per_head)))


@dataclass(frozen=True)
class DecodeTiles:
    """Sizes of the decode kernel.

    Attributes:
        warps: Of a program.
        programs: Of the grid; they share the tiles of all heads.
        buffers: Places for half a tile's keys or values that a warp has.
    """

    warps: int
    programs: int
    buffers: int


PARTS = 32
"""Programs of a head where it has more are a multiple of these, which divides the rounds of long rows most evenly."""


def _aligned(slots: int, heads: int) -> int:
    """Return how many programs share heads: where rows are of one length, a share ends where a head does.

    At most an eighth of the ``slots`` stays free for that.
    """
    each = slots // heads
    if each > PARTS:
        each -= each % PARTS
    programs = each * heads or -(-heads // -(-heads // slots))
    return programs if 8 * programs >= 7 * slots else slots


def select_decode_tiles(
    arch: int, block_d: int, block_dv: int, bits: int, *, heads: int, tiles: int, processors: int
) -> DecodeTiles:
    """Return the sizes of a decode step: a function of shapes and capacities, not of how much a cache holds.

    Args:
        arch: Compute capability, major version times ten plus minor.
        block_d: Head dimension of keys, padded to a power of two.
        block_dv: That of values, likewise, at least 64.
        bits: Of a code.
        heads: Kv heads of all batch rows.
        tiles: Tiles that the cache can hold, raw ones too.
        processors: Multiprocessors of the device.
    """
    # With two places for halves of a tile, which keys and values take in turn, a multiprocessor has shared memory for
    # eight warps of 8 bits, as many as it has registers for, instead of six (an H200, Triton 3.6, in us: 64 x 4K 147
    # instead of 159), and at head_dim 256 for six instead of three (32 x 8K 290 instead of 321; 4 bits, eight instead
    # of six, 175 instead of 209). Those of 4 bits and head_dim 128 have room for eight with four (1 x 32K 25.3 instead
    # of 26.6).
    buffers = 2 if block_d == block_dv and (bits == 8 or block_d > 128) else 4
    tile = (block_d + block_dv) * 4 * buffers * bits + 4 * block_d + 8 * block_dv
    # Of the shared memory of a multiprocessor CUDA keeps 1 KB for each program.
    has = 167_936 if arch == 80 else 233_472 if arch == 90 or arch in TENSOR_MEMORY_ARCHS else 102_400
    # Few heads have many parts to be combined, fewer with four warps (4 bits, 8 x 32K: 86 us, 90 with two; 8 bits have
    # none of it, 1 x 32K: 33.8, 32.7 with two); of many heads a program has one or two whole ones, and others meanwhile
    # go on (4 bits, 64 x 4K: 104 us, 119 with four).
    warps = 4 if bits == 4 and heads < processors else 2
    if heads >= processors and bits == 8 and block_d > 128:
        warps = 1  # 32 x 8K: 290 us, 299 with two
    while warps > 1 and warps * tile + 1024 > has:
        warps //= 2
    slots = processors * max(1, min(8 // warps, has // (warps * tile + 1024)))
    # Where a program has few tiles, it mostly waits, the more so in steps over raw tiles. With rounds and steps divided
    # each by themselves (an H200, Triton 3.6, after other work on the chip; 4 bits, in us) 1 x 8K takes 15.9 instead of
    # 17.0, but 1 x 32K 27.2 instead of 25.6, 8 x 32K 90.7 instead of 84.1; with raw tiles loaded a step ahead, too,
    # 16.8, 29.8 and 95.6.
    return DecodeTiles(
        warps=warps,
        programs=min(_aligned(slots, heads), heads * tiles),
        buffers=buffers,
    )
