// What every texture program may use. Coordinates: p in image sides, origin top left, y down; PX is one pixel.
const float TAU = 6.28318530718;
uniform sampler2D noise_table;   // (256, 256) two independent uniform numbers per texel, repeated
uniform float PX;

float edge(float d, float width) { return clamp(d / width + 0.5, 0.0, 1.0); }
vec2 rotated(vec2 p, float angle) {
    float c = cos(angle), s = sin(angle);
    return vec2(c * p.x + s * p.y, c * p.y - s * p.x);
}
vec2 hash(vec2 cell) { return texelFetch(noise_table, ivec2(cell) & 255, 0).rg; }

// Value noise: the table read between its texels with a smooth weight.
float noise(vec2 p) {
    vec2 cell = floor(p), f = p - cell;
    return texture(noise_table, (cell + f * f * (3.0 - 2.0 * f) + 0.5) / 256.0).r;
}
// Fractional Brownian motion, 5 octaves, mean 1/2.
float fbm(vec2 p) {
    float sum = 0.0, weight = 0.5;
    for (int k = 0; k < 5; k++) {
        sum += weight * noise(p);
        p = vec2(1.6 * p.x + 1.2 * p.y, 1.6 * p.y - 1.2 * p.x) + 17.0;
        weight *= 0.5;
    }
    return sum / 0.96875;
}
// Distances to the two nearest feature points of jittered cells, and the random number of the nearest.
vec3 voronoi(vec2 p) {
    vec2 cell = floor(p);
    vec3 best = vec3(9.0, 9.0, 0.0);
    for (int j = -1; j <= 1; j++) for (int i = -1; i <= 1; i++) {
        vec2 c = cell + vec2(i, j), h = hash(c);
        float d = distance(p, c + h);
        if (d < best.x) best = vec3(d, best.x, hash(c + 101.0).r);
        else if (d < best.y) best.y = d;
    }
    return best;
}
float bands(float u, float width) { return edge(abs(fract(u) - 0.5) - 0.25, width); }
