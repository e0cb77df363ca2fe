// The soft triangle rasterizer for GPUs: one source for GLSL and CUDA C++ (docs/rasterizer.md has the
// formulas). glsl.h and cuda.h give it their languages' words.
//
// A team of LANES lanes, a subgroup or a warp, draws a tile of TILE_W x TILE_H pixels; a lane has
// four pixels of a row, whose state stays in registers.
//
// 1. Front to back. Candidates, triangles whose padded box meets the tile, are listed; up to CHUNK at
//    a time, a lane each works out their constants and drops what is too far. Then all lanes go over
//    the chunk: transmittance T and colour C of the chunk alone, put under what was before at its end,
//    so that thousands of faint triangles lose no digits.
// 2. Back to front. With g = dL/dC of the finished pixel, dL/dw = T (g.c - D), where D = g.C_below
//    runs along as D += w (g.c - D). T above a triangle is recovered from below, T + T w/(1 - w), and
//    set right where pass 1 kept it. A pixel through which nothing shines any more keeps the triangle
//    that closed it and the T above that.
// 3. A team's sums over its pixels are one slot of `partials`; `reduce` adds a triangle's slots in
//    their order.
//
// Precision: distances to an edge's line come from S + i a + j b with S, a and b each the sum of two
// floats, the first of which lie on one grid, so that their sum is exact; distances along an edge from
// vectors to its ends. Lengths are in sigmas, times log2(e) for the sigmoid.

CONSTANT uint ALL_SIGMA = 1u, ALL_BACKGROUND = 2u, ALL_COUNTS = 4u, ADD = 8u;
CONSTANT int FORWARD = 0, BACKWARD = 1, FUSED = 2;
CONSTANT int PARAMS = 10;

CONSTANT float CULL_WEIGHT = 1e-6f;
CONSTANT float COMPACT_RADIUS = 3.0f;
CONSTANT float LOG2E = 1.44269504088896f;
CONSTANT float FULL = 25.3f;          // beyond 17.5 sigmas coverage is 1 to the last bit
CONSTANT float FAR = 1e9f;            // coordinates are cut here
CONSTANT float STEEPEST = 1e8f;       // 1/sigma, likewise
CONSTANT int GROUP = 32;
CONSTANT int BATCH = LANES > 64 ? 2 : 4;
CONSTANT float CLOSED = 1e-12f;       // of the light, less is none

// --- arithmetic ---------------------------------------------------------------------------------

// A number as the sum of two floats: x, and y of at most half a last digit of x.

FN vec2 two_sum(float a, float b) {
    EXACT float s = a + b;
    EXACT float v = s - a;
    EXACT float e = (a - (s - v)) + (b - v);
    return vec2(s, e);
}

FN vec2 add2(vec2 a, vec2 b) {
    vec2 s = two_sum(a.x, b.x);
    EXACT float e = s.y + (a.y + b.y);
    return two_sum(s.x, e);
}

FN vec2 negative(vec2 a) { return vec2(-a.x, -a.y); }

FN vec2 product2(vec2 a, vec2 b) {
    vec2 p = two_product(a.x, b.x);
    EXACT float e = p.y + (PRODUCT(a.x, b.y) + PRODUCT(a.y, b.x));
    return two_sum(p.x, e);
}

FN bool finite(float v) { return (BITS(v) & 0x7f800000u) != 0x7f800000u; }

FN float limit(float v, float most) { return min(max(v, -most), most); }

FN float smoothstep_u(float z) {
    return SATURATE(0.5f + z * (1.0f / (2.0f * COMPACT_RADIUS)));
}

// --- a triangle ---------------------------------------------------------------------------------

FN float sigma_of(uint index) { return (set.flags & ALL_SIGMA) != 0u ? set.sigma : SIGMA(index); }

// How many of a distance's units an image is wide.
FN float scale_of(float sigma) {
    return min((COMPACT != 0 ? 1.0f : LOG2E) / sigma, STEEPEST);
}

// How far outside, in those units, it may still weigh something; a little more, since weights are
// compared themselves. alpha / (1 + 2^d) = CULL_WEIGHT.
FN float reach_of(float alpha) {
    return COMPACT != 0 ? COMPACT_RADIUS : log2(alpha / CULL_WEIGHT - 1.0f) + 2e-3f;
}

FN bool alive(uint item, uint t) {
    if ((set.flags & ALL_COUNTS) == 0u && int(t) >= COUNTS(item)) return false;
    uint index = item * set.triangles + t;
    float sigma = sigma_of(index);
    bool sound = finite(sigma) && sigma > 0.0f;
    for (int i = 0; i < PARAMS; i++) sound = sound && finite(PARAM(index * 10u + uint(i)));
    return sound && PARAM(index * 10u + 9u) > CULL_WEIGHT;
}

FN float opacity(uint index) { return min(PARAM(index * 10u + 9u), 1.0f); }

FN float coordinate(uint index, int i) { return limit(PARAM(index * 10u + uint(i)), FAR); }

// The first and last tile that lie between two pixel positions, or none.
FN uvec2 tiles_between(float low, float high, int size, int tile, uint first, uint count) {
    int a = int(floor(min(max(low, 0.0f), 2e9f))) / tile;
    int b = int(floor(min(max(high, -1.0f), float(size - 1)) + 1.0f)) - 1;
    b = b < 0 ? -1 : b / tile;
    a = max(a, int(first)) - int(first);
    b = min(b, int(first + count) - 1) - int(first);
    return a <= b ? uvec2(uint(a), uint(b)) : uvec2(1u, 0u);
}

// What does not depend on the tile, GEO vec4 a triangle; positions in pixels of the image:
// 0-2  of each edge: S high and low, a high and low: signed distance to its line at the first pixel,
//      and its growth along x
// 3-5  of each edge: b high and low: growth along y; tangent x and y, times a pixel
// 6-8  of each vertex: x high and low, y high and low
// 9    1/length of each edge, 0 where it is a point; least distance that is inside
// 10   opacity, red, green, blue
// 11   1 or -1 for the winding; least distance² that has a direction; reach; scale
// 12   the box padded by 6 sigma: left, right, top, bottom

FN vec2 in_pixels(float v, float size) {
    return add2(two_product(v, size), vec2(-0.5f, 0.0f));
}

FN void put_geo(uint index, float w, float h) {
    uint at = index * uint(GEO);
    float sigma = sigma_of(index);
    float scale = scale_of(sigma);
    float alpha = opacity(index);
    vec2 vx[3], vy[3], ex[3], ey[3];
    UNROLL for (int k = 0; k < 3; k++) {
        vx[k] = in_pixels(coordinate(index, 2 * k), w);
        vy[k] = in_pixels(coordinate(index, 2 * k + 1), h);
        GEOMETRY(at + 6u + uint(k)) = vec4(vx[k].x, vx[k].y, vy[k].x, vy[k].y);
    }
    UNROLL for (int k = 0; k < 3; k++) {
        int n = k == 2 ? 0 : k + 1;
        ex[k] = add2(vx[n], negative(vx[k]));
        ey[k] = add2(vy[n], negative(vy[k]));
    }
    // e0 x (v2 - v0), and v2 - v0 = -e2.
    vec2 area = add2(product2(ey[0], ex[2]), negative(product2(ex[0], ey[2])));
    bool flat_ = area.x == 0.0f;
    float turn = area.x < 0.0f ? -1.0f : 1.0f;
    vec4 inverse = vec4(0.0f, 0.0f, 0.0f, flat_ ? 1e30f : 0.0f);
    UNROLL for (int k = 0; k < 3; k++) {
        vec2 dx = ex[k], dy = ey[k];
        float lx = dx.x / w, ly = dy.x / h;
        float big = max(abs(lx), abs(ly));
        float norm = big > 0.0f ? big * sqrt((lx / big) * (lx / big) + (ly / big) * (ly / big)) : 0.0f;
        bool point = !(norm > 1e-18f);
        if (point) {  // it has no direction: along the axes its distance comes out right
            dx = vec2(w, 0.0f);
            dy = vec2(0.0f, 0.0f);
            norm = 1.0f;
        }
        float unit = scale / norm;
        vec2 f = vec2(turn * unit / w / h, 0.0f);
        vec2 s = product2(add2(product2(dy, vx[k]), negative(product2(dx, vy[k]))), f);
        vec2 a = product2(negative(dy), f), b = product2(dx, f);
        GEOMETRY(at + uint(k)) = vec4(s.x, s.y, a.x, a.y);
        GEOMETRY(at + 3u + uint(k)) = vec4(b.x, b.y, dx.x / w * unit / w, dy.x / h * unit / h);
        float over = point ? 0.0f : min(1.0f / (norm * scale), 1e30f);
        if (k == 0) inverse.x = over;
        if (k == 1) inverse.y = over;
        if (k == 2) inverse.z = over;
    }
    GEOMETRY(at + 9u) = inverse;
    GEOMETRY(at + 10u) =
        vec4(alpha, PARAM(index * 10u + 6u), PARAM(index * 10u + 7u), PARAM(index * 10u + 8u));
    float least = 1e-9f * scale;
    GEOMETRY(at + 11u) = vec4(turn, max(least * least, 1e-36f), reach_of(alpha), scale);
    if (BBOX6 != 0) {
        float px = 6.0f * sigma * w, py = 6.0f * sigma * h;
        GEOMETRY(at + 12u) = vec4(min(min(vx[0].x, vx[1].x), vx[2].x) - px,
                                  max(max(vx[0].x, vx[1].x), vx[2].x) + px,
                                  min(min(vy[0].x, vy[1].x), vy[2].x) - py,
                                  max(max(vy[0].x, vy[1].x), vy[2].x) + py);
    }
}

FN void setup_main(uint thread) {
    if (thread >= set.items * set.triangles) return;
    uint item = thread / set.triangles;
    uvec2 across = uvec2(1u, 0u), down = uvec2(1u, 0u);
    if (alive(item, thread - item * set.triangles)) {
        float sigma = sigma_of(thread);
        float pad = reach_of(opacity(thread)) / scale_of(sigma);
        float x0 = coordinate(thread, 0), y0 = coordinate(thread, 1), x1 = coordinate(thread, 2);
        float y1 = coordinate(thread, 3), x2 = coordinate(thread, 4), y2 = coordinate(thread, 5);
        if (BBOX6 != 0) pad = min(pad, 6.0f * sigma);
        float w = float(set.width), h = float(set.height);
        float left = (min(min(x0, x1), x2) - pad) * w - 0.5f;
        float right = (max(max(x0, x1), x2) + pad) * w - 0.5f;
        float top = (min(min(y0, y1), y2) - pad) * h - 0.5f;
        float bottom = (max(max(y0, y1), y2) + pad) * h - 0.5f;
        left -= 0.01f + 1e-6f * abs(left);
        right += 0.01f + 1e-6f * abs(right);
        top -= 0.01f + 1e-6f * abs(top);
        bottom += 0.01f + 1e-6f * abs(bottom);
        if (left <= right && top <= bottom) {
            across = tiles_between(left, right, int(set.width), TILE_W, set.tile_x, set.columns);
            down = tiles_between(top, bottom, int(set.height), TILE_H, set.tile_y, set.rows);
        }
    }
    uint count = (across.y + 1u - across.x) * (down.y + 1u - down.x);
    if (count > 0u) put_geo(thread, float(set.width), float(set.height));
    if (count == 0u) { across = uvec2(1u, 0u); down = uvec2(1u, 0u); }
    BOUNDS(thread) = uvec4(across.x | (across.y << 16), down.x | (down.y << 16), count,
                           thread * set.slots);
}

// One team: where each triangle's slots begin, and how many there are.
FN void scan_main(uint lane) {
    uint n = set.items * set.triangles;
    uint low = 0u, high = 0u;
    for (uint base = 0u; base < n; base += uint(LANES)) {
        uint count = base + lane < n ? BOUNDS(base + lane).z : 0u;
        uint before = TEAM_BEFORE(count);
        // Past 2^32 the places are wrong, and the total says that they do not fit.
        if (base + lane < n) BOUNDS_W(base + lane) = low + before;
        uint sum = TEAM_ADD_UINT(count);
        high += low + sum < low ? 1u : 0u;
        low += sum;
    }
    if (lane == 0u) { TOTALS(0) = low; TOTALS(1) = high; }
}

// --- a triangle in a tile -----------------------------------------------------------------------

// Constants of an entry of the chunk, CON vec4: as in GEO, but from the tile's first pixel on, the first
// parts of S, a and b on one grid.

FN vec2 from_origin(float high, float low, float origin) {
    vec2 v = two_sum(high, -origin);
    return two_sum(v.x, v.y + low);
}

// Work out an entry's constants. Returns 0 where it covers nothing of the tile; else which edges can be
// the nearest of a pixel that feels it: 1 + the first + 4 times how many, none where all are covered.
FN uint constants(uint index, float x0, float y0, uint to) {
    uint at = index * uint(GEO);
    float right = float(TILE_W - 1), bottom = float(TILE_H - 1);
    vec4 inverse = GEOMETRY(at + 9u), other = GEOMETRY(at + 11u);
    float reach = other.z;
    bool flat_ = inverse.w != 0.0f;
    bool keep = true, full = !flat_;
    float vx[3], vy[3];
    UNROLL for (int k = 0; k < 3; k++) {
        vec4 v = GEOMETRY(at + 6u + uint(k));
        vec2 x = from_origin(v.x, v.y, x0), y = from_origin(v.z, v.w, y0);
        con[to + 6u + uint(k)] = vec4(x.x, x.y, y.x, y.y);
        vx[k] = x.x;
        vy[k] = y.x;
    }
    float s0[3], sx[3], sy[3], a0[3], b0[3], ax[3], ay[3];
    UNROLL for (int k = 0; k < 3; k++) {
        int n = k == 2 ? 0 : k + 1;
        vec4 c = GEOMETRY(at + uint(k)), d = GEOMETRY(at + 3u + uint(k));
        vec2 a = vec2(c.z, c.w), b = vec2(d.x, d.y);
        vec2 over = two_product(a.x, x0), down = two_product(b.x, y0);
        over.y = FMA(a.y, x0, over.y);
        down.y = FMA(b.y, y0, down.y);
        vec2 s = add2(vec2(c.x, c.y), add2(over, down));
        if (!(abs(s.x) < 1e15f)) s = vec2(limit(s.x, 1e15f), 0.0f);
        // First parts on one grid, coarse enough that s + i a + j b is exact.
        float most = max(abs(s.x), max(abs(a.x) * float(TILE_W), abs(b.x) * float(TILE_H)));
        float grid = 6.0f * FLOAT(BITS(most) & 0x7f800000u);
        EXACT float sh = (s.x + grid) - grid;
        EXACT float ah = (a.x + grid) - grid;
        EXACT float bh = (b.x + grid) - grid;
        EXACT float sl = (s.x - sh) + s.y;
        EXACT float al = (a.x - ah) + a.y;
        EXACT float bl = (b.x - bh) + b.y;
        con[to + uint(k)] = vec4(sh, sl, ah, al);
        con[to + 3u + uint(k)] = vec4(bh, bl, d.z, d.w);

        float grow = abs(a.x) * right, fall = abs(b.x) * bottom;
        float here = s.x + 0.5f * (a.x * right + b.x * bottom);
        float spread = 0.5f * (grow + fall);
        float slack = 1e-5f * (abs(s.x) + grow + fall) + 1e-3f;
        bool point = (k == 0 ? inverse.x : (k == 1 ? inverse.y : inverse.z)) == 0.0f;
        if (!point && here + spread < -reach - slack) keep = false;
        if (!(here - spread > (COMPACT != 0 ? COMPACT_RADIUS : FULL) + slack)) full = false;
        s0[k] = s.x;
        sx[k] = a.x;
        sy[k] = b.x;
        a0[k] = -(d.z * vx[k] + d.w * vy[k]);
        b0[k] = -(d.z * vx[n] + d.w * vy[n]);
        ax[k] = d.z;
        ay[k] = d.w;
    }
    if (BBOX6 != 0) {
        vec4 b = GEOMETRY(at + 12u);
        b = vec4(b.x - x0, b.y - x0, b.z - y0, b.w - y0);
        con[to + 12u] = b;
        if (b.y < 0.0f || b.x > right || b.w < 0.0f || b.z > bottom) keep = false;
        if (b.x > 0.0f || b.y < right || b.z > 0.0f || b.w < bottom) full = false;
    }
    con[to + 9u] = inverse;
    con[to + 10u] = GEOMETRY(at + 10u);
    con[to + 11u] = vec4(other.x, other.y, 0.0f, 0.0f);
    if (full) return keep ? 1u : 0u;

    // Which edges matter, looked at from the middles of cells of 4 x 4 pixels. `wanted`: an edge's inside
    // may be the nearest; `ends`: a vertex may, for which one of its two edges will do.
    float rx = 1.5f / float(set.width), ry = 1.5f / float(set.height);
    float radius = other.w * sqrt(rx * rx + ry * ry) * 1.001f + 1e-3f;
    uint wanted = 0u, ends = 0u;
    bool seen = false;
    for (int cell = 0; keep && cell < CELLS; cell++) {
        float x = float(cell % COLUMNS) * 4.0f + 1.5f, y = float(cell / COLUMNS) * 4.0f + 1.5f;
        float d[3], la[3], lb[3];
        float least = 1e30f, inner = 1e30f;
        UNROLL for (int k = 0; k < 3; k++) {
            float s = FMA(x, sx[k], FMA(y, sy[k], s0[k]));
            la[k] = FMA(x, ax[k], FMA(y, ay[k], a0[k]));
            lb[k] = FMA(x, ax[k], FMA(y, ay[k], b0[k]));
            float beyond = min(la[k], 0.0f) + max(lb[k], 0.0f);
            d[k] = SQRT(FMA(beyond, beyond, s * s));
            least = min(least, d[k]);
            inner = min(inner, s);
        }
        float slack = radius + 1e-5f * least;
        bool inside = !flat_ && inner >= 0.0f;
        bool felt = least - slack < (inside ? (COMPACT != 0 ? COMPACT_RADIUS : FULL) : reach);
        seen = seen || inside || felt;
        UNROLL for (int k = 0; k < 3; k++) {
            if (felt && d[k] <= least + 2.0f * slack) {
                if (la[k] > -slack && lb[k] < slack) wanted |= 1u << uint(k);
                if (la[k] < slack) ends |= 1u << uint(k);
                if (lb[k] > -slack) ends |= 1u << uint(k == 2 ? 0 : k + 1);
            }
        }
    }
    if (!seen) return 0u;
    UNROLL for (int k = 0; k < 3; k++) {
        uint both = (1u << uint(k)) | (1u << uint(k == 0 ? 2 : k - 1));
        if ((ends & (1u << uint(k))) != 0u && (wanted & both) == 0u) wanted |= 1u << uint(k);
    }
    if (wanted == 1u || wanted == 2u || wanted == 4u) return 5u + (wanted >> 1u);
    if (wanted == 3u || wanted == 6u || wanted == 5u) return 9u + (wanted == 3u ? 0u : (wanted == 6u ? 1u : 2u));
    return 13u;
}

// --- the chunk ----------------------------------------------------------------------------------

// Whether the tile is among those that a triangle may touch, and then where its slot is.
FN bool meets(uint index, uvec2 tile, OUT(uint) slot) {
    uvec4 b = BOUNDS(index);
    uint l = b.x & 0xffffu, r = b.x >> 16, t = b.y & 0xffffu, d = b.y >> 16;
    slot = b.w + (tile.y - t) * (r + 1u - l) + (tile.x - l);
    return tile.x >= l && tile.x <= r && tile.y >= t && tile.y <= d;
}

FN void nothing(uint slot) {
    PARTIAL(slot * 3u) = PARTIAL(slot * 3u + 1u) = PARTIAL(slot * 3u + 2u) = vec4(0.0f, 0.0f, 0.0f, 0.0f);
}

// Append to the list those of BATCH * LANES triangles, from `from` on in steps of `step`, that may touch
// the tile; returns how many the list has then. All lanes call it.
FN uint append(uint lane, uint item, uvec2 tile, int from, int step, uint listed) {
    bool there[BATCH];
    UNROLL for (int i = 0; i < BATCH; i++) {  // all are looked up before the first is waited for
        int t = from + step * (i * LANES + int(lane));
        uint slot;
        there[i] = t >= 0 && t < int(set.triangles) && meets(item * set.triangles + uint(t), tile, slot);
    }
    UNROLL for (int i = 0; i < BATCH; i++) {
        uint place = listed + TEAM_RANK(there[i]);
        if (there[i]) list[place] = uint(from + step * (i * LANES + int(lane)));
        listed += TEAM_COUNT(there[i]);
    }
    return listed;
}

// The constants of `count` listed triangles, up to CHUNK, `first` and on; `number` is what the first is
// among all candidates, counted from the front, and `step` how that goes on. `order` then has those
// that cover something; returns how many.
FN uint prepare(uint lane, uint item, uvec2 tile, float x0, float y0, uint first, uint count, uint number,
                int step) {
    TEAM_SYNC;  // nobody reads the chunk before any more
    bool keep = false;
    if (lane < count) {
        uint t = list[first + lane];
        uint index = item * set.triangles + t;
        uint edges = constants(index, x0, y0, lane * uint(CON));
        keep = edges != 0u;
        entry[lane] = uvec4(t, uint(int(number) + step * int(lane)), (edges - 1u) & 3u, (edges - 1u) >> 2u);
        uint slot;
        if (MODE != FORWARD && !keep && meets(index, tile, slot)) nothing(slot);
    }
    uint place = TEAM_RANK(keep);
    if (keep) order[place] = lane;
    TEAM_SYNC;
    return TEAM_COUNT(keep);
}

// --- its pixels ---------------------------------------------------------------------------------

// Of an entry: what a lane's four pixels share. Edges are counted from the first that matters, `edges`
// of them do; the inside is where all three lines say so. Where a pixel is not large against sigma
// (FINE), sums stay sums up to the pixel; else they are rounded where the lane's pixels begin.
struct Row {
    float base[3], rest[3], ah[3], al[3];  // distance to a line, as a sum; its growth
    float tx[3], along_a[3], along_b[3];   // distance along an edge from its ends
    float vh[3], vl[3];
};

FN uint turn_to(uint k) { return k >= 3u ? k - 3u : k; }

FN void start_row(const int edges, uint at, uint first, float x, float y, OUT(Row) r) {
    float dx[3], dy[3], ty[3];
    UNROLL for (int j = 0; j < 3; j++) {
        uint k = turn_to(first + uint(j));
        vec4 c = con[at + k], d = con[at + 3u + k];
        EXACT float base = FMA(y, d.x, FMA(x, c.z, c.x));
        float rest = FMA(y, d.y, FMA(x, c.w, c.y));
        r.base[j] = FINE != 0 ? base : base + rest;
        r.rest[j] = rest;
        r.ah[j] = FINE != 0 ? c.z : c.z + c.w;
        r.al[j] = c.w;
        r.tx[j] = d.z;
        ty[j] = d.w;
        if (j <= edges) {
            vec4 v = con[at + 6u + k];
            EXACT float xk = (x - v.x) - v.y;
            EXACT float yk = (y - v.z) - v.w;
            dx[j] = xk;
            dy[j] = yk;
            r.vh[j] = v.x;
            r.vl[j] = v.y;
        }
    }
    UNROLL for (int j = 0; j < 3; j++) {
        if (j < edges) {
            int n = j == 2 ? 0 : j + 1;
            r.along_a[j] = FINE != 0 ? ty[j] * dy[j] : FMA(r.tx[j], dx[j], ty[j] * dy[j]);
            r.along_b[j] = FINE != 0 ? ty[j] * dy[n] : FMA(r.tx[j], dx[n], ty[j] * dy[n]);
        }
    }
}

// Of a pixel: signed distances to the lines, distances along the edges from their first ends, how far
// beyond their ends, and the squares of the distances to the edges.
struct Near {
    float s[3], la[3], beyond[3], m[3];
};

FN void measure(const int edges, Row r, float x, float i, OUT(Near) n) {
    float dx[3];
    UNROLL for (int j = 0; j < 3; j++) {
        if (j <= edges) {
            EXACT float d = ((x + i) - r.vh[j]) - r.vl[j];
            dx[j] = FINE != 0 ? d : i;
        }
        EXACT float fine = FMA(i, r.ah[j], r.base[j]) + FMA(i, r.al[j], r.rest[j]);
        n.s[j] = FINE != 0 ? fine : FMA(i, r.ah[j], r.base[j]);
    }
    UNROLL for (int j = 0; j < 3; j++) {
        if (j < edges) {
            n.la[j] = FMA(r.tx[j], dx[j], r.along_a[j]);
            float lb = FMA(r.tx[j], dx[j == 2 ? 0 : j + 1], r.along_b[j]);
            n.beyond[j] = min(n.la[j], 0.0f) + max(lb, 0.0f);
            n.m[j] = FMA(n.beyond[j], n.beyond[j], n.s[j] * n.s[j]);
        }
    }
}

FN float covers(float m, bool inside) {
    float d = SQRT(m);
    float outward = inside ? -d : d;
    if (COMPACT != 0) {
        float u = smoothstep_u(-outward);
        return u * u * (3.0f - 2.0f * u);
    }
    return RECIPROCAL(1.0f + EXP2(outward));
}

FN bool boxed(uint at, float x, float y) {
    if (BBOX6 == 0) return true;
    vec4 b = con[at + 12u];
    return x >= b.x && x <= b.y && y >= b.z && y <= b.w;
}

// Weights of a lane's four pixels.
FN void weigh(const int edges, uint at, uint first, float x, float y, float alpha, INOUT_ARRAY(float, w, 4)) {
    if (edges == 0) {
        UNROLL for (int p = 0; p < 4; p++) w[p] = alpha;
        return;
    }
    float inside_from = con[at + 9u].w;
    Row row;
    start_row(edges, at, first, x, y, row);
    UNROLL for (int p = 0; p < 4; p++) {
        Near n;
        measure(edges, row, x, float(p), n);
        bool inside = min(min(n.s[0], n.s[1]), n.s[2]) >= inside_from;
        float m = n.m[0];
        if (edges > 1) m = min(m, n.m[1]);
        if (edges > 2) m = min(m, n.m[2]);
        float v = alpha * covers(m, inside);
        w[p] = v > CULL_WEIGHT && boxed(at, x + float(p), y) ? v : 0.0f;
    }
}

// Put a group of triangles under those before. Of faint ones 1 - sum w T is the better transmittance.
FN void close_group(INOUT_ARRAY(float, light, 4), INOUT_ARRAY(float, red, 4), INOUT_ARRAY(float, green, 4),
                    INOUT_ARRAY(float, blue, 4), IN_ARRAY(float, t, 4), IN_ARRAY(float, cover, 4),
                    IN_ARRAY(float, r, 4), IN_ARRAY(float, g, 4), IN_ARRAY(float, b, 4)) {
    UNROLL for (int p = 0; p < 4; p++) {
        red[p] = FMA(light[p], r[p], red[p]);
        green[p] = FMA(light[p], g[p], green[p]);
        blue[p] = FMA(light[p], b[p], blue[p]);
        light[p] *= t[p] > 0.0f && cover[p] < 0.5f ? 1.0f - cover[p] : t[p];
    }
}

// What pass 2 knows of a lane's four pixels.
struct Back {
    float light[4], below[4], gr[4], gg[4], gb[4], ga[4], closed_light[4];
    int closed[4];
    bool any_closed;
};

// Move four pixels in front of an entry; `sums` of what its gradients need: dL/dC w T; dL/dw w; then of
// the pull on the boundary, all of it, the first vertex's share, the second's; and sigma's.
FN void pull(const int edges, uint at, uint first, int serial, float x, float y, INOUT(Back) q,
             INOUT_ARRAY(float, sums, 12)) {
    vec4 look = con[at + 10u], inverse = con[at + 9u], other = con[at + 11u];
    UNROLL for (int j = 0; j < 12; j++) sums[j] = 0.0f;
    Row row;
    float ex[3], ey[3], over[3];
    if (edges > 0) {
        start_row(edges, at, first, x, y, row);
        UNROLL for (int j = 0; j < 3; j++) {
            if (j < edges) {
                uint k = turn_to(first + uint(j));
                ex[j] = row.tx[j] * float(set.width);
                ey[j] = con[at + 3u + k].w * float(set.height);
                over[j] = k == 0u ? inverse.x : (k == 1u ? inverse.y : inverse.z);
            }
        }
    }
    float outer_x = 0.0f, outer_y = 0.0f;  // the share of the vertex after the two
    UNROLL for (int p = 0; p < 4; p++) {
        float w = look.x, slope = 0.0f, signed_d = 0.0f, ux = 0.0f, uy = 0.0f, near_ = 0.0f, far_ = 0.0f;
        if (edges > 0) {
            Near n;
            measure(edges, row, x, float(p), n);
            bool inside = min(min(n.s[0], n.s[1]), n.s[2]) >= inverse.w;
            float m = n.m[0], s = n.s[0], beyond = n.beyond[0], la = n.la[0], scale = over[0];
            float tx = ex[0], ty = ey[0];
            bool second = false, third = false;
            if (edges > 1) {
                second = n.m[1] < m;
                m = second ? n.m[1] : m;
            }
            if (edges > 2) {
                third = n.m[2] < m;
                m = third ? n.m[2] : m;
            }
            if (edges > 1) {
                s = second ? n.s[1] : s;
                beyond = second ? n.beyond[1] : beyond;
                la = second ? n.la[1] : la;
                scale = second ? over[1] : scale;
                tx = second ? ex[1] : tx;
                ty = second ? ey[1] : ty;
            }
            if (edges > 2) {
                s = third ? n.s[2] : s;
                beyond = third ? n.beyond[2] : beyond;
                la = third ? n.la[2] : la;
                scale = third ? over[2] : scale;
                tx = third ? ex[2] : tx;
                ty = third ? ey[2] : ty;
            }
            float part = SATURATE(la * scale);
            near_ = 1.0f - part;
            if (edges > 1) {
                near_ = second ? 0.0f : near_;
                far_ = second ? part : 0.0f;
            }
            if (edges > 2) {
                near_ = third ? part : near_;
                far_ = third ? 1.0f - part : far_;
            }
            float inv = RSQRT(max(m, 1e-30f));
            float d = m * inv;
            float outward = inside ? -d : d;
            float cover;
            if (COMPACT != 0) {
                float u = smoothstep_u(-outward);
                cover = u * u * (3.0f - 2.0f * u);
                slope = u * (1.0f - u);
            } else {  // where z overflows nothing is seen
                float z = EXP2(outward);
                cover = RECIPROCAL(1.0f + z);
                slope = z * cover * cover;
            }
            w = look.x * cover;
            bool seen = w > CULL_WEIGHT && boxed(at, x + float(p), y);
            w = seen ? w : 0.0f;
            slope = seen && m > other.y ? slope : 0.0f;
            signed_d = -slope * outward;
            slope *= inside ? inv : -inv;
            float turned = s * other.x;
            ux = FMA(beyond, tx, -turned * ty);
            uy = FMA(beyond, ty, turned * tx);
        }
        float t = FMA(q.light[p], w * RECIPROCAL(1.0f - w), q.light[p]);
        if (q.any_closed && !(q.light[p] > 0.0f)) t = serial == q.closed[p] ? q.closed_light[p] : 0.0f;
        q.light[p] = t;
        float lead = FMA(q.gr[p], look.y, FMA(q.gg[p], look.z, q.gb[p] * look.w)) - q.below[p];
        if (CHANNELS == 4) lead += q.ga[p];
        q.below[p] = FMA(w, lead, q.below[p]);
        float dw = t * lead, wt = w * t;
        sums[0] = FMA(q.gr[p], wt, sums[0]);
        sums[1] = FMA(q.gg[p], wt, sums[1]);
        sums[2] = FMA(q.gb[p], wt, sums[2]);
        sums[3] = FMA(dw, w, sums[3]);
        if (edges > 0) {
            float force = dw * slope;
            float fx = force * ux, fy = force * uy;
            sums[4] += fx;
            sums[5] += fy;
            sums[6] = FMA(fx, near_, sums[6]);
            sums[7] = FMA(fy, near_, sums[7]);
            if (edges > 1) {
                outer_x = FMA(fx, far_, outer_x);
                outer_y = FMA(fy, far_, outer_y);
            }
            sums[10] = FMA(dw, signed_d, sums[10]);
        }
    }
    if (edges > 0) {  // of the vertices as they are numbered
        float nx = sums[6], ny = sums[7];
        float mx = sums[4] - nx - outer_x, my = sums[5] - ny - outer_y;
        sums[6] = first == 0u ? nx : (first == 1u ? outer_x : mx);
        sums[7] = first == 0u ? ny : (first == 1u ? outer_y : my);
        sums[8] = first == 0u ? mx : (first == 1u ? nx : outer_x);
        sums[9] = first == 0u ? my : (first == 1u ? ny : outer_y);
    }
}

// --- a tile -------------------------------------------------------------------------------------

FN void draw_main(uint lane, uvec2 tile, uint item) {
    const int triangles = int(set.triangles);
    uint tx = (set.tile_x + tile.x) * uint(TILE_W), ty = (set.tile_y + tile.y) * uint(TILE_H);
    float x0 = float(tx), y0 = float(ty);
    // Where this lane's pixels are in the tile, and in the image.
    float x = float(4u * (lane % uint(COLUMNS))), y = float(lane / uint(COLUMNS));
    uint px = tx + 4u * (lane % uint(COLUMNS)), py = ty + lane / uint(COLUMNS);

    // Front to back.
    float light[4], red[4], green[4], blue[4], closed_light[4];
    int closed[4];
    bool any_closed = false;
    UNROLL for (int p = 0; p < 4; p++) {
        light[p] = 1.0f;
        red[p] = green[p] = blue[p] = closed_light[p] = 0.0f;
        closed[p] = 0x7fffffff;
    }
    uint spacing = uint(CHUNK), kept = 0u;
    uint number = 0u;         // candidates so far
    uint found = 0u;          // of the last chunk, those that cover something
    uint listed = 0u, taken = 0u;
    uint blocks = 0u;         // how often the list was filled
    int next = triangles - 1; // the next triangle to be looked at
    int last = triangles;     // the last one that was drawn
    // Of the group that is being drawn: light through it, what it covers, its colour.
    float t[4], cover[4], r[4], g[4], b[4];
    float enough = 0.0f;
    int grouped = GROUP;      // candidates in it; a full one is closed, and another begun
    UNROLL for (int p = 0; p < 4; p++) {
        t[p] = 1.0f;
        cover[p] = r[p] = g[p] = b[p] = 0.0f;
    }
    while (true) {
        if (taken == listed) {
            if (next < 0) break;
            TEAM_SYNC;
            listed = taken = 0u;
            while (next >= 0 && listed + uint(BATCH * LANES) <= uint(LIST)) {
                listed = append(lane, item, tile, next, -1, listed);
                next -= BATCH * LANES;
            }
            TEAM_SYNC;
            blocks += 1u;
            if (listed == 0u) continue;
        }
        if (grouped >= GROUP) {
            if (number > 0u) {
                close_group(light, red, green, blue, t, cover, r, g, b);
                if (!TEAM_ANY(max(max(light[0], light[1]), max(light[2], light[3])) > 0.0f)) break;
            }
            grouped = 0;
            enough = 0.0f;
            UNROLL for (int p = 0; p < 4; p++) {
                t[p] = light[p] > 0.0f ? 1.0f : 0.0f;
                cover[p] = r[p] = g[p] = b[p] = 0.0f;
                if (light[p] > 0.0f) enough = max(enough, CLOSED / light[p]);
            }
            if (MODE != FORWARD && number >= kept * spacing) {
                if (kept == uint(KEPT)) {  // every other one stays
                    UNROLL for (int j = 1; j < KEPT / 2; j++) {
                        kept_light[uint(j * LANES) + lane] = kept_light[uint(2 * j * LANES) + lane];
                        kept_at[j] = kept_at[2 * j];
                        TEAM_SYNC;
                    }
                    kept = uint(KEPT / 2);
                    spacing *= 2u;
                }
                if (number >= kept * spacing) {
                    kept_light[kept * uint(LANES) + lane] = vec4(light[0], light[1], light[2], light[3]);
                    kept_at[kept] = number;  // the same from every lane
                    kept += 1u;
                }
            }
        }
        uint count = min(listed - taken, uint(CHUNK));
        found = prepare(lane, item, tile, x0, y0, taken, count, number, 1);
        for (uint i = 0u; i < found; i++) {
            uint e = order[i], at = e * uint(CON);
            vec4 look = con[at + 10u];
            uvec4 one = entry[e];
            float w[4];
            if (one.w == 1u) {
                weigh(1, at, one.z, x, y, look.x, w);
            } else if (one.w == 2u) {
                weigh(2, at, one.z, x, y, look.x, w);
            } else if (one.w == 3u) {
                weigh(3, at, 0u, x, y, look.x, w);
            } else {
                weigh(0, at, 0u, x, y, look.x, w);
            }
            float least = 1.0f;
            float under[4];
            UNROLL for (int p = 0; p < 4; p++) {
                float wt = w[p] * t[p];
                r[p] = FMA(look.y, wt, r[p]);
                g[p] = FMA(look.z, wt, g[p]);
                b[p] = FMA(look.w, wt, b[p]);
                cover[p] += wt;
                under[p] = REST(t[p], w[p]);
                least = min(least, under[p]);
            }
            if (least < enough) {
                UNROLL for (int p = 0; p < 4; p++) {
                    if (t[p] > 0.0f && under[p] * light[p] < CLOSED) {
                        closed[p] = int(one.y);
                        closed_light[p] = t[p] * light[p];
                        under[p] = 0.0f;
                        any_closed = true;
                    }
                }
            }
            UNROLL for (int p = 0; p < 4; p++) t[p] = under[p];
        }
        number += count;
        taken += count;
        grouped += CHUNK;
        last = int(list[taken - 1u]);
    }
    close_group(light, red, green, blue, t, cover, r, g, b);

    float base_r = set.red, base_g = set.green, base_b = set.blue;
    if ((set.flags & ALL_BACKGROUND) == 0u) {
        base_r = BACKGROUND(item * 3u);
        base_g = BACKGROUND(item * 3u + 1u);
        base_b = BACKGROUND(item * 3u + 2u);
    }
    uint pixel = (item * set.buffer_rows + (py - set.first_row)) * set.width + px;
    if (MODE == FORWARD) {
        if (py < set.height) {
            UNROLL for (int p = 0; p < 4; p++) {
                if (px + uint(p) < set.width) {
                    uint at = (pixel + uint(p)) * uint(CHANNELS);
                    IMAGE(at) = FMA(light[p], base_r, red[p]);
                    IMAGE(at + 1u) = FMA(light[p], base_g, green[p]);
                    IMAGE(at + 2u) = FMA(light[p], base_b, blue[p]);
                    if (CHANNELS == 4) IMAGE(at + 3u) = 1.0f - light[p];
                }
            }
        }
        return;
    }

    // dL/dC of the pixels, and what the background gets.
    Back q;
    float sum_r = 0.0f, sum_g = 0.0f, sum_b = 0.0f, loss = 0.0f;
    UNROLL for (int p = 0; p < 4; p++) {
        float gr = 0.0f, gg = 0.0f, gb = 0.0f, ga = 0.0f;
        if (py < set.height && px + uint(p) < set.width) {
            uint at = (pixel + uint(p)) * uint(CHANNELS);
            gr = GIVEN(at);
            gg = GIVEN(at + 1u);
            gb = GIVEN(at + 2u);
            if (CHANNELS == 4) ga = GIVEN(at + 3u);
            if (MODE == FUSED) {
                float dr = FMA(light[p], base_r, red[p]) - gr;
                float dg = FMA(light[p], base_g, green[p]) - gg;
                float db = FMA(light[p], base_b, blue[p]) - gb;
                loss += dr * dr + dg * dg + db * db;
                gr = 2.0f * set.scale * dr;
                gg = 2.0f * set.scale * dg;
                gb = 2.0f * set.scale * db;
            }
        }
        q.gr[p] = gr;
        q.gg[p] = gg;
        q.gb[p] = gb;
        q.ga[p] = ga;
        q.light[p] = light[p];
        q.below[p] = gr * base_r + gg * base_g + gb * base_b;
        q.closed[p] = closed[p];
        q.closed_light[p] = closed_light[p];
        sum_r = FMA(gr, light[p], sum_r);
        sum_g = FMA(gg, light[p], sum_g);
        sum_b = FMA(gb, light[p], sum_b);
    }
    q.any_closed = any_closed;
    sum_r = TEAM_ADD(sum_r);
    sum_g = TEAM_ADD(sum_g);
    sum_b = TEAM_ADD(sum_b);
    loss = TEAM_ADD(loss);
    if (lane == 0u) {
        uint index = (item * set.rows + tile.y) * set.columns + tile.x;
        TILE(index) = vec4(sum_r, sum_g, sum_b, loss);
    }

    // What was not drawn has no gradient.
    for (uint i = taken + lane; i < listed; i += uint(LANES)) {
        uint slot;
        if (meets(item * set.triangles + list[i], tile, slot)) nothing(slot);
    }
    for (int t = next - int(lane); t >= 0; t -= LANES) {
        uint slot;
        if (meets(item * set.triangles + uint(t), tile, slot)) nothing(slot);
    }

    // Back to front: the list backwards, or, where it was filled more than once, made anew.
    bool again = blocks > 1u;
    uint position = 0u, there = again ? 0u : taken;
    int up = last;
    const uint all = number;
    int right_at = kept > 0u ? int(kept_at[kept - 1u]) : 0;
    while (number > 0u) {
        if (again && position == there) {
            TEAM_SYNC;
            position = there = 0u;
            while (up < triangles && there + uint(BATCH * LANES) <= uint(LIST)) {
                there = append(lane, item, tile, up, 1, there);
                up += BATCH * LANES;
            }
            TEAM_SYNC;
            if (there == 0u) continue;
        }
        uint count = min(there - position, uint(CHUNK));
        if (again) {
            found = prepare(lane, item, tile, x0, y0, position, count, number - 1u, -1);
        } else {  // the chunks that there were, backwards; the last is still there
            if (there % uint(CHUNK) != 0u) count = there % uint(CHUNK);
            there -= count;
            if (number < all) found = prepare(lane, item, tile, x0, y0, there, count, there, 1);
        }
        for (uint i = 0u; i < found; i++) {
            uint e = order[again ? i : found - 1u - i], at = e * uint(CON);
            uvec4 one = entry[e];
            int serial = int(one.y);
            while (right_at > serial) {
                kept -= 1u;
                vec4 l = kept_light[kept * uint(LANES) + lane];
                q.light[0] = l.x;
                q.light[1] = l.y;
                q.light[2] = l.z;
                q.light[3] = l.w;
                right_at = kept > 0u ? int(kept_at[kept - 1u]) : 0;
            }
            float sums[12];
            if (one.w == 1u) {
                pull(1, at, one.z, serial, x, y, q, sums);
            } else if (one.w == 2u) {
                pull(2, at, one.z, serial, x, y, q, sums);
            } else if (one.w == 3u) {
                pull(3, at, 0u, serial, x, y, q, sums);
            } else {
                pull(0, at, 0u, serial, x, y, q, sums);
            }
            uint slot;
            meets(item * set.triangles + one.x, tile, slot);
            STORE_SUMS(lane, slot, sums);
        }
        if (again) position += count;
        number -= count;
    }
}

// --- a triangle's sums --------------------------------------------------------------------------

// A sum and what rounding took from it.
FN void add_to(INOUT(float) sum, INOUT(float) lost, float v) {
    vec2 s = two_sum(sum, v);
    sum = s.x;
    lost += s.y;
}

FN void reduce_main(uint lane, uint group) {
    uint n = set.items * set.triangles;
    bool add = (set.flags & ADD) != 0u;
    if (group >= n + set.items) return;
    float sum[12], lost[12];
    UNROLL for (int j = 0; j < 12; j++) sum[j] = lost[j] = 0.0f;
    if (group >= n) {
        uint item = group - n, tiles = set.columns * set.rows;
        for (uint i = lane; i < tiles; i += uint(LANES)) {
            vec4 v = TILE(item * tiles + i);
            add_to(sum[0], lost[0], v.x);
            add_to(sum[1], lost[1], v.y);
            add_to(sum[2], lost[2], v.z);
            add_to(sum[3], lost[3], v.w);
        }
        UNROLL for (int j = 0; j < 4; j++) sum[j] = TEAM_ADD(sum[j] + lost[j]);
        if (lane == 0u) {
            UNROLL for (int j = 0; j < 3; j++) {
                uint at = item * 3u + uint(j);
                GRAD_BACKGROUND(at) = (add ? GRAD_BACKGROUND(at) : 0.0f) + sum[j];
            }
            LOSS(item) = (add ? LOSS(item) : 0.0f) + sum[3] * set.scale;
        }
        return;
    }
    uvec4 bounds = BOUNDS(group);
    for (uint i = lane; i < bounds.z; i += uint(LANES)) {
        uint at = (bounds.w + i) * 3u;
        vec4 a = PARTIAL(at), b = PARTIAL(at + 1u), c = PARTIAL(at + 2u);
        add_to(sum[0], lost[0], a.x);
        add_to(sum[1], lost[1], a.y);
        add_to(sum[2], lost[2], a.z);
        add_to(sum[3], lost[3], a.w);
        add_to(sum[4], lost[4], b.x);
        add_to(sum[5], lost[5], b.y);
        add_to(sum[6], lost[6], b.z);
        add_to(sum[7], lost[7], b.w);
        add_to(sum[8], lost[8], c.x);
        add_to(sum[9], lost[9], c.y);
        add_to(sum[10], lost[10], c.z);
    }
    UNROLL for (int j = 0; j < 11; j++) sum[j] = TEAM_ADD(sum[j] + lost[j]);
    if (lane != 0u) return;
    float grad[10], grad_sigma = 0.0f;
    UNROLL for (int j = 0; j < 10; j++) grad[j] = 0.0f;
    if (bounds.z > 0u) {
        float sigma = sigma_of(group), given = PARAM(group * 10u + 9u), alpha = opacity(group);
        float scale = scale_of(sigma);
        // dsd/dV = -weight times direction, which came times the scale; a pixel's weights sum to 1.
        float f = -alpha / sigma;
        float v = f / scale;
        grad[0] = v * sum[6];
        grad[1] = v * sum[7];
        grad[2] = v * sum[8];
        grad[3] = v * sum[9];
        grad[4] = v * (sum[4] - sum[6] - sum[8]);
        grad[5] = v * (sum[5] - sum[7] - sum[9]);
        grad[6] = sum[0];
        grad[7] = sum[1];
        grad[8] = sum[2];
        grad[9] = given < 1.0f ? sum[3] / alpha : 0.0f;  // a clamped opacity gets no gradient
        grad_sigma = f * sum[10] * (COMPACT != 0 ? 1.0f : 0.693147180559945f);
    }
    UNROLL for (int j = 0; j < 10; j++) {
        uint at = group * 10u + uint(j);
        GRAD(at) = (add ? GRAD(at) : 0.0f) + grad[j];
    }
    GRAD_SIGMA(group) = (add ? GRAD_SIGMA(group) : 0.0f) + grad_sigma;
}
