"""Synthetic pictures with true captions: no private image, no person, no privacy cost.

`generate.SyntheticData` returns the example of any index: picture, caption and their scene. An
example passes `compose` (seed and index -> scene and statement), `scene` (statement -> caption) and
`render` (scene -> pixels); `write` makes tar shards with provenance. `scenes` is a separate world:
public photographs of clothes and printed letters in clutter, rendered in blocks.
"""
