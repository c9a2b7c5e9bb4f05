// A rectangle of whole pixels in the atlas: corner numbers 0 to 3 of a triangle strip.
in vec4 rect;   // left, top, right, bottom in pixels of the atlas
in vec2 cell;   // where the picture starts
in vec4 a, b; in vec3 c0, c1, c2;
out vec4 va, vb; out vec3 v0, v1, v2; out vec2 vcell;
uniform vec2 atlas;
void main() {
    vec2 corner = vec2(gl_VertexID & 1, gl_VertexID >> 1);
    gl_Position = vec4(mix(rect.xy, rect.zw, corner) / atlas * 2.0 - 1.0, 0.0, 1.0);
    va = a; vb = b; v0 = c0; v1 = c1; v2 = c2; vcell = cell;
}
