// Texture programs: a number in [0, 1] per pixel that picks the colour. a and b are the program's own parameters.
// data/synthetic/fields.py has the same programs in numpy, under the same names and in the same order.

float stripes(vec2 p, vec4 a, vec4 b) {  // frequency, angle, wave height, wave frequency; number of colours
    vec2 q = rotated(p, a.y);
    float u = (q.x + a.z * sin(TAU * a.w * q.y)) * a.x;
    return b.x < 2.5 ? bands(u, a.x * PX) : floor(fract(u) * 3.0) * 0.5;
}
float checkerboard(vec2 p, vec4 a, vec4 b) {  // frequency, angle
    vec2 q = abs(fract(rotated(p, a.y) * a.x) - 0.5) - 0.25;
    return edge(q.x * q.y, 0.25 * a.x * PX);
}
float dots(vec2 p, vec4 a, vec4 b) {  // frequency, radius in cells, shift of odd rows, angle
    vec2 q = rotated(p, a.w) * a.x;
    q.x += a.z * mod(floor(q.y), 2.0);
    return edge(a.y - length(fract(q) - 0.5), a.x * PX);
}
float rings(vec2 p, vec4 a, vec4 b) {  // frequency, centre
    return bands(length(p - a.yz) * a.x, a.x * PX);
}
float spiral(vec2 p, vec4 a, vec4 b) {  // arms, twist, centre
    vec2 q = p - a.zw;
    float r = max(length(q), 1e-4);
    return bands(atan(q.y, q.x) / TAU * a.x + r * a.y, (a.x / (TAU * r) + abs(a.y)) * PX);
}
float rays(vec2 p, vec4 a, vec4 b) {  // count, phase, centre
    vec2 q = p - a.zw;
    float r = max(length(q), 1e-4);
    return bands(atan(q.y, q.x) / TAU * a.x + a.y, a.x / (TAU * r) * PX);
}
float mosaic(vec2 p, vec4 a, vec4 b) {  // frequency, number of colours; offset
    float n = a.y;
    return floor(min(voronoi(p * a.x + b.zw).z, 0.999) * n) / (n - 1.0);
}
float cracks(vec2 p, vec4 a, vec4 b) {  // frequency, width; offset
    vec3 v = voronoi(p * a.x + b.zw);
    return edge(a.y - (v.y - v.x), 2.0 * a.x * PX);
}
float clouds(vec2 p, vec4 a, vec4 b) {  // frequency; offset
    return smoothstep(0.3, 0.7, fbm(p * a.x + b.zw));
}
float marble(vec2 p, vec4 a, vec4 b) {  // frequency, warp; offset: fBm of a place that fBm has moved
    vec2 q = p * a.x + b.zw;
    vec2 moved = vec2(fbm(q), fbm(q + vec2(41.0, 83.0)));
    return smoothstep(0.3, 0.7, fbm(q + a.y * moved));
}
float swirls(vec2 p, vec4 a, vec4 b) {  // frequency, warp, phases
    vec2 q = p * a.x;
    for (int k = 1; k <= 4; k++) {
        q.x += a.y / float(k) * sin(float(k) * q.y + a.z);
        q.y += a.y / float(k) * sin(float(k) * q.x + a.w);
    }
    return 0.5 + 0.5 * sin(q.x + q.y);
}
float kaleidoscope(vec2 p, vec4 a, vec4 b) {  // mirrors, frequency, warp, rings; offset
    vec2 q = p - 0.5;
    float r = length(q), wedge = TAU / a.x;
    float angle = atan(q.y, q.x) + TAU;
    angle = abs(mod(angle, wedge) - 0.5 * wedge);
    float n = fbm(r * a.y * vec2(cos(angle), sin(angle)) + b.zw);
    return 0.5 + 0.5 * sin(TAU * (a.z * n + a.w * r));
}
float escape(vec2 z, vec2 c, float scale) {
    float n = 0.0;
    for (int k = 0; k < 48; k++) {
        z = vec2(z.x * z.x - z.y * z.y, 2.0 * z.x * z.y) + c;
        if (dot(z, z) > 16.0) break;
        n += 1.0;
    }
    return n > 47.5 ? 1.0 : 0.5 - 0.5 * cos(scale * sqrt(n));
}
float julia(vec2 p, vec4 a, vec4 b) {  // constant, zoom, angle; colour bands
    return escape(rotated(p - 0.5, a.w) * a.z, a.xy, b.x);
}
float mandelbrot(vec2 p, vec4 a, vec4 b) {  // centre, zoom, angle; colour bands
    return escape(vec2(0.0), rotated(p - 0.5, a.w) * a.z + a.xy, b.x);
}
float carpet(vec2 p, vec4 a, vec4 b) {  // levels, scale, offset
    vec2 q = fract(p * a.y + a.zw);
    for (int k = 0; k < 5; k++) {
        if (float(k) >= a.x) break;
        q = fract(q) * 3.0;
        if (floor(q) == vec2(1.0)) return 1.0;
    }
    return 0.0;
}
float bricks(vec2 p, vec4 a, vec4 b) {  // rows, mortar in rows
    vec2 q = p * vec2(0.5, 1.0) * a.x;
    q.x += 0.5 * mod(floor(q.y), 2.0);
    vec2 f = abs(fract(q) - 0.5);
    float gap = min((0.5 - f.x) * 2.0, 0.5 - f.y);
    return edge(a.y - gap, a.x * PX);
}
float honeycomb(vec2 p, vec4 a, vec4 b) {  // frequency, wall
    const vec2 s = vec2(1.0, 1.7320508);
    vec2 q = p * a.x;
    vec2 one = mod(q, s) - 0.5 * s, two = mod(q - 0.5 * s, s) - 0.5 * s;
    vec2 g = abs(dot(one, one) < dot(two, two) ? one : two);
    return edge(a.y - (0.5 - max(g.x, 0.5 * g.x + 0.8660254 * g.y)), a.x * PX);
}
float zigzag(vec2 p, vec4 a, vec4 b) {  // frequency, height, teeth, angle
    vec2 q = rotated(p, a.w);
    return bands((q.y + a.y * abs(fract(q.x * a.z) - 0.5)) * a.x, 1.5 * a.x * PX);
}
float plaid(vec2 p, vec4 a, vec4 b) {  // frequencies across and down
    return 0.5 * (bands(p.x * a.x, a.x * PX) + bands(p.y * a.y, a.y * PX));
}
float gradient(vec2 p, vec4 a, vec4 b) {  // angle, or 9 for a radial one; start and length
    float u = a.x > 8.0 ? length(p - 0.5) * 1.4 : rotated(p - 0.5, a.x).x + 0.5;
    return clamp((u - a.y) / a.z, 0.0, 1.0);
}
float ripples(vec2 p, vec4 a, vec4 b) {  // two sources; frequency
    float sum = sin(length(p - a.xy) * b.x) + sin(length(p - a.zw) * b.x);
    return edge(sum, 0.6);
}
float loops(vec2 p, vec4 a, vec4 b) {  // frequency, width; offset: quarter circles in cells turned at random (Truchet)
    vec2 q = p * a.x + b.zw, cell = floor(q), f = q - cell;
    if (hash(cell).r > 0.5) f.x = 1.0 - f.x;
    float d = min(abs(length(f) - 0.5), abs(length(f - 1.0) - 0.5));
    return edge(a.y - d, a.x * PX);
}
float contours(vec2 p, vec4 a, vec4 b) {  // frequency, levels, width; offset
    float u = fbm(p * a.x + b.zw) * a.y;
    return edge(a.z - abs(fract(u) - 0.5), 0.15);
}
float wood(vec2 p, vec4 a, vec4 b) {  // rings, warp, stretch; offset
    float u = p.x * a.x + a.y * noise(vec2(p.x * 3.0, p.y * a.z) + b.zw);
    return smoothstep(0.0, 1.0, abs(2.0 * fract(u) - 1.0));
}
float scales(vec2 p, vec4 a, vec4 b) {  // frequency, rim
    vec2 q = p * a.x * vec2(1.0, 2.0);
    float best = 0.0, row = floor(q.y);
    for (int k = 1; k >= 0; k--) {  // the row above lies on top
        float r = row - float(k);
        vec2 f = vec2(fract(q.x + 0.5 * mod(r, 2.0)) - 0.5, (q.y - r) * 0.5);
        float d = length(f) - 0.5;
        best = mix(best, edge(a.y - abs(d + a.y), a.x * PX), edge(-d, a.x * PX));
    }
    return best;
}
float grid(vec2 p, vec4 a, vec4 b) {  // frequency, half width in cells, angle
    vec2 f = abs(fract(rotated(p, a.z) * a.x) - 0.5);
    return edge(a.y - min(f.x, f.y), a.x * PX);
}
float triangles(vec2 p, vec4 a, vec4 b) {  // frequency
    vec2 q = p * a.x * vec2(1.0, 1.1547);
    float u = fract(q.x - 0.5 * q.y), v = fract(q.y);
    return edge(1.0 - u - v, 1.5 * a.x * PX);
}
float rosette(vec2 p, vec4 a, vec4 b) {  // petals, frequency, depth, phase
    vec2 q = p - 0.5;
    float r = length(q) / (1.0 + a.z * cos(a.x * atan(q.y, q.x) + a.w));
    return bands(r * a.y, 1.6 * a.y * PX);
}
float basket(vec2 p, vec4 a, vec4 b) {  // frequency, strands per cell
    vec2 q = p * a.x, f = fract(q) * a.y;
    float across = mod(floor(q.x) + floor(q.y), 2.0);
    return bands(across < 0.5 ? f.x : f.y, a.x * a.y * PX);
}
float specks(vec2 p, vec4 a, vec4 b) {  // frequency, radius in cells; offset
    vec2 q = p * a.x + b.zw, cell = floor(q);
    vec2 place = cell + 0.5 + (hash(cell) - 0.5) * (1.0 - 2.0 * a.y);
    return edge(a.y - distance(q, place), a.x * PX);
}
