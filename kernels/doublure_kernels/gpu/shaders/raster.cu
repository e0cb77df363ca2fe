// The kernels as CUDA C++: a warp is a team. See raster.h.

#define FN __device__ __forceinline__
#include "cuda.h"

#define BITS __float_as_uint
#define FLOAT __uint_as_float
#define PRODUCT(a, b) __fmul_rn(a, b)
#define FMA fmaf
#define REST(t, w) fmaf(-(w), t, t)  // t (1 - w), exact to its own last bit
#define RSQRT approximate_rsqrt
#define SQRT approximate_sqrt
#define SATURATE __saturatef
#define EXP2 approximate_exp2
#define RECIPROCAL approximate_reciprocal

FN float approximate_rsqrt(float v) {
    float r;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
    return r;
}

FN float approximate_sqrt(float v) {
    float r;
    asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
    return r;
}

FN float approximate_exp2(float v) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
    return r;
}

FN float approximate_reciprocal(float v) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
    return r;
}

FN vec2 two_product(float a, float b) {
    float p = __fmul_rn(a, b);
    return vec2(p, fmaf(a, b, -p));
}

constexpr uint ALL = 0xffffffffu;

FN float add_all(float v) {
    _Pragma("unroll") for (int step = 16; step > 0; step >>= 1) v += __shfl_xor_sync(ALL, v, step);
    return v;
}

FN uint add_all_uint(uint v) {
    _Pragma("unroll") for (int step = 16; step > 0; step >>= 1) v += __shfl_xor_sync(ALL, v, step);
    return v;
}

FN uint add_before(uint v) {
    uint sum = v;
    _Pragma("unroll") for (int step = 1; step < 32; step <<= 1) {
        uint other = __shfl_up_sync(ALL, sum, step);
        if (threadIdx.x >= uint(step)) sum += other;
    }
    return sum - v;
}

#define TEAM_SYNC __syncwarp()
#define TEAM_BEFORE add_before
#define TEAM_ADD add_all
#define TEAM_ADD_UINT add_all_uint
#define TEAM_RANK(flag) uint(__popc(__ballot_sync(ALL, flag) & ((1u << threadIdx.x) - 1u)))
#define TEAM_COUNT(flag) uint(__popc(__ballot_sync(ALL, flag)))
#define TEAM_MASK(flag) __ballot_sync(ALL, flag)
#define LOWEST(bits) (__ffs(int(bits)) - 1)
#define HIGHEST(bits) (31 - __clz(int(bits)))
#define TEAM_ANY(flag) (__any_sync(ALL, flag) != 0)
#define STORE_SUMS store_sums

struct Kernel {
    const Args &args;
    const Settings &set;
    vec4 *con = nullptr;
    uint *slots = nullptr;
    uint *list = nullptr;
    vec4 *kept_light = nullptr;
    uint *kept_at = nullptr;

    // Each exchange with a lane far off halves how many sums both go on with, from 12 to 6, 3, 2, 1: 13
    // exchanges instead of 60. Sums 0-2, 3-5, 6-8 and 9-11 end up in lanes 0, 8, 16, 24 and on, the
    // first two of three in the first two, the third in the third.
    FN void store_sums(uint lane, uint slot, float (&s)[12]) {
        bool upper = (lane & 16u) != 0u;
        float a[6];
        _Pragma("unroll") for (int j = 0; j < 6; j++) {
            float mine = upper ? s[6 + j] : s[j], theirs = upper ? s[j] : s[6 + j];
            a[j] = mine + __shfl_xor_sync(ALL, theirs, 16);
        }
        upper = (lane & 8u) != 0u;
        float b[3];
        _Pragma("unroll") for (int j = 0; j < 3; j++) {
            float mine = upper ? a[3 + j] : a[j], theirs = upper ? a[j] : a[3 + j];
            b[j] = mine + __shfl_xor_sync(ALL, theirs, 8);
        }
        upper = (lane & 4u) != 0u;
        float c0 = (upper ? b[2] : b[0]) + __shfl_xor_sync(ALL, upper ? b[0] : b[2], 4);
        float c1 = b[1] + __shfl_xor_sync(ALL, b[1], 4);
        // Lanes without bit 4 go on with sums 0 and 1, those with it with sum 2.
        bool second = (lane & 2u) != 0u && !upper;
        float d = second ? c1 : c0, other = (lane & 2u) != 0u || upper ? c0 : c1;
        d += __shfl_xor_sync(ALL, other, 2);
        d += __shfl_xor_sync(ALL, d, 1);
        if ((lane & 1u) == 0u && (lane & 6u) != 6u) {
            uint which = (lane >> 3) * 3u + ((lane & 4u) != 0u ? 2u : (lane & 2u) >> 1);
            ((float *)args.partials)[slot * 12u + which] = d;
        }
    }

#include "raster.h"
};

extern "C" __global__ void __launch_bounds__(LANES) setup(const __grid_constant__ Args args) {
    Kernel k{args, args.settings};
    k.setup_main((blockIdx.y * gridDim.x + blockIdx.x) * uint(LANES) + threadIdx.x);
}

extern "C" __global__ void __launch_bounds__(LANES) scan(const __grid_constant__ Args args) {
    Kernel k{args, args.settings};
    k.scan_main(threadIdx.x);
}

extern "C" __global__ void __launch_bounds__(LANES, 16) draw(const __grid_constant__ Args args) {
    __shared__ vec4 con[CHUNK * CON];
    __shared__ uint slots[CHUNK];
    __shared__ uint list[LIST];
    __shared__ vec4 kept_light[KEPT * LANES];
    __shared__ uint kept_at[KEPT];
    Kernel k{args, args.settings, con, slots, list, kept_light, kept_at};
    // From the middle rows of all items outwards: triangles are fewer at an image's border, and what
    // comes last is waited for by all.
    uint n = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    uint item = n % gridDim.z, place = n / gridDim.z;
    uint row = place / gridDim.x, middle = (gridDim.y - 1u) / 2u;
    row = (row & 1u) != 0u ? middle + (row + 1u) / 2u : middle - row / 2u;
    k.draw_main(threadIdx.x, uvec2(place % gridDim.x, row), item);
}

extern "C" __global__ void __launch_bounds__(LANES) reduce(const __grid_constant__ Args args) {
    Kernel k{args, args.settings};
    k.reduce_main(threadIdx.x, blockIdx.y * gridDim.x + blockIdx.x);
}

extern "C" __global__ void __launch_bounds__(LANES) adam(const __grid_constant__ Args args) {
    Kernel k{args, args.settings};
    k.adam_main((blockIdx.y * gridDim.x + blockIdx.x) * uint(LANES) + threadIdx.x);
}
