// What raster.h is written in, for CUDA C++: buffers, lanes, and names. Macros LANES, MODE,
// COMPACT, BBOX6, CHANNELS and FINE are given to the compiler.

typedef unsigned int uint;

struct alignas(8) vec2 {
    float x, y;
    vec2() = default;
    FN vec2(float a, float b) : x(a), y(b) {}
};

struct alignas(16) vec4 {
    float x, y, z, w;
    vec4() = default;
    FN vec4(float a, float b, float c, float d) : x(a), y(b), z(c), w(d) {}
};

struct alignas(8) uvec2 {
    uint x, y;
    uvec2() = default;
    FN uvec2(uint a, uint b) : x(a), y(b) {}
};

struct alignas(16) uvec4 {
    uint x, y, z, w;
    uvec4() = default;
    FN uvec4(uint a, uint b, uint c, uint d) : x(a), y(b), z(c), w(d) {}
};

constexpr int COLUMNS = LANES < 8 ? 1 : (LANES < 32 ? 2 : (LANES < 128 ? 4 : 8));
constexpr int TILE_W = 4 * COLUMNS, TILE_H = LANES / COLUMNS;
constexpr int CHUNK = LANES < 32 ? LANES : 32;
constexpr int CON = 13, GEO = 13;  // 13, so that lanes write to different banks
constexpr int LIST = 512;
constexpr int KEPT = 8;

struct Settings {
    uint items, triangles, height, width, tile_x, tile_y, columns, rows, first_row, buffer_rows;
    uint slots, flags;
    float sigma, red, green, blue, scale;
    uint iteration;
    float step, root;
};

// Pointers in the order of the bindings, then the settings.
struct Args {
    float *params;
    const float *sigma, *background;
    const int *counts;
    const float *given;
    float *images;
    uvec4 *bounds;
    vec4 *partials, *tiles;
    float *grads, *grad_sigma, *grad_background, *losses;
    uint *totals;
    float *fit;
    vec4 *geometry;
    Settings settings;
};

#define PARAM(i) args.params[i]
#define SIGMA(i) args.sigma[i]
#define BACKGROUND(i) args.background[i]
#define COUNTS(i) args.counts[i]
#define GIVEN(i) args.given[i]
#define IMAGE(i) args.images[i]
#define BOUNDS(i) args.bounds[i]
#define BOUNDS_W(i) args.bounds[i].w
#define PARTIAL(i) args.partials[i]
#define TILE(i) args.tiles[i]
#define GRAD(i) args.grads[i]
#define GRAD_SIGMA(i) args.grad_sigma[i]
#define GRAD_BACKGROUND(i) args.grad_background[i]
#define LOSS(i) args.losses[i]
#define FIT(i) args.fit[i]
#define GEOMETRY(i) args.geometry[i]
#define TOTALS(i) args.totals[i]

#define CONSTANT static constexpr
#define EXACT
#define UNROLL _Pragma("unroll")
#define OUT(type) type &
#define INOUT(type) type &
#define IN_ARRAY(type, name, count) const type (&name)[count]
#define INOUT_ARRAY(type, name, count) type (&name)[count]
