// One texture program per pixel. FIELD is defined before this text.
in vec4 va, vb; in vec3 v0, v1, v2; in vec2 vcell;
out vec4 colour;
uniform float size;
void main() {
    float t = FIELD((gl_FragCoord.xy - vcell) / size, va, vb);
    colour = vec4(v0 + (v1 - v0) * clamp(2.0 * t, 0.0, 1.0) + (v2 - v1) * clamp(2.0 * t - 1.0, 0.0, 1.0), 1.0);
}
