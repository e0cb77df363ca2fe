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
// 11   1, or -1 where the last two vertices changed places, so that the inside is left of all edges;
//      least distance² that has a direction; reach; scale
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
    }
    vec2 ux = add2(vx[1], negative(vx[0])), uy = add2(vy[1], negative(vy[0]));
    vec2 wx = add2(vx[2], negative(vx[0])), wy = add2(vy[2], negative(vy[0]));
    vec2 area = add2(product2(ux, wy), negative(product2(uy, wx)));
    bool flat_ = area.x == 0.0f, changed = area.x < 0.0f;
    if (changed) {
        vec2 x = vx[1], y = vy[1];
        vx[1] = vx[2];
        vy[1] = vy[2];
        vx[2] = x;
        vy[2] = y;
    }
    UNROLL for (int k = 0; k < 3; k++) {
        int n = k == 2 ? 0 : k + 1;
        ex[k] = add2(vx[n], negative(vx[k]));
        ey[k] = add2(vy[n], negative(vy[k]));
        GEOMETRY(at + 6u + uint(k)) = vec4(vx[k].x, vx[k].y, vy[k].x, vy[k].y);
    }
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
        vec2 f = vec2(unit / w / h, 0.0f);
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
    GEOMETRY(at + 11u) = vec4(changed ? -1.0f : 1.0f, max(least * least, 1e-36f), reach_of(alpha), scale);
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
    if (thread == 0u) TOTALS(1) = 0u;
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
    for (uint base = 0u; base < n; base += uint(8 * LANES)) {
        uint count[8];
        UNROLL for (int i = 0; i < 8; i++) {  // all on their way before the first is waited for
            uint at = base + uint(i * LANES) + lane;
            count[i] = at < n ? BOUNDS(at).z : 0u;
        }
        UNROLL for (int i = 0; i < 8; i++) {
            uint at = base + uint(i * LANES) + lane;
            uint before = TEAM_BEFORE(count[i]);
            // Past 2^32 the places are wrong, and the total says that they do not fit.
            if (at < n) BOUNDS_W(at) = low + before;
            uint sum = TEAM_ADD_UINT(count[i]);
            high += low + sum < low ? 1u : 0u;
            low += sum;
        }
    }
    if (lane == 0u) { TOTALS(0) = low; TOTALS(1) = high; }
}

// --- a triangle in a tile -----------------------------------------------------------------------

// Constants of an entry of the chunk, CON vec4: as in GEO, but from the tile's first pixel on, the first
// parts of S, a and b on one grid; and in 11, instead of the reach, 1 where it covers all.

FN vec2 from_origin(float high, float low, float origin) {
    vec2 v = two_sum(high, -origin);
    return two_sum(v.x, v.y + low);
}

// Work out an entry's constants; false where it covers nothing of the tile.
FN bool constants(uint index, float x0, float y0, uint to) {
    uint at = index * uint(GEO);
    float right = float(TILE_W - 1), bottom = float(TILE_H - 1);
    float mx = 0.5f * right, my = 0.5f * bottom;
    vec4 inverse = GEOMETRY(at + 9u), other = GEOMETRY(at + 11u);
    float reach = other.z;
    bool flat_ = inverse.w != 0.0f;
    bool keep = true, full = !flat_;
    float middle_x[3], middle_y[3], middle_least = 1e30f, middle_nearest = 1e30f;
    UNROLL for (int k = 0; k < 3; k++) {
        vec4 v = GEOMETRY(at + 6u + uint(k));
        vec2 x = from_origin(v.x, v.y, x0), y = from_origin(v.z, v.w, y0);
        con[to + 6u + uint(k)] = vec4(x.x, x.y, y.x, y.y);
        middle_x[k] = mx - x.x;
        middle_y[k] = my - y.x;
    }
    UNROLL for (int k = 0; k < 3; k++) {
        int n = k == 2 ? 0 : k + 1;
        vec4 c = GEOMETRY(at + uint(k)), d = GEOMETRY(at + 3u + uint(k));
        vec2 a = vec2(c.z, c.w), b = vec2(d.x, d.y);
        vec2 ax = two_product(a.x, x0), by = two_product(b.x, y0);
        ax.y = FMA(a.y, x0, ax.y);
        by.y = FMA(b.y, y0, by.y);
        vec2 s = add2(vec2(c.x, c.y), add2(ax, by));
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
        // The tile's middle: how far it is from the triangle.
        float la = d.z * middle_x[k] + d.w * middle_y[k];
        float lb = d.z * middle_x[n] + d.w * middle_y[n];
        float beyond = min(la, 0.0f) + max(lb, 0.0f);
        middle_least = min(middle_least, here);
        middle_nearest = min(middle_nearest, beyond * beyond + here * here);
    }
    if (flat_ || middle_least < 0.0f) {
        float rx = mx / float(set.width), ry = my / float(set.height);
        float away = sqrt(middle_nearest), radius = other.w * sqrt(rx * rx + ry * ry);
        if (away - radius > reach + 1e-4f * (away + radius) + 1e-3f) keep = false;
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
    con[to + 11u] = vec4(other.x, other.y, full ? 1.0f : 0.0f, other.w);
    return keep;
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

// The constants of `count` listed triangles, up to CHUNK, `first` and on. Returns which of them cover
// something, a bit each.
FN uint prepare(uint lane, uint item, uvec2 tile, float x0, float y0, uint first, uint count) {
    TEAM_SYNC;  // nobody reads the chunk before any more
    bool keep = false;
    if (lane < count) {
        uint index = item * set.triangles + list[first + lane];
        keep = constants(index, x0, y0, lane * uint(CON));
        uint slot;
        meets(index, tile, slot);
        slots[lane] = slot;
        if (MODE != FORWARD && !keep) nothing(slot);
    }
    TEAM_SYNC;
    return TEAM_MASK(keep);
}

// --- its pixels ---------------------------------------------------------------------------------

// Of an entry: what a lane's four pixels share. Where a pixel is not large against sigma (FINE), sums
// stay sums up to the pixel; else they are rounded where the lane's pixels begin.
struct Row {
    float base[3], rest[3], ah[3], al[3];  // distance to a line, as a sum; its growth
    float tx[3], along_a[3], along_b[3];   // distance along an edge from its ends
    float vh[3], vl[3];
};

FN void start_row(uint at, float x, float y, OUT(Row) r) {
    float dx[3], dy[3], ty[3];
    UNROLL for (int k = 0; k < 3; k++) {
        vec4 c = con[at + uint(k)], d = con[at + uint(3 + k)], v = con[at + uint(6 + k)];
        EXACT float base = FMA(y, d.x, FMA(x, c.z, c.x));
        float rest = FMA(y, d.y, FMA(x, c.w, c.y));
        EXACT float xk = (x - v.x) - v.y;
        EXACT float yk = (y - v.z) - v.w;
        dx[k] = xk;
        dy[k] = yk;
        r.base[k] = FINE != 0 ? base : base + rest;
        r.rest[k] = rest;
        r.ah[k] = FINE != 0 ? c.z : c.z + c.w;
        r.al[k] = c.w;
        r.tx[k] = d.z;
        ty[k] = d.w;
        r.vh[k] = v.x;
        r.vl[k] = v.y;
    }
    UNROLL for (int k = 0; k < 3; k++) {
        int n = k == 2 ? 0 : k + 1;
        r.along_a[k] = FINE != 0 ? ty[k] * dy[k] : FMA(r.tx[k], dx[k], ty[k] * dy[k]);
        r.along_b[k] = FINE != 0 ? ty[k] * dy[n] : FMA(r.tx[k], dx[n], ty[k] * dy[n]);
    }
}

// Of a pixel: signed distances to the lines, distances along the edges from their first ends, how far
// beyond their ends, and the squares of the distances to the edges.
struct Near {
    float s[3], la[3], beyond[3], m[3];
};

FN void measure(Row r, float x, float i, OUT(Near) n) {
    float dx[3];
    UNROLL for (int k = 0; k < 3; k++) {
        EXACT float d = ((x + i) - r.vh[k]) - r.vl[k];
        dx[k] = FINE != 0 ? d : i;
    }
    UNROLL for (int k = 0; k < 3; k++) {
        EXACT float fine = FMA(i, r.ah[k], r.base[k]) + FMA(i, r.al[k], r.rest[k]);
        float s = FINE != 0 ? fine : FMA(i, r.ah[k], r.base[k]);
        float la = FMA(r.tx[k], dx[k], r.along_a[k]);
        float lb = FMA(r.tx[k], dx[k == 2 ? 0 : k + 1], r.along_b[k]);
        float beyond = min(la, 0.0f) + max(lb, 0.0f);
        n.s[k] = s;
        n.la[k] = la;
        n.beyond[k] = beyond;
        n.m[k] = FMA(beyond, beyond, s * s);
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
FN void weigh(uint at, float x, float y, float alpha, INOUT_ARRAY(float, w, 4)) {
    float inside_from = con[at + 9u].w;
    Row row;
    start_row(at, x, y, row);
    UNROLL for (int p = 0; p < 4; p++) {
        Near n;
        measure(row, x, float(p), n);
        bool inside = min(min(n.s[0], n.s[1]), n.s[2]) >= inside_from;
        float v = alpha * covers(min(min(n.m[0], n.m[1]), n.m[2]), inside);
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

// What pass 2 knows of a lane's four pixels. `reopened` is the light above the triangle at hand where it
// is the one that closed the pixel, else 0.
struct Back {
    float light[4], below[4], gr[4], gg[4], gb[4], ga[4], reopened[4];
};

// Move a pixel in front of a triangle, and add to what its colour and opacity get. Returns dL/dw.
FN float pass_colour(INOUT(Back) q, int p, float w, vec4 look, INOUT_ARRAY(float, sums, 12)) {
    // The light above it from that below. Where a pixel is closed both are 0.
    float t = FMA(q.light[p], w * RECIPROCAL(max(1.0f - w, 3e-8f)), q.light[p] + q.reopened[p]);
    q.light[p] = t;
    float lead = FMA(q.gr[p], look.y, FMA(q.gg[p], look.z, q.gb[p] * look.w)) - q.below[p];
    if (CHANNELS == 4) lead += q.ga[p];
    q.below[p] = FMA(w, lead, q.below[p]);
    float dw = t * lead, wt = w * t;
    sums[0] = FMA(q.gr[p], wt, sums[0]);
    sums[1] = FMA(q.gg[p], wt, sums[1]);
    sums[2] = FMA(q.gb[p], wt, sums[2]);
    sums[3] = FMA(dw, w, sums[3]);
    return dw;
}

// Of a triangle that covers all of the tile: its boundary feels nothing.
FN void pull_all(uint at, INOUT(Back) q, INOUT_ARRAY(float, sums, 12)) {
    vec4 look = con[at + 10u];
    UNROLL for (int p = 0; p < 4; p++) {
        pass_colour(q, p, look.x, look, sums);
    }
}

// Four pixels of an entry. `sums`: dL/dC w T; dL/dw w; of the pull on the boundary all of it, the first
// vertex's share, the second's; sigma's.
FN void pull(uint at, float x, float y, INOUT(Back) q, INOUT_ARRAY(float, sums, 12)) {
    vec4 look = con[at + 10u], inverse = con[at + 9u];
    float least = con[at + 11u].y;
    Row row;
    start_row(at, x, y, row);
    float ex[3], ey[3];
    UNROLL for (int k = 0; k < 3; k++) {
        ex[k] = row.tx[k] * float(set.width);
        ey[k] = con[at + uint(3 + k)].w * float(set.height);
    }
    UNROLL for (int p = 0; p < 4; p++) {
        Near n;
        measure(row, x, float(p), n);
        bool inside = min(min(n.s[0], n.s[1]), n.s[2]) >= inverse.w;
        bool second = n.m[1] < n.m[0];
        float m = second ? n.m[1] : n.m[0];
        bool third = n.m[2] < m;
        m = third ? n.m[2] : m;
        float s = third ? n.s[2] : (second ? n.s[1] : n.s[0]);
        float beyond = third ? n.beyond[2] : (second ? n.beyond[1] : n.beyond[0]);
        float la = third ? n.la[2] : (second ? n.la[1] : n.la[0]);
        float scale = third ? inverse.z : (second ? inverse.y : inverse.x);
        float tx = third ? ex[2] : (second ? ex[1] : ex[0]);
        float ty = third ? ey[2] : (second ? ey[1] : ey[0]);
        float part = SATURATE(la * scale);
        float b0 = third ? part : (second ? 0.0f : 1.0f - part);
        float b1 = third ? 0.0f : (second ? 1.0f - part : part);
        float inv = RSQRT(max(m, least));  // on the boundary itself there is no direction
        float outer = inside ? -inv : inv;
        float outward = m * outer;
        float cover, slope;
        if (COMPACT != 0) {
            float u = smoothstep_u(-outward);
            cover = u * u * (3.0f - 2.0f * u);
            slope = u * (1.0f - u);
        } else {  // where z overflows nothing is seen
            float z = EXP2(outward);
            cover = RECIPROCAL(1.0f + z);
            slope = z * cover * cover;
        }
        float w = look.x * cover;
        bool seen = w > CULL_WEIGHT && boxed(at, x + float(p), y);
        w = seen ? w : 0.0f;
        slope = seen ? slope : 0.0f;

        float force = pass_colour(q, p, w, look, sums) * slope;
        sums[10] = FMA(force, outward, sums[10]);
        force *= outer;
        float along = force * beyond, across = force * s;
        float fx = along * tx - across * ty, fy = FMA(along, ty, across * tx);
        sums[4] += fx;
        sums[5] += fy;
        sums[6] = FMA(fx, b0, sums[6]);
        sums[7] = FMA(fy, b0, sums[7]);
        sums[8] = FMA(fx, b1, sums[8]);
        sums[9] = FMA(fy, b1, sums[9]);
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
        found = prepare(lane, item, tile, x0, y0, taken, count);
        for (uint rest = found; rest != 0u; rest &= rest - 1u) {
            uint e = uint(LOWEST(rest)), at = e * uint(CON);
            vec4 look = con[at + 10u];
            float w[4];
            if (con[at + 11u].z != 0.0f) {
                UNROLL for (int p = 0; p < 4; p++) w[p] = look.x;
            } else {
                weigh(at, x, y, look.x, w);
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
                        closed[p] = int(number + e);
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
        q.reopened[p] = 0.0f;
        sum_r = FMA(gr, light[p], sum_r);
        sum_g = FMA(gg, light[p], sum_g);
        sum_b = FMA(gb, light[p], sum_b);
    }
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
        if (!again) {  // the chunks that there were, backwards; the last is still there
            if (there % uint(CHUNK) != 0u) count = there % uint(CHUNK);
            there -= count;
        }
        if (again || number < all) found = prepare(lane, item, tile, x0, y0, again ? position : there, count);
        for (uint rest = found; rest != 0u;) {
            uint e = uint(again ? LOWEST(rest) : HIGHEST(rest)), at = e * uint(CON);
            rest ^= 1u << e;
            int serial = int(again ? number - 1u - e : there + e);
            while (right_at > serial) {
                kept -= 1u;
                vec4 l = kept_light[kept * uint(LANES) + lane];
                q.light[0] = l.x;
                q.light[1] = l.y;
                q.light[2] = l.z;
                q.light[3] = l.w;
                right_at = kept > 0u ? int(kept_at[kept - 1u]) : 0;
            }
            if (any_closed) {
                UNROLL for (int p = 0; p < 4; p++) q.reopened[p] = serial == closed[p] ? closed_light[p] : 0.0f;
            }
            float sums[12];
            UNROLL for (int j = 0; j < 12; j++) sums[j] = 0.0f;
            if (con[at + 11u].z != 0.0f) {
                pull_all(at, q, sums);
            } else {
                pull(at, x, y, q, sums);
            }
            STORE_SUMS(lane, slots[e], sums);
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
        // dsd/dV = weight times the direction outwards, which came times the scale; a pixel's weights sum
        // to 1. Sums are of minus the distance.
        float f = alpha / sigma;
        float v = f / scale;
        bool changed = GEOMETRY(group * uint(GEO) + 11u).x < 0.0f;
        float mx = v * sum[8], my = v * sum[9];
        float lx = v * (sum[4] - sum[6] - sum[8]), ly = v * (sum[5] - sum[7] - sum[9]);
        grad[0] = v * sum[6];
        grad[1] = v * sum[7];
        grad[2] = changed ? lx : mx;
        grad[3] = changed ? ly : my;
        grad[4] = changed ? mx : lx;
        grad[5] = changed ? my : ly;
        grad[6] = sum[0];
        grad[7] = sum[1];
        grad[8] = sum[2];
        grad[9] = given < 1.0f ? sum[3] / alpha : 0.0f;  // a clamped opacity gets no gradient
        grad_sigma = f * sum[10] * (COMPACT != 0 ? 1.0f : 0.693147180559945f);
    }
    bool sound = true;
    UNROLL for (int j = 0; j < 10; j++) {
        uint at = group * 10u + uint(j);
        sound = sound && finite(grad[j]);
        GRAD(at) = (add ? GRAD(at) : 0.0f) + grad[j];
    }
    GRAD_SIGMA(group) = (add ? GRAD_SIGMA(group) : 0.0f) + grad_sigma;
    if (!sound) TOTALS(1) = 1u;  // a fit stops at that
}

// --- a fit ----------------------------------------------------------------------------------------

// What `fit` holds, in floats or their bits (see `gpu/fit.py`): two states, used in turn; for each
// column of the parameters the rate, the least and the most; constants; from FIT_LOSSES on the losses
// of `fit_total` iterations, how often the target is halved at each, Adam's two moments, the best.
CONSTANT uint FIT_BEST = 0u, FIT_BEST_AT = 1u, FIT_STOPPED = 2u, FIT_LIMIT = 3u, FIT_DONE = 4u;
CONSTANT uint FIT_STATE = 8u, FIT_RATE = 16u, FIT_LOW = 26u, FIT_HIGH = 36u;
CONSTANT uint FIT_BETA1 = 46u, FIT_BETA2 = 47u, FIT_EPSILON = 48u, FIT_PATIENCE = 49u, FIT_TOTAL = 50u;
CONSTANT uint FIT_DIVERGENCE = 51u, FIT_BLANK = 52u, FIT_LEAST_LIMIT = 53u, FIT_LOSSES = 64u;
CONSTANT uint COMPLETED = 1u, CONVERGED = 2u, DIVERGED = 3u;

// One number of one iteration's update: Adam (Kingma and Ba 2015), then its range; or why not. Every
// thread comes to the same decision from the state before; the first writes the state after.
FN void adam_main(uint thread) {
    uint n = set.triangles * 10u, at = set.iteration, total = BITS(FIT(FIT_TOTAL));
    if (thread >= n) return;
    uint before = FIT_STATE * (at & 1u), after = FIT_STATE - before;
    float best = FIT(before + FIT_BEST), limit_ = FIT(before + FIT_LIMIT), loss = LOSS(0);
    int best_at = int(BITS(FIT(before + FIT_BEST_AT)));
    uint stopped = BITS(FIT(before + FIT_STOPPED)), done = BITS(FIT(before + FIT_DONE));
    bool better = false, move = false;
    if (stopped == 0u) {
        if (at == 0u) {
            limit_ = max(FIT(FIT_DIVERGENCE) * max(loss, FIT(FIT_BLANK)), FIT(FIT_LEAST_LIMIT));
        }
        done = at + 1u;
        uint halvings = FIT_LOSSES + total;
        if (!finite(loss) || !(loss <= limit_)) {
            stopped = DIVERGED;
        } else {
            // Losses against a reduced target are lower, so the first at a finer one is always better.
            better = best_at < 0 || loss < best;
            if (!better) better = FIT(halvings + at) < FIT(halvings + uint(best_at));
            uint patience = BITS(FIT(FIT_PATIENCE));
            if (!better && patience != 0u && at - uint(best_at) >= patience) {
                stopped = CONVERGED;
            } else if (TOTALS(1) != 0u) {
                stopped = DIVERGED;
            } else {
                move = true;
                if (at + 1u >= total) stopped = COMPLETED;
            }
        }
        if (better) {
            best = loss;
            best_at = int(at);
        }
        if (thread == 0u) FIT(FIT_LOSSES + at) = loss;
    }
    if (thread == 0u) {
        FIT(after + FIT_BEST) = best;
        FIT(after + FIT_BEST_AT) = FLOAT(uint(best_at));
        FIT(after + FIT_STOPPED) = FLOAT(stopped);
        FIT(after + FIT_LIMIT) = limit_;
        FIT(after + FIT_DONE) = FLOAT(done);
    }
    uint first = FIT_LOSSES + 2u * total + thread, second = first + n, kept = second + n;
    float value = PARAM(thread);
    if (better) FIT(kept) = value;
    if (!move) return;
    uint column = thread % 10u;
    float g = GRAD(thread), beta1 = FIT(FIT_BETA1), beta2 = FIT(FIT_BETA2);
    float m = beta1 * FIT(first) + (1.0f - beta1) * g;
    float v = beta2 * FIT(second) + (1.0f - beta2) * g * g;
    FIT(first) = m;
    FIT(second) = v;
    value -= set.step * FIT(FIT_RATE + column) * m / (sqrt(v) * set.root + FIT(FIT_EPSILON));
    PARAM(thread) = min(max(value, FIT(FIT_LOW + column)), FIT(FIT_HIGH + column));
}
