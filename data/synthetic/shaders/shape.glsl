// A shape: its signed distance from the table, its fill, a soft edge. a: centre, radius, angle; b: layer, fill.
in vec4 va, vb; in vec3 v0, v1, v2; in vec2 vcell;
out vec4 colour;
uniform float size;
uniform sampler2DArray shape_table;
const float FREQUENCY[5] = float[](0.0, 0.0, 2.5, 3.5, 1.75);
void main() {
    vec2 q = rotated((gl_FragCoord.xy - vcell) / size - va.xy, va.w) / va.z;
    float pixel = PX / va.z;
    float d = texture(shape_table, vec3(q / (2.0 * EXTENT) + 0.5, vb.x)).r;
    int fill = int(vb.y + 0.5);
    if (fill == 1) d = abs(d + HOLLOW) - HOLLOW;
    float f = FREQUENCY[fill], other = 0.0;
    vec2 g = fract(q * f) - 0.5;
    if (fill == 2) other = 1.0 - bands(q.y * f, f * pixel);
    if (fill == 3) other = edge(0.3 - length(g), f * pixel);
    if (fill == 4) other = edge((abs(g.x) - 0.25) * (abs(g.y) - 0.25), 0.25 * f * pixel);
    colour = vec4(mix(v0, v2, other), edge(-d, pixel));
}
