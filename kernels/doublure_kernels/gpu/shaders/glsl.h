// What raster.h is written in, for GLSL: buffers, lanes, and names.

#extension GL_EXT_control_flow_attributes : require
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_shader_subgroup_vote : require
#extension GL_KHR_shader_subgroup_ballot : require
#extension GL_KHR_shader_subgroup_arithmetic : require

layout(constant_id = 0) const int LANES = 32;
layout(constant_id = 1) const int MODE = 0;
layout(constant_id = 2) const int COMPACT = 0;
layout(constant_id = 3) const int BBOX6 = 0;
layout(constant_id = 4) const int CHANNELS = 3;
layout(constant_id = 5) const int FINE = 1;

// The workgroup is one subgroup.
layout(local_size_x_id = 0, local_size_y = 1, local_size_z = 1) in;

const int COLUMNS = LANES < 8 ? 1 : (LANES < 32 ? 2 : (LANES < 128 ? 4 : 8));
const int TILE_W = 4 * COLUMNS, TILE_H = LANES / COLUMNS;
const int CHUNK = LANES < 32 ? LANES : 32;
const int CON = 13, GEO = 13;
const int LIST = 512;
const int KEPT = LANES > 64 ? 2 : (LANES > 32 ? 4 : 8);

layout(push_constant) uniform Push {
    uint items, triangles, height, width, tile_x, tile_y, columns, rows, first_row, buffer_rows;
    uint slots, flags;
    float sigma, red, green, blue, scale;
    uint iteration;
    float step, root;
} set;

#define STORAGE(number, type, name) \
    layout(std430, set = 0, binding = number) buffer Buffer##number { type name[]; }
STORAGE(0, float, params_);
STORAGE(1, float, sigma_);
STORAGE(2, float, background_);
STORAGE(3, int, counts_);
STORAGE(4, float, given_);
STORAGE(5, float, images_);
STORAGE(6, uvec4, bounds_);
STORAGE(7, vec4, partials_);
STORAGE(8, vec4, tiles_);
STORAGE(9, float, grads_);
STORAGE(10, float, grad_sigma_);
STORAGE(11, float, grad_background_);
STORAGE(12, float, losses_);
STORAGE(13, uint, totals_);
STORAGE(14, float, fit_);
STORAGE(15, vec4, geometry_);

#define PARAM(i) params_[i]
#define SIGMA(i) sigma_[i]
#define BACKGROUND(i) background_[i]
#define COUNTS(i) counts_[i]
#define GIVEN(i) given_[i]
#define IMAGE(i) images_[i]
#define BOUNDS(i) bounds_[i]
#define BOUNDS_W(i) bounds_[i].w
#define PARTIAL(i) partials_[i]
#define TILE(i) tiles_[i]
#define GRAD(i) grads_[i]
#define GRAD_SIGMA(i) grad_sigma_[i]
#define GRAD_BACKGROUND(i) grad_background_[i]
#define LOSS(i) losses_[i]
#define FIT(i) fit_[i]
#define GEOMETRY(i) geometry_[i]
#define TOTALS(i) totals_[i]

shared vec4 con[CHUNK * CON];
shared uint slots[CHUNK];
shared uint list[LIST];
shared vec4 kept_light[KEPT * LANES];
shared uint kept_at[KEPT];

#define FN
#define CONSTANT const
#define EXACT precise
#define UNROLL [[unroll]]
#define OUT(type) out type
#define INOUT(type) inout type
#define IN_ARRAY(type, name, count) type name[count]
#define INOUT_ARRAY(type, name, count) inout type name[count]
#define BITS floatBitsToUint
#define FLOAT uintBitsToFloat
#define PRODUCT(a, b) ((a) * (b))
#define FMA(a, b, c) ((a) * (b) + (c))
// t (1 - w), exact to its own last bit: a multiplication may not be fused with what follows.
#define REST(t, w) ((w) < 0.5 ? (t) - (w) * (t) : (t) * (1.0 - (w)))
#define RSQRT inversesqrt
#define SQRT sqrt
#define SATURATE(x) clamp(x, 0.0, 1.0)
#define EXP2 exp2
#define RECIPROCAL(x) (1.0 / (x))

// Without a fused multiplication, by halves of 12 bits (Dekker 1971).
vec2 two_product(float a, float b) {
    precise float ca = a * 4097.0;
    precise float ah = ca - (ca - a);
    precise float al = a - ah;
    precise float cb = b * 4097.0;
    precise float bh = cb - (cb - b);
    precise float bl = b - bh;
    precise float p = a * b;
    precise float e = ((ah * bh - p) + ah * bl + al * bh) + al * bl;
    return vec2(p, e);
}

#define TEAM_SYNC barrier()
#define TEAM_BEFORE subgroupExclusiveAdd
#define TEAM_ADD subgroupAdd
#define TEAM_ADD_UINT subgroupAdd
#define TEAM_RANK(flag) subgroupExclusiveAdd(flag ? 1u : 0u)
#define TEAM_COUNT(flag) subgroupAdd(flag ? 1u : 0u)
#define TEAM_MASK(flag) subgroupBallot(flag).x
#define LOWEST findLSB
#define HIGHEST findMSB
#define TEAM_ANY subgroupAny
#define LANE gl_SubgroupInvocationID

void store_sums(uint lane, uint slot, float sums[12]) {
    [[unroll]] for (int j = 0; j < 11; j++) sums[j] = subgroupAdd(sums[j]);
    if (lane < 3u) {
        vec4 v = vec4(sums[0], sums[1], sums[2], sums[3]);
        if (lane == 1u) v = vec4(sums[4], sums[5], sums[6], sums[7]);
        if (lane == 2u) v = vec4(sums[8], sums[9], sums[10], 0.0);
        partials_[slot * 3u + lane] = v;
    }
}
#define STORE_SUMS store_sums
